use std::os::unix::process::{CommandExt, ExitStatusExt};

use hardware::{
    citizen::QuietHours,
    telemetry::{CpuNow, GpuNow, Telemetry},
};
use rustix::process::Pid;

use super::*;

fn guard(wishes: Wishes, aside: bool) -> Guard {
    Guard {
        watch: Watch::new(None),
        presence: Presence::new(v1::AgentStatus {
            state: v1::agent_status::State::Ready.into(),
            ..Default::default()
        }),
        aside,
        herd: Herd::default(),
        weather: Weather::default(),
        quiet_per_s: 10_000.0,
        reaction: Reaction::default(),
        citizen: Citizen::new(wishes),
        pace: None,
        hang: Hang::default(),
        floor: Floor::new(3 << 30),
        cause: None,
        storms: 0,
        reacted: "",
        looked: false,
    }
}

fn look(second: u64, per_s: f64) -> Looked {
    let telemetry = Telemetry {
        at_ms: second * 1000,
        tlb_per_s: Some(per_s),
        cpu: Some(CpuNow { busy: 1.0, system: 0.9 }),
        ..Telemetry::default()
    };
    Looked { telemetry, foreign: Vec::new() }
}

fn job(role: &str, done: u32) -> v1::ActiveJob {
    v1::ActiveJob { role: role.into(), run: "r-1".into(), done, ..Default::default() }
}

fn storm(guard: &Guard) -> v1::telemetry::Storm {
    guard.presence.now().telemetry.unwrap().storm.unwrap()
}

const STORM: f64 = 340_000.0;

#[test]
fn a_training_that_evaluates_in_its_own_process_is_named_with_the_remedy() {
    let mut guard = guard(Wishes::default(), false);
    for second in 0..20 {
        guard.take(&look(second, 110.0), &[job("trainer", u32::try_from(second).unwrap())]);
    }
    assert_eq!(storm(&guard).cause, "");
    for second in 20..40 {
        guard.take(&look(second, STORM), &[job("trainer", 20)]);
    }
    let seen = storm(&guard);
    assert_eq!((seen.level(), seen.storms), (v1::telemetry::storm::Level::Storm, 1));
    assert!(seen.cause.contains("evaluation inside the training process"), "{seen:?}");
    assert!(seen.cause.contains("eval_strategy=\"no\""), "{seen:?}");
    let trouble = guard.presence.now().trouble;
    assert!(trouble.starts_with("storm: a storm of TLB shootdowns: evaluation"), "{trouble}");
    guard.take(&look(40, 110.0), &[job("trainer", 21)]);
    assert_eq!(storm(&guard).cause, seen.cause, "it is told until all is calm");
    guard.take(&look(41, STORM), &[job("trainer", 22)]);
    assert!(!storm(&guard).cause.contains("evaluation"), "it trains again: {:?}", storm(&guard));
}

#[test]
fn somebody_else_s_training_is_named_while_nothing_of_ours_runs() {
    let cause = |jobs: &[v1::ActiveJob]| {
        let mut guard = guard(Wishes::default(), true);
        (0..10).for_each(|second| guard.take(&look(second, STORM), jobs));
        storm(&guard).cause
    };
    let words = "probably evaluation inside the training process, which is not ours";
    assert!(cause(&[]).starts_with(words) && cause(&[job("watcher", 3)]).starts_with(words));
    assert!(!cause(&[job("watcher", 3), job("generator", 3)]).contains("evaluation"));
}

#[tokio::test]
async fn nothing_is_taken_before_the_first_look_nor_while_the_box_rests() {
    let somewhere = PathBuf::from("/nowhere");
    let watch = Watch::new(Some(&somewhere));
    watch.forbidden().await;
    let always = ["00:00-12:00", "12:00-00:00"].map(|hours| hours.parse::<QuietHours>().unwrap());
    let mut guard = guard(Wishes { quiet: always.into(), ..Wishes::default() }, false);
    guard.watch = watch.clone();
    guard.take(&look(0, 110.0), &[]);
    watch.forbidden().await;
    let told = guard.presence.now();
    assert_eq!(told.state(), v1::agent_status::State::Draining);
    assert!(told.trouble.starts_with("box: takes nothing new: quiet hours"), "{}", told.trouble);
    guard.citizen = Citizen::default();
    guard.take(&look(1, 110.0), &[]);
    watch.allowed().await;
    let told = guard.presence.now();
    assert_eq!((told.state(), &*told.trouble), (v1::agent_status::State::Ready, ""));
    guard.miss();
    assert!(guard.presence.now().telemetry.is_none());
}

