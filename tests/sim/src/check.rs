//! What must hold after every step, and at the end.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use cycle::{PlannedJob, Run, audit_records, canary_agreement};
use wire::{Fact, FactBody, FactKey, Record, WorkKind, v1};

use crate::{faults::Faults, server::Server, task};

/// More than the window of orders, hedges of it included.
const QUEUED_MAX: usize = 120;
const ORDERS_A_ROUND_MAX: usize = 8;

/// What a run comes to: of each cycle the dataset selected, and the last adapter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Results {
    datasets: BTreeMap<u32, String>,
    adapters: BTreeMap<u32, String>,
}

/// Folds the log as it grows, and remembers the first thing that was wrong.
pub(crate) struct Check {
    faults: Faults,
    run: Option<Run>,
    records: Vec<Rc<Record>>,
    subjects: BTreeSet<String>,
    orders: BTreeMap<(u32, String, u32), usize>,
    settled: BTreeMap<(u32, String), Outcome>,
    broken: Option<String>,
}

impl Check {
    pub(crate) fn new(faults: &Faults) -> Self {
        Self {
            faults: faults.clone(),
            run: None,
            records: Vec::new(),
            subjects: BTreeSet::new(),
            orders: BTreeMap::new(),
            settled: BTreeMap::new(),
            broken: None,
        }
    }

    fn insist(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.broken.is_none() {
            self.broken = Some(what());
        }
    }

