//! Invariants that hold after every step, and checks at the end of a run.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use cycle::{PlannedJob, Run, audit_records, canary_agreement};
use wire::{Fact, FactBody, FactKey, Record, WorkKind, v1};

use crate::{faults::Faults, server::Server, task};

/// More than the limit of open orders, including backup orders.
const QUEUED_MAX: usize = 120;
const ORDERS_A_ROUND_MAX: usize = 8;

/// The results of a run: the selected dataset and the final adapter of each cycle.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Results {
    datasets: BTreeMap<u32, String>,
    adapters: BTreeMap<u32, String>,
}

/// Folds the log as it grows, and keeps the first violated invariant.
pub(crate) struct Checker {
    faults: Faults,
    run: Option<Run>,
    records: Vec<Rc<Record>>,
    subjects: BTreeSet<String>,
    order_counts: BTreeMap<(u32, String, u32), usize>,
    settled: BTreeMap<(u32, String), Outcome>,
    violation: Option<String>,
}

impl Checker {
    pub(crate) fn new(faults: &Faults) -> Self {
        Self {
            faults: faults.clone(),
            run: None,
            records: Vec::new(),
            subjects: BTreeSet::new(),
            order_counts: BTreeMap::new(),
            settled: BTreeMap::new(),
            violation: None,
        }
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(crate) fn result(&self) -> Result<(), String> {
        self.violation.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.done.is_some())
    }

    pub(crate) fn describe(&self) -> String {
        self.run.as_ref().map_or("there is none".into(), |run| {
            let cycle = run.current_cycle();
            let open = run
                .cycles
                .get(&cycle)
                .map_or(0, |cycle| cycle.jobs.values().filter(|job| !job.is_settled()).count());
            format!(
                "cycle {cycle}, phase {}, {open} jobs open, paused {}, round {}",
                run.current_phase().as_str(),
                run.paused,
                run.round
            )
        })
    }

    pub(crate) fn apply_record(&mut self, record: &Rc<Record>) {
        let subject = record.fact.subject.to_string();
        let new = self.subjects.insert(subject.clone());
        self.require(new, || format!("{subject} was accepted twice"));
        let done = self.run.as_ref().and_then(|run| run.done.clone());
        match &mut self.run {
            None => self.run = Run::start(record),
            Some(run) => run.fold_record(record),
        }
        self.records.push(record.clone());
        let Some(run) = &self.run else { return };
        let is_unchanged = done.is_none() || run.done == done;
        let contradiction =
            run.anomalies.iter().find(|anomaly| !self.is_expected(&anomaly.description));
        let contradiction = contradiction.map(|anomaly| format!("{anomaly:?}"));
        self.require(is_unchanged, || "a finished run ended otherwise".into());
        self.require(contradiction.is_none(), || contradiction.unwrap_or_default());
        self.check_selection(record);
        self.check_stale_samples(record);
        self.check_order_count(record);
        self.check_settled_jobs();
    }

    /// A settled job must not change, or a selection would depend on the time of the decision.
    fn check_settled_jobs(&mut self) {
        let Some(run) = &self.run else { return };
        let jobs = run.cycles.iter().flat_map(|(number, cycle)| {
            let settled = cycle.jobs.iter().filter(|(_, job)| job.is_settled());
            settled.map(|(id, job)| ((*number, id.to_string()), job_outcome(job)))
        });
        let mut changed = None;
        for (name, outcome) in jobs {
            let before = self.settled.entry(name.clone()).or_insert(outcome);
            changed = changed.or((*before != outcome).then_some(name));
        }
        self.require(changed.is_none(), || format!("{changed:?} was settled, and then otherwise"));
    }

    fn is_expected(&self, what: &str) -> bool {
        self.faults.liar && what.contains("void")
    }

