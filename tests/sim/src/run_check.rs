//! Invariants of one run that hold after every step, and checks at its end.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use cycle::{Cycle, PlannedJob, Run, audit_records, canary_agreement};
use wire::{FactBody, FactKey, Record, v1};

use crate::{
    faults::Faults,
    server::{Server, is_archived_with},
    store::{Store, archive_digest},
    task,
};

const ORDERS_A_ROUND_MAX: usize = 8;

/// The dataset and the final adapter of each finished cycle, as far as no job before was set aside
/// and no sample was void: then they do not depend on faults.
pub type RunResults = BTreeMap<u32, (Option<String>, Option<String>)>;

/// Folds the facts of a run as the log grows, and keeps the first violated invariant.
pub(crate) struct RunChecker {
    faults: Faults,
    run: Option<Run>,
    records: Vec<Rc<Record>>,
    subjects: BTreeSet<String>,
    order_counts: BTreeMap<(u32, String, u32), usize>,
    settled: BTreeMap<(u32, String), Outcome>,
    /// What controls have changed, in log order: sequence, paused, over, round.
    states: Vec<(u64, bool, bool, u32)>,
    results: RunResults,
    /// The run forks one whose results may differ, or is not in each simulation of the seed.
    starts_different: bool,
    /// A finished cycle may have other results than without faults.
    results_may_differ: bool,
    /// The log has lost facts, so others may contradict what is left.
    has_lost_facts: bool,
    violation: Option<String>,
}

impl RunChecker {
    /// Creates the checker of a run whose results may differ from the start.
    pub(crate) fn new(faults: &Faults, results_may_differ: bool) -> Self {
        Self {
            faults: faults.clone(),
            starts_different: results_may_differ,
            run: None,
            records: Vec::new(),
            subjects: BTreeSet::new(),
            order_counts: BTreeMap::new(),
            settled: BTreeMap::new(),
            states: Vec::new(),
            results: RunResults::new(),
            results_may_differ,
            has_lost_facts: false,
            violation: None,
        }
    }

    /// Forgets the facts after a sequence, which the log has lost. From then on a violation is
    /// allowed, but only results of cycles without any are allowed to count.
    pub(crate) fn lose_tail(&mut self, end: u64) {
        self.has_lost_facts = true;
        if self.records.last().is_some_and(|last| last.sequence > end) {
            let mut kept = std::mem::take(&mut self.records);
            kept.retain(|record| record.sequence <= end);
            let violation = self.violation.take();
            *self = Self {
                violation,
                has_lost_facts: true,
                ..Self::new(&self.faults, self.starts_different)
            };
            kept.iter().for_each(|record| self.apply_record(record));
        }
    }

    pub(crate) fn run(&self) -> Option<&Run> {
        self.run.as_ref()
    }

    pub(crate) fn records(&self) -> &[Rc<Record>] {
        &self.records
    }

    pub(crate) fn results(&self) -> &RunResults {
        &self.results
    }

