use std::os::unix::process::{CommandExt, ExitStatusExt};

use hardware::{
    owner_policy::QuietHours,
    telemetry::{CpuUsage, GpuReading, HostTelemetry},
};
use process::ChildPid;

use super::*;

fn guard(limits: OwnerLimits, aside: bool) -> HostGuard {
    HostGuard {
        handle: TelemetryHandle::new(None),
        live_status: LiveStatus::new(v1::AgentStatus {
            state: v1::agent_status::State::Ready.into(),
            ..Default::default()
        }),
        has_external_training: aside,
        process_groups: ProcessGroups::default(),
        storm_detector: StormDetector::default(),
        quiet_per_s: 10_000.0,
        reaction: StormResponder::default(),
        owner_policy: OwnerPolicy::new(limits),
        training_pace: None,
        hang_detector: HangDetector::default(),
        memory_guard: MemoryGuard::new(3 << 30),
        storm_cause: None,
        storm_count: 0,
        reaction_note: "",
        has_sampled: false,
    }
}

fn sample(second: u64, per_s: f64) -> TelemetrySample {
    let telemetry = HostTelemetry {
        at_ms: second * 1000,
        tlb_per_s: Some(per_s),
        cpu: Some(CpuUsage { busy: 1.0, system: 0.9 }),
        ..HostTelemetry::default()
    };
    TelemetrySample { telemetry, foreign: Vec::new() }
}

fn job(role: &str, done: u32) -> v1::ActiveJob {
    v1::ActiveJob { role: role.into(), run: "r-1".into(), done, ..Default::default() }
}

fn storm(guard: &HostGuard) -> v1::telemetry::Storm {
    guard.live_status.current_status().telemetry.unwrap().storm.unwrap()
}

const STORM: f64 = 340_000.0;

#[test]
fn a_training_that_evaluates_in_its_own_process_is_named_with_the_remedy() {
    let mut guard = guard(OwnerLimits::default(), false);
    for second in 0..20 {
        guard.handle_sample(
            &sample(second, 110.0),
            &[job("trainer", u32::try_from(second).unwrap())],
        );
    }
    assert_eq!(storm(&guard).cause, "");
    for second in 20..40 {
        guard.handle_sample(&sample(second, STORM), &[job("trainer", 20)]);
    }
    let seen = storm(&guard);
    assert_eq!((seen.level(), seen.storms), (v1::telemetry::storm::Level::Storm, 1));
    assert!(seen.cause.contains("evaluation inside the training process"), "{seen:?}");
    assert!(seen.cause.contains("eval_strategy=\"no\""), "{seen:?}");
    let trouble = guard.live_status.current_status().trouble;
    assert!(trouble.starts_with("storm: a storm of TLB shootdowns: evaluation"), "{trouble}");
    guard.handle_sample(&sample(40, 110.0), &[job("trainer", 21)]);
    assert_eq!(storm(&guard).cause, seen.cause, "it is shown until all is calm");
    guard.handle_sample(&sample(41, STORM), &[job("trainer", 22)]);
    assert!(!storm(&guard).cause.contains("evaluation"), "it trains again: {:?}", storm(&guard));
}

#[test]
fn another_program_s_training_is_named_while_no_job_runs() {
    let cause = |jobs: &[v1::ActiveJob]| {
        let mut guard = guard(OwnerLimits::default(), true);
        (0..10).for_each(|second| guard.handle_sample(&sample(second, STORM), jobs));
        storm(&guard).cause
    };
    let words = "probably evaluation inside the training process of another program";
    assert!(cause(&[]).starts_with(words) && cause(&[job("watcher", 3)]).starts_with(words));
    assert!(!cause(&[job("watcher", 3), job("generator", 3)]).contains("evaluation"));
}

#[tokio::test]
async fn no_job_is_taken_before_the_first_sample_or_while_the_owner_s_limits_forbid_it() {
    let somewhere = PathBuf::from("/nowhere");
    let watch = TelemetryHandle::new(Some(&somewhere));
    watch.wait_until_forbidden().await;
    let always = ["00:00-12:00", "12:00-00:00"].map(|hours| hours.parse::<QuietHours>().unwrap());
    let mut guard = guard(OwnerLimits { quiet: always.into(), ..OwnerLimits::default() }, false);
    guard.handle = watch.clone();
    guard.handle_sample(&sample(0, 110.0), &[]);
    watch.wait_until_forbidden().await;
    let status = guard.live_status.current_status();
    assert_eq!(status.state(), v1::agent_status::State::Draining);
    assert!(
        status.trouble.starts_with("box: takes no new work: quiet hours"),
        "{}",
        status.trouble
    );
    guard.owner_policy = OwnerPolicy::default();
    guard.handle_sample(&sample(1, 110.0), &[]);
    watch.wait_until_allowed().await;
    let status = guard.live_status.current_status();
    assert_eq!((status.state(), &*status.trouble), (v1::agent_status::State::Ready, ""));
    guard.handle_missed_sample();
    assert!(guard.live_status.current_status().telemetry.is_none());
}

