//! The fold of facts into state, and the only place that changes a [`Run`]. A fact that contradicts
//! earlier ones is recorded as an anomaly and otherwise ignored, so folding never fails, regardless
//! of the content of the log.

pub(crate) mod late_work;
mod outer_steps;
mod quarantine;

use std::collections::{BTreeMap, BTreeSet};

use wire::{
    Fact, FactBody, FactKey, JobId, NAME_BYTES_MAX, Record, SpecOrigin, Subject, SuiteName,
    TrainPart, WorkKind, check_checkpoint_author, control_user, v1,
};

use crate::{
    canary_vote, select,
    split_training::SliceState,
    state::{
        AcceptedSamples, Cycle, FactAnomaly, JobNeeds, PlannedJob, PolicyWeights, Run,
        job_index::JobIndex,
    },
};

/// The failures that a run keeps; the oldest are dropped.
const FAILURES_MAX: usize = 1000;

/// The length of each text of a failure that a run keeps, in bytes.
const FAILURE_TEXT_MAX: usize = 4096;

/// The anomalies that a run keeps.
const ANOMALIES_MAX: usize = 1000;

/// The agents of a failure that a run keeps: more than the failures after which work is given up.
const FAILURE_AGENTS_MAX: usize = 64;

/// Returns a failure with its texts cut: members may write any, and a run keeps many.
fn shorten_failure(failure: &v1::Failure) -> v1::Failure {
    let cut = cut_failure_text;
    let agents = failure.agents.iter().take(FAILURE_AGENTS_MAX);
    v1::Failure {
        run: cut(&failure.run),
        kind: cut(&failure.kind),
        id: cut(&failure.id),
        attempt: failure.attempt,
        agent: cut(&failure.agent),
        message: cut(&failure.message),
        log_tail: cut(&failure.log_tail),
        r#final: failure.r#final,
        cause: failure.cause,
        agents: agents.map(|name| cut_text(name, NAME_BYTES_MAX)).collect(),
    }
}

pub(crate) fn cut_failure_text(text: &str) -> String {
    cut_text(text, FAILURE_TEXT_MAX)
}

fn cut_text(text: &str, most: usize) -> String {
    text[..text.floor_char_boundary(most)].to_owned()
}

impl Run {
    /// Returns the initial state of the run that a `spec` fact defines; `None` for any other fact.
    pub fn start(record: &Record) -> Option<Self> {
        let FactBody::Spec(spec) = &record.fact.body else { return None };
        let mut spec = spec.clone();
        let forked = spec.take_forked_cycles();
        let mut run = Self::new(record.fact.subject.run.clone(), spec, record.time_ms);
        run.spec_sequence = record.sequence;
        run.sequence = record.sequence;
        run.author.clone_from(&record.author);
        run.take_over_cycles(forked);
        Some(run)
    }

    /// Applies one fact of this run to its state. Ignores facts that were applied before (at or
    /// below the last sequence); a fact that contradicts the state is added to `anomalies`.
    pub fn fold_record(&mut self, record: &Record) {
        if record.sequence <= self.sequence {
            return;
        }
        self.sequence = record.sequence;
        let outcome = match record.fact.subject.key.cycle_number() {
            Some(number) if number < self.first_cycle => {
                Err(format!("cycle {number} is that of the run that the spec forks"))
            }
            _ => self.apply_record(record),
        };
        self.reindex_job(&record.fact.subject.key);
        if let Err(what) = outcome {
            let subject = record.fact.subject.to_string();
            if self.anomalies.len() < ANOMALIES_MAX {
                self.anomalies.push(FactAnomaly {
                    sequence: record.sequence,
                    subject,
                    description: what,
                });
            }
        }
    }

