use wire::{Fact, JobId, RunId, Subject, SuiteName};

use super::*;
use crate::ActiveJobs;

const START_MS: u64 = 1_000_000;

#[test]
fn the_cycles_that_a_fork_takes_over_have_their_numbers_of_samples() {
    let rate = |mean, samples| v1::cycle_done::Rate { mean, samples, ..Default::default() };
    let done = v1::CycleDone {
        sampled: 64,
        train: Some(rate(0.25, 60)),
        heldout: Some(rate(0.5, 8)),
        suites: vec![v1::cycle_done::SuiteRate {
            suite: "carry".into(),
            rate: Some(rate(1.0, 4)),
            ..Default::default()
        }],
        ..Default::default()
    };
    let cycles = vec![v1::spec::ForkedCycle { done: Some(done), ..Default::default() }];
    let fork = Some(v1::spec::Fork { run: "a-1".into(), cycles, ..Default::default() });
    let raft = v1::spec::Raft { cycles: 3, ..Default::default() };
    let kind = Some(v1::spec::Kind::Raft(raft));
    let spec = v1::Spec { kind, fork, ..Default::default() };
    let view = RunView::start(&record(1, 0.0, FactKey::Spec, FactBody::Spec(spec))).unwrap();
    let (board, _) = view.changes_since(0).unwrap();
    let counts = |planned, judged, passed| {
        Some(v1::board::Samples { planned, drawn: planned, judged, passed, errors: 0 })
    };
    assert_eq!(board.cycles[0].train, counts(64, 60, 15));
    assert_eq!(board.cycles[0].heldout, counts(12, 12, 8));
    assert!(view.missing_archives().is_empty());
}

/// A view that receives a run's facts one after the other.
struct Told<'a> {
    board: RunView,
    sequence: u64,
    /// Receives the facts as well.
    kept: Option<&'a mut Vec<Record>>,
}