#[test]
fn what_fails_when_the_workers_are_ended_is_the_box_s_fault_and_the_content_s_stays() {
    let watch = Watch::new(None);
    let fault = |error: JobError| match watch.blame(WorkKind::Generate, error) {
        JobError::Failed { fault, .. } => Some(fault),
        JobError::Stopped | JobError::PassedOn(_) => None,
    };
    let work = || JobError::retry(anyhow::anyhow!("the worker died"));
    assert_eq!(fault(work()), Some(Fault::Work));
    watch.ends(Some(WorkKind::Train), Fault::TooLarge, "no memory".into());
    assert_eq!(fault(work()), Some(Fault::Work), "it was not its worker");
    watch.ends(None, Fault::Box, "a storm".into());
    assert_eq!(fault(work()), Some(Fault::Box));
    assert_eq!(fault(JobError::fatal(anyhow::anyhow!("no"))), Some(Fault::Content));
    assert_eq!(fault(JobError::Stopped), None);
}

#[test]
fn a_training_is_ended_before_unified_memory_runs_out_and_may_have_been_too_large() {
    let mut guard = guard(Wishes::default(), false);
    let mut worker =
        std::process::Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
    let group = Pid::from_raw(i32::try_from(worker.id()).unwrap()).unwrap();
    let _of_another_role = guard.herd.join(group, "generate");
    let low = |second: u64| {
        let mut looked = look(second, 110.0);
        looked.telemetry.gpus = vec![GpuNow { integrated: true, ..GpuNow::default() }];
        looked.telemetry.memory.available = Some(2 << 30);
        looked
    };
    let failed = |guard: &Guard| match guard
        .watch
        .blame(WorkKind::Train, JobError::retry(anyhow::anyhow!("signal 9")))
    {
        JobError::Failed { fault, message, .. } => (fault, message),
        JobError::Stopped | JobError::PassedOn(_) => panic!("it failed"),
    };
    (0..3).for_each(|second| guard.take(&low(second), &[job("generator", 0)]));
    assert_eq!(failed(&guard).0, Fault::Work);
    guard.take(&low(3), &[job("trainer", 0)]);
    guard.take(&low(4), &[job("trainer", 0)]);
    let (fault, message) = failed(&guard);
    assert_eq!(fault, Fault::TooLarge);
    assert!(message.contains("2.0 GiB of memory were left"), "{message}");
    assert!(worker.try_wait().unwrap().is_none(), "the generator's goes on");
    let _training = guard.herd.join(group, "train");
    guard.take(&low(5), &[job("trainer", 0)]);
    guard.take(&low(6), &[job("trainer", 0)]);
    assert_eq!(worker.wait().unwrap().signal(), Some(9));
}

#[test]
fn shootdowns_of_a_piece_of_work_are_counted_and_their_peak_is_seen() {
    let root = tempfile::tempdir().unwrap();
    let interrupts = root.path().join("proc/interrupts");
    std::fs::create_dir(root.path().join("proc")).unwrap();
    let count = |count: u64| std::fs::write(&interrupts, format!("TLB: {count} 0 TLB\n")).unwrap();
    let watch = Watch::new(Some(&root.path().to_owned()));
    assert_eq!(watch.span().finish(), None, "nobody counts here");
    count(1000);
    let (whole, later) = (watch.span(), watch.span());
    watch.state.spans.hear(Some(1e9), true);
    watch.state.spans.hear(Some(5.0), false);
    let calm = watch.span();
    count(3000);
    let seen = whole.finish().unwrap();
    assert!(seen.mean_per_s > 0.0 && seen.stormed && seen.peak_per_s >= 1e9, "{seen:?}");
    assert!(!calm.finish().unwrap().stormed);
    count(10);
    assert_eq!(later.finish(), None, "a core went offline");
}