    fn reindex_job(&mut self, place: &FactKey) {
        let failed;
        let (number, id) = match place {
            FactKey::GenerateOrder { cycle, job, .. }
            | FactKey::Samples { cycle, job }
            | FactKey::Verdicts { cycle, job }
            | FactKey::Scores { cycle, job } => (*cycle, job),
            FactKey::Failure { id, .. } => {
                failed = parse_job_id(id);
                let Some((number, id)) = &failed else { return };
                (*number, id)
            }
            _ => return,
        };
        let round = self.round;
        if let Some(cycle) = self.cycles.get_mut(&number) {
            cycle.reindex_job(id, round);
        }
    }

    fn apply_record(&mut self, record: &Record) -> Result<(), String> {
        let Fact { subject, body } = &record.fact;
        let at = record.time_ms;
        // Written by a coordinator with an outdated state after the run ended, or by an agent that
        // had not read the end either. Others ignore it, and so does the fold.
        if self.done.is_some() && (starts_work(body) || self.is_late_result(&subject.key)) {
            self.record_late_work(&subject.key, body);
            return Ok(());
        }
        if subject.key.is_bulky() && self.is_archived(&subject.key) {
            // An agent that was offline may write results again that the log has already purged.
            return Ok(());
        }
        match (&subject.key, body) {
            (FactKey::Spec | FactKey::WatchedSpec, _) => Err("a second spec".into()),
            (FactKey::Control { number }, FactBody::Control(control)) => {
                self.apply_control(*number, control, record)
            }
            (FactKey::Plan { cycle }, FactBody::Plan(plan)) => self.apply_plan(*cycle, plan, at),
            (
                FactKey::GenerateOrder { cycle, job, attempt, .. },
                FactBody::GenerateOrder(order),
            ) => self.record_generate_order(*cycle, job, *attempt, order, at),
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                self.apply_samples(*cycle, job, samples, record)
            }
            // Only reports need it: the order stays open, and another agent takes it.
            (FactKey::Declined { .. }, FactBody::Declined(_)) => Ok(()),
            (FactKey::Quarantine { number, .. }, FactBody::Quarantine(quarantine)) => {
                self.apply_quarantine(*number, quarantine, record.sequence)
            }
            (FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts)) => {
                self.apply_verdicts(*cycle, job, verdicts, at)
            }
            (FactKey::Scores { cycle, job }, FactBody::Scores(scores)) => {
                self.apply_scores(*cycle, job, scores, at)
            }
            (FactKey::Selection { cycle }, FactBody::Selected(selected)) => {
                self.apply_selection(*cycle, selected)
            }
            (FactKey::TrainOrder { cycle, attempt, .. }, FactBody::TrainOrder(order)) => {
                let cycle = self.cycles.entry(*cycle).or_default();
                cycle.train_orders.record_order(*attempt, order.round, at);
                cycle.record_training_order(order, at);
                Ok(())
            }
            (
                place @ (FactKey::Checkpoint { .. } | FactKey::WatchedCheckpoint { .. }),
                FactBody::Checkpoint(checkpoint),
            ) => self.apply_checkpoint(place, checkpoint, record),
            (FactKey::Eval { cycle, step, suite }, FactBody::Eval(eval)) => {
                self.apply_eval(*cycle, *step, suite, eval, at)
            }
            (FactKey::PassRates { cycle }, FactBody::PassRates(rates)) => {
                self.require_cycle(*cycle)?.pass_rates = Some(rates.clone());
                Ok(())
            }
            (FactKey::Failure { kind, .. }, FactBody::Failure(failure)) => {
                self.apply_failure(*kind, failure);
                Ok(())
            }
            (FactKey::CycleDone { cycle }, FactBody::CycleDone(done)) => {
                self.apply_cycle_done(*cycle, done)
            }
            (FactKey::Archived { cycle }, FactBody::Archived(archived)) => {
                self.apply_archived(*cycle, archived)
            }
            (FactKey::Done, FactBody::Done(done)) => {
                self.done = Some(done.clone());
                self.ended_ms = Some(at);
                Ok(())
            }
            (place, body) => self.apply_outer_step(place, body, at),
        }
    }

    fn record_generate_order(
        &mut self,
        number: u32,
        id: &JobId,
        attempt: u32,
        order: &v1::GenerateOrder,
        at: u64,
    ) -> Result<(), String> {
        if self.require_cycle(number)?.replaced_jobs.contains(id) {
            // A coordinator that had not read the quarantine yet wrote it.
            return Ok(());
        }
        let job = self.require_job(number, id)?;
        job.orders.record_order(attempt, order.round, at);
        if job.needs_samples() && job.requests.is_empty() {
            job.requests.clone_from(&order.requests);
        }
        Ok(())
    }

    fn require_cycle(&mut self, number: u32) -> Result<&mut Cycle, String> {
        self.cycles.get_mut(&number).ok_or_else(|| never_planned_message(number))
    }

    fn require_job(&mut self, cycle: u32, job: &JobId) -> Result<&mut PlannedJob, String> {
        let missing = || format!("job {job} is not in the plan of cycle {cycle}");
        self.require_cycle(cycle)?.jobs.get_mut(job).ok_or_else(missing)
    }

    /// Starts a new round on a resume after a pause. The first release from the queue starts none,
    /// because agents count the pauses that they read.
    fn apply_control(
        &mut self,
        number: u64,
        control: &v1::Control,
        record: &Record,
    ) -> Result<(), String> {
        use v1::control::Action;
        self.last_control = self.last_control.max(number);
        let author = record.author.as_ref();
        self.queue = self.queue.after_control(control);
        match control.action() {
            Action::Pause => {
                self.paused = true;
                self.paused_by = control_user(control, author);
                control.short_reason().clone_into(&mut self.pause_reason);
            }
            Action::Resume => {
                self.round = self.round.saturating_add(u32::from(self.paused));
                self.paused = false;
                let round = self.round;
                let open = self.cycles.values_mut().filter(|cycle| cycle.done.is_none());
                open.for_each(|cycle| cycle.reindex_all(round));
            }
            Action::Cancel => {
                if !self.cancelled {
                    self.cancelled_by = control_user(control, author);
                    control.short_reason().clone_into(&mut self.cancel_reason);
                }
                self.cancelled = true;
            }
            Action::Unspecified => return Err("a control without an action".into()),
        }
        match (self.is_halted(), self.halted_since_ms) {
            (true, None) => self.halted_since_ms = Some(record.time_ms),
            (false, Some(since)) => {
                self.halted_ms += record.time_ms.saturating_sub(since);
                self.halted_since_ms = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
        Ok(())
    }

    fn apply_plan(&mut self, number: u32, plan: &v1::Plan, at: u64) -> Result<(), String> {
        let round = self.round;
        let needs = |job: &v1::plan::Job| self.job_needs(job.purpose(), &job.suite);
        let needs: Vec<JobNeeds> = plan.jobs.iter().map(needs).collect();
        let cycle = self.cycles.entry(number).or_default();
        cycle.times.planned = Some(at);
        for (planned, needs) in plan.jobs.iter().zip(needs) {
            let id = JobId::new(planned.job.as_str()).map_err(|error| error.to_string())?;
            let (suite, draws) = (planned.suite.clone(), planned.draws.clone());
            // If a plan contains a job twice, the last entry counts; an audit reports it.
            cycle.remove_job(&id);
            cycle.jobs.insert(id.clone(), PlannedJob::new(planned.purpose(), suite, draws, needs));
            cycle.reindex_job(&id, round);
        }
        cycle.plan = Some(plan.clone());
        Ok(())
    }

    /// Returns what samples need: scores if they are trained on and the run has a teacher, verdicts
    /// if their prompts have a verifier.
    fn job_needs(&self, purpose: v1::Purpose, suite: &str) -> JobNeeds {
        let raft = self.raft_spec();
        let set = raft.and_then(|raft| raft.find_prompt_set(purpose, suite));
        JobNeeds {
            verdicts: set.is_none_or(|set| set.verifier.is_some()),
            scores: purpose != v1::Purpose::Heldout
                && raft.is_some_and(|raft| raft.teacher.is_some()),
        }
    }

    /// Stores samples that may not be used as void, and returns the reason as an error.
    fn apply_samples(
        &mut self,
        number: u32,
        id: &JobId,
        samples: &v1::Samples,
        record: &Record,
    ) -> Result<(), String> {
        let purpose = self.require_job(number, id)?.purpose;
        let policy = self.sampling_policy(number, purpose);
        let accepts_unverified = self.raft_spec().is_some_and(|raft| raft.accept_unverified_policy);
        if self.require_cycle(number)?.is_closed_for(purpose) {
            return Ok(());
        }
        let unproven = canary_vote::unproven_reason(self, samples);
        let job = self.require_job(number, id)?;
        if job.set_aside.is_some() {
            return Ok(());
        }
        let unverified = (!accepts_unverified && !samples.caveat.is_empty())
            .then(|| format!("the spec does not accept that {}", samples.caveat));
        let void = samples_void_reason(job, policy.as_ref(), samples).or(unverified).or(unproven);
        job.samples = Some(AcceptedSamples {
            sequence: record.sequence,
            agent: samples.agent.clone(),
            engine: samples.engine.clone(),
            count: u32::try_from(samples.samples.len()).unwrap_or(u32::MAX),
            wall_s: samples.wall_s,
            joules: samples.joules,
            void_reason: void.clone(),
            canary: samples.canary.clone(),
            samples: if void.is_none() { samples.samples.clone() } else { Vec::new() },
        });
        let cycle = self.require_cycle(number)?;
        cycle.record_samples(purpose, samples);
        let times = &mut cycle.times;
        match purpose {
            v1::Purpose::Heldout => times.last_evaluation = Some(record.time_ms),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                times.last_samples = Some(record.time_ms);
            }
        }
        if void.is_none()
            && !samples.canary.is_empty()
            && canary_vote::canary_settings(self).is_some()
        {
            self.canary_votes.record_report(number, record.sequence, samples);
        }
        void.map_or(Ok(()), |why| Err(format!("the samples are void: {why}")))
    }

    /// Returns the weights that samples of a cycle are drawn from. Training samples: the checkpoint
    /// that the cycle continues from, or an earlier one by `staleness`. Held-out samples: the
    /// cycle's own final checkpoint, or while it has none, the one that it continues from. `None`
    /// if there is no such checkpoint yet.
    pub fn sampling_policy(&self, cycle: u32, purpose: v1::Purpose) -> Option<PolicyWeights> {
        self.sampling_checkpoint(cycle, purpose).and_then(PolicyWeights::from_checkpoint)
    }

    pub(crate) fn sampling_checkpoint(
        &self,
        cycle: u32,
        purpose: v1::Purpose,
    ) -> Option<&v1::Checkpoint> {
        let own = || self.cycles.get(&cycle).and_then(Cycle::final_checkpoint);
        match purpose {
            v1::Purpose::Heldout => own().or_else(|| self.parent_checkpoint(cycle)),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                let stale = self.raft_spec().map_or(0, |raft| raft.staleness);
                // The first cycle samples with the base model: no other checkpoint exists yet.
                self.parent_checkpoint(cycle.saturating_sub(stale).max(1))
            }
        }
    }

    /// Returns the cycle whose final checkpoint a cycle's training starts from.
    pub fn training_cycle(&self, cycle: u32) -> Option<u32> {
        let parent = self.training_parent(cycle)?;
        let is_parent = |cycle: &Cycle| cycle.final_checkpoint() == Some(parent);
        self.cycles.iter().find(|(_, cycle)| is_parent(cycle)).map(|(number, _)| *number)
    }

    pub(crate) fn training_policy(&self, cycle: u32) -> Option<PolicyWeights> {
        self.training_parent(cycle).and_then(PolicyWeights::from_checkpoint)
    }

    /// Returns the base model if the spec sets `from_base`, else the checkpoint that the cycle
    /// continues from.
    fn training_parent(&self, cycle: u32) -> Option<&v1::Checkpoint> {
        let from_base = self.raft_spec().is_some_and(|raft| raft.from_base);
        self.parent_checkpoint(if from_base { 1 } else { cycle })
    }

    /// Fails if the verdicts do not judge each accepted sample once. Void ones are not kept, so
    /// that nothing is compared with them.
    fn apply_verdicts(
        &mut self,
        number: u32,
        id: &JobId,
        verdicts: &v1::Verdicts,
        at: u64,
    ) -> Result<(), String> {
        if self.require_cycle(number)?.replaced_jobs.contains(id) {
            return Ok(());
        }
        let purpose = self.require_job(number, id)?.purpose;
        let past = self.require_cycle(number)?.is_closed_for(purpose);
        let job = self.require_job(number, id)?;
        if past || job.set_aside.is_some() {
            return Ok(());
        }
        if !job.needs.verdicts {
            return Err("judges samples that have no verifier".into());
        }
        let samples = job.samples.as_ref().ok_or("verdicts before any samples")?;
        let judged: BTreeSet<_> =
            verdicts.verdicts.iter().map(|v| (&v.prompt_id, v.index)).collect();
        let made: BTreeSet<_> = samples.samples.iter().map(|s| (&s.prompt_id, s.index)).collect();
        let whole = samples.void_reason.is_some()
            || (judged == made && judged.len() == verdicts.verdicts.len());
        let same = samples.sequence == verdicts.samples_sequence;
        job.verdicts = Some(verdicts.clone());
        if purpose == v1::Purpose::Heldout {
            job.drop_texts();
        }
        let times = &mut self.require_cycle(number)?.times;
        match purpose {
            v1::Purpose::Heldout => times.last_evaluation = Some(at),
            v1::Purpose::Train | v1::Purpose::Unspecified => times.last_verdicts = Some(at),
        }
        match (same, whole) {
            (true, true) => Ok(()),
            (false, _) => Err(format!("judges samples {}", verdicts.samples_sequence)),
            (true, false) => Err("does not judge each sample of its job once".into()),
        }
    }

    /// Fails if the scores are not those of the accepted samples by the spec's teacher.
    fn apply_scores(
        &mut self,
        number: u32,
        id: &JobId,
        scores: &v1::Scores,
        at: u64,
    ) -> Result<(), String> {
        if self.require_cycle(number)?.replaced_jobs.contains(id) {
            return Ok(());
        }
        let teacher = self.raft_spec().and_then(|raft| raft.teacher.as_ref());
        let same_teacher = teacher.is_some_and(|teacher| teacher.manifest == scores.teacher);
        let purpose = self.require_job(number, id)?.purpose;
        let past = self.require_cycle(number)?.is_closed_for(purpose);
        let job = self.require_job(number, id)?;
        if past || job.set_aside.is_some() {
            return Ok(());
        }
        if !job.needs.scores {
            return Err("scores samples of a run without a teacher, or held-out ones".into());
        }
        let samples = job.samples.as_ref().ok_or("scores before any samples")?;
        if samples.void_reason.is_some() {
            return Ok(());
        }
        let (scored, drawn) = (scores.samples_sequence, samples.sequence);
        let is_whole = scores.scores.len() == samples.samples.len();
        // Wrong scores are stored as none, so that the job does not wait.
        let fits = same_teacher && scored == drawn && is_whole;
        let rest = if fits { scores.scores.clone() } else { Vec::new() };
        job.scores = Some(v1::Scores { scores: rest, ..scores.clone() });
        self.require_cycle(number)?.times.last_verdicts = Some(at);
        match (same_teacher, scored == drawn, is_whole) {
            (true, true, true) => Ok(()),
            (false, ..) => Err("scored by another model than the spec's teacher".into()),
            (_, false, _) => Err(format!("scores samples {scored}")),
            (_, _, false) => Err("does not score each sample of its job once".into()),
        }
    }

    /// Updates the history of each prompt and drops the texts of the samples. Fails if the
    /// selection does not follow from the verdicts.
    fn apply_selection(&mut self, number: u32, selected: &v1::Selected) -> Result<(), String> {
        let raft = self.raft_spec().ok_or("a selection in a run that selects nothing")?;
        let cycle = self.cycles.get(&number).ok_or_else(|| never_planned_message(number))?;
        let select::CycleSelection { fact: expected, dataset } =
            select::select_samples(self, raft, number, cycle);
        let canary = canary_vote::canary_settings(self).map_or(String::new(), |_| {
            canary_vote::text_from_dataset(&dataset.unwrap_or_default())
        });
        for (line, (judged, passed)) in
            selected.prompts.iter().zip(selected.judged.iter().zip(&selected.passed))
        {
            self.prompt_histories.entry(*line).or_default().record_cycle(*judged, *passed);
        }
        let cycle = self.require_cycle(number)?;
        cycle.selected = Some(selected.clone());
        cycle.canary_text = canary;
        cycle.jobs.values_mut().for_each(PlannedJob::drop_texts);
        if expected == *selected {
            return Ok(());
        }
        Err("does not follow from the cycle's verdicts".into())
    }

    /// Fails if the parent is not the checkpoint that the training had to start from.
    fn apply_checkpoint(
        &mut self,
        place: &FactKey,
        checkpoint: &v1::Checkpoint,
        record: &Record,
    ) -> Result<(), String> {
        let spec = SpecOrigin { is_watched: self.is_watched(), author: self.author.as_ref() };
        check_checkpoint_author(place, record.author.as_ref(), spec)?;
        let (number, step) = place.checkpoint_position().ok_or("not a checkpoint's subject")?;
        if number == 0 && self.raft_spec().is_some() && !self.is_base(checkpoint) {
            return Err("cycle 0 of a RAFT run is its base, and this is another model".into());
        }
        let parent = self.training_parent(number).and_then(|parent| parent.tree.clone());
        let cycle = self.cycles.entry(number).or_default();
        cycle.checkpoints.insert(step, checkpoint.clone());
        if checkpoint.r#final {
            cycle.times.trained = Some(record.time_ms);
        }
        let manifest = |tree: &v1::Tree| tree.manifest.clone();
        if parent.as_ref().map(manifest) == checkpoint.parent.as_ref().map(manifest)
            || parent.is_none()
        {
            return Ok(());
        }
        Err("its parent is not the checkpoint before it".into())
    }

    fn is_base(&self, checkpoint: &v1::Checkpoint) -> bool {
        let start = self.spec.base.as_ref();
        let start = start.and_then(|base| base.adapter.as_ref().or(base.tree.as_ref()));
        let manifest = |tree: Option<&v1::Tree>| tree.map(|tree| tree.manifest.clone());
        manifest(checkpoint.tree.as_ref()) == manifest(start)
    }

    /// Fails if the eval measured other weights than its checkpoint's.
    fn apply_eval(
        &mut self,
        number: u32,
        step: u32,
        suite: &SuiteName,
        eval: &v1::Eval,
        at: u64,
    ) -> Result<(), String> {
        let cycle = self.require_cycle(number)?;
        let checkpoint = cycle.checkpoints.get(&step).ok_or("an eval before its checkpoint")?;
        let manifest = checkpoint.tree.as_ref().map(|tree| tree.manifest.as_str());
        let same = manifest == Some(eval.manifest.as_str());
        cycle.evals.insert((step, suite.clone()), eval.clone());
        cycle.times.last_evaluation = Some(at);
        if same { Ok(()) } else { Err("measured something else than its checkpoint".into()) }
    }

    fn apply_cycle_done(&mut self, number: u32, done: &v1::CycleDone) -> Result<(), String> {
        self.canary_votes.drop_before(number);
        let cycle = self.require_cycle(number)?;
        cycle.done = Some(done.clone());
        // An audit still counts the verdicts, but their details are no longer needed.
        let verdicts = cycle.jobs.values_mut().filter_map(|job| job.verdicts.as_mut());
        verdicts.flat_map(|v| &mut v.verdicts).for_each(|v| v.detail = String::new());
        Ok(())
    }

    /// Drops the plan and jobs, because the log may no longer contain them, and the anomalies of
    /// the cycle, which can no longer be derived once facts are purged.
    fn apply_archived(&mut self, number: u32, archived: &v1::Archived) -> Result<(), String> {
        let cycle = self.require_cycle(number)?;
        if cycle.done.is_none() {
            return Err("archived before it was done".into());
        }
        cycle.archived = Some(archived.clone());
        cycle.jobs = BTreeMap::new();
        cycle.job_index = JobIndex::default();
        cycle.plan = None;
        self.anomalies.retain(|anomaly| {
            let subject: Option<Subject> = anomaly.subject.parse().ok();
            subject.is_none_or(|subject| {
                let named = matches!(subject.key, FactKey::Quarantine { .. });
                !named && subject.key.cycle_number() != Some(number)
            })
        });
        Ok(())
    }

    fn is_archived(&self, place: &FactKey) -> bool {
        let cycle = place.cycle_number().and_then(|number| self.cycles.get(&number));
        cycle.is_some_and(|cycle| cycle.archived.is_some())
    }

    /// Gives up the job, eval or training on a final failure.
    fn apply_failure(&mut self, kind: WorkKind, failure: &v1::Failure) {
        if self.failures.len() == FAILURES_MAX {
            self.failures.remove(0);
        }
        self.failures.push(shorten_failure(failure));
        if !failure.r#final {
            return;
        }
        match kind {
            WorkKind::Eval => {
                if let Some((cycle, step, suite)) = parse_eval_id(&failure.id)
                    && let Some(cycle) = self.cycles.get_mut(&cycle)
                {
                    cycle.failed_evals.insert((step, suite));
                }
            }
            WorkKind::Generate | WorkKind::Verify | WorkKind::Score => {
                self.set_job_aside(kind, failure);
            }
            WorkKind::Train if self.is_obsolete_part(&failure.id) => {}
            WorkKind::Train => {
                self.training_failure.get_or_insert_with(|| shorten_failure(failure));
            }
        }
    }

    /// Returns true for the failure of a slice or merge (`<cycle>-<outer>-<part>`) that is in the log,
    /// or of a slice whose outer step is closed: its steps are planned again.
    fn is_obsolete_part(&self, id: &str) -> bool {
        let mut texts = id.splitn(3, '-');
        let (Some(cycle), Some(outer), Some(part)) = (texts.next(), texts.next(), texts.next())
        else {
            return false;
        };
        let (Ok(cycle), Ok(outer), Ok(part)) =
            (cycle.parse::<u32>(), outer.parse::<u32>(), part.parse::<TrainPart>())
        else {
            return false;
        };
        let step =
            self.cycles.get(&cycle).and_then(|cycle| cycle.split_training.outer_steps.get(&outer));
        step.is_some_and(|step| match part {
            TrainPart::Slice(slice) => {
                let settled = step.slices.get(&slice).is_some_and(SliceState::is_settled);
                settled || step.closed.is_some()
            }
            TrainPart::Merge => step.merge.is_some(),
        })
    }

    /// Gives up a job after a final failure. If the log contains both a result and a final failure,
    /// the first one counts, so a selection never waits for a result that may or may not arrive.
    fn set_job_aside(&mut self, kind: WorkKind, failure: &v1::Failure) {
        let Some((number, id)) = parse_job_id(&failure.id) else { return };
        let Ok(job) = self.require_job(number, &id) else { return };
        let missing = match kind {
            WorkKind::Generate => job.samples.is_none(),
            WorkKind::Verify => job.awaits_verdicts(),
            WorkKind::Score => job.awaits_scores(),
            WorkKind::Train | WorkKind::Eval => false,
        };
        if missing && job.set_aside.is_none() {
            let message = cut_failure_text(&failure.message);
            job.set_aside = Some(format!("{kind} {}: {message}", failure.id));
        }
    }
}

