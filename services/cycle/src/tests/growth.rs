//! Ten times the samples cost ten times the work. Visits and allocations are counted, so nothing
//! here depends on the machine.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use super::log::{prompts, raft};
use crate::{
    FleetMember, FleetSnapshot, HeldJob, JobSizing, PlannerInputs, ReissueTimeouts, Run,
    RunAuditor, RunSet, cost_probe::visit_count,
};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: counts, and forwards every call.
#[expect(unsafe_code, reason = "an allocator is")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = ALLOCATED.try_with(|count| count.set(count.get() + 1 + layout.size() as u64 / 64));
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Visited elements and allocations; each 64 bytes count as another allocation.
#[derive(Debug, Clone, Copy)]
struct Cost {
    visits: u64,
    allocated: u64,
}

fn cost_of<T>(work: impl FnOnce() -> T) -> (T, Cost) {
    let before = (visit_count(), ALLOCATED.get());
    let done = work();
    let (visits, allocated) = (visit_count() - before.0, ALLOCATED.get() - before.1);
    (done, Cost { visits, allocated })
}

/// A coordinator that plans at every fact, and its agents, which answer one order after another.
struct SimulatedFleet {
    runs: RunSet,
    id: RunId,
    records: Vec<Record>,
    /// Log entries that the agents have read.
    answered: usize,
    prompts: Vec<wire::PromptEntry>,
    heldout: Vec<wire::PromptEntry>,
    fleet: FleetSnapshot,
}

impl SimulatedFleet {
    fn new(count: u32) -> Self {
        let mut spec = raft(1);
        let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind else { panic!("a raft run") };
        (raft.prompt_count, raft.samples_per_prompt) = (count, 8);
        let member = |n: usize| FleetMember {
            agent: format!("g{n}"),
            tokens_per_s: 100.0,
            // Jobs that others hold are searched as well.
            held_jobs: (0..n)
                .map(|job| HeldJob {
                    run: "r1".parse().unwrap(),
                    cycle: 1,
                    job: format!("t{job:05}"),
                })
                .collect(),
            remaining_samples: 8,
            seconds_per_sample: 1.0,
            training_speed: None,
        };
        let mut simulated = Self {
            runs: RunSet::default(),
            id: RunId::new("r1").unwrap(),
            records: Vec::new(),
            answered: 0,
            prompts: prompts("p", count as usize),
            heldout: prompts("h", 10),
            fleet: FleetSnapshot {
                generators: (0..4).map(member).collect(),
                ..FleetSnapshot::default()
            },
        };
        simulated.runs.mark_caught_up();
        simulated.write(FactKey::Spec, FactBody::Spec(spec));
        simulated
    }

    fn write(&mut self, place: FactKey, body: FactBody) {
        let sequence = self.records.len() as u64 + 1;
        let fact = Fact { subject: Subject::new(&self.id, place), body };
        let record = Record { sequence, time_ms: sequence, author: None, fact };
        self.runs.fold_record(&record);
        self.records.push(record);
        // Time passes every 100 facts.
        if sequence.is_multiple_of(100) {
            self.runs.mark_dirty();
        }
    }

    fn decide(&mut self) {
        while self.decides() {}
    }

    fn decides(&mut self) -> bool {
        let before = self.records.len();
        let sizing = JobSizing { samples_min: 8, samples_max: 8, ..JobSizing::default() };
        for id in self.runs.take_dirty() {
            let inputs = PlannerInputs {
                prompts: &self.prompts,
                heldout: &self.heldout,
                suites: &Default::default(),
                fleet: &self.fleet,
                sizing: &sizing,
                timeouts: &ReissueTimeouts::default(),
                check_stragglers: true,
                now_ms: self.records.len() as u64,
            };
            for command in self.runs.next_commands(&id, inputs) {
                let Subject { key: place, .. } = command.fact.subject;
                self.write(place, command.fact.body);
            }
        }
        self.records.len() > before
    }

    /// Runs until nothing is left to write.
    fn run(mut self) -> Vec<Record> {
        self.decide();
        while let Some(record) = self.records.get(self.answered).cloned() {
            self.answered += 1;
            if let Some((place, body)) = answer(&record) {
                self.write(place, body);
                self.decide();
            }
        }
        assert!(self.runs.iter_open().next().is_none(), "the run came to a halt");
        self.records
    }
}