    pub(crate) fn mark_incomparable(&mut self) {
        self.results_may_differ = true;
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.has_lost_facts {
            self.results_may_differ = true;
        } else if !holds && self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(crate) fn violation(&self) -> Option<&String> {
        self.violation.as_ref()
    }

    pub(crate) fn apply_record(&mut self, record: &Rc<Record>) {
        let subject = record.fact.subject.to_string();
        let new = self.subjects.insert(subject.clone());
        // Late results may be written again after their cycle was purged.
        let is_late = record.fact.subject.key.is_bulky() && self.is_of_archived_cycle(record);
        self.require(new || is_late, || format!("{subject} was accepted twice"));
        let done = self.run.as_ref().and_then(|run| run.done.clone());
        if let FactBody::Archived(archived) = &record.fact.body {
            self.check_archive(archived);
        }
        match &mut self.run {
            None => self.run = Run::start(record),
            Some(run) => run.fold_record(record),
        }
        self.records.push(record.clone());
        self.record_state(record);
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
        if let FactBody::CycleDone(done) = &record.fact.body {
            self.record_finished_cycle(done.cycle);
            if !self.results_may_differ {
                self.check_suites(done);
            }
        }
    }

    /// True if each finished cycle was archived, and the log holds bulky facts of the newest only.
    pub(crate) fn is_archived(&self, server: &Server, keep: usize) -> bool {
        let Some(run) = self.run.as_ref().filter(|run| run.raft_spec().is_some()) else {
            return true;
        };
        let is_done = |record: &&Rc<Record>| matches!(record.fact.body, FactBody::CycleDone(_));
        let mut ends: Vec<(u32, u64)> = self
            .records
            .iter()
            .filter(is_done)
            .filter_map(|record| Some((record.fact.subject.key.cycle_number()?, record.sequence)))
            .collect();
        ends.sort_unstable();
        let let_go = ends.len().saturating_sub(keep);
        ends.iter().all(|(number, _)| run.cycles[number].archived.is_some())
            && !ends[..let_go].iter().any(|(n, end)| server.has_bulky_facts(&run.id, *n, *end))
    }

    fn is_of_archived_cycle(&self, record: &Record) -> bool {
        let cycles = self.run.as_ref().map(|run| &run.cycles);
        let cycle = record.fact.subject.key.cycle_number().zip(cycles);
        cycle.is_some_and(|(number, cycles)| {
            cycles.get(&number).is_some_and(|cycle| cycle.archived.is_some())
        })
    }

    /// Whoever archives a cycle, its archive holds all facts of the cycle up to its end.
    fn check_archive(&mut self, archived: &v1::Archived) {
        let is_end = |record: &&Rc<Record>| {
            record.fact.subject.key == FactKey::CycleDone { cycle: archived.cycle }
        };
        let end = self.records.iter().find(is_end).map_or(0, |record| record.sequence);
        let belongs = |record: &&Rc<Record>| {
            let run = &record.fact.subject.run;
            record.sequence <= end && is_archived_with(record, run, archived.cycle)
        };
        let expected: Vec<Rc<Record>> = self.records.iter().filter(belongs).cloned().collect();
        let digest = archived.tree.as_ref().map_or("", |tree| &tree.manifest);
        self.require(archive_digest(&expected) == digest, || {
            format!("the archive of cycle {} does not hold its facts", archived.cycle)
        });
    }

    fn record_state(&mut self, record: &Record) {
        let (_, paused, over, round) = self.states.last().copied().unwrap_or((0, false, false, 1));
        let now = match &record.fact.body {
            FactBody::Done(_) => (paused, true, round),
            FactBody::Control(control) => match control.action() {
                v1::control::Action::Pause => (true, over, round),
                v1::control::Action::Resume => (false, over, round + u32::from(paused)),
                v1::control::Action::Cancel => (paused, true, round),
                v1::control::Action::Unspecified => return,
            },
            _ => return,
        };
        self.states.push((record.sequence, now.0, now.1, now.2));
    }

    /// Returns the state from the facts up to a sequence: is the run paused, is it over, its round.
    fn state_at(&self, known: u64) -> (bool, bool, u32) {
        let last = self.states.iter().rev().find(|(sequence, ..)| *sequence <= known);
        last.map_or((false, false, 1), |(_, paused, over, round)| (*paused, *over, *round))
    }

    /// Checks that each job of a finished cycle is accounted for, and keeps its results.
    fn record_finished_cycle(&mut self, number: u32) {
        let Some(run) = &self.run else { return };
        let Some(cycle) = run.cycles.get(&number) else { return };
        let trained = cycle.final_checkpoint().is_some();
        let is_wrong = |job: &PlannedJob| {
            let expected = trained || job.purpose == v1::Purpose::Train;
            let judged = job.verdicts.is_some() == job.needs.verdicts;
            let scored = job.is_void() || job.scores.is_some() == job.needs.scores;
            let finished = job.samples.is_some() && judged && scored;
            expected && finished == job.set_aside.is_some()
        };
        let wrong = cycle.jobs.iter().find(|(_, job)| is_wrong(job)).map(|(id, _)| id.to_string());
        let may_differ = |job: &PlannedJob| job.set_aside.is_some() || job.is_void();
        // Which slices count, and so the merged weights, depends on when boxes die.
        let is_merged = !cycle.split_training.outer_steps.is_empty();
        self.results_may_differ |= is_merged
            || cycle.jobs.values().any(may_differ)
            || self.has_undetectable_samples(run, cycle);
        let counted = (is_merged && trained).then(|| self.count_merged_steps(number));
        let miscounted = counted.filter(|counts| counts.iter().any(|count| *count != 1));
        if !self.results_may_differ {
            let dataset = cycle.selected.as_ref().and_then(|selected| selected.dataset.clone());
            let tree = cycle.final_checkpoint().and_then(|checkpoint| checkpoint.tree.clone());
            let results = (dataset.map(|blob| blob.digest), tree.map(|tree| tree.manifest));
            self.results.insert(number, results);
        }
        self.require(wrong.is_none(), || {
            format!("job {wrong:?} of cycle {number} is not accounted for once")
        });
        self.require(miscounted.is_none(), || {
            format!("the steps of cycle {number} count so often: {miscounted:?}")
        });
    }

    /// Returns how often each step of a training on several boxes is in a slice that counts.
    fn count_merged_steps(&self, number: u32) -> Vec<u32> {
        let of_cycle = || {
            let all = self.records.iter().map(|record| &record.fact);
            all.filter(|fact| fact.subject.key.cycle_number() == Some(number))
        };
        let closed: BTreeSet<(u32, u32)> = of_cycle()
            .flat_map(|fact| match &fact.body {
                FactBody::SliceClose(v1::SliceClose { outer, slices, .. }) => {
                    slices.iter().map(|slice| (*outer, *slice)).collect()
                }
                _ => Vec::new(),
            })
            .collect();
        let mut counts = Vec::new();
        for fact in of_cycle() {
            let FactBody::Delta(delta) = &fact.body else { continue };
            counts.resize(counts.len().max(delta.total_steps as usize), 0);
            if closed.contains(&(delta.outer, delta.slice)) {
                let steps = delta.first as usize..(delta.first + delta.steps) as usize;
                counts[steps].iter_mut().for_each(|count| *count += 1);
            }
        }
        counts
    }

    /// Stale samples cannot be detected without a canary or without a majority.
    fn has_undetectable_samples(&self, run: &Run, cycle: &Cycle) -> bool {
        if !self.faults.stale || run.raft_spec().is_none() {
            return false;
        }
        let proof = run.raft_spec().and_then(|raft| raft.proof.as_ref());
        let sequences: BTreeSet<u64> =
            cycle.jobs.values().filter_map(|job| Some(job.samples.as_ref()?.sequence)).collect();
        let mut counted = self.records.iter().filter(|record| sequences.contains(&record.sequence));
        let is_stale = |record: &Rc<Record>| match &record.fact.body {
            FactBody::Samples(samples) => task::is_stale(samples),
            _ => false,
        };
        !proof.is_some_and(|proof| proof.canary) || counted.any(is_stale)
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
        let mut adapters = CycleAdapters::default();
        let mut staleness = 0;
        for record in &self.records {
            match &record.fact.body {
                FactBody::Spec(spec) => {
                    if let Some(v1::spec::Kind::Raft(raft)) = &spec.kind {
                        staleness = raft.staleness;
                    }
                    for cycle in spec.fork.iter().flat_map(|fork| &fork.cycles) {
                        cycle.checkpoints.iter().for_each(|it| adapters.add_checkpoint(it));
                        cycle.done.iter().for_each(|done| adapters.add_cycle_done(done));
                    }
                }
                FactBody::Checkpoint(checkpoint) => adapters.add_checkpoint(checkpoint),
                FactBody::CycleDone(done) => adapters.add_cycle_done(done),
                _ => {}
            }
        }
        let from = cycle.saturating_sub(1 + staleness);
        adapters.after.get(&from).cloned().unwrap_or_default()
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
        let cycle = self.run.as_ref().and_then(|run| run.cycles.get(&selected.cycle));
        let find = |id: &str| cycle.and_then(|cycle| cycle.jobs.get(&id.parse().ok()?));
        let mut jobs: BTreeMap<&str, &v1::Samples> = BTreeMap::new();
        let mut newest: BTreeMap<&str, &[f32]> = BTreeMap::new();
        let mut kept = Vec::new();
        for record in &self.records {
            match &record.fact.body {
                FactBody::Samples(samples)
                    if samples.cycle == selected.cycle
                        && samples.purpose() == v1::Purpose::Train
                        && samples.adapter == adapter =>
                {
                    // Samples that arrive after their job was set aside do not count.
                    let counts = find(&samples.job).is_none_or(|job| {
                        job.samples.as_ref().is_some_and(|s| s.sequence == record.sequence)
                    });
                    if counts {
                        jobs.insert(&samples.job, samples);
                        newest.insert(&samples.agent, &samples.canary);
                    }
                }
                FactBody::Quarantine(quarantine) => {
                    for job in quarantine.jobs_in_cycle(selected.cycle) {
                        jobs.remove(job);
                        let samples = find(job).and_then(|job| job.samples.as_ref());
                        kept.extend(samples.filter(|s| s.void_reason.is_none()).map(|_| job));
                    }
                }
                _ => {}
            }
        }
        let kept = kept.join(", ");
        let near = |a: &[f32], b: &[f32]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.02)
        };
        let counts =
            |samples: &&&v1::Samples| find(&samples.job).is_some_and(|job| job.set_aside.is_none());
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
        self.require(kept.is_empty(), || format!("quarantined, and selected from: {kept}"));
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

