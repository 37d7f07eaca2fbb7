//! The planner: returns the facts that a run needs next. Pure: the same state gives the same facts,
//! and writing a fact that already exists changes nothing.

use wire::{Digest, FactBody, FactKey, JobId, Pool, derive_seed, v1};

use crate::{
    backlog::SampleBacklog,
    canary_vote,
    command::{PlannerInputs, WriteCommand, fail_command, write_command},
    cycle_summary, outcome, sampling_plan, schedule, select,
    speculation::{self, BackupOrder},
    split_training,
    state::{Cycle, PlannedJob, PolicyWeights, Run},
};

/// Bounded so that a pause takes effect soon and the queue does not grow with the plan.
const IN_FLIGHT_PER_GENERATOR: usize = 12;
/// Lower bound for small fleets.
const IN_FLIGHT_MIN: usize = 16;

/// Returns the facts to write now; none if the run waits for agents or has ended.
///
/// The first rule that applies decides:
///
/// 1. the run is done: nothing;
/// 2. the run has an outcome (finished, cancelled, stopped by a gate, hopeless): its `done` fact;
/// 3. the run is paused or queued: nothing;
/// 4. an agent contradicts the canary majority: its `quarantine` fact, because selection and
///    evaluation depend on it;
/// 5. otherwise: the next facts of the current cycle and, if it may be pipelined, of the next one.
pub fn next_commands(run: &Run, inputs: PlannerInputs<'_>) -> Vec<WriteCommand> {
    if run.done.is_some() {
        return Vec::new();
    }
    if let Some(done) = outcome::run_outcome(run, inputs.fleet) {
        return vec![write_command(run, FactKey::Done, FactBody::Done(done))];
    }
    if run.is_halted() {
        return Vec::new();
    }
    if let Some(quarantine) = canary_vote::next_quarantine(run) {
        return vec![quarantine];
    }
    let number = run.current_cycle();
    let untouched = Cycle::default();
    let cycle = run.cycles.get(&number).unwrap_or(&untouched);
    match &run.spec.kind {
        Some(v1::spec::Kind::Sft(sft)) => sft_commands(run, sft, cycle, inputs),
        Some(v1::spec::Kind::Raft(raft)) => {
            let turn = CyclePlanner { run, raft, number, cycle, inputs };
            let mut commands = turn.next_commands();
            commands.extend(turn.pipelined_commands());
            commands
        }
        Some(v1::spec::Kind::Watched(_)) => watched_commands(run, cycle),
        None => vec![fail_command(run, "the spec asks for no kind of run".into())],
    }
}

/// Returns `default` if the spec names no pool or an invalid one.
fn run_pool(run: &Run) -> Pool {
    Pool::new(run.spec.pool.as_str())
        .or_else(|_| Pool::new("default"))
        .expect("\"default\" is a legal name")
}

/// An SFT run is one cycle that only trains and evaluates.
fn sft_commands(
    run: &Run,
    sft: &v1::spec::Sft,
    cycle: &Cycle,
    inputs: PlannerInputs<'_>,
) -> Vec<WriteCommand> {
    if cycle.final_checkpoint().is_some() {
        return finish_cycle(run, 0, cycle);
    }
    let order = v1::TrainOrder {
        base: run.spec.base.clone(),
        adapter: None,
        dataset: sft.dataset.clone(),
        training: sft.training.clone(),
        ..base_train_order(run, 0)
    };
    order_training(run, cycle, order, inputs)
}

/// A watched run is one cycle whose training is not ordered by Flotilla.
fn watched_commands(run: &Run, cycle: &Cycle) -> Vec<WriteCommand> {
    if cycle.final_checkpoint().is_some() { finish_cycle(run, 0, cycle) } else { Vec::new() }
}

fn base_train_order(run: &Run, cycle: u32) -> v1::TrainOrder {
    v1::TrainOrder {
        run: run.id.to_string(),
        cycle,
        round: run.round,
        seed: derive_seed(run.spec.seed, &["train", &cycle.to_string()]),
        ..Default::default()
    }
}

