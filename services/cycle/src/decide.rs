//! What a run needs next, as facts to write. Pure: the same state gives the same
//! facts, and writing one that is already there changes nothing.

use std::collections::BTreeMap;

use wire::{Body, Digest, Fact, JobId, Place, Pool, Prompt, Subject, WorkKind, derive, v1};

use crate::{
    Fleet,
    again::{self, Again, Waiting},
    behind::Behind,
    draw, ending,
    fleet::Held,
    measure,
    plan::Sizing,
    proof, schedule, select,
    state::{Cycle, Job, Policy, Run},
};

/// What deciding needs beside the run's own facts.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    pub prompts: &'a [Prompt],
    pub heldout: &'a [Prompt],
    /// Those of the spec's prompt suites, by name.
    pub suites: &'a BTreeMap<String, Vec<Prompt>>,
    pub fleet: &'a Fleet,
    pub sizing: &'a Sizing,
    pub waiting: &'a Waiting,
    /// Whether to look through all that is out for what should be ordered once more. Not for every
    /// fact: only time makes it so.
    pub again: bool,
    /// The log's clock: when it would accept a fact now.
    pub now_ms: u64,
}

impl<'a> Inputs<'a> {
    /// What the jobs of a purpose and suite draw from.
    pub(crate) fn prompts_of(&self, purpose: v1::Purpose, suite: &str) -> &'a [Prompt] {
        match purpose {
            v1::Purpose::Heldout if suite.is_empty() => self.heldout,
            v1::Purpose::Heldout => self.suites.get(suite).map_or(&[], Vec::as_slice),
            v1::Purpose::Train | v1::Purpose::Unspecified => self.prompts,
        }
    }
}

/// A fact to write. The blob it speaks of, if any, must be in the store first.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    pub fact: Fact,
    pub blob: Option<Vec<u8>>,
}

/// At most so many orders are written at a time, so that a pause takes hold soon
/// and no queue grows with the plan.
const ORDERS_AHEAD_PER_GENERATOR: usize = 12;
const ORDERS_AHEAD_MIN: usize = 16;

/// The facts that should be written now. Empty when the run waits for others or has ended.
pub fn decide(run: &Run, inputs: Inputs<'_>) -> Vec<Command> {
    if run.done.is_some() {
        return Vec::new();
    }
    if let Some(done) = ending::of(run, inputs.fleet) {
        return vec![command(run, Place::Done, Body::Done(done))];
    }
    if run.paused {
        return Vec::new();
    }
    if let Some(quarantine) = proof::conviction(run) {
        // What is selected and measured depends on it.
        return vec![quarantine];
    }
    let number = run.current_cycle();
    let untouched = Cycle::default();
    let cycle = run.cycles.get(&number).unwrap_or(&untouched);
    match &run.spec.kind {
        Some(v1::spec::Kind::Sft(sft)) => supervised(run, sft, cycle, inputs),
        Some(v1::spec::Kind::Raft(raft)) => {
            let turn = Turn { run, raft, number, cycle, inputs };
            let mut commands = turn.next();
            commands.extend(turn.ahead());
            commands
        }
        Some(v1::spec::Kind::Watched(_)) => watched(run, cycle),
        None => vec![fail(run, "the spec asks for no kind of run".into())],
    }
}

fn command(run: &Run, place: Place, body: Body) -> Command {
    Command { fact: Fact { subject: Subject::new(&run.id, place), body }, blob: None }
}

fn fail(run: &Run, message: String) -> Command {
    let done = v1::Done { status: v1::done::Status::Failed.into(), message };
    command(run, Place::Done, Body::Done(done))
}

fn pool(run: &Run) -> Pool {
    Pool::new(run.spec.pool.as_str())
        .or_else(|_| Pool::new("default"))
        .expect("\"default\" is a legal name")
}

/// An SFT run is one cycle that only trains and measures.
fn supervised(run: &Run, sft: &v1::spec::Sft, cycle: &Cycle, inputs: Inputs<'_>) -> Vec<Command> {
    if cycle.final_checkpoint().is_some() {
        return finish_cycle(run, 0, cycle);
    }
    let order = v1::TrainOrder {
        base: run.spec.base.clone(),
        adapter: None,
        dataset: sft.dataset.clone(),
        training: sft.training.clone(),
        ..train_order(run, 0)
    };
    order_training(run, cycle, order, inputs)
}

/// A watched run is one cycle whose checkpoints nobody orders.
fn watched(run: &Run, cycle: &Cycle) -> Vec<Command> {
    if cycle.final_checkpoint().is_some() { finish_cycle(run, 0, cycle) } else { Vec::new() }
}

fn train_order(run: &Run, cycle: u32) -> v1::TrainOrder {
    v1::TrainOrder {
        run: run.id.to_string(),
        cycle,
        round: run.round,
        seed: derive(run.spec.seed, &["train", &cycle.to_string()]),
        ..Default::default()
    }
}