    /// Checks that an order is allowed by the part of the log that the coordinator has read.
    pub(crate) fn check_order(&mut self, subject: &wire::Subject, known: u64) {
        let (paused, over, _) = self.state_at(known);
        let is_queued = self.run.as_ref().is_some_and(|run| run.spec.queue.is_some());
        let released = self.states.iter().any(|(at, paused, ..)| *at <= known && !paused);
        let held = is_queued && !released;
        self.require(!paused && !held && !over, || {
            format!("{subject} was decided on, paused {paused}, held {held}, over {over}")
        });
    }

    /// Checks that the start of a job is allowed by the part of the log that the agent has read.
    pub(crate) fn check_job_start(&mut self, job: &Record, known: u64) {
        let (paused, over, round) = self.state_at(known);
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
        let done = self.run.as_ref().and_then(|run| run.done.as_ref());
        !self.results_may_differ
            && done.is_some_and(|done| done.status() == v1::done::Status::Succeeded)
    }

    /// Audits the whole log of the ended run, with the facts that were archived and purged.
    pub(crate) fn finish(&self) -> Result<(), String> {
        let run = self.run.as_ref().ok_or("there is no run")?;
        if self.has_lost_facts && self.results_may_differ {
            return Err("facts contradict what is left of the log".into());
        }
        let status = run.done.as_ref().map(v1::Done::status);
        let Faults { poison, flaky, all_flaky, liar, damage_every, .. } = self.faults;
        let may_fail = poison || flaky || all_flaky || liar || damage_every > 0;
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
        Ok(())
    }