    /// Returns the adapter that a cycle samples with. It comes from the cycle before, or from the
    /// one before that if the spec allows staleness.
    fn adapter_for_cycle(&self, cycle: u32) -> String {
        let mut adapters: BTreeMap<u32, String> = BTreeMap::from([(0, String::new())]);
        let mut adapters_after = adapters.clone();
        let mut staleness = 0;
        for record in &self.records {
            match &record.fact.body {
                FactBody::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(raft)), .. }) => {
                    staleness = raft.staleness;
                }
                FactBody::Checkpoint(checkpoint)
                    if checkpoint.r#final
                        && checkpoint.content() == v1::checkpoint::Content::Adapter =>
                {
                    let tree = checkpoint.tree.as_ref();
                    let adapter: String = tree.map_or("", |tree| &tree.manifest).into();
                    // The end of the cycle may replace it.
                    adapters_after.insert(checkpoint.cycle, adapter.clone());
                    adapters.insert(checkpoint.cycle, adapter);
                }
                FactBody::CycleDone(done) if done.cycle > 0 => {
                    let rolls_back = done.then() == v1::gates::Then::RollBack;
                    let chosen = adapters.get(if rolls_back { &done.best } else { &done.cycle });
                    let before = adapters_after.get(&(done.cycle - 1));
                    let adapter = chosen.or(before).cloned().unwrap_or_default();
                    adapters_after.insert(done.cycle, adapter);
                }
                _ => {}
            }
        }
        let from = cycle.saturating_sub(1 + staleness);
        adapters_after.get(&from).cloned().unwrap_or_default()
    }

    /// Recomputes from the log that kept samples are of the cycle's policy, and that each planned
    /// sample is either kept or dropped with a reason.
    fn check_selection(&mut self, record: &Record) {
        let FactBody::Selected(selected) = &record.fact.body else { return };
        let mut planned = 0;
        let mut sound = 0;
        let adapter = self.adapter_for_cycle(selected.cycle);
        for record in &self.records {
            match &record.fact.body {
                FactBody::Plan(plan) if plan.cycle == selected.cycle => {
                    let train = plan.jobs.iter().filter(|job| job.purpose() == v1::Purpose::Train);
                    planned = train.flat_map(|job| &job.draws).map(|draw| draw.count).sum();
                }
                FactBody::Samples(samples)
                    if samples.cycle == selected.cycle
                        && samples.purpose() == v1::Purpose::Train
                        && samples.adapter == adapter =>
                {
                    sound += u32::try_from(samples.samples.len()).unwrap_or(u32::MAX);
                }
                _ => {}
            }
        }
        let accounted = selected.kept + selected.dropped.values().sum::<u32>();
        self.require(accounted == planned && selected.considered == planned, || {
            format!("of {planned} planned samples {accounted} are accounted for: {selected:?}")
        });
        self.require(selected.kept <= sound, || {
            format!("{} kept of {sound} that were made by the policy", selected.kept)
        });
    }

    /// An agent whose canary differs from more than half of the others must be in quarantine before
    /// the selection, and its samples must not be selected.
    fn check_stale_samples(&mut self, record: &Record) {
        let FactBody::Selected(selected) = &record.fact.body else { return };
        let adapter = self.adapter_for_cycle(selected.cycle);
        let mut jobs: BTreeMap<&str, &v1::Samples> = BTreeMap::new();
        let mut newest: BTreeMap<&str, &[f32]> = BTreeMap::new();
        for record in &self.records {
            match &record.fact.body {
                FactBody::Samples(samples)
                    if samples.cycle == selected.cycle
                        && samples.purpose() == v1::Purpose::Train
                        && samples.adapter == adapter =>
                {
                    jobs.insert(&samples.job, samples);
                    newest.insert(&samples.agent, &samples.canary);
                }
                FactBody::Quarantine(quarantine) => {
                    for job in quarantine.jobs.iter().filter(|job| job.cycle == selected.cycle) {
                        jobs.remove(&*job.job);
                    }
                }
                _ => {}
            }
        }
        let near = |a: &[f32], b: &[f32]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.02)
        };
        let cycle = self.run.as_ref().and_then(|run| run.cycles.get(&selected.cycle));
        // Samples that arrive after their job was set aside do not count.
        let counts = |samples: &&&v1::Samples| {
            let id = samples.job.parse().ok();
            let job = cycle.zip(id).and_then(|(cycle, id): (_, wire::JobId)| cycle.jobs.get(&id));
            job.is_some_and(|job| job.set_aside.is_none())
        };
        let counted = jobs.values().filter(counts);
        let wrong = counted.filter(|samples| {
            // The agent itself does not count as a witness.
            let others = newest.iter().filter(|(agent, _)| **agent != samples.agent);
            let others = others.filter(|(_, other)| !near(&samples.canary, other)).count();
            2 * others > newest.len()
        });
        let wrong: Vec<String> =
            wrong.map(|samples| format!("{} by {}", samples.job, samples.agent)).collect();
        let run = self.run.as_ref();
        let agreement =
            run.and_then(|run| canary_agreement(run, selected.cycle, v1::Purpose::Train));
        self.require(wrong.is_empty(), || {
            format!("of another policy, and selected from: {}; {agreement:?}", wrong.join(", "))
        });
    }

    fn check_order_count(&mut self, record: &Record) {
        let (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) =
            (&record.fact.subject.key, &record.fact.body)
        else {
            return;
        };
        let count = self.order_counts.entry((*cycle, job.to_string(), order.round)).or_insert(0);
        *count += 1;
        let few = *count <= ORDERS_A_ROUND_MAX;
        self.require(few, || format!("job {job} of cycle {cycle} was ordered again and again"));
    }

    pub(crate) fn check_queues(&mut self, server: &Server) {
        for kind in WorkKind::ALL {
            let queued = server.queued(kind);
            self.require(queued <= QUEUED_MAX, || format!("{queued} facts wait for {kind}"));
        }
    }

    /// Checks that an order is allowed by the part of the log that the coordinator has read.
    pub(crate) fn check_order(&mut self, log: &[Rc<Record>], order: &Fact, known: u64) {
        let (paused, over, _) = run_state_at(log, known);
        self.require(!paused && !over, || {
            format!("{} was decided on, paused {paused}, over {over}", order.subject)
        });
    }

    /// Checks that the start of a job is allowed by the part of the log that the agent has read.
    pub(crate) fn check_job_start(&mut self, log: &[Rc<Record>], job: &Record, known: u64) {
        let (paused, over, round) = run_state_at(log, known);
        let ordered = match &job.fact.body {
            FactBody::GenerateOrder(order) => Some(order.round),
            FactBody::TrainOrder(order) => Some(order.round),
            _ => None,
        };
        let newer = ordered.is_some_and(|ordered| ordered > round);
        let stale = ordered.is_some_and(|ordered| ordered < round);
        self.require(!over && !stale && (!paused || newer), || {
            format!("{} was begun, paused {paused}, over {over}", job.fact.subject)
        });
    }

    /// True if the run must have the same results as without faults.
    pub(crate) fn is_comparable(&self) -> bool {
        let Some(run) = &self.run else { return false };
        let succeeded =
            run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded);
        let jobs = || run.cycles.values().flat_map(|cycle| cycle.jobs.values());
        // Stale samples cannot be detected without a canary or without a majority.
        let undetectable = self.faults.stale && self.has_undetectable_samples(run);
        succeeded
            && !undetectable
            && jobs().all(|job| {
                job.set_aside.is_none()
                    && job.samples.as_ref().is_none_or(|s| s.void_reason.is_none())
            })
    }

    fn has_undetectable_samples(&self, run: &Run) -> bool {
        let canary_enabled =
            run.raft_spec().and_then(|raft| raft.proof.as_ref()).is_some_and(|p| p.canary);
        let stale = |record: &Rc<Record>| match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let counts = run.cycles.get(cycle).is_some_and(|c| c.jobs.contains_key(job));
                counts && task::is_stale(samples)
            }
            _ => false,
        };
        !canary_enabled || self.records.iter().any(stale)
    }

    /// Audits the whole log of the ended run and returns its results.
    pub(crate) fn finish(&self) -> Result<Results, String> {
        let run = self.run.as_ref().ok_or("there is no run")?;
        let status = run.done.as_ref().map(v1::Done::status);
        let Faults { poison, flaky, all_flaky, liar, .. } = self.faults;
        let may_fail = poison || flaky || all_flaky || liar;
        let expected = match status {
            Some(v1::done::Status::Succeeded) => true,
            Some(v1::done::Status::Cancelled) => self.faults.cancel,
            Some(v1::done::Status::Failed) => may_fail,
            Some(v1::done::Status::Unspecified) | None => false,
        };
        if !expected {
            return Err(format!("the run ended so: {:?}", run.done));
        }
        let report =
            audit_records(self.records.iter().map(|record| &**record)).ok_or("nothing to audit")?;
        if let Some(finding) =
            report.findings.iter().find(|finding| !self.is_expected(&finding.description))
        {
            return Err(format!("the audit found: {finding:?}"));
        }
        if status == Some(v1::done::Status::Succeeded) {
            Self::check_all_jobs(run)?;
        }
        if self.is_comparable() {
            self.check_suites()?;
        }
        Ok(collect_results(run))
    }

    fn check_all_jobs(run: &Run) -> Result<(), String> {
        // Jobs that were sampled ahead for a cycle that the gates prevented do not count.
        for (number, cycle) in run.cycles.range(..=run.stopped_after().unwrap_or(u32::MAX)) {
            let trained = cycle.final_checkpoint().is_some();
            for (id, job) in &cycle.jobs {
                let expected = trained || job.purpose == v1::Purpose::Train;
                let judged = job.samples.is_some() && job.verdicts.is_some();
                if expected && judged == job.set_aside.is_some() {
                    return Err(format!("job {id} of cycle {number} is not accounted for once"));
                }
            }
        }
        Ok(())
    }
}