    pub(crate) fn verdict(&self) -> Result<(), String> {
        self.broken.clone().map_or(Ok(()), Err)
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

    /// The log has grown.
    pub(crate) fn append(&mut self, record: &Rc<Record>) {
        let subject = record.fact.subject.to_string();
        let new = self.subjects.insert(subject.clone());
        self.insist(new, || format!("{subject} was accepted twice"));
        let done = self.run.as_ref().and_then(|run| run.done.clone());
        match &mut self.run {
            None => self.run = Run::start(record),
            Some(run) => run.fold_record(record),
        }
        self.records.push(record.clone());
        let Some(run) = &self.run else { return };
        let still = done.is_none() || run.done == done;
        let contradiction = run.anomalies.iter().find(|anomaly| !self.may_be(&anomaly.description));
        let contradiction = contradiction.map(|anomaly| format!("{anomaly:?}"));
        self.insist(still, || "a finished run ended otherwise".into());
        self.insist(contradiction.is_none(), || contradiction.unwrap_or_default());
        self.selection_is_of_its_policy(record);
        self.stale_samples_are_never_selected(record);
        self.orders_are_few(record);
        self.settled_jobs_stay();
    }

    /// What became of a job does not change, or a selection would depend on who looks when.
    fn settled_jobs_stay(&mut self) {
        let Some(run) = &self.run else { return };
        let jobs = run.cycles.iter().flat_map(|(number, cycle)| {
            let settled = cycle.jobs.iter().filter(|(_, job)| job.is_settled());
            settled.map(|(id, job)| ((*number, id.to_string()), outcome(job)))
        });
        let mut changed = None;
        for (name, outcome) in jobs {
            let before = self.settled.entry(name.clone()).or_insert(outcome);
            changed = changed.or((*before != outcome).then_some(name));
        }
        self.insist(changed.is_none(), || format!("{changed:?} was settled, and then otherwise"));
    }

    fn may_be(&self, what: &str) -> bool {
        self.faults.liar && what.contains("void")
    }

    /// What a cycle samples with: what the cycle before, or that before it, came to.
    fn adapter_of(&self, cycle: u32) -> String {
        let mut made: BTreeMap<u32, String> = BTreeMap::from([(0, String::new())]);
        let mut left_with = made.clone();
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
                    // Until the cycle's end says otherwise.
                    left_with.insert(checkpoint.cycle, adapter.clone());
                    made.insert(checkpoint.cycle, adapter);
                }
                FactBody::CycleDone(done) if done.cycle > 0 => {
                    let back = done.then() == v1::gates::Then::RollBack;
                    let own = made.get(if back { &done.best } else { &done.cycle });
                    let before = left_with.get(&(done.cycle - 1));
                    let adapter = own.or(before).cloned().unwrap_or_default();
                    left_with.insert(done.cycle, adapter);
                }
                _ => {}
            }
        }
        let from = cycle.saturating_sub(1 + staleness);
        left_with.get(&from).cloned().unwrap_or_default()
    }

    /// Recomputed from the log alone: what was kept comes from samples of the cycle's policy,
    /// and every planned sample is kept or has a reason.
    fn selection_is_of_its_policy(&mut self, record: &Record) {
        let FactBody::Selected(selected) = &record.fact.body else { return };
        let mut planned = 0;
        let mut sound = 0;
        let adapter = self.adapter_of(selected.cycle);
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
        self.insist(accounted == planned && selected.considered == planned, || {
            format!("of {planned} planned samples {accounted} are accounted for: {selected:?}")
        });
        self.insist(selected.kept <= sound, || {
            format!("{} kept of {sound} that were made by the policy", selected.kept)
        });
    }

    /// Who differs from more than half of those who showed what they sampled with is in
    /// quarantine before anything is selected, and nothing of that is.
    fn stale_samples_are_never_selected(&mut self, record: &Record) {
        let FactBody::Selected(selected) = &record.fact.body else { return };
        let adapter = self.adapter_of(selected.cycle);
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
        // What was given up before its samples came does not count.
        let counts = |samples: &&&v1::Samples| {
            let id = samples.job.parse().ok();
            let job = cycle.zip(id).and_then(|(cycle, id): (_, wire::JobId)| cycle.jobs.get(&id));
            job.is_some_and(|job| job.set_aside.is_none())
        };
        let counted = jobs.values().filter(counts);
        let wrong = counted.filter(|samples| {
            // An agent is no witness against itself.
            let others = newest.iter().filter(|(agent, _)| **agent != samples.agent);
            let others = others.filter(|(_, other)| !near(&samples.canary, other)).count();
            2 * others > newest.len()
        });
        let wrong: Vec<String> =
            wrong.map(|samples| format!("{} by {}", samples.job, samples.agent)).collect();
        let run = self.run.as_ref();
        let shown = run.and_then(|run| canary_agreement(run, selected.cycle, v1::Purpose::Train));
        self.insist(wrong.is_empty(), || {
            format!("of another policy, and selected from: {}; {shown:?}", wrong.join(", "))
        });
    }

    fn orders_are_few(&mut self, record: &Record) {
        let (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) =
            (&record.fact.subject.key, &record.fact.body)
        else {
            return;
        };
        let count = self.orders.entry((*cycle, job.to_string(), order.round)).or_insert(0);
        *count += 1;
        let few = *count <= ORDERS_A_ROUND_MAX;
        self.insist(few, || format!("job {job} of cycle {cycle} was ordered again and again"));
    }

    pub(crate) fn queues(&mut self, server: &Server) {
        for kind in WorkKind::ALL {
            let queued = server.queued(kind);
            self.insist(queued <= QUEUED_MAX, || format!("{queued} facts wait for {kind}"));
        }
    }

    /// A coordinator decides on an order: what it knows of the log must allow that.
    pub(crate) fn orders(&mut self, log: &[Rc<Record>], order: &Fact, known: u64) {
        let (paused, over, _) = course(log, known);
        self.insist(!paused && !over, || {
            format!("{} was decided on, paused {paused}, over {over}", order.subject)
        });
    }

    /// An agent begins a job: what it knows of the log must allow that.
    pub(crate) fn begins(&mut self, log: &[Rc<Record>], job: &Record, known: u64) {
        let (paused, over, round) = course(log, known);
        let ordered = match &job.fact.body {
            FactBody::GenerateOrder(order) => Some(order.round),
            FactBody::TrainOrder(order) => Some(order.round),
            _ => None,
        };
        let newer = ordered.is_some_and(|ordered| ordered > round);
        let stale = ordered.is_some_and(|ordered| ordered < round);
        self.insist(!over && !stale && (!paused || newer), || {
            format!("{} was begun, paused {paused}, over {over}", job.fact.subject)
        });
    }

    /// Whether the run must come to the same as an undisturbed one.
    pub(crate) fn comparable(&self) -> bool {
        let Some(run) = &self.run else { return false };
        let succeeded =
            run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded);
        let jobs = || run.cycles.values().flat_map(|cycle| cycle.jobs.values());
        // Where nobody was asked, or no more than half agreed, nobody could know.
        let unknown = self.faults.stale && self.stale_samples_count(run);
        succeeded
            && !unknown
            && jobs().all(|job| {
                job.set_aside.is_none()
                    && job.samples.as_ref().is_none_or(|s| s.void_reason.is_none())
            })
    }

    fn stale_samples_count(&self, run: &Run) -> bool {
        let asked = run.raft_spec().and_then(|raft| raft.proof.as_ref()).is_some_and(|p| p.canary);
        let stale = |record: &Rc<Record>| match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let counts = run.cycles.get(cycle).is_some_and(|c| c.jobs.contains_key(job));
                counts && task::is_stale(samples)
            }
            _ => false,
        };
        !asked || self.records.iter().any(stale)
    }

    /// The whole log once more, as an auditor reads it.
    pub(crate) fn end(&self) -> Result<Results, String> {
        let run = self.run.as_ref().ok_or("there is no run")?;
        let status = run.done.as_ref().map(v1::Done::status);
        let Faults { poison, flaky, sick, liar, .. } = self.faults;
        let may_fail = poison || flaky || sick || liar;
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
            report.findings.iter().find(|finding| !self.may_be(&finding.description))
        {
            return Err(format!("the audit found: {finding:?}"));
        }
        if status == Some(v1::done::Status::Succeeded) {
            Self::all_accounted_for(run)?;
        }
        if self.comparable() {
            self.suites_recounted()?;
        }
        Ok(results(run))
    }

    fn all_accounted_for(run: &Run) -> Result<(), String> {
        // What was drawn ahead for a cycle that its gates kept from coming is nobody's.
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

impl Check {
    /// What each cycle says of its prompt suites, from the verdicts that name them; those of jobs
    /// that had been drawn with something else by then are other jobs' to tell.
    fn suites_recounted(&self) -> Result<(), String> {
        let mut redrawn: BTreeSet<(u32, &str)> = BTreeSet::new();
        for record in &self.records {
            if let FactBody::Quarantine(quarantine) = &record.fact.body {
                redrawn.extend(quarantine.jobs.iter().map(|job| (job.cycle, job.job.as_str())));
            }
            let FactBody::CycleDone(done) = &record.fact.body else { continue };
            for told in &done.suites {
                let of_suite = self.records.iter().filter_map(|record| match &record.fact.body {
                    FactBody::Verdicts(verdicts) => Some(verdicts),
                    _ => None,
                });
                let of_suite = of_suite
                    .filter(|found| found.cycle == done.cycle && found.suite == told.suite)
                    .filter(|found| found.purpose() == v1::Purpose::Heldout)
                    .filter(|found| !redrawn.contains(&(found.cycle, found.job.as_str())));
                let passed = |v: &v1::verdicts::Verdict| v.outcome() == v1::verdicts::Outcome::Pass;
                let each: Vec<bool> =
                    of_suite.flat_map(|v| v.verdicts.iter().map(passed)).collect();
                // Each prompt has as many samples as any other.
                let count = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
                let share =
                    count(each.iter().filter(|passed| **passed).count()) / count(each.len());
                let rate = told.rate.unwrap_or_default();
                if each.len() != rate.samples as usize || (rate.mean - share).abs() > 1e-9 {
                    return Err(format!("{share} of {} passed, but: {told:?}", each.len()));
                }
            }
        }
        Ok(())
    }
}

/// Whether the run is paused, or over, and its round, as the log says up to a sequence.
fn course(log: &[Rc<Record>], known: u64) -> (bool, bool, u32) {
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

/// Sequence of its samples, whether they were judged, whether it was set aside.
type Outcome = (Option<u64>, bool, bool);

fn outcome(job: &PlannedJob) -> Outcome {
    let samples = job.samples.as_ref().map(|samples| samples.sequence);
    (samples, job.verdicts.is_some(), job.set_aside.is_some())
}

fn results(run: &Run) -> Results {
    let mut results = Results::default();
    for (number, cycle) in &run.cycles {
        let dataset = cycle.selected.as_ref().and_then(|selected| selected.dataset.clone());
        results.datasets.extend(dataset.map(|blob| (*number, blob.digest)));
        let tree = cycle.final_checkpoint().and_then(|checkpoint| checkpoint.tree.clone());
        results.adapters.extend(tree.map(|tree| (*number, tree.manifest)));
    }
    results
}