impl Told<'_> {
    fn begin(kind: v1::spec::Kind) -> Self {
        let suites = vec![v1::Suite { name: "text".into(), ..Default::default() }];
        let base = Some(v1::Base { tree: Some(tree("base")), random_init: false, adapter: None });
        let kind = Some(kind);
        let spec = v1::Spec { name: "sums".into(), suites, base, kind, ..Default::default() };
        let first = record(1, 0.0, FactKey::Spec, FactBody::Spec(spec));
        Self { board: RunView::start(&first).unwrap(), sequence: 1, kept: None }
    }

    fn raft() -> Self {
        let verifier = Some(v1::Verifier::default());
        let raft = v1::spec::Raft { cycles: 3, verifier, ..Default::default() };
        let mut told = Self::begin(v1::spec::Kind::Raft(raft));
        told.checkpoint(1.0, 0, "base", "base");
        told
    }

    fn tell(&mut self, at_s: f64, place: FactKey, body: FactBody) {
        self.sequence += 1;
        let record = record(self.sequence, at_s, place, body);
        self.kept.iter_mut().for_each(|kept| kept.push(record.clone()));
        self.board.apply_fact(record);
    }

    fn plan(&mut self, at_s: f64, cycle: u32, jobs: u32) {
        let job = |number: u32| v1::plan::Job {
            job: format!("j{number}"),
            purpose: v1::Purpose::Train.into(),
            draws: vec![v1::plan::Draw { prompt: number, first: 0, count: 2 }],
            suite: String::new(),
        };
        let plan = v1::Plan { cycle, jobs: (0..jobs).map(job).collect() };
        self.tell(at_s, FactKey::Plan { cycle }, FactBody::Plan(plan));
        for number in 0..jobs {
            let request = v1::generate_order::Request {
                prompt_id: format!("p{number}"),
                text: "a text that nobody needs here".into(),
                first: 0,
                count: 2,
            };
            let requests = vec![request];
            let order = v1::GenerateOrder { cycle, requests, round: 1, ..Default::default() };
            let pool = wire::Pool::new("default").unwrap();
            let place = FactKey::GenerateOrder { pool, cycle, job: job_id(number), attempt: 1 };
            self.tell(at_s, place, FactBody::GenerateOrder(order));
        }
    }

    fn samples(&mut self, at_s: f64, cycle: u32, number: u32, agent: &str) {
        let sample = |index: u32| v1::samples::Sample {
            prompt_id: format!("p{number}"),
            index,
            text: "4".into(),
            tokens: 3,
            ..Default::default()
        };
        let samples = v1::Samples {
            cycle,
            agent: agent.into(),
            base: "base".into(),
            samples: vec![sample(0), sample(1)],
            wall_s: 2.0,
            ..Default::default()
        };
        let place = FactKey::Samples { cycle, job: job_id(number) };
        self.tell(at_s, place, FactBody::Samples(samples));
    }

    fn verdicts(&mut self, at_s: f64, cycle: u32, number: u32, rewards: [f64; 2]) {
        let verdict = |(index, reward): (usize, f64)| v1::verdicts::Verdict {
            prompt_id: format!("p{number}"),
            index: u32::try_from(index).unwrap(),
            outcome: match reward {
                reward if reward < 0.0 => v1::verdicts::Outcome::Error,
                reward if reward < 1.0 => v1::verdicts::Outcome::Fail,
                _ => v1::verdicts::Outcome::Pass,
            }
            .into(),
            reward,
            detail: "why".into(),
        };
        let verdicts = v1::Verdicts {
            cycle,
            agent: "box".into(),
            verdicts: rewards.into_iter().enumerate().map(verdict).collect(),
            wall_s: 0.5,
            ..Default::default()
        };
        let place = FactKey::Verdicts { cycle, job: job_id(number) };
        self.tell(at_s, place, FactBody::Verdicts(verdicts));
    }

    fn checkpoint(&mut self, at_s: f64, cycle: u32, manifest: &str, parent: &str) {
        let checkpoint = v1::Checkpoint {
            cycle,
            step: 10,
            steps: 10,
            r#final: true,
            content: v1::checkpoint::Content::Model.into(),
            tree: Some(tree(manifest)),
            parent: Some(tree(parent)),
            loss: 0.5,
            wall_s: 3.0,
            agent: "box".into(),
            ..Default::default()
        };
        self.tell(at_s, FactKey::Checkpoint { cycle, step: 10 }, FactBody::Checkpoint(checkpoint));
    }

    fn cycle_done(&mut self, at_s: f64, cycle: u32) {
        if !self.board.run.cycles.contains_key(&cycle) {
            self.plan(at_s, cycle, 0);
        }
        let done = v1::CycleDone { cycle, ..Default::default() };
        self.tell(at_s, FactKey::CycleDone { cycle }, FactBody::CycleDone(done));
    }

    /// Plans the first outer step of an SFT run: 10 steps from 0 for `a`, 30 from 10 for `b`.
    fn shared() -> Self {
        let mut told = Self::begin(v1::spec::Kind::Sft(v1::spec::Sft::default()));
        let slice = |first, steps, agent: &str| v1::slice_plan::Slice {
            first,
            steps,
            agent: agent.into(),
            ..Default::default()
        };
        let slices = vec![slice(0, 10, "a"), slice(10, 30, "b")];
        let plan = v1::SlicePlan { outer: 1, slices, ..Default::default() };
        let place = FactKey::SlicePlan { cycle: 0, outer: 1 };
        told.tell(1.0, place, FactBody::SlicePlan(plan));
        told
    }

    fn control(&mut self, at_s: f64, number: u64, action: v1::control::Action) {
        let control =
            v1::Control { action: action.into(), reason: "a game".into(), ..Default::default() };
        self.tell(at_s, FactKey::Control { number }, FactBody::Control(control));
    }

    fn cycle(&self, number: u32) -> Cycle {
        let (board, _) = self.board.changes_since(0).unwrap();
        board.cycles.into_iter().find(|cycle| cycle.cycle == number).unwrap()
    }
}

fn tree(manifest: &str) -> v1::Tree {
    v1::Tree { path: format!("at/{manifest}"), manifest: manifest.into() }
}