impl Checker {
    /// Recomputes the pass rates of the prompt suites from the verdicts. Verdicts of redrawn jobs
    /// do not count.
    fn check_suites(&self) -> Result<(), String> {
        let mut redrawn: BTreeSet<(u32, &str)> = BTreeSet::new();
        for record in &self.records {
            if let FactBody::Quarantine(quarantine) = &record.fact.body {
                redrawn.extend(quarantine.jobs.iter().map(|job| (job.cycle, job.job.as_str())));
            }
            let FactBody::CycleDone(done) = &record.fact.body else { continue };
            for reported in &done.suites {
                let of_suite = self.records.iter().filter_map(|record| match &record.fact.body {
                    FactBody::Verdicts(verdicts) => Some(verdicts),
                    _ => None,
                });
                let of_suite = of_suite
                    .filter(|found| found.cycle == done.cycle && found.suite == reported.suite)
                    .filter(|found| found.purpose() == v1::Purpose::Heldout)
                    .filter(|found| !redrawn.contains(&(found.cycle, found.job.as_str())));
                let passed = |v: &v1::verdicts::Verdict| v.outcome() == v1::verdicts::Outcome::Pass;
                let each: Vec<bool> =
                    of_suite.flat_map(|v| v.verdicts.iter().map(passed)).collect();
                // All prompts have the same number of samples.
                let count = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
                let share =
                    count(each.iter().filter(|passed| **passed).count()) / count(each.len());
                let rate = reported.rate.unwrap_or_default();
                if each.len() != rate.samples as usize || (rate.mean - share).abs() > 1e-9 {
                    return Err(format!("{share} of {} passed, but: {reported:?}", each.len()));
                }
            }
        }
        Ok(())
    }
}

