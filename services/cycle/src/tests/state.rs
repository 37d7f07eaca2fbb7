//! What is derived from the state of a run, and the index of its jobs.

use wire::{JobId, v1};

use super::log::{Log, raft, sft, watched};
use crate::{
    Cycle, PlannedJob, PolicyWeights, RunPhase, outcome,
    state::{AcceptedSamples, JobNeeds, OrderHistory},
};

fn accepted() -> AcceptedSamples {
    AcceptedSamples {
        sequence: 1,
        agent: String::new(),
        engine: String::new(),
        count: 4,
        wall_s: 1.0,
        joules: 0.0,
        void_reason: None,
        canary: Vec::new(),
        samples: Vec::new(),
    }
}

#[test]
fn an_index_counts_the_jobs_of_a_purpose_by_stage() {
    use v1::Purpose::{Heldout, Train};
    let mut cycle = Cycle::default();
    let needs = JobNeeds { verdicts: true, scores: false };
    let ids: [JobId; 3] = ["a", "b", "c"].map(|id| id.parse().unwrap());
    for id in &ids {
        let draws = vec![v1::plan::Draw { prompt: 0, first: 0, count: 4 }];
        cycle.jobs.insert(id.clone(), PlannedJob::new(Train, String::new(), draws, needs));
    }
    let change = |cycle: &mut Cycle, id: &JobId, change: fn(&mut PlannedJob)| {
        change(cycle.jobs.get_mut(id).unwrap());
        cycle.reindex_all(2);
        let index = cycle.purpose_index(Train);
        let counts = [
            index.unordered.len(),
            index.in_flight.len(),
            index.unsettled_count(),
            index.finished_count(),
            index.set_aside,
            index.job_count(),
        ];
        (counts, index.unordered_samples)
    };
    let [a, b, c] = &ids;
    assert_eq!(change(&mut cycle, a, |_| {}), ([3, 0, 3, 0, 0, 3], 12));
    let stale = |job: &mut PlannedJob| job.orders.record_order(1, 1, 0);
    assert_eq!(change(&mut cycle, a, stale), ([3, 0, 3, 0, 0, 3], 12));
    let order = |job: &mut PlannedJob| job.orders.record_order(1, 2, 0);
    assert_eq!(change(&mut cycle, a, order), ([2, 1, 3, 0, 0, 3], 8));
    assert_eq!(change(&mut cycle, b, order), ([1, 2, 3, 0, 0, 3], 4));
    let sample = |job: &mut PlannedJob| job.samples = Some(accepted());
    assert_eq!(change(&mut cycle, a, sample), ([1, 1, 3, 0, 0, 3], 4));
    assert!(!cycle.has_all_samples(Train) && cycle.has_all_samples(Heldout));
    let judge = |job: &mut PlannedJob| job.verdicts = Some(v1::Verdicts::default());
    assert_eq!(change(&mut cycle, a, judge), ([1, 1, 2, 1, 0, 3], 4));
    let give_up = |job: &mut PlannedJob| job.set_aside = Some(String::new());
    assert_eq!(change(&mut cycle, b, give_up), ([1, 0, 1, 1, 1, 3], 4));
    assert_eq!((cycle.set_aside_samples(Train), cycle.is_settled(Train)), (4, false));
    let job = &cycle.jobs[c];
    assert!(job.needs_samples() && !job.is_settled() && !cycle.jobs[b].needs_samples());
    assert!(cycle.jobs[a].is_settled() && cycle.jobs[b].is_settled());
    cycle.remove_job(a);
    cycle.remove_job(b);
    assert_eq!(change(&mut cycle, c, sample), ([0, 0, 1, 0, 0, 1], 0));
    cycle.remove_job(c);
    assert!(cycle.is_settled(Train) && cycle.is_settled(Heldout));
}