fn job_id(number: u32) -> JobId {
    JobId::new(format!("j{number}")).unwrap()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a test's times")]
fn record(sequence: u64, at_s: f64, place: FactKey, body: FactBody) -> Record {
    let subject = Subject::new(&RunId::new("r-1").unwrap(), place);
    let time_ms = START_MS + (at_s * 1000.0) as u64;
    Record { sequence, time_ms, author: None, fact: Fact { subject, body } }
}

#[test]
fn a_cycle_is_counted_and_drawn_as_its_facts_come() {
    let mut told = Told::raft();
    told.plan(10.0, 1, 3);
    let head = told.board.run_head();
    assert_eq!((head.phase.as_str(), head.done, head.total), ("generate", 0, 6));
    told.samples(12.0, 1, 0, "box-a");
    told.samples(14.0, 1, 1, "box-a");
    told.samples(14.0, 1, 2, "box-b");
    told.verdicts(15.0, 1, 0, [0.0, 1.0]);
    told.verdicts(16.0, 1, 1, [1.0, -1.0]);
    let head = told.board.run_head();
    assert_eq!((head.phase.as_str(), head.done, head.total), ("verify", 4, 6));
    let cycle = told.cycle(1);
    let expected = v1::board::Samples { planned: 6, drawn: 6, judged: 3, passed: 2, errors: 1 };
    assert_eq!(cycle.train, Some(expected));
    assert_eq!(cycle.rewards.unwrap().counts.iter().sum::<u32>(), 3);
    let bars: Vec<_> =
        cycle.spans.iter().map(|it| (it.agent.as_str(), it.work.as_str(), it.count)).collect();
    let expected = [("box", "verify", 2), ("box-a", "generate", 2), ("box-b", "generate", 1)];
    assert_eq!(bars, expected);
}

#[test]
fn who_has_seen_a_place_in_the_log_is_told_what_came_behind_it() {
    let mut told = Told::raft();
    told.plan(10.0, 1, 2);
    let (first, seen) = told.board.changes_since(0).unwrap();
    assert!(first.spec.is_some());
    assert_eq!(told.board.changes_since(seen), None);
    told.plan(11.0, 2, 1);
    let (next, seen) = told.board.changes_since(seen).unwrap();
    assert_eq!(next.cycles.iter().map(|cycle| cycle.cycle).collect::<Vec<_>>(), [2]);
    assert!(next.spec.is_none() && next.head.is_some());
    // Facts that were applied before are ignored, as after a broken connection.
    let again = record(2, 11.0, FactKey::Plan { cycle: 1 }, FactBody::Plan(v1::Plan::default()));
    told.board.apply_fact(again);
    assert_eq!(told.board.changes_since(seen), None);
}

#[test]
fn what_the_log_has_let_go_of_is_drawn_from_the_archive() {
    let mut told = Told::raft();
    let mut whole = Told::raft();
    for told in [&mut told, &mut whole] {
        told.plan(10.0, 1, 1);
    }
    whole.samples(12.0, 1, 0, "box-a");
    whole.verdicts(13.0, 1, 0, [0.0, 1.0]);
    for told in [&mut told, &mut whole] {
        let done = v1::CycleDone { cycle: 1, sampled: 2, ..Default::default() };
        told.tell(20.0, FactKey::CycleDone { cycle: 1 }, FactBody::CycleDone(done));
        let archived = v1::Archived { cycle: 1, ..Default::default() };
        told.tell(21.0, FactKey::Archived { cycle: 1 }, FactBody::Archived(archived));
    }
    assert_eq!(whole.board.missing_archives(), []);
    assert_eq!(told.board.missing_archives().len(), 1);
    let mut archive = Told::raft();
    let mut records = Vec::new();
    archive.kept = Some(&mut records);
    archive.samples(12.0, 1, 0, "box-a");
    archive.verdicts(13.0, 1, 0, [0.0, 1.0]);
    let seen = told.board.current_revision();
    told.board.restore_cycle(1, &records);
    assert_eq!(told.board.missing_archives(), []);
    let recalled = told.board.changes_since(seen).unwrap().0.cycles.remove(0);
    assert_eq!((recalled.spans, recalled.train), (whole.cycle(1).spans, whole.cycle(1).train));
}

#[test]
fn samples_of_an_agent_that_is_found_out_count_no_more() {
    let mut told = Told::raft();
    told.plan(10.0, 1, 2);
    told.samples(12.0, 1, 0, "box-a");
    told.verdicts(13.0, 1, 0, [1.0, 1.0]);
    assert_eq!(told.cycle(1).train.unwrap().passed, 2);
    let job = v1::quarantine::Job { cycle: 1, job: "j0".into(), again: "j0x".into() };
    let found = v1::Quarantine { agent: "box-a".into(), jobs: vec![job], ..Default::default() };
    let agent = wire::AgentId::new("box-a").unwrap();
    told.tell(14.0, FactKey::Quarantine { agent, number: 1 }, FactBody::Quarantine(found));
    let train = told.cycle(1).train.unwrap();
    assert_eq!((train.planned, train.drawn, train.passed), (4, 0, 0));
    assert_eq!(told.cycle(1).rewards, None);
    let head = told.board.run_head();
    assert_eq!((head.troubles_in_all, head.troubles[0].what.as_str()), (1, "quarantine"));
}

#[test]
fn an_end_is_foretold_and_pauses_do_not_count() {
    let mut told = Told::raft();
    told.cycle_done(10.0, 0);
    assert_eq!(told.board.run_head().run_ends, None);
    told.cycle_done(110.0, 1);
    assert_eq!(told.board.run_head().run_ends.unwrap().likely_s, 310.0);
    told.control(120.0, 1, v1::control::Action::Pause);
    assert_eq!(told.board.run_head().run_ends, None, "nobody knows when it goes on");
    told.control(1120.0, 2, v1::control::Action::Resume);
    let head = told.board.run_head();
    assert_eq!(head.run_ends.unwrap().likely_s, 1310.0);
    assert_eq!((head.steered.len(), head.state.as_str()), (2, "running"));
    told.plan(1130.0, 2, 20);
    for number in 0..5 {
        told.samples(1140.0 + f64::from(number) * 10.0, 2, number, "box");
    }
    let phase = told.board.run_head().phase_ends.unwrap();
    assert_eq!(phase.likely_s, 1330.0, "a quarter took 50 s");
}

#[test]
fn checkpoints_and_evals_say_what_came_of_a_training() {
    let mut told = Told::raft();
    told.plan(10.0, 1, 0);
    told.checkpoint(20.0, 1, "one", "base");
    let eval = v1::Eval {
        cycle: 1,
        step: 10,
        suite: "text".into(),
        manifest: "one".into(),
        perplexity: 7.5,
        agent: "box-b".into(),
        ..Default::default()
    };
    let place = FactKey::Eval { cycle: 1, step: 10, suite: SuiteName::new("text").unwrap() };
    told.tell(25.0, place, FactBody::Eval(eval));
    let cycle = told.cycle(1);
    let point = &cycle.checkpoints[0];
    assert_eq!((point.manifest.as_str(), point.parent.as_str()), ("one", "base"));
    assert_eq!((point.at_s, point.path.as_str()), (20.0, "at/one"));
    assert_eq!((cycle.evals[0].suite.as_str(), cycle.evals[0].perplexity), ("text", 7.5));
}

#[test]
fn a_run_that_ended_says_so_and_foretells_nothing() {
    let mut told = Told::raft();
    told.cycle_done(10.0, 0);
    told.cycle_done(110.0, 1);
    let status = v1::done::Status::Failed.into();
    let done = v1::Done { status, message: "no box trains".into() };
    told.tell(120.0, FactKey::Done, FactBody::Done(done));
    assert!(told.board.has_ended());
    let head = told.board.run_head();
    assert_eq!((head.state.as_str(), head.message.as_str()), ("failed", "no box trains"));
    assert_eq!((head.ended_s, head.run_ends, head.phase.as_str()), (Some(120.0), None, "done"));
}

#[test]
fn troubles_are_the_newest_and_their_number_is_that_of_all() {
    let mut told = Told::raft();
    for attempt in 1..=200 {
        let id = "1-j0".to_owned();
        let place = FactKey::Failure { kind: wire::WorkKind::Generate, id: id.clone(), attempt };
        let failure = v1::Failure { kind: "generate".into(), id, attempt, ..Default::default() };
        told.tell(f64::from(attempt), place, FactBody::Failure(failure));
    }
    let head = told.board.run_head();
    assert_eq!((head.troubles.len(), head.troubles_in_all), (TROUBLES_MAX, 200));
    assert_eq!(head.troubles.last().unwrap().at_s, 200.0);
}

#[test]
fn a_long_run_comes_in_parts_and_all_of_it_comes() {
    let mut told = Told::raft();
    for cycle in 1..=100 {
        told.plan(f64::from(cycle), cycle, 1);
    }
    let (mut seen, mut found) = (0, Vec::new());
    while let Some((part, reached)) = told.board.changes_since(seen) {
        assert!(part.cycles.len() <= CYCLES_PER_MESSAGE && reached > seen);
        found.extend(part.cycles.iter().map(|cycle| cycle.cycle));
        assert_eq!(part.spec.is_some(), seen == 0);
        seen = reached;
    }
    found.sort_unstable();
    assert_eq!(found, (0..=100).collect::<Vec<u32>>());
}

#[test]
fn a_shared_training_proceeds_with_what_its_boxes_report() {
    let mut told = Told::shared();
    let status = |agent: &str, slice: u32, done| v1::AgentStatus {
        agent: agent.into(),
        jobs: vec![v1::ActiveJob {
            role: "trainer".into(),
            run: "r-1".into(),
            job: format!("train-1-{slice}"),
            done,
            total: 100,
            ..Default::default()
        }],
        ..Default::default()
    };
    let progress = |told: &Told, statuses: &[v1::AgentStatus]| {
        let run = &told.board.run;
        let progress = ActiveJobs::from_statuses(run, statuses).phase_progress(run);
        assert_eq!(progress.note, "outer step 1 on 2 boxes");
        (progress.done, progress.total)
    };
    assert_eq!(progress(&told, &[status("a", 1, 4), status("b", 2, 0)]), (4, 100));
    assert_eq!(progress(&told, &[status("a", 1, 4), status("b", 2, 15)]), (9, 100));
    assert_eq!(progress(&told, &[status("b", 2, 99)]), (30, 100), "more than its slice");
    let delta = v1::Delta {
        steps: 10,
        total_steps: 100,
        trained_tokens: 1,
        start: "new".into(),
        tree: Some(tree("delta")),
        ..Default::default()
    };
    // It starts from the adapter of merge 0.
    let order = v1::TrainOrder { round: 1, ..Default::default() };
    let pool = wire::Pool::new("default").unwrap();
    let (cycle, outer, part) = (0, 0, wire::TrainPart::Merge);
    let place = FactKey::TrainPartOrder { pool, cycle, outer, part, attempt: 1 };
    told.tell(2.0, place, FactBody::TrainOrder(order));
    let merge = v1::Merge { tree: Some(tree("new")), ..Default::default() };
    told.tell(2.0, FactKey::Merge { cycle, outer }, FactBody::Merge(merge));
    let place = FactKey::Delta { cycle, outer: 1, slice: 1 };
    told.tell(3.0, place, FactBody::Delta(delta));
    assert_eq!(progress(&told, &[status("b", 2, 15)]), (15, 100));
    let close = v1::SliceClose { outer: 1, slices: vec![1], ..Default::default() };
    let place = FactKey::SliceClose { cycle, outer: 1 };
    told.tell(4.0, place, FactBody::SliceClose(close));
    assert_eq!(progress(&told, &[status("b", 2, 15)]), (10, 100), "its steps do not count");
}

#[test]
fn work_of_a_shared_training_names_its_outer_steps() {
    let mut told = Told::shared();
    let delta = |outer| v1::Delta { outer, agent: "a".into(), wall_s: 8.0, ..Default::default() };
    for (at_s, outer) in [(10.0, 1), (20.0, 2), (28.0, 3)] {
        let place = FactKey::Delta { cycle: 0, outer, slice: 1 };
        told.tell(at_s, place, FactBody::Delta(delta(outer)));
    }
    let merge = v1::Merge { agent: "b".into(), wall_s: 1.0, ..Default::default() };
    told.tell(12.0, FactKey::Merge { cycle: 0, outer: 1 }, FactBody::Merge(merge));
    let eval = v1::Eval { agent: "b".into(), ..Default::default() };
    let place = FactKey::Eval { cycle: 0, step: 1, suite: SuiteName::new("text").unwrap() };
    told.tell(40.0, place, FactBody::Eval(eval));
    let spans = told.cycle(0).spans;
    let label = |it: &v1::board::Span| {
        (it.agent.clone(), it.work.clone(), it.first_outer_step, it.last_outer_step)
    };
    let labels: Vec<(String, String, u32, u32)> = spans.iter().map(label).collect();
    let expected = [
        ("a".to_owned(), "train".to_owned(), 1, 1),
        ("a".to_owned(), "train".to_owned(), 2, 3),
        ("b".to_owned(), "evaluate".to_owned(), 0, 0),
        ("b".to_owned(), "merge".to_owned(), 1, 1),
    ];
    assert_eq!(labels, expected, "the second bar joins two that touch");
    let run = &told.board.run;
    let text = |body| {
        let place = FactKey::Merge { cycle: 0, outer: 4 };
        crate::describe_fact(run, &record(99, 50.0, place, body))
    };
    let merge =
        v1::Merge { outer: 4, agent: "b".into(), deltas: vec!["x".into()], ..<_>::default() };
    let merged = text(FactBody::Merge(merge)).unwrap();
    assert_eq!(merged, "r-1: cycle 0: outer step 4: merged 1 slice on b");
    let trained = text(FactBody::Delta(v1::Delta { steps: 5, first: 20, ..delta(4) })).unwrap();
    assert_eq!(trained, "r-1: cycle 0: outer step 4: 5 steps from 20 on a, loss 0.0000");
}
