//! Facts into state. The only place that changes a [`Run`].
//!
//! A fact that contradicts earlier ones is noted as an anomaly and otherwise ignored:
//! folding never fails, whatever somebody wrote to the log.

mod quarantine;

use std::collections::{BTreeMap, BTreeSet};

use wire::{Body, Fact, JobId, Place, Record, Subject, SuiteName, WorkKind, v1};

use crate::{
    ledger::Ledger,
    proof, select,
    state::{Anomaly, Cycle, Job, Policy, Run, Samples},
};

impl Run {
    /// The run a `spec` fact starts. `None` for any other fact.
    pub fn start(record: &Record) -> Option<Self> {
        let Body::Spec(spec) = &record.fact.body else { return None };
        let mut run = Self::new(record.fact.subject.run.clone(), spec.clone(), record.time_ms);
        run.sequence = record.sequence;
        Some(run)
    }

    /// Takes in one fact of this run. Facts at or below the last sequence are ignored.
    pub fn fold(&mut self, record: &Record) {
        if record.sequence <= self.sequence {
            return;
        }
        self.sequence = record.sequence;
        let outcome = self.apply(record);
        self.book(&record.fact.subject.place);
        if let Err(what) = outcome {
            let subject = record.fact.subject.to_string();
            self.anomalies.push(Anomaly { sequence: record.sequence, subject, what });
        }
    }

    /// Notes where the job stands that a fact was about.
    fn book(&mut self, place: &Place) {
        let failed;
        let (number, id) = match place {
            Place::GenerateOrder { cycle, job, .. }
            | Place::Samples { cycle, job }
            | Place::Verdicts { cycle, job } => (*cycle, job),
            Place::Failure { id, .. } => {
                failed = job_of(id);
                let Some((number, id)) = &failed else { return };
                (*number, id)
            }
            _ => return,
        };
        let round = self.round;
        if let Some(cycle) = self.cycles.get_mut(&number) {
            cycle.book(id, round);
        }
    }

    fn apply(&mut self, record: &Record) -> Result<(), String> {
        let Fact { subject, body } = &record.fact;
        let at = record.time_ms;
        // A coordinator that slept wrote it: agents know better, and so do we.
        if self.done.is_some() && starts_work(body) {
            return Ok(());
        }
        if subject.place.is_bulky() && self.is_archived(&subject.place) {
            // What the log has let go of may be written again by an agent that was away.
            return Ok(());
        }
        match (&subject.place, body) {
            (Place::Spec, _) => Err("a second spec".into()),
            (Place::Control { number }, Body::Control(control)) => self.control(*number, control),
            (Place::Plan { cycle }, Body::Plan(plan)) => self.plan(*cycle, plan, at),
            (Place::GenerateOrder { cycle, job, attempt, .. }, Body::GenerateOrder(order)) => {
                if self.cycle(*cycle)?.redrawn.contains(job) {
                    // A coordinator that had not heard of it wrote it.
                    return Ok(());
                }
                let job = self.job(*cycle, job)?;
                job.ordered.note(*attempt, order.round, at);
                if job.needs_samples() && job.requests.is_empty() {
                    job.requests.clone_from(&order.requests);
                }
                Ok(())
            }
            (Place::Samples { cycle, job }, Body::Samples(samples)) => {
                self.samples(*cycle, job, samples, record)
            }
            (Place::Quarantine { number, .. }, Body::Quarantine(quarantine)) => {
                self.quarantine(*number, quarantine, record.sequence)
            }
            (Place::Verdicts { cycle, job }, Body::Verdicts(verdicts)) => {
                self.verdicts(*cycle, job, verdicts, at)
            }
            (Place::Selection { cycle }, Body::Selected(selected)) => {
                self.selected(*cycle, selected)
            }
            (Place::TrainOrder { cycle, attempt, .. }, Body::TrainOrder(order)) => {
                let cycle = self.cycles.entry(*cycle).or_default();
                cycle.train_ordered.note(*attempt, order.round, at);
                cycle.canary.clone_from(&order.canary);
                cycle.times.train_ordered.get_or_insert(at);
                Ok(())
            }
            (Place::Checkpoint { cycle, step }, Body::Checkpoint(checkpoint)) => {
                self.checkpoint(*cycle, *step, checkpoint, at)
            }
            (Place::Eval { cycle, step, suite }, Body::Eval(eval)) => {
                self.eval(*cycle, *step, suite, eval, at)
            }
            (Place::Failure { kind, .. }, Body::Failure(failure)) => {
                self.failure(*kind, failure);
                Ok(())
            }
            (Place::CycleDone { cycle }, Body::CycleDone(done)) => {
                self.proofs.forget_before(*cycle);
                let cycle = self.cycle(*cycle)?;
                cycle.done = Some(done.clone());
                // An audit still counts them, but nobody reads why any more.
                let verdicts = cycle.jobs.values_mut().filter_map(|job| job.verdicts.as_mut());
                verdicts.flat_map(|v| &mut v.verdicts).for_each(|v| v.detail = String::new());
                Ok(())
            }
            (Place::Archived { cycle }, Body::Archived(archived)) => {
                self.archived(*cycle, archived)
            }
            (Place::Done, Body::Done(done)) => {
                self.done = Some(done.clone());
                self.ended_ms = Some(at);
                Ok(())
            }
            _ => Err("the message does not belong under this subject".into()),
        }
    }