/// Returns from the log up to a sequence: is the run paused, is it over, and its round.
fn run_state_at(log: &[Rc<Record>], known: u64) -> (bool, bool, u32) {
    let (mut paused, mut over, mut round) = (false, false, 1);
    for record in log.iter().filter(|record| record.sequence <= known) {
        match &record.fact.body {
            FactBody::Done(_) => over = true,
            FactBody::Control(control) => match control.action() {
                v1::control::Action::Pause => paused = true,
                v1::control::Action::Resume => {
                    round += u32::from(paused);
                    paused = false;
                }
                v1::control::Action::Cancel => over = true,
                v1::control::Action::Unspecified => {}
            },
            _ => {}
        }
    }
    (paused, over, round)
}

/// The sequence of the samples, whether they were judged, and whether the job was set aside.
type Outcome = (Option<u64>, bool, bool);

fn job_outcome(job: &PlannedJob) -> Outcome {
    let samples = job.samples.as_ref().map(|samples| samples.sequence);
    (samples, job.verdicts.is_some(), job.set_aside.is_some())
}

fn collect_results(run: &Run) -> Results {
    let mut results = Results::default();
    for (number, cycle) in &run.cycles {
        let dataset = cycle.selected.as_ref().and_then(|selected| selected.dataset.clone());
        results.datasets.extend(dataset.map(|blob| (*number, blob.digest)));
        let tree = cycle.final_checkpoint().and_then(|checkpoint| checkpoint.tree.clone());
        results.adapters.extend(tree.map(|tree| (*number, tree.manifest)));
    }
    results
}