    /// Checks that the log and the archives together still hold all facts, and that a replay of the
    /// log alone leads to the same end.
    pub(crate) fn check_purged_log(&self, log: &[Rc<Record>], store: &Store) -> Result<(), String> {
        let mut merged: BTreeMap<u64, Rc<Record>> =
            log.iter().map(|record| (record.sequence, record.clone())).collect();
        for record in log {
            let FactBody::Archived(archived) = &record.fact.body else { continue };
            let digest = archived.tree.as_ref().map_or("", |tree| &tree.manifest);
            let archive = store.find_archive(digest).ok_or("an archive is not in the store")?;
            merged.extend(archive.iter().map(|record| (record.sequence, record.clone())));
        }
        if !merged.into_values().eq(self.records.iter().cloned()) {
            return Err("log and archives do not hold all facts".into());
        }
        let mut records = log.iter();
        let mut replayed = records.next().and_then(|first| Run::start(first));
        if let Some(run) = &mut replayed {
            records.for_each(|record| run.fold_record(record));
        }
        let end = |run: &Run| {
            let cycle = |c: &Cycle| (c.selected.clone(), c.checkpoints.clone(), c.done.clone());
            let cycles: Vec<_> = run.cycles.iter().map(|(n, c)| (*n, cycle(c))).collect();
            (run.done.clone(), run.round, cycles)
        };
        if replayed.as_ref().map(end) != self.run.as_ref().map(end) {
            return Err("a replay of the purged log leads to another end".into());
        }
        Ok(())
    }
}