impl Cycle {
    fn record_training_order(&mut self, order: &v1::TrainOrder, at: u64) {
        self.canary_text.clone_from(&order.canary);
        self.times.train_ordered.get_or_insert(at);
    }

    /// Returns true if new samples of this purpose can no longer count.
    pub(crate) fn is_closed_for(&self, purpose: v1::Purpose) -> bool {
        match purpose {
            v1::Purpose::Heldout => self.done.is_some(),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                self.selected.is_some() || self.done.is_some()
            }
        }
    }
}

impl PlannedJob {
    fn drop_texts(&mut self) {
        self.requests = Vec::new();
        if let Some(samples) = &mut self.samples {
            samples.samples = Vec::new();
        }
        if let Some(scores) = &mut self.scores {
            scores.scores = Vec::new();
        }
    }
}

fn never_planned_message(cycle: u32) -> String {
    format!("cycle {cycle} was never planned")
}

fn starts_work(body: &FactBody) -> bool {
    matches!(
        body,
        FactBody::Plan(_)
            | FactBody::GenerateOrder(_)
            | FactBody::TrainOrder(_)
            | FactBody::SlicePlan(_)
            | FactBody::SliceClose(_)
    )
}

/// Parses `<cycle>-<job>`, the id of a failed generation or verification.
pub(crate) fn parse_job_id(id: &str) -> Option<(u32, JobId)> {
    let (cycle, job) = id.split_once('-')?;
    Some((cycle.parse().ok()?, job.parse().ok()?))
}