#[test]
fn an_index_measures_the_median_of_the_most_recent_jobs() {
    use v1::Purpose::Train;
    let mut cycle = Cycle::default();
    let record = |cycle: &mut Cycle, wall_s: f64, tokens: &[u32]| {
        let one = |tokens: &u32| v1::samples::Sample { tokens: *tokens, ..Default::default() };
        let samples = tokens.iter().map(one).collect();
        cycle.record_samples(Train, &v1::Samples { wall_s, samples, ..Default::default() });
        let index = cycle.purpose_index(Train);
        (index.ms_per_sample(), index.tokens_per_sample())
    };
    assert_eq!(record(&mut cycle, f64::NAN, &[]), (None, None));
    assert_eq!(record(&mut cycle, 10.0, &[3; 5]), (Some(2000.0), Some(3.0)));
    assert_eq!(record(&mut cycle, -1.0, &[9]), (Some(2000.0), Some(4.0)));
    assert_eq!(record(&mut cycle, 1.0, &[4]), (Some(2000.0), Some(4.0)));
    assert_eq!(record(&mut cycle, 0.0, &[]), (Some(1000.0), Some(4.0)));
    for _ in 0..32 {
        record(&mut cycle, 7.0, &[4]);
    }
    assert_eq!(record(&mut cycle, 7.0, &[4]).0, Some(7000.0));
    for _ in 0..32 {
        record(&mut cycle, 9.0, &[4]);
    }
    assert_eq!(record(&mut cycle, 9.0, &[4]).0, Some(9000.0), "33 of the last 64");
}

#[test]
fn orders_are_counted_in_their_round() {
    let mut orders = OrderHistory::default();
    let counts = [(1, 1), (2, 1), (3, 2), (2, 1), (4, 2)].map(|(attempt, round)| {
        orders.record_order(attempt, round, u64::from(attempt));
        (orders.last_attempt, orders.round, orders.orders_in_round, orders.last_ordered_ms)
    });
    assert_eq!(counts, [(1, 1, 1, 1), (2, 1, 2, 2), (3, 2, 1, 3), (3, 2, 2, 2), (4, 2, 3, 4)]);
}

#[test]
fn a_run_has_the_state_that_its_last_facts_give_it() {
    use v1::{control::Action, done::Status, run::State};
    let mut log = Log::new(raft(1));
    let mut states = vec![log.run().current_state()];
    for action in [Action::Pause, Action::Resume] {
        log.control(action);
        states.push(log.run().current_state());
    }
    let mut run = log.run();
    for status in [Status::Succeeded, Status::Failed, Status::Cancelled, Status::Unspecified] {
        run.done = Some(v1::Done { status: status.into(), ..Default::default() });
        states.push(run.current_state());
    }
    let ended = [State::Succeeded, State::Failed, State::Cancelled, State::Failed];
    assert_eq!(states[..3], [State::Running, State::Paused, State::Running]);
    assert_eq!(states[3..], ended);
    assert_eq!(
        [raft(1), sft(), watched()].map(|spec| Log::new(spec).run().kind_name()),
        ["raft", "sft", "watched"]
    );
    use RunPhase::{Done, Evaluate, Generate, Plan, Select, Train, Verify};
    assert_eq!(
        [Plan, Generate, Verify, Select, Train, Evaluate, Done].map(RunPhase::as_str),
        ["plan", "generate", "verify", "select", "train", "evaluate", "done"]
    );
}

#[test]
fn a_policy_is_the_tree_of_its_checkpoint_on_its_base() {
    use v1::checkpoint::Content;
    let tree = |manifest: &str| v1::Tree { manifest: manifest.into(), ..Default::default() };
    let policy = |content: Content, base: Option<&str>| {
        let (tree, base) = (Some(tree("new")), base.map(tree));
        let point = v1::Checkpoint { tree, base, content: content.into(), ..Default::default() };
        PolicyWeights::from_checkpoint(&point)
    };
    let adapter = policy(Content::Adapter, Some("base")).unwrap();
    assert_eq!((&*adapter.base.manifest, adapter.adapter_manifest()), ("base", "new"));
    assert_eq!(adapter.adapter_or_base().manifest, "new");
    let model = policy(Content::Model, None).unwrap();
    assert_eq!((&*model.adapter_or_base().manifest, model.adapter_manifest()), ("new", ""));
    assert_eq!(policy(Content::Adapter, None), None);
    assert_eq!(policy(Content::Unspecified, Some("base")), None);
}