/// Orders the training, or the next parts of one on several boxes.
fn order_training(
    run: &Run,
    cycle: &Cycle,
    mut order: v1::TrainOrder,
    inputs: PlannerInputs<'_>,
) -> Vec<WriteCommand> {
    if order.training.as_ref().is_some_and(|training| training.across.is_some()) {
        return split_training::next_commands(
            run,
            &cycle.split_training,
            &order,
            &run_pool(run),
            inputs,
        );
    }
    let ordered = &cycle.train_orders;
    if !speculation::is_training_due(run, order.cycle, "train", ordered, inputs) {
        return Vec::new();
    }
    order.attempt = ordered.last_attempt.saturating_add(1);
    let place =
        FactKey::TrainOrder { pool: run_pool(run), cycle: order.cycle, attempt: order.attempt };
    vec![write_command(run, place, FactBody::TrainOrder(order))]
}

/// Ends a cycle once each checkpoint has been evaluated on each suite and the held-out samples are
/// settled. Writes the pass rates first.
fn finish_cycle(run: &Run, number: u32, cycle: &Cycle) -> Vec<WriteCommand> {
    let measured = cycle.has_all_evals(&run.spec.suites) && cycle.is_settled(v1::Purpose::Heldout);
    if !measured {
        return Vec::new();
    }
    if cycle.pass_rates.is_none()
        && let Some(rates) = cycle_summary::pass_rates(run, number, cycle)
    {
        let place = FactKey::PassRates { cycle: number };
        return vec![write_command(run, place, FactBody::PassRates(rates))];
    }
    let done = cycle_summary::summarize_cycle(run, number, cycle);
    vec![write_command(run, FactKey::CycleDone { cycle: number }, FactBody::CycleDone(done))]
}

fn has_only_errors(selected: &v1::Selected) -> bool {
    selected.considered > 0 && selected.dropped.get("error") == Some(&selected.considered)
}

/// The planner of one cycle of a RAFT run.
///
/// A cycle passes through these states; the planner derives the current one from the facts and
/// returns the facts that lead to the next:
///
/// ```text
/// no plan              -> plan (cycle 0: the base model as first checkpoint)
/// jobs without samples -> generate orders, limited by the in-flight window
/// all jobs settled     -> selection and its dataset
/// samples selected     -> train order
/// final checkpoint     -> generate orders for the held-out samples
/// evals complete       -> pass rates, then cycle done
/// ```
///
/// While a cycle trains or is evaluated, the planner of the next one may already run: see
/// [`CyclePlanner::pipelined_commands`].
struct CyclePlanner<'a> {
    run: &'a Run,
    raft: &'a v1::spec::Raft,
    /// Cycle 0 evaluates the base model.
    number: u32,
    cycle: &'a Cycle,
    inputs: PlannerInputs<'a>,
}