impl RunChecker {
    /// Recomputes the pass rates of the prompt suites of a cycle from the verdicts. Verdicts of
    /// redrawn jobs do not count.
    fn check_suites(&mut self, done: &v1::CycleDone) {
        let mut redrawn: BTreeSet<&str> = BTreeSet::new();
        for record in &self.records {
            if let FactBody::Quarantine(quarantine) = &record.fact.body {
                redrawn.extend(quarantine.jobs_in_cycle(done.cycle));
            }
        }
        let wrong = done.suites.iter().find(|reported| {
            let of_suite = self.records.iter().filter_map(|record| match &record.fact.body {
                FactBody::Verdicts(verdicts) => Some(verdicts),
                _ => None,
            });
            let of_suite = of_suite
                .filter(|found| found.cycle == done.cycle && found.suite == reported.suite)
                .filter(|found| found.purpose() == v1::Purpose::Heldout)
                .filter(|found| !redrawn.contains(found.job.as_str()));
            let passed = |v: &v1::verdicts::Verdict| v.outcome() == v1::verdicts::Outcome::Pass;
            let each: Vec<bool> = of_suite.flat_map(|v| v.verdicts.iter().map(passed)).collect();
            // All prompts have the same number of samples.
            let count = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
            let share = count(each.iter().filter(|passed| **passed).count()) / count(each.len());
            let rate = reported.rate.unwrap_or_default();
            each.len() != rate.samples as usize || (rate.mean - share).abs() > 1e-9
        });
        let wrong = wrong.map(|reported| format!("a pass rate is wrong: {reported:?}"));
        self.require(wrong.is_none(), || wrong.unwrap_or_default());
    }
}

/// The adapters that cycles made, and those that a cycle continues with.
#[derive(Default)]
struct CycleAdapters {
    made: BTreeMap<u32, String>,
    after: BTreeMap<u32, String>,
}

impl CycleAdapters {
    fn add_checkpoint(&mut self, checkpoint: &v1::Checkpoint) {
        let is_adapter = checkpoint.content() == v1::checkpoint::Content::Adapter;
        if checkpoint.r#final && is_adapter {
            let adapter = checkpoint.tree.clone().unwrap_or_default().manifest;
            // The end of the cycle may replace it.
            self.after.insert(checkpoint.cycle, adapter.clone());
            self.made.insert(checkpoint.cycle, adapter);
        }
    }

    fn add_cycle_done(&mut self, done: &v1::CycleDone) {
        if done.cycle == 0 {
            return;
        }
        let rolls_back = done.then() == v1::gates::Then::RollBack;
        let base = (rolls_back && done.best == 0).then(String::new);
        let chosen = self.made.get(if rolls_back { &done.best } else { &done.cycle }).cloned();
        let before = self.after.get(&(done.cycle - 1)).cloned();
        let adapter = base.or(chosen).or(before).unwrap_or_default();
        self.after.insert(done.cycle, adapter);
    }
}

/// The sequence of the samples, whether they were judged and scored, and whether the job was set
/// aside.
type Outcome = (Option<u64>, bool, bool, bool);

fn job_outcome(job: &PlannedJob) -> Outcome {
    let samples = job.samples.as_ref().map(|samples| samples.sequence);
    (samples, job.verdicts.is_some(), job.scores.is_some(), job.set_aside.is_some())
}