    fn cycle(&mut self, number: u32) -> Result<&mut Cycle, String> {
        self.cycles.get_mut(&number).ok_or_else(|| never_planned(number))
    }

    fn job(&mut self, cycle: u32, job: &JobId) -> Result<&mut Job, String> {
        let missing = || format!("job {job} is not in the plan of cycle {cycle}");
        self.cycle(cycle)?.jobs.get_mut(job).ok_or_else(missing)
    }

    fn control(&mut self, number: u64, control: &v1::Control) -> Result<(), String> {
        use v1::control::Action;
        self.controls = self.controls.max(number);
        match control.action() {
            Action::Pause => self.paused = true,
            Action::Resume => {
                self.round = self.round.saturating_add(u32::from(self.paused));
                self.paused = false;
                let round = self.round;
                let open = self.cycles.values_mut().filter(|cycle| cycle.done.is_none());
                open.for_each(|cycle| cycle.book_all(round));
            }
            Action::Cancel => self.cancelled = true,
            Action::Unspecified => return Err("a control without an action".into()),
        }
        Ok(())
    }

    fn plan(&mut self, number: u32, plan: &v1::Plan, at: u64) -> Result<(), String> {
        let round = self.round;
        let cycle = self.cycles.entry(number).or_default();
        cycle.times.planned = Some(at);
        for planned in &plan.jobs {
            let id = JobId::new(planned.job.as_str()).map_err(|error| error.to_string())?;
            let (suite, draws) = (planned.suite.clone(), planned.draws.clone());
            // Named twice: the last counts, and an audit says so.
            cycle.strike(&id);
            cycle.jobs.insert(id.clone(), Job::new(planned.purpose(), suite, draws));
            cycle.book(&id, round);
        }
        cycle.plan = Some(plan.clone());
        Ok(())
    }