/// Parses `<cycle>-<step>-<suite>`.
fn parse_eval_id(id: &str) -> Option<(u32, u32, SuiteName)> {
    let mut parts = id.splitn(3, '-');
    let cycle = parts.next()?.parse().ok()?;
    let step = parts.next()?.parse().ok()?;
    Some((cycle, step, parts.next()?.parse().ok()?))
}

/// Returns the reason why samples may not be used: wrong weights, wrong suite, or not exactly the
/// samples ordered.
fn samples_void_reason(
    job: &PlannedJob,
    policy: Option<&PolicyWeights>,
    samples: &v1::Samples,
) -> Option<String> {
    let Some(policy) = policy else { return Some("no policy to sample from".into()) };
    if samples.base != policy.base.manifest || samples.adapter != policy.adapter_manifest() {
        return Some("made by another policy".into());
    }
    // Verifiers and scorers do what the purpose says.
    let is_heldout = |purpose: v1::Purpose| purpose == v1::Purpose::Heldout;
    if is_heldout(samples.purpose()) != is_heldout(job.purpose) {
        return Some("its purpose is not its job's".into());
    }
    // A different suite would use a different verifier.
    if samples.suite != job.suite {
        return Some("its suite is not its job's".into());
    }
    // The counts are compared first: an invalid order may request more samples than can be
    // enumerated.
    let count: u64 = job.requests.iter().map(|r| u64::from(r.count)).sum();
    let ordered = || -> BTreeSet<(&str, u64)> {
        let index = |first: u32, n: u32| u64::from(first) + u64::from(n);
        job.requests
            .iter()
            .flat_map(|r| (0..r.count).map(|n| (r.prompt_id.as_str(), index(r.first, n))))
            .collect()
    };
    let made: BTreeSet<(&str, u64)> =
        samples.samples.iter().map(|s| (s.prompt_id.as_str(), u64::from(s.index))).collect();
    let whole = count == samples.samples.len() as u64
        && made.len() == samples.samples.len()
        && ordered() == made;
    (!whole).then(|| "not the samples that were ordered".into())
}