impl CyclePlanner<'_> {
    /// Returns the next facts of the first cycle that is not done, including its end.
    fn next_commands(&self) -> Vec<WriteCommand> {
        let work = self.pending_work();
        if work.is_empty() { self.finish_commands() } else { work }
    }

    /// Returns the next facts of the following cycle, if it may start before this one is done:
    ///
    /// - if no gate can reject this cycle's checkpoint, the next cycle starts as soon as the checkpoint
    ///   exists and runs while it is evaluated;
    /// - if the spec allows staleness, the next cycle is planned and sampled while this one trains.
    ///
    /// Never more than one cycle ahead of the first that is not done.
    fn pipelined_commands(&self) -> Vec<WriteCommand> {
        let Self { run, raft, inputs, .. } = *self;
        let number = self.number + 1;
        if number > run.last_cycle() {
            return Vec::new();
        }
        let untouched = Cycle::default();
        let cycle = run.cycles.get(&number).unwrap_or(&untouched);
        let turn = CyclePlanner { run, raft, number, cycle, inputs };
        if self.cycle.allows_pipelining(raft) {
            return turn.pending_work();
        }
        // With staleness, the samples come from the checkpoint before the last, so they can be
        // drawn while this cycle trains and is evaluated.
        let trains = self.cycle.selected.as_ref().is_some_and(|selected| selected.kept > 0);
        match (raft.staleness > 0 && trains, &cycle.plan) {
            (false, _) => Vec::new(),
            (true, None) => vec![turn.plan_cycle()],
            (true, Some(_)) => turn.order_samples(v1::Purpose::Train),
        }
    }

    fn pending_work(&self) -> Vec<WriteCommand> {
        use v1::Purpose::{Heldout, Train};
        if self.number == 0 && self.cycle.checkpoints.is_empty() {
            return self.adopt_base();
        }
        if self.cycle.plan.is_none() {
            return vec![self.plan_cycle()];
        }
        if self.cycle.final_checkpoint().is_some() {
            return self.order_samples(Heldout);
        }
        let orders = self.order_samples(Train);
        if !orders.is_empty() {
            return orders;
        }
        match &self.cycle.selected {
            None if self.cycle.is_settled(Train) => vec![self.select_samples()],
            None => Vec::new(),
            Some(selected) if selected.kept == 0 && has_only_errors(selected) => {
                vec![fail_command(self.run, self.verifier_error())]
            }
            Some(selected) if selected.kept == 0 => Vec::new(),
            Some(selected) => self.train_commands(selected),
        }
    }

    /// Writes the start of the run as the checkpoint of cycle 0, which evaluates it.
    fn adopt_base(&self) -> Vec<WriteCommand> {
        let base = self.run.spec.base.clone().unwrap_or_default();
        let Some(tree) = base.tree else {
            return vec![fail_command(self.run, "the spec names no base model".into())];
        };
        let (content, tree, base) = match base.adapter {
            Some(adapter) => (v1::checkpoint::Content::Adapter, adapter, Some(tree)),
            None => (v1::checkpoint::Content::Model, tree, None),
        };
        let checkpoint = v1::Checkpoint {
            run: self.run.id.to_string(),
            r#final: true,
            content: content.into(),
            tree: Some(tree),
            base,
            ..Default::default()
        };
        let place = FactKey::Checkpoint { cycle: 0, step: 0 };
        vec![write_command(self.run, place, FactBody::Checkpoint(checkpoint))]
    }

    /// Fails the run if the plan is too large for one fact.
    fn plan_cycle(&self) -> WriteCommand {
        let cycle = self.number;
        match sampling_plan::plan_jobs(self.run, self.raft, cycle, &self.inputs) {
            Ok(jobs) => write_command(
                self.run,
                FactKey::Plan { cycle },
                FactBody::Plan(v1::Plan { cycle, jobs }),
            ),
            Err(why) => fail_command(self.run, why),
        }
    }

    /// Orders the jobs that have no order in this round, as far as the in-flight window allows. If
    /// all are ordered, returns backup orders for lost, overdue and straggling jobs.
    fn order_samples(&self, purpose: v1::Purpose) -> Vec<WriteCommand> {
        let Some(policy) = self.run.sampling_policy(self.number, purpose) else {
            return vec![fail_command(self.run, format!("cycle {} has no policy", self.number))];
        };
        let account = self.cycle.purpose_index(purpose);
        let window =
            IN_FLIGHT_MIN.max(IN_FLIGHT_PER_GENERATOR * self.inputs.fleet.generators.len());
        let next = account.unordered.iter().take(window.saturating_sub(account.in_flight.len()));
        let next = next.filter_map(|id| self.cycle.jobs.get_key_value(id));
        let mut behind = SampleBacklog::from_index(account, self.inputs.fleet);
        let orders: Vec<WriteCommand> = next
            .map(|(id, job)| {
                behind.remove_job(job);
                self.order_job(id, job, purpose, &policy, behind.to_proto())
            })
            .collect();
        if !orders.is_empty() {
            return orders;
        }
        let again =
            speculation::backup_orders(self.run, self.number, self.cycle, purpose, self.inputs);
        again
            .into_iter()
            .map(|BackupOrder { id, job, agent }| {
                let behind = agent.and_then(|agent| behind.clone().with_fastest(agent).to_proto());
                self.order_job(id, job, purpose, &policy, behind)
            })
            .collect()
    }

    fn order_job(
        &self,
        id: &JobId,
        job: &PlannedJob,
        purpose: v1::Purpose,
        policy: &PolicyWeights,
        behind: Option<v1::generate_order::Behind>,
    ) -> WriteCommand {
        let suite = job.suite.as_str();
        let prompts = self.inputs.prompts_for(purpose, suite);
        let request = |draw: &v1::plan::Draw| {
            let prompt = prompts.get(draw.prompt as usize)?;
            Some(v1::generate_order::Request {
                prompt_id: prompt.id.clone(),
                text: prompt.prompt.clone(),
                first: draw.first,
                count: draw.count,
            })
        };
        let (cycle, attempt) = (self.number, job.orders.last_attempt.saturating_add(1));
        let order = v1::GenerateOrder {
            run: self.run.id.to_string(),
            cycle,
            job: id.to_string(),
            attempt,
            purpose: purpose.into(),
            base: Some(policy.base.clone()),
            adapter: policy.adapter.clone(),
            sampling: schedule::sampling_settings(self.raft, cycle, purpose, suite),
            seed: schedule::generate_seed(self.run.spec.seed, cycle, purpose, suite),
            requests: job.draws.iter().filter_map(request).collect(),
            round: self.run.round,
            accept_unverified_policy: self.raft.accept_unverified_policy,
            suite: suite.to_owned(),
            logprobs: schedule::needs_logprobs(self.raft, purpose),
            token_logprobs: schedule::needs_token_logprobs(self.raft, purpose),
            episodes: schedule::plays_episodes(self.raft, purpose, suite),
            canary: canary_vote::canary_text_for(self.run, cycle, purpose, self.inputs.prompts),
            behind,
        };
        let place =
            FactKey::GenerateOrder { pool: run_pool(self.run), cycle, job: id.clone(), attempt };
        write_command(self.run, place, FactBody::GenerateOrder(order))
    }

    fn select_samples(&self) -> WriteCommand {
        let selection = select::select_samples(self.run, self.raft, self.number, self.cycle);
        debug_assert!(selection.dataset.as_ref().is_none_or(|dataset| {
            let digest = Digest::hash_bytes(dataset).to_string();
            selection.fact.dataset.as_ref().is_some_and(|blob| blob.digest == digest)
        }));
        let place = FactKey::Selection { cycle: self.number };
        WriteCommand {
            blob: selection.dataset,
            ..write_command(self.run, place, FactBody::Selected(selection.fact))
        }
    }

    fn train_commands(&self, selected: &v1::Selected) -> Vec<WriteCommand> {
        let Some(PolicyWeights { base, adapter }) = self.run.training_policy(self.number) else {
            return vec![fail_command(self.run, format!("cycle {} has no policy", self.number))];
        };
        let order = v1::TrainOrder {
            base: Some(v1::Base { tree: Some(base), ..v1::Base::default() }),
            adapter,
            dataset: selected.dataset.clone(),
            training: schedule::training_settings(self.raft, self.number),
            replay: select::replayed_datasets(self.run, self.raft, self.number),
            replay_share: select::replay_share(self.raft),
            canary: self.cycle.canary_text.clone(),
            ..base_train_order(self.run, self.number)
        };
        order_training(self.run, self.cycle, order, self.inputs)
    }

    fn verifier_error(&self) -> String {
        let verdicts = self.cycle.jobs.values().filter_map(|job| job.verdicts.as_ref());
        let detail = verdicts.flat_map(|v| &v.verdicts).map(|verdict| &verdict.detail);
        let detail = detail.into_iter().find(|detail| !detail.is_empty());
        let detail = detail.map_or("no detail was given", String::as_str);
        format!("the verifier failed on every sample of cycle {}: {detail}", self.number)
    }

    /// Ends the cycle after its evaluation, or immediately if its selection kept nothing.
    fn finish_commands(&self) -> Vec<WriteCommand> {
        if self.cycle.final_checkpoint().is_some() {
            return finish_cycle(self.run, self.number, self.cycle);
        }
        if self.cycle.selected.as_ref().is_none_or(|selected| selected.kept > 0) {
            return Vec::new();
        }
        // The selection kept nothing to train on. The next cycle draws other samples.
        let done = cycle_summary::summarize_cycle(self.run, self.number, self.cycle);
        vec![write_command(
            self.run,
            FactKey::CycleDone { cycle: self.number },
            FactBody::CycleDone(done),
        )]
    }
}