/// Once a round, and again when nobody holds it though a trainer stands idle.
fn order_training(
    run: &Run,
    cycle: &Cycle,
    mut order: v1::TrainOrder,
    inputs: Inputs<'_>,
) -> Vec<Command> {
    let ordered = &cycle.train_ordered;
    if ordered.round == run.round {
        let held = Held { run: run.id.clone(), cycle: order.cycle, job: "train".into() };
        let waited = inputs.now_ms.saturating_sub(ordered.at_ms);
        let lost = inputs.fleet.idle(WorkKind::Train) > 0
            && !inputs.fleet.holds(WorkKind::Train, &held)
            && again::is_lost(
                ordered,
                inputs.fleet.unheld_ms(WorkKind::Train, &held, waited),
                inputs.waiting,
            );
        if !lost {
            return Vec::new();
        }
    }
    order.attempt = ordered.attempt.saturating_add(1);
    let place = Place::TrainOrder { pool: pool(run), cycle: order.cycle, attempt: order.attempt };
    vec![command(run, place, Body::TrainOrder(order))]
}

fn finish_cycle(run: &Run, number: u32, cycle: &Cycle) -> Vec<Command> {
    let measured = cycle.has_all_evals(&run.spec.suites) && cycle.is_settled(v1::Purpose::Heldout);
    if !measured {
        return Vec::new();
    }
    let done = measure::summarize(run, number, cycle);
    vec![command(run, Place::CycleDone { cycle: number }, Body::CycleDone(done))]
}

fn all_errors(selected: &v1::Selected) -> bool {
    selected.considered > 0 && selected.dropped.get("error") == Some(&selected.considered)
}

/// One turn of a RAFT run.
struct Turn<'a> {
    run: &'a Run,
    raft: &'a v1::spec::Raft,
    number: u32,
    cycle: &'a Cycle,
    inputs: Inputs<'a>,
}