#[test]
fn failures_after_a_termination_are_the_host_s_unless_the_content_is_at_fault() {
    let watch = TelemetryHandle::new(None);
    let fault = |error: JobError| match watch.explain_termination(WorkKind::Generate, error) {
        JobError::Failed { fault, .. } => Some(fault),
        JobError::Stopped | JobError::HandedOver(_) => None,
    };
    let work = || JobError::retryable_failure(anyhow::anyhow!("the worker died"));
    assert_eq!(fault(work()), Some(JobFault::WorkFailed));
    watch.record_termination(Some(WorkKind::Train), JobFault::OutOfMemory, "no memory".into());
    assert_eq!(fault(work()), Some(JobFault::WorkFailed), "it was not its worker");
    watch.record_termination(None, JobFault::HostUnfit, "a storm".into());
    assert_eq!(fault(work()), Some(JobFault::HostUnfit));
    assert_eq!(fault(JobError::fatal_failure(anyhow::anyhow!("no"))), Some(JobFault::InvalidInput));
    assert_eq!(fault(JobError::Stopped), None);
}

#[test]
fn a_training_is_ended_before_unified_memory_runs_out_and_may_have_been_too_large() {
    let mut guard = guard(OwnerLimits::default(), false);
    let mut worker =
        std::process::Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
    let group = ChildPid::from_id(worker.id()).unwrap();
    let _of_another_role = guard.process_groups.register_group(group, "generate");
    let low = |second: u64| {
        let mut low_memory = sample(second, 110.0);
        low_memory.telemetry.gpus = vec![GpuReading { integrated: true, ..GpuReading::default() }];
        low_memory.telemetry.memory.available = Some(2 << 30);
        low_memory
    };
    let failed = |guard: &HostGuard| match guard.handle.explain_termination(
        WorkKind::Train,
        JobError::retryable_failure(anyhow::anyhow!("signal 9")),
    ) {
        JobError::Failed { fault, message, .. } => (fault, message),
        JobError::Stopped | JobError::HandedOver(_) => panic!("it failed"),
    };
    (0..3).for_each(|second| guard.handle_sample(&low(second), &[job("generator", 0)]));
    assert_eq!(failed(&guard).0, JobFault::WorkFailed);
    guard.handle_sample(&low(3), &[job("trainer", 0)]);
    guard.handle_sample(&low(4), &[job("trainer", 0)]);
    let (fault, message) = failed(&guard);
    assert_eq!(fault, JobFault::OutOfMemory);
    assert!(message.contains("2.0 GiB of memory were free"), "{message}");
    assert!(worker.try_wait().unwrap().is_none(), "the generator's worker runs");
    let _training = guard.process_groups.register_group(group, "train");
    guard.handle_sample(&low(5), &[job("trainer", 0)]);
    guard.handle_sample(&low(6), &[job("trainer", 0)]);
    assert_eq!(worker.wait().unwrap().signal(), Some(9));
}

#[test]
fn shootdowns_of_a_piece_of_work_are_counted_and_their_peak_is_seen() {
    let root = tempfile::tempdir().unwrap();
    let interrupts = root.path().join("proc/interrupts");
    std::fs::create_dir(root.path().join("proc")).unwrap();
    let count = |count: u64| std::fs::write(&interrupts, format!("TLB: {count} 0 TLB\n")).unwrap();
    let watch = TelemetryHandle::new(Some(&root.path().to_owned()));
    assert_eq!(watch.start_shootdown_span().finish_span(), None, "no counter here");
    count(1000);
    let (whole, later) = (watch.start_shootdown_span(), watch.start_shootdown_span());
    watch.state.shootdown_counters.record_rate(Some(1e9), true);
    watch.state.shootdown_counters.record_rate(Some(5.0), false);
    let calm = watch.start_shootdown_span();
    count(3000);
    let seen = whole.finish_span().unwrap();
    assert!(seen.mean_per_s > 0.0 && seen.stormed && seen.peak_per_s >= 1e9, "{seen:?}");
    assert!(!calm.finish_span().unwrap().stormed);
    count(10);
    assert_eq!(later.finish_span(), None, "a core went offline");
}
