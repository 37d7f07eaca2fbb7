//! Forks of a run over gRPC.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tonic::Code;
use wire::{FactBody, v1};

use crate::rig::Rig;

/// The forks that are timed.
const FORKS: usize = 50;

/// Prompts whose counts each selection has.
const PROMPTS: u32 = 1000;

/// The longest median time of a fork that the test accepts, on a machine that is busy with others.
const FORK_LIMIT: Duration = Duration::from_secs(1);

fn tree(name: &str) -> Option<v1::Tree> {
    Some(v1::Tree { path: format!("runs/sums-1/{name}"), manifest: name.into() })
}

fn spec() -> v1::Spec {
    let raft = v1::spec::Raft {
        prompts: Some(v1::Blob::default()),
        prompt_count: PROMPTS,
        cycles: 3,
        samples_per_prompt: 8,
        heldout_samples_per_prompt: 1,
        sampling: Some(v1::Sampling { top_p: 1.0, max_new_tokens: 16, ..Default::default() }),
        verifier: Some(v1::Verifier { how: Some(v1::verifier::How::Exact(Default::default())) }),
        selection: Some(v1::Selection { min_reward: 1.0, ..Default::default() }),
        training: Some(v1::Training {
            epochs: 1,
            batch_size: 8,
            learning_rate: 1e-3,
            max_grad_norm: 1.0,
            max_tokens: 64,
            ..Default::default()
        }),
        pass_at: vec![1],
        ..Default::default()
    };
    v1::Spec {
        run: "sums-1".into(),
        name: "sums".into(),
        pool: "default".into(),
        base: Some(v1::Base { tree: tree("base"), ..Default::default() }),
        kind: Some(v1::spec::Kind::Raft(raft)),
        ..Default::default()
    }
}

/// Publishes a run with done cycles 0 to 2, of which 3 is open.
async fn publish_run(rig: &Rig) {
    rig.publish("flotilla.sums-1.spec", FactBody::Spec(spec())).await;
    for cycle in 0..3 {
        let at = |kind: &str| format!("flotilla.sums-1.cycle.{cycle}.{kind}");
        rig.publish(&at("plan"), FactBody::Plan(v1::Plan { cycle, jobs: vec![] })).await;
        let counts = vec![8; PROMPTS as usize];
        let selected = v1::Selected {
            cycle,
            prompts: (0..PROMPTS).collect(),
            judged: counts.clone(),
            passed: counts,
            ..Default::default()
        };
        if cycle > 0 {
            let place = format!("flotilla.sums-1.selection.{cycle}");
            rig.publish(&place, FactBody::Selected(selected)).await;
        }
        let checkpoint = v1::Checkpoint {
            run: "sums-1".into(),
            cycle,
            r#final: true,
            content: v1::checkpoint::Content::Model.into(),
            tree: tree(if cycle == 0 { "base" } else { "trained" }),
            ..Default::default()
        };
        let place = format!("flotilla.sums-1.checkpoint.{cycle}.0");
        rig.publish(&place, FactBody::Checkpoint(checkpoint)).await;
        let done = v1::CycleDone { cycle, best: cycle, ..Default::default() };
        rig.publish(&at("done"), FactBody::CycleDone(done)).await;
    }
}

fn request(cycle: u32, settings: &[&str]) -> v1::ForkRequest {
    let settings = settings.iter().map(|it| (*it).to_owned()).collect();
    v1::ForkRequest { run: "sums-1".into(), cycle, settings, name: String::new() }
}

#[tokio::test]
async fn a_fork_takes_over_cycles_and_copies_no_file() {
    let rig = Rig::start().await;
    publish_run(&rig).await;
    let before = stored_files(&rig.dir.path().join("store"));
    let changed = request(1, &["training.learning_rate=5e-4", "raft.cycles=5"]);
    let run = rig.runs().fork(changed).await.unwrap().into_inner().run;
    assert_eq!(run, "sums-2");
    let shown = rig.runs().get(v1::GetRunRequest { run }).await.unwrap().into_inner();
    assert_eq!((&*shown.forked_from, shown.cycle, shown.cycles), ("sums-1@1", 2, 5));
    assert_eq!(shown.cycles_done.len(), 2);
    let runs: Vec<&str> =
        shown.checkpoints.iter().map(|it| &*it.checkpoint.as_ref().unwrap().run).collect();
    assert_eq!(runs, ["sums-1", "sums-1"], "they are those of the run that was forked");
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..FORKS {
        // A name of its own: otherwise each fork looks for a free number after the others.
        let named = v1::ForkRequest { name: format!("f{}", times.len()), ..request(2, &[]) };
        let began = Instant::now();
        rig.runs().fork(named).await.unwrap();
        times.push(began.elapsed());
    }
    times.sort();
    let (median, most) = (times[FORKS / 2], times[FORKS - 1]);
    println!("{FORKS} forks of {PROMPTS} prompts: median {median:?}, longest {most:?}");
    assert!(median < FORK_LIMIT, "{times:?}");
    assert_eq!(stored_files(&rig.dir.path().join("store")), before, "a file was stored");
}

#[tokio::test]
async fn a_fork_that_cannot_be_is_refused_with_its_reason() {
    let rig = Rig::start().await;
    publish_run(&rig).await;
    let supervised = rig.submit().await;
    let other = |run: &str| v1::ForkRequest { run: run.into(), ..request(0, &[]) };
    for (request, code, said) in [
        (request(3, &[]), Code::FailedPrecondition, "cycle 3 of run sums-1 is not done"),
        (other("none-1"), Code::NotFound, "there is no run none-1"),
        (other(&supervised), Code::FailedPrecondition, "it trains once and has no cycles"),
        (request(1, &["prompts=x"]), Code::InvalidArgument, "field raft.prompts: cannot change"),
        (request(2, &["cycles=2"]), Code::InvalidArgument, "field raft.cycles: must be above 2"),
        (request(1, &["cycles"]), Code::InvalidArgument, "is not KEY=VALUE"),
        (
            v1::ForkRequest { name: "A B".into(), ..request(1, &[]) },
            Code::InvalidArgument,
            "field name: must be",
        ),
    ] {
        let refused = rig.runs().fork(request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), code, "{request:?}: {refused}");
        assert!(refused.message().contains(said), "{request:?}: {refused}");
    }
}

fn stored_files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().map(|it| it.unwrap().path());
    let files = |path: PathBuf| if path.is_dir() { stored_files(&path) } else { vec![path] };
    let mut all: Vec<PathBuf> = entries.flat_map(files).collect();
    all.sort();
    all
}