    fn samples(
        &mut self,
        number: u32,
        id: &JobId,
        samples: &v1::Samples,
        record: &Record,
    ) -> Result<(), String> {
        let purpose = self.job(number, id)?.purpose;
        let policy = self.policy(number, purpose);
        let accepts_unverified = self.raft().is_some_and(|raft| raft.accept_unverified_policy);
        if self.cycle(number)?.is_past(purpose) {
            return Ok(());
        }
        let unproven = proof::why_void(self, samples);
        let job = self.job(number, id)?;
        if job.set_aside.is_some() {
            return Ok(());
        }
        let unverified = (!accepts_unverified && !samples.caveat.is_empty())
            .then(|| format!("the spec does not accept that {}", samples.caveat));
        let void = why_void(job, policy.as_ref(), samples).or(unverified).or(unproven);
        job.samples = Some(Samples {
            sequence: record.sequence,
            agent: samples.agent.clone(),
            engine: samples.engine.clone(),
            count: u32::try_from(samples.samples.len()).unwrap_or(u32::MAX),
            wall_s: samples.wall_s,
            joules: samples.joules,
            void: void.clone(),
            canary: samples.canary.clone(),
            samples: samples.samples.clone(),
        });
        let cycle = self.cycle(number)?;
        cycle.count(purpose, samples);
        let times = &mut cycle.times;
        match purpose {
            v1::Purpose::Heldout => times.last_measure = Some(record.time_ms),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                times.last_samples = Some(record.time_ms);
            }
        }
        if void.is_none() && !samples.canary.is_empty() && proof::asked(self).is_some() {
            self.proofs.show(number, record.sequence, samples);
        }
        void.map_or(Ok(()), |why| Err(format!("the samples are void: {why}")))
    }

    /// What generates a cycle's samples: held-out ones measure the cycle's own checkpoint.
    pub fn policy(&self, cycle: u32, purpose: v1::Purpose) -> Option<Policy> {
        self.drawn_with(cycle, purpose).and_then(Policy::of)
    }

    /// The checkpoint that is its policy.
    pub(crate) fn drawn_with(&self, cycle: u32, purpose: v1::Purpose) -> Option<&v1::Checkpoint> {
        let own = || self.cycles.get(&cycle).and_then(Cycle::final_checkpoint);
        match purpose {
            v1::Purpose::Heldout => own().or_else(|| self.parent(cycle)),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                let stale = self.raft().map_or(0, |raft| raft.staleness);
                // The first cycle samples with the base, which is the only one there is.
                self.parent(cycle.saturating_sub(stale).max(1))
            }
        }
    }

    /// What a cycle trains on.
    pub(crate) fn trained_from(&self, cycle: u32) -> Option<Policy> {
        self.origin(cycle).and_then(Policy::of)
    }

    /// The checkpoint whose weights a cycle's training begins with.
    fn origin(&self, cycle: u32) -> Option<&v1::Checkpoint> {
        let from_base = self.raft().is_some_and(|raft| raft.from_base);
        self.parent(if from_base { 1 } else { cycle })
    }

    fn verdicts(
        &mut self,
        number: u32,
        id: &JobId,
        verdicts: &v1::Verdicts,
        at: u64,
    ) -> Result<(), String> {
        if self.cycle(number)?.redrawn.contains(id) {
            return Ok(());
        }
        let purpose = self.job(number, id)?.purpose;
        let past = self.cycle(number)?.is_past(purpose);
        let job = self.job(number, id)?;
        if past || job.set_aside.is_some() {
            return Ok(());
        }
        let samples = job.samples.as_ref().ok_or("verdicts before any samples")?;
        let judged: BTreeSet<_> =
            verdicts.verdicts.iter().map(|v| (&v.prompt_id, v.index)).collect();
        let made: BTreeSet<_> = samples.samples.iter().map(|s| (&s.prompt_id, s.index)).collect();
        let whole = judged == made && judged.len() == verdicts.verdicts.len();
        let same = samples.sequence == verdicts.samples_sequence;
        job.verdicts = Some(verdicts.clone());
        if purpose == v1::Purpose::Heldout {
            job.forget_texts();
        }
        let times = &mut self.cycle(number)?.times;
        match purpose {
            v1::Purpose::Heldout => times.last_measure = Some(at),
            v1::Purpose::Train | v1::Purpose::Unspecified => times.last_verdicts = Some(at),
        }
        match (same, whole) {
            (true, true) => Ok(()),
            (false, _) => Err(format!("judges samples {}", verdicts.samples_sequence)),
            (true, false) => Err("does not judge each sample of its job once".into()),
        }
    }

    fn selected(&mut self, number: u32, selected: &v1::Selected) -> Result<(), String> {
        let raft = self.raft().ok_or("a selection in a run that selects nothing")?;
        let cycle = self.cycles.get(&number).ok_or_else(|| never_planned(number))?;
        let select::Selection { fact: expected, dataset } =
            select::select(self, raft, number, cycle);
        let canary = proof::asked(self).map_or(String::new(), |_| proof::of_dataset(&dataset));
        for (line, (judged, passed)) in
            selected.prompts.iter().zip(selected.judged.iter().zip(&selected.passed))
        {
            self.prompts.entry(*line).or_default().note(*judged, *passed);
        }
        let cycle = self.cycle(number)?;
        cycle.selected = Some(selected.clone());
        cycle.canary = canary;
        cycle.jobs.values_mut().for_each(Job::forget_texts);
        if expected == *selected {
            return Ok(());
        }
        Err("does not follow from the cycle's verdicts".into())
    }

    fn checkpoint(
        &mut self,
        number: u32,
        step: u32,
        checkpoint: &v1::Checkpoint,
        at: u64,
    ) -> Result<(), String> {
        let parent = self.origin(number).and_then(|parent| parent.tree.clone());
        let cycle = self.cycles.entry(number).or_default();
        cycle.checkpoints.insert(step, checkpoint.clone());
        if checkpoint.r#final {
            cycle.times.trained = Some(at);
        }
        let manifest = |tree: &v1::Tree| tree.manifest.clone();
        if parent.as_ref().map(manifest) == checkpoint.parent.as_ref().map(manifest)
            || parent.is_none()
        {
            return Ok(());
        }
        Err("its parent is not the checkpoint before it".into())
    }

    fn eval(
        &mut self,
        number: u32,
        step: u32,
        suite: &SuiteName,
        eval: &v1::Eval,
        at: u64,
    ) -> Result<(), String> {
        let cycle = self.cycle(number)?;
        let checkpoint = cycle.checkpoints.get(&step).ok_or("an eval before its checkpoint")?;
        let manifest = checkpoint.tree.as_ref().map(|tree| tree.manifest.as_str());
        let same = manifest == Some(eval.manifest.as_str());
        cycle.evals.insert((step, suite.clone()), eval.clone());
        cycle.times.last_measure = Some(at);
        if same { Ok(()) } else { Err("measured something else than its checkpoint".into()) }
    }

    /// From here on the log need not hold what the cycle was made of, and neither do we; where
    /// it does not, what followed from it could not be re-derived.
    fn archived(&mut self, number: u32, archived: &v1::Archived) -> Result<(), String> {
        let cycle = self.cycle(number)?;
        if cycle.done.is_none() {
            return Err("archived before it was done".into());
        }
        cycle.archived = Some(archived.clone());
        cycle.jobs = BTreeMap::new();
        cycle.ledger = Ledger::default();
        cycle.plan = None;
        self.anomalies.retain(|anomaly| {
            let subject: Option<Subject> = anomaly.subject.parse().ok();
            subject.is_none_or(|subject| {
                let named = matches!(subject.place, Place::Quarantine { .. });
                !named && subject.place.cycle() != Some(number)
            })
        });
        Ok(())
    }

    fn is_archived(&self, place: &Place) -> bool {
        let cycle = place.cycle().and_then(|number| self.cycles.get(&number));
        cycle.is_some_and(|cycle| cycle.archived.is_some())
    }

    fn failure(&mut self, kind: WorkKind, failure: &v1::Failure) {
        self.failures.push(failure.clone());
        if !failure.r#final {
            return;
        }
        match kind {
            WorkKind::Eval => {
                if let Some((cycle, step, suite)) = eval_of(&failure.id)
                    && let Some(cycle) = self.cycles.get_mut(&cycle)
                {
                    cycle.evals_failed.insert((step, suite));
                }
            }
            WorkKind::Generate | WorkKind::Verify => self.set_aside(kind, failure),
            WorkKind::Train => drop(self.untrained.get_or_insert_with(|| failure.clone())),
        }
    }

    /// The first of a result and a last failure counts, in the order of the log; so no
    /// selection ever waits for what may or may not come.
    fn set_aside(&mut self, kind: WorkKind, failure: &v1::Failure) {
        let Some((number, id)) = job_of(&failure.id) else { return };
        let Ok(job) = self.job(number, &id) else { return };
        let missing = match kind {
            WorkKind::Generate => job.samples.is_none(),
            WorkKind::Verify => job.samples.is_some() && job.verdicts.is_none(),
            WorkKind::Train | WorkKind::Eval => false,
        };
        if missing && job.set_aside.is_none() {
            job.set_aside = Some(format!("{kind} {}: {}", failure.id, failure.message));
        }
    }
}