#[test]
fn the_next_cycle_waits_only_for_gates_that_may_reject_a_checkpoint() {
    use v1::gates::{Gate, Then};
    let gate = |then: Then| Gate { then: then.into(), ..Default::default() };
    let kinds: [fn(&mut v1::Gates, Gate); 7] = [
        |gates, gate| gates.perplexity.push(gate),
        |gates, gate| gates.pass_rate = Some(gate),
        |gates, gate| gates.pass_rates.push(gate),
        |gates, gate| gates.diversity = Some(gate),
        |gates, gate| gates.entropy = Some(gate),
        |gates, gate| gates.dropped_tokens = Some(gate),
        |gates, gate| gates.divergence = Some(gate),
    ];
    let mut cycle = Cycle::default();
    let allows = |cycle: &Cycle, gates: Option<v1::Gates>| {
        cycle.allows_pipelining(&v1::spec::Raft { gates, ..Default::default() })
    };
    assert!(!allows(&cycle, None), "there is no checkpoint yet");
    let point = |r#final| v1::Checkpoint { r#final, ..Default::default() };
    cycle.checkpoints = [(5, point(false))].into();
    assert!(!allows(&cycle, None));
    cycle.checkpoints.insert(9, point(true));
    assert!(allows(&cycle, None) && allows(&cycle, Some(v1::Gates::default())));
    assert!(!allows(&cycle, Some(v1::Gates { patience: 1, ..Default::default() })));
    for set_gate in kinds {
        let allowed = [Then::Tell, Then::RollBack, Then::Stop].map(|then| {
            let mut gates = v1::Gates::default();
            set_gate(&mut gates, gate(then));
            allows(&cycle, Some(gates))
        });
        assert_eq!(allowed, [true, false, false]);
    }
}

#[test]
fn a_finished_run_tells_what_it_lacks_and_why_a_gate_stopped_it() {
    use v1::{cycle_done::Finding, gates::Then};
    let mut run = Log::new(raft(1)).run();
    let fleet = crate::FleetSnapshot::default();
    let message = |run: &crate::Run| outcome::run_outcome(run, &fleet).map(|done| done.message);
    let done = |then: Then, set_aside, findings| v1::CycleDone {
        then: then.into(),
        set_aside,
        findings,
        best: 1,
        ..Default::default()
    };
    let finish = |run: &mut crate::Run, number: u32, done| {
        run.cycles.entry(number).or_default().done = Some(done);
    };
    finish(&mut run, 0, done(Then::Tell, 0, vec![]));
    assert_eq!(message(&run), None);
    finish(&mut run, 1, done(Then::Tell, 0, vec![]));
    assert_eq!(message(&run).as_deref(), Some(""));
    finish(&mut run, 0, done(Then::RollBack, 2, vec![]));
    finish(&mut run, 1, done(Then::RollBack, 3, vec![]));
    let failed = [(0, "text"), (10, "text")].map(|(step, name)| (step, name.parse().unwrap()));
    run.cycles.get_mut(&1).unwrap().failed_evals = failed.clone().into();
    let lacks = "2 evals failed, 5 samples were set aside, cycle 1 was the best";
    assert_eq!(message(&run).as_deref(), Some(lacks));
    run.cycles.get_mut(&1).unwrap().evals.insert(failed[0].clone(), v1::Eval::default());
    assert!(message(&run).unwrap().starts_with("1 evals failed"));
    run.cycles.get_mut(&1).unwrap().failed_evals.clear();
    let finding = |gate: &str| {
        vec![Finding { gate: gate.into(), value: 2.0, limit: 1.5, ..Default::default() }]
    };
    for (findings, why) in [
        (vec![], "stopped after cycle 1, 2 samples were set aside"),
        (
            finding("patience"),
            "stopped after cycle 1: no improvement since cycle 1, 2 samples were set aside",
        ),
        (
            finding("perplexity"),
            "stopped after cycle 1: its perplexity of 2.0000 is past 1.5000; cycle 1 was the \
             best, 2 samples were set aside",
        ),
    ] {
        finish(&mut run, 1, done(Then::Stop, 0, findings));
        assert_eq!(message(&run).as_deref(), Some(why));
    }
    run.cancelled = true;
    assert_eq!(message(&run).as_deref(), Some("a user asked for it"));
    run.cancelled_by = Some(wire::AgentId::new("ann").unwrap());
    assert_eq!(message(&run).as_deref(), Some("ann asked for it"));
}