impl Turn<'_> {
    /// Of the first cycle that is not done.
    fn next(&self) -> Vec<Command> {
        let work = self.work();
        if work.is_empty() { self.finish() } else { work }
    }

    /// Of the cycle after it. Nothing more is begun before the first is done.
    fn ahead(&self) -> Vec<Command> {
        let Self { run, raft, inputs, .. } = *self;
        let number = self.number + 1;
        if number > run.last_cycle() {
            return Vec::new();
        }
        let untouched = Cycle::default();
        let cycle = run.cycles.get(&number).unwrap_or(&untouched);
        let turn = Turn { run, raft, number, cycle, inputs };
        if self.cycle.is_passed_on(raft) {
            return turn.work();
        }
        // Where samples may be of the checkpoint before the last, they are drawn while this cycle
        // trains and measures.
        let trains = self.cycle.selected.as_ref().is_some_and(|selected| selected.kept > 0);
        match (raft.staleness > 0 && trains, &cycle.plan) {
            (false, _) => Vec::new(),
            (true, None) => vec![turn.plan()],
            (true, Some(_)) => turn.order_samples(v1::Purpose::Train),
        }
    }

    /// All but its end.
    fn work(&self) -> Vec<Command> {
        use v1::Purpose::{Heldout, Train};
        if self.number == 0 && self.cycle.checkpoints.is_empty() {
            return self.adopt_base();
        }
        if self.cycle.plan.is_none() {
            return vec![self.plan()];
        }
        if self.cycle.final_checkpoint().is_some() {
            return self.order_samples(Heldout);
        }
        let orders = self.order_samples(Train);
        if !orders.is_empty() {
            return orders;
        }
        match &self.cycle.selected {
            None if self.cycle.is_settled(Train) => vec![self.select()],
            None => Vec::new(),
            Some(selected) if selected.kept == 0 && all_errors(selected) => {
                vec![fail(self.run, self.verifier_trouble())]
            }
            Some(selected) if selected.kept == 0 => Vec::new(),
            Some(selected) => self.train(selected),
        }
    }

    /// Cycle 0 measures the base: it enters the log as the first checkpoint.
    fn adopt_base(&self) -> Vec<Command> {
        let Some(tree) = self.run.spec.base.as_ref().and_then(|base| base.tree.clone()) else {
            return vec![fail(self.run, "the spec names no base model".into())];
        };
        let checkpoint = v1::Checkpoint {
            run: self.run.id.to_string(),
            r#final: true,
            content: v1::checkpoint::Content::Model.into(),
            tree: Some(tree),
            ..Default::default()
        };
        let place = Place::Checkpoint { cycle: 0, step: 0 };
        vec![command(self.run, place, Body::Checkpoint(checkpoint))]
    }

    fn plan(&self) -> Command {
        let cycle = self.number;
        match draw::jobs(self.run, self.raft, cycle, &self.inputs) {
            Ok(jobs) => {
                command(self.run, Place::Plan { cycle }, Body::Plan(v1::Plan { cycle, jobs }))
            }
            Err(why) => fail(self.run, why),
        }
    }

    /// Orders for jobs that have none in this round, as far as the window allows; else for
    /// those that should be ordered again.
    fn order_samples(&self, purpose: v1::Purpose) -> Vec<Command> {
        let Some(policy) = self.run.policy(self.number, purpose) else {
            return vec![fail(self.run, format!("cycle {} has no policy", self.number))];
        };
        let account = self.cycle.account(purpose);
        let window =
            ORDERS_AHEAD_MIN.max(ORDERS_AHEAD_PER_GENERATOR * self.inputs.fleet.generators.len());
        let next = account.unordered.iter().take(window.saturating_sub(account.out.len()));
        let next = next.filter_map(|id| self.cycle.jobs.get_key_value(id));
        let mut behind = Behind::of(account, self.inputs.fleet);
        let orders: Vec<Command> = next
            .map(|(id, job)| {
                behind.pass(job);
                self.order(id, job, purpose, &policy, &behind)
            })
            .collect();
        if !orders.is_empty() {
            return orders;
        }
        let again = again::jobs(self.run, self.number, self.cycle, purpose, self.inputs);
        again
            .into_iter()
            .map(|Again { id, job, tokens_per_s }| {
                self.order(id, job, purpose, &policy, &behind.meant_for(tokens_per_s))
            })
            .collect()
    }

    fn order(
        &self,
        id: &JobId,
        job: &Job,
        purpose: v1::Purpose,
        policy: &Policy,
        behind: &Behind,
    ) -> Command {
        let suite = job.suite.as_str();
        let prompts = self.inputs.prompts_of(purpose, suite);
        let request = |draw: &v1::plan::Draw| {
            let prompt = prompts.get(draw.prompt as usize)?;
            Some(v1::generate_order::Request {
                prompt_id: prompt.id.clone(),
                text: prompt.prompt.clone(),
                first: draw.first,
                count: draw.count,
            })
        };
        let (cycle, attempt) = (self.number, job.ordered.attempt.saturating_add(1));
        let order = v1::GenerateOrder {
            run: self.run.id.to_string(),
            cycle,
            job: id.to_string(),
            attempt,
            purpose: purpose.into(),
            base: Some(policy.base.clone()),
            adapter: policy.adapter.clone(),
            sampling: schedule::sampling(self.raft, cycle, purpose, suite),
            seed: schedule::generate_seed(self.run.spec.seed, cycle, purpose, suite),
            requests: job.draws.iter().filter_map(request).collect(),
            round: self.run.round,
            accept_unverified_policy: self.raft.accept_unverified_policy,
            suite: suite.to_owned(),
            logprobs: schedule::logprobs(self.raft, purpose),
            canary: proof::text(self.run, cycle, purpose, self.inputs.prompts),
            behind: behind.told(),
        };
        let place = Place::GenerateOrder { pool: pool(self.run), cycle, job: id.clone(), attempt };
        command(self.run, place, Body::GenerateOrder(order))
    }

    fn select(&self) -> Command {
        let selection = select::select(self.run, self.raft, self.number, self.cycle);
        debug_assert_eq!(
            selection.fact.dataset.as_ref().map(|blob| blob.digest.clone()),
            Some(Digest::of(&selection.dataset).to_string())
        );
        let place = Place::Selection { cycle: self.number };
        Command {
            blob: Some(selection.dataset),
            ..command(self.run, place, Body::Selected(selection.fact))
        }
    }

    fn train(&self, selected: &v1::Selected) -> Vec<Command> {
        let Some(Policy { base, adapter }) = self.run.trained_from(self.number) else {
            return vec![fail(self.run, format!("cycle {} has no policy", self.number))];
        };
        let order = v1::TrainOrder {
            base: Some(v1::Base { tree: Some(base), random_init: false }),
            adapter,
            dataset: selected.dataset.clone(),
            training: schedule::training(self.raft, self.number),
            replay: select::replay(self.run, self.raft, self.number),
            replay_share: select::replay_share(self.raft),
            canary: self.cycle.canary.clone(),
            ..train_order(self.run, self.number)
        };
        order_training(self.run, self.cycle, order, self.inputs)
    }

    fn verifier_trouble(&self) -> String {
        let verdicts = self.cycle.jobs.values().filter_map(|job| job.verdicts.as_ref());
        let detail = verdicts.flat_map(|v| &v.verdicts).map(|verdict| &verdict.detail);
        let detail = detail.into_iter().find(|detail| !detail.is_empty());
        let detail = detail.map_or("no detail was given", String::as_str);
        format!("the verifier failed on every sample of cycle {}: {detail}", self.number)
    }

    fn finish(&self) -> Vec<Command> {
        if self.cycle.final_checkpoint().is_some() {
            return finish_cycle(self.run, self.number, self.cycle);
        }
        if self.cycle.selected.as_ref().is_none_or(|selected| selected.kept > 0) {
            return Vec::new();
        }
        // Nothing to learn from: the next cycle tries again with other samples.
        let done = measure::summarize(self.run, self.number, self.cycle);
        vec![command(self.run, Place::CycleDone { cycle: self.number }, Body::CycleDone(done))]
    }
}