impl Cycle {
    /// Whether nothing that is sampled for this purpose can count any more.
    pub(crate) fn is_past(&self, purpose: v1::Purpose) -> bool {
        match purpose {
            v1::Purpose::Heldout => self.done.is_some(),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                self.selected.is_some() || self.done.is_some()
            }
        }
    }
}

impl Job {
    fn forget_texts(&mut self) {
        self.requests = Vec::new();
        if let Some(samples) = &mut self.samples {
            samples.samples = Vec::new();
        }
    }
}

fn never_planned(cycle: u32) -> String {
    format!("cycle {cycle} was never planned")
}

fn starts_work(body: &Body) -> bool {
    matches!(body, Body::Plan(_) | Body::GenerateOrder(_) | Body::TrainOrder(_))
}

/// The id of a failed generation or verification: `<cycle>-<job>`.
pub(crate) fn job_of(id: &str) -> Option<(u32, JobId)> {
    let (cycle, job) = id.split_once('-')?;
    Some((cycle.parse().ok()?, job.parse().ok()?))
}

/// The id of an eval failure: `<cycle>-<step>-<suite>`.
fn eval_of(id: &str) -> Option<(u32, u32, SuiteName)> {
    let mut parts = id.splitn(3, '-');
    let cycle = parts.next()?.parse().ok()?;
    let step = parts.next()?.parse().ok()?;
    Some((cycle, step, parts.next()?.parse().ok()?))
}

fn why_void(job: &Job, policy: Option<&Policy>, samples: &v1::Samples) -> Option<String> {
    let Some(policy) = policy else { return Some("no policy to sample from".into()) };
    if samples.base != policy.base.manifest || samples.adapter != policy.adapter_manifest() {
        return Some("made by another policy".into());
    }
    // It would be judged by another verifier than its own.
    if samples.suite != job.suite {
        return Some("its suite is not its job's".into());
    }
    // Counted first: an order may ask for more than can be written down.
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
