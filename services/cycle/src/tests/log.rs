//! A write-once log and agents that answer at once.

use std::collections::{BTreeMap, BTreeSet};

use wire::{Fact, FactBody, FactKey, PromptEntry, Record, RunId, Subject, v1};

use crate::{
    FleetMember, FleetSnapshot, HeldJob, JobSizing, PlannerInputs, ReissueTimeouts, Run, RunPhase,
    next_commands,
};

pub(super) const WAITING: ReissueTimeouts =
    ReissueTimeouts { unclaimed_ms: 90_000, overdue_ms: 60_000 };

pub(super) struct Log {
    pub(super) id: RunId,
    records: Vec<Record>,
    run: Option<Run>,
    subjects: BTreeSet<String>,
    controls: u64,
    barren: BTreeSet<u32>,
    /// Perplexity by cycle; 10 for the others.
    pub(super) perplexities: BTreeMap<u32, f64>,
    /// Cycles whose held-out samples all fail.
    pub(super) forgetful: BTreeSet<u32>,
    /// Cycles and prompt suites whose samples all fail.
    pub(super) forgotten: BTreeSet<(u32, String)>,
    /// Mean log-probability in nats per token, for the cycles whose samples report it.
    pub(super) surprise: BTreeMap<u32, f64>,
    /// Log-probabilities and tokens of training samples, in turn by index. The first is cut if
    /// there are several.
    pub(super) drawn: Vec<(Vec<u8>, Vec<u32>)>,
    /// The turns of each sample of an order for episodes.
    pub(super) turns: Vec<v1::samples::Turn>,
    /// The weights of tokens that the training of a cycle reports.
    pub(super) weighting: BTreeMap<u32, v1::checkpoint::Weighting>,
    /// Steps of a training on several boxes.
    pub(super) total_steps: u32,
    /// Steps per second of trainers on several boxes; 1 for the others. With 0, an agent takes none.
    pub(super) speeds: BTreeMap<String, f64>,
    pub(super) fleet: FleetSnapshot,
    pub(super) now_ms: u64,
}

fn blob(name: &str) -> Option<v1::Blob> {
    Some(v1::Blob { digest: wire::Digest::hash_bytes(name.as_bytes()).to_string(), bytes: 1 })
}

pub(super) fn tree(manifest: &str) -> Option<v1::Tree> {
    Some(v1::Tree { path: format!("trees/{manifest}"), manifest: manifest.into() })
}

fn spec(kind: v1::spec::Kind) -> v1::Spec {
    v1::Spec {
        run: "r1".into(),
        seed: 7,
        base: Some(v1::Base { tree: tree("base"), random_init: false, adapter: None }),
        pool: "default".into(),
        suites: vec![v1::Suite { name: "text".into(), ..Default::default() }],
        kind: Some(kind),
        ..Default::default()
    }
}

pub(super) fn sft() -> v1::Spec {
    spec(v1::spec::Kind::Sft(v1::spec::Sft { dataset: blob("d"), training: None }))
}

pub(super) fn raft(cycles: u32) -> v1::Spec {
    spec(v1::spec::Kind::Raft(v1::spec::Raft {
        prompts: blob("p"),
        prompt_count: 20,
        heldout: blob("h"),
        heldout_count: 10,
        verifier: Some(v1::Verifier::default()),
        cycles,
        samples_per_prompt: 8,
        heldout_samples_per_prompt: 2,
        sampling: Some(v1::Sampling { max_new_tokens: 16, ..Default::default() }),
        selection: Some(v1::Selection {
            keep_per_prompt: 1,
            min_reward: 0.5,
            ..Default::default()
        }),
        training: Some(v1::Training { lora: Some(v1::Lora::default()), ..Default::default() }),
        ..Default::default()
    }))
}

pub(super) fn watched() -> v1::Spec {
    let (source, host) = ("out".into(), "box".into());
    spec(v1::spec::Kind::Watched(v1::spec::Watched { source, host }))
}