fn samples(order: &v1::GenerateOrder) -> v1::Samples {
    let samples = order.requests.iter().flat_map(|request| {
        (request.first..request.first + request.count).map(|index| v1::samples::Sample {
            prompt_id: request.prompt_id.clone(),
            index,
            text: "answer".into(),
            tokens: 2,
            finish: v1::samples::Finish::Stop.into(),
            ..Default::default()
        })
    });
    let manifest =
        |tree: Option<&v1::Tree>| tree.map_or(String::new(), |tree| tree.manifest.clone());
    v1::Samples {
        run: order.run.clone(),
        cycle: order.cycle,
        job: order.job.clone(),
        attempt: order.attempt,
        purpose: order.purpose,
        base: manifest(order.base.as_ref()),
        adapter: manifest(order.adapter.as_ref()),
        agent: "g1".into(),
        wall_s: 1.0,
        samples: samples.collect(),
        ..Default::default()
    }
}

fn answer(record: &Record) -> Option<(FactKey, FactBody)> {
    match (&record.fact.subject.key, &record.fact.body) {
        (_, FactBody::GenerateOrder(order)) if order.attempt == 1 => {
            let place = FactKey::Samples { cycle: order.cycle, job: order.job.parse().unwrap() };
            Some((place, FactBody::Samples(samples(order))))
        }
        (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
            let judge = |sample: &v1::samples::Sample| v1::verdicts::Verdict {
                prompt_id: sample.prompt_id.clone(),
                index: sample.index,
                outcome: v1::verdicts::Outcome::Pass.into(),
                reward: 1.0,
                detail: String::new(),
            };
            let body = v1::Verdicts {
                run: samples.run.clone(),
                cycle: *cycle,
                job: samples.job.clone(),
                purpose: samples.purpose,
                samples_sequence: record.sequence,
                verdicts: samples.samples.iter().map(judge).collect(),
                ..Default::default()
            };
            Some((FactKey::Verdicts { cycle: *cycle, job: job.clone() }, FactBody::Verdicts(body)))
        }
        (_, FactBody::TrainOrder(order)) => {
            let base = order.base.as_ref().and_then(|base| base.tree.clone());
            let body = v1::Checkpoint {
                run: order.run.clone(),
                cycle: order.cycle,
                step: 10,
                steps: 10,
                r#final: true,
                content: v1::checkpoint::Content::Adapter.into(),
                tree: Some(v1::Tree { path: "trees/a".into(), manifest: "a".into() }),
                parent: order.adapter.clone().or_else(|| base.clone()),
                base,
                ..Default::default()
            };
            let place = FactKey::Checkpoint { cycle: order.cycle, step: 10 };
            Some((place, FactBody::Checkpoint(body)))
        }
        (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => {
            let manifest = checkpoint.tree.clone().unwrap_or_default().manifest;
            let body = v1::Eval {
                run: checkpoint.run.clone(),
                cycle: *cycle,
                step: *step,
                suite: "text".into(),
                perplexity: 10.0,
                manifest,
                ..Default::default()
            };
            let suite = "text".parse().unwrap();
            Some((FactKey::Eval { cycle: *cycle, step: *step, suite }, FactBody::Eval(body)))
        }
        _ => None,
    }
}

/// The cost of a run with `count` prompts: to coordinate, to replay, to audit; and its facts.
fn costs(count: u32) -> (usize, [Cost; 3]) {
    let (records, live) = cost_of(|| SimulatedFleet::new(count).run());
    let (run, replay) = cost_of(|| {
        let mut run = Run::start(&records[0]).unwrap();
        records.iter().for_each(|record| run.fold_record(record));
        run
    });
    assert_eq!(run.anomalies, []);
    assert_eq!(run.done.unwrap().status(), v1::done::Status::Succeeded);
    let (audit, audited) = cost_of(|| {
        let mut auditor = RunAuditor::default();
        records.iter().for_each(|record| auditor.audit_record(record));
        auditor.finish_audit().unwrap()
    });
    assert_eq!(audit.findings, []);
    (records.len(), [live, replay, audited])
}

#[test]
fn ten_times_the_samples_are_ten_times_the_work() {
    let (facts, small) = costs(300);
    let (more_facts, large) = costs(3000);
    assert!((9 * facts..11 * facts).contains(&more_facts), "{facts} facts, {more_facts}");
    for (what, (small, large)) in ["decide", "fold", "audit"].iter().zip(small.iter().zip(&large)) {
        println!("{what}: {small:?}, ten times: {large:?}");
        assert!(large.allocated <= 12 * small.allocated, "{what}: {small:?}, {large:?}");
        // Elements that are visited a bounded number of times whatever the run's size.
        let few = 5_000;
        assert!(large.visits <= 12 * small.visits + few, "{what}: {small:?}, {large:?}");
    }
}