pub(super) fn prompts(prefix: &str, count: usize) -> Vec<PromptEntry> {
    let lines: Vec<String> =
        (0..count).map(|n| format!(r#"{{"id":"{prefix}{n}","prompt":"{n}+1="}}"#)).collect();
    PromptEntry::parse_all(lines.join("\n").as_bytes()).unwrap()
}

/// Returns prompts with the same ids as the run's own held-out prompts.
pub(super) fn suites(run: &Run) -> BTreeMap<String, Vec<PromptEntry>> {
    let suites = run.raft_spec().map_or(&[][..], |raft| &raft.prompt_suites);
    suites.iter().map(|suite| (suite.name.clone(), prompts("h", suite.count as usize))).collect()
}

impl Log {
    pub(super) fn new(spec: v1::Spec) -> Self {
        let id = RunId::new("r1").unwrap();
        let mut log = Self {
            id,
            records: Vec::new(),
            run: None,
            subjects: BTreeSet::new(),
            controls: 0,
            barren: BTreeSet::new(),
            perplexities: BTreeMap::new(),
            forgetful: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            surprise: BTreeMap::new(),
            drawn: Vec::new(),
            turns: Vec::new(),
            weighting: BTreeMap::new(),
            total_steps: 50,
            speeds: BTreeMap::new(),
            fleet: FleetSnapshot::default(),
            now_ms: 0,
        };
        for agent in ["g1", "g2"] {
            log.fleet
                .generators
                .push(FleetMember { agent: agent.into(), ..FleetMember::default() });
        }
        let is_watched = matches!(spec.kind, Some(v1::spec::Kind::Watched(_)));
        let place = if is_watched { FactKey::WatchedSpec } else { FactKey::Spec };
        log.write(place, FactBody::Spec(spec));
        log
    }

    /// Begins a RAFT run with a changed spec.
    pub(super) fn start_raft(cycles: u32, change: impl FnOnce(&mut v1::spec::Raft)) -> Self {
        let mut spec = raft(cycles);
        let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind else { panic!("a raft run") };
        change(raft);
        Self::new(spec)
    }

    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    pub(super) fn run(&self) -> Run {
        self.run.clone().unwrap()
    }

    pub(super) fn nothing_passes_in_cycle(&mut self, cycle: u32) {
        self.barren.insert(cycle);
    }

    pub(super) fn write(&mut self, place: FactKey, body: FactBody) {
        let subject = Subject::new(&self.id, place);
        if self.subjects.insert(subject.to_string()) {
            let sequence = self.records.len() as u64 + 1;
            let fact = Fact { subject, body };
            let time_ms = self.now_ms.max(sequence * 100);
            let record = Record { sequence, time_ms, author: None, fact };
            match &mut self.run {
                Some(run) => run.fold_record(&record),
                None => self.run = Run::start(&record),
            }
            self.records.push(record);
        }
    }

    /// Lets one coordinator plan until it has nothing to write.
    pub(super) fn coordinate(&mut self) {
        let (train, heldout) = (prompts("p", 20), prompts("h", 10));
        let suites = suites(&self.run());
        loop {
            let sizing = JobSizing::default();
            let inputs = PlannerInputs {
                prompts: &train,
                heldout: &heldout,
                suites: &suites,
                fleet: &self.fleet,
                sizing: &sizing,
                timeouts: &WAITING,
                check_stragglers: true,
                now_ms: self.now_ms.max(100 * self.records.len() as u64),
            };
            let commands = next_commands(&self.run(), inputs);
            let before = self.records.len();
            for command in commands {
                self.write(command.fact.subject.key, command.fact.body);
            }
            if self.records.len() == before {
                return;
            }
        }
    }

    pub(super) fn generate_orders(&self) -> impl Iterator<Item = &v1::GenerateOrder> {
        self.records.iter().filter_map(|record| match &record.fact.body {
            FactBody::GenerateOrder(order) => Some(order),
            _ => None,
        })
    }

    pub(super) fn train_orders(&self) -> impl Iterator<Item = &v1::TrainOrder> {
        self.records.iter().filter_map(|record| match &record.fact.body {
            FactBody::TrainOrder(order) => Some(order),
            _ => None,
        })
    }

    pub(super) fn generate(&mut self) {
        for order in self.generate_orders().cloned().collect::<Vec<_>>() {
            self.sample(&order, &order.base.clone().unwrap().manifest);
        }
    }

    fn sample(&mut self, order: &v1::GenerateOrder, base: &str) {
        self.sample_from(order, base, "");
    }

    fn sample_from(&mut self, order: &v1::GenerateOrder, base: &str, caveat: &str) {
        self.sample_as(order, base, caveat, "g1", &[]);
    }

    /// Samples an order as an agent that reports this canary.
    pub(super) fn show(&mut self, order: &v1::GenerateOrder, agent: &str, canary: &[f32]) {
        let base = order.base.clone().unwrap().manifest;
        self.sample_as(order, &base, "", agent, canary);
    }

    fn sample_as(
        &mut self,
        order: &v1::GenerateOrder,
        base: &str,
        caveat: &str,
        agent: &str,
        canary: &[f32],
    ) {
        use v1::samples::Finish;
        let samples = order.requests.iter().flat_map(|request| {
            (request.first..request.first + request.count).map(|index| {
                let turn = index as usize % self.drawn.len().max(1);
                let drawn = self.drawn.get(turn).filter(|_| order.token_logprobs);
                let (token_logprobs, token_ids) = drawn.cloned().unwrap_or_default();
                let is_cut = self.drawn.len() > 1 && drawn.is_some() && turn == 0;
                v1::samples::Sample {
                    prompt_id: request.prompt_id.clone(),
                    index,
                    text: format!("answer {}", index % 3),
                    tokens: 2,
                    finish: if is_cut { Finish::Length } else { Finish::Stop }.into(),
                    logprob: self.surprise.get(&order.cycle).map(|nats| -2.0 * nats),
                    token_logprobs,
                    token_ids,
                    turns: if order.episodes { self.turns.clone() } else { Vec::new() },
                }
            })
        });
        let body = v1::Samples {
            run: order.run.clone(),
            cycle: order.cycle,
            job: order.job.clone(),
            attempt: order.attempt,
            purpose: order.purpose,
            base: base.into(),
            adapter: order.adapter.clone().map_or(String::new(), |tree| tree.manifest),
            agent: agent.into(),
            canary: canary.to_owned(),
            wall_s: 10.0,
            caveat: caveat.into(),
            suite: order.suite.clone(),
            samples: samples.collect(),
            ..Default::default()
        };
        let place = FactKey::Samples { cycle: order.cycle, job: order.job.parse().unwrap() };
        self.write(place, FactBody::Samples(body));
    }

    pub(super) fn lie_about_the_policy_once(&mut self) {
        let order = self
            .generate_orders()
            .find(|order| order.purpose() == v1::Purpose::Train)
            .cloned()
            .unwrap();
        self.sample(&order, "stale");
    }

    /// The first job of each purpose is done by an endpoint that cannot be verified.
    pub(super) fn generate_somewhere(&mut self) {
        for purpose in [v1::Purpose::Train, v1::Purpose::Heldout] {
            let order = self.generate_orders().find(|order| order.purpose() == purpose).cloned();
            if let Some(order) = order {
                let base = order.base.clone().unwrap().manifest;
                self.sample_from(&order, &base, "nobody knows what generated them");
            }
        }
    }

    pub(super) fn verify(&mut self) {
        for record in self.records.clone() {
            let FactBody::Samples(samples) = &record.fact.body else { continue };
            let heldout = samples.purpose() == v1::Purpose::Heldout;
            let barren = self.barren.contains(&samples.cycle)
                || (heldout && self.forgetful.contains(&samples.cycle))
                || self.forgotten.contains(&(samples.cycle, samples.suite.clone()));
            let judge = |sample: &v1::samples::Sample| {
                let pass = sample.index % 3 == 1 && !barren;
                let outcome =
                    if pass { v1::verdicts::Outcome::Pass } else { v1::verdicts::Outcome::Fail };
                v1::verdicts::Verdict {
                    prompt_id: sample.prompt_id.clone(),
                    index: sample.index,
                    outcome: outcome.into(),
                    reward: f64::from(u8::from(pass)),
                    detail: String::new(),
                }
            };
            let body = v1::Verdicts {
                run: samples.run.clone(),
                cycle: samples.cycle,
                job: samples.job.clone(),
                purpose: samples.purpose,
                samples_sequence: record.sequence,
                suite: samples.suite.clone(),
                verdicts: samples.samples.iter().map(judge).collect(),
                ..Default::default()
            };
            let place =
                FactKey::Verdicts { cycle: samples.cycle, job: samples.job.parse().unwrap() };
            self.write(place, FactBody::Verdicts(body));
        }
    }

    pub(super) fn train(&mut self) {
        self.train_and_show(&[]);
    }

    /// The trainer reports the canary of the result.
    pub(super) fn train_and_show(&mut self, canary: &[f32]) {
        use v1::checkpoint::Content;
        for record in self.records.clone() {
            let FactBody::TrainOrder(order) = &record.fact.body else { continue };
            match &order.part {
                Some(v1::train_order::Part::Slice(slice)) => {
                    self.train_slice(order, slice);
                    continue;
                }
                Some(v1::train_order::Part::Merge(merge)) => {
                    self.merge(order, merge, canary);
                    continue;
                }
                None => {}
            }
            let parent = order.adapter.clone().or(order.base.clone().unwrap().tree);
            let lora = order.training.as_ref().is_some_and(|training| training.lora.is_some());
            let body = v1::Checkpoint {
                run: order.run.clone(),
                cycle: order.cycle,
                step: 10,
                steps: 10,
                r#final: true,
                content: if lora { Content::Adapter } else { Content::Model }.into(),
                tree: tree(&format!("adapter-{}", order.cycle)),
                base: order.base.clone().unwrap().tree.filter(|_| lora),
                parent,
                canary: canary.to_owned(),
                weighting: self.weighting.get(&order.cycle).cloned(),
                ..Default::default()
            };
            self.write(
                FactKey::Checkpoint { cycle: order.cycle, step: 10 },
                FactBody::Checkpoint(body),
            );
        }
    }

    fn train_slice(&mut self, order: &v1::TrainOrder, slice: &v1::train_order::Slice) {
        let planned = slice.planned.as_ref().unwrap();
        let speed = self.speeds.get(&planned.agent).copied().unwrap_or(1.0);
        if speed > 0.0 {
            let delta = self.delta(order, slice, speed);
            let (cycle, outer, slice) = (order.cycle, slice.outer, slice.slice);
            self.write(FactKey::Delta { cycle, outer, slice }, FactBody::Delta(delta));
        }
    }

    pub(super) fn delta(
        &self,
        order: &v1::TrainOrder,
        slice: &v1::train_order::Slice,
        speed: f64,
    ) -> v1::Delta {
        let planned = slice.planned.clone().unwrap();
        let end = (planned.first + planned.steps).min(self.total_steps);
        let steps = end.saturating_sub(planned.first);
        let name = format!("delta-{}-{}-{}", order.cycle, slice.outer, slice.slice);
        v1::Delta {
            run: order.run.clone(),
            cycle: order.cycle,
            outer: slice.outer,
            slice: slice.slice,
            agent: planned.agent,
            start: slice.start.clone().unwrap().manifest,
            tree: tree(&name).filter(|_| steps > 0),
            first: planned.first,
            steps,
            total_steps: self.total_steps,
            state: planned.state,
            tokens: u64::from(steps) * 10,
            trained_tokens: u64::from(steps) * 4,
            loss: 1.0,
            wall_s: f64::from(steps) / speed,
            ..Default::default()
        }
    }

    fn merge(&mut self, order: &v1::TrainOrder, merge: &v1::train_order::Merge, canary: &[f32]) {
        let (cycle, outer) = (order.cycle, merge.outer);
        let merged = tree(&format!("merge-{cycle}-{outer}"));
        if let Some(checkpoint) = &merge.checkpoint {
            let place = FactKey::Checkpoint { cycle, step: checkpoint.step };
            let canary = if checkpoint.r#final { canary.to_owned() } else { Vec::new() };
            let checkpoint = v1::Checkpoint { tree: merged.clone(), canary, ..checkpoint.clone() };
            self.write(place, FactBody::Checkpoint(checkpoint));
        }
        let manifest = |tree: &Option<v1::Tree>| tree.clone().unwrap_or_default().manifest;
        let across = order.training.as_ref().and_then(|training| training.across);
        let is_soup = across.unwrap_or_default().method() == v1::across::Method::Soup;
        let fact = v1::Merge {
            run: order.run.clone(),
            cycle,
            outer,
            total_steps: if outer == 0 && is_soup { self.total_steps } else { 0 },
            start: manifest(&merge.start),
            deltas: merge.deltas.iter().map(|delta| manifest(&delta.tree)).collect(),
            tree: merged,
            derived: merge.derived,
            ..Default::default()
        };
        self.write(FactKey::Merge { cycle, outer }, FactBody::Merge(fact));
    }

    /// Publishes a checkpoint that an agent found in a watched directory, of a training of 30
    /// steps.
    pub(super) fn find_checkpoint(&mut self, step: u32) {
        let body = v1::Checkpoint {
            run: self.id.to_string(),
            step,
            steps: 30,
            r#final: step == 30,
            content: v1::checkpoint::Content::Adapter.into(),
            tree: tree(&format!("adapter-{step}")),
            base: tree("base"),
            parent: tree("base"),
            ..Default::default()
        };
        self.write(FactKey::WatchedCheckpoint { step }, FactBody::Checkpoint(body));
    }

    pub(super) fn evaluate(&mut self) {
        self.evaluate_suite("text");
    }

    pub(super) fn evaluate_suite(&mut self, suite: &str) {
        for record in self.records.clone() {
            let FactBody::Checkpoint(checkpoint) = &record.fact.body else { continue };
            let manifest = checkpoint.tree.clone().unwrap().manifest;
            let (cycle, step) = (checkpoint.cycle, checkpoint.step);
            let body = v1::Eval {
                run: checkpoint.run.clone(),
                cycle,
                step,
                suite: suite.to_owned(),
                perplexity: self.perplexities.get(&cycle).copied().unwrap_or(10.0),
                manifest,
                ..Default::default()
            };
            let suite = suite.parse().unwrap();
            self.write(FactKey::Eval { cycle, step, suite }, FactBody::Eval(body));
        }
    }

    pub(super) fn archive(&mut self, cycle: u32) {
        let archived = v1::Archived { cycle, ..Default::default() };
        self.write(FactKey::Archived { cycle }, FactBody::Archived(archived));
    }

    pub(super) fn control(&mut self, action: v1::control::Action) {
        self.controls += 1;
        let control = v1::Control { action: action.into(), ..Default::default() };
        self.write(FactKey::Control { number: self.controls }, FactBody::Control(control));
    }

    pub(super) fn quarantine(&mut self, quarantine: v1::Quarantine) {
        let agent = quarantine.agent.parse().unwrap();
        self.write(FactKey::Quarantine { agent, number: 1 }, FactBody::Quarantine(quarantine));
    }

    pub(super) fn fail(&mut self, kind: &str, id: &str, message: &str) {
        let r#final = true;
        self.failure(v1::Failure {
            kind: kind.into(),
            id: id.into(),
            message: message.into(),
            r#final,
            ..Default::default()
        });
    }

    pub(super) fn failure(&mut self, failure: v1::Failure) {
        let failure = v1::Failure { run: self.id.to_string(), ..failure };
        let kind = failure.kind.parse().unwrap();
        let attempt = failure.attempt.max(1);
        let place = FactKey::Failure { kind, id: failure.id.clone(), attempt };
        self.write(place, FactBody::Failure(failure));
    }

    /// Samples all orders except those of these jobs.
    pub(super) fn generate_all_but(&mut self, jobs: &[&str]) {
        for order in self.generate_orders().cloned().collect::<Vec<_>>() {
            if !jobs.contains(&order.job.as_str()) {
                self.sample(&order, &order.base.clone().unwrap().manifest);
            }
        }
    }

    pub(super) fn jobs(&self, cycle: u32, purpose: v1::Purpose) -> Vec<String> {
        let run = self.run();
        run.cycles[&cycle].jobs_for(purpose).map(|(id, _)| id.to_string()).collect()
    }

    /// Reports that one agent works on a job of a cycle; the other is idle.
    pub(super) fn hold(&mut self, cycle: u32, job: &str) {
        let run = self.id.clone();
        self.fleet.generators[0].held_jobs = [HeldJob { run, cycle, job: job.to_owned() }].into();
    }

    fn agents(&mut self) {
        self.generate();
        self.verify();
        self.train();
        self.evaluate();
    }

    pub(super) fn until(&mut self, phase: RunPhase) {
        for _ in 0..100 {
            self.coordinate();
            if self.run().current_phase() == phase {
                return;
            }
            self.agents();
        }
        panic!("the run never came to {phase:?}");
    }

    pub(super) fn run_to_the_end(&mut self) {
        self.until(RunPhase::Done);
    }
}
