//! Invariants of the whole log that hold after every step. Those of each run are in `run_check`.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use cycle::check_fork;
use wire::{Fact, FactBody, FactKey, Record, RunId, v1};

use crate::{
    channel_check::ChannelChecker,
    faults::Faults,
    run_check::{RunChecker, RunResults},
    server::{QUEUED_MAX, Server},
    specs,
    store::Store,
};

/// Checks all runs of a log as it grows.
pub(crate) struct Checker {
    faults: Faults,
    runs: BTreeMap<RunId, RunChecker>,
    /// The runs that are submitted in each simulation of the seed.
    submitted: BTreeSet<RunId>,
    channel: ChannelChecker,
    /// Whether another agent held an order when an agent considered declining one.
    others_work: BTreeMap<(usize, String), bool>,
    /// The log has lost facts, so processes may still know what it does not hold.
    has_lost_facts: bool,
    violation: Option<String>,
}

impl Checker {
    pub(crate) fn new(faults: &Faults, specs: &[v1::Spec]) -> Self {
        let run = |spec: &v1::Spec| RunId::new(spec.run.as_str()).expect("a legal name");
        let submitted: BTreeSet<RunId> = specs.iter().map(run).collect();
        let runs = submitted.iter().map(|run| (run.clone(), RunChecker::new(faults, false)));
        Self {
            faults: faults.clone(),
            runs: runs.collect(),
            submitted,
            channel: ChannelChecker::default(),
            others_work: BTreeMap::new(),
            has_lost_facts: false,
            violation: None,
        }
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.has_lost_facts {
            self.runs.values_mut().for_each(RunChecker::mark_incomparable);
        } else if !holds && self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(crate) fn result(&self) -> Result<(), String> {
        let of_runs = self.runs.iter().find_map(|(run, checker)| Some((run, checker.violation()?)));
        let of_channel = self.channel.violation().filter(|_| !self.has_lost_facts);
        match (self.violation.as_ref().or(of_channel), of_runs) {
            (Some(violation), _) => Err(violation.clone()),
            (None, Some((run, violation))) => Err(format!("run {run}: {violation}")),
            (None, None) => Ok(()),
        }
    }

    pub(crate) fn apply_record(&mut self, record: &Rc<Record>, store: &Store) {
        let missing = store.find_missing_file(&record.fact);
        self.require(missing.is_none(), || {
            format!("{} names {missing:?}, which was never stored", record.fact.subject)
        });
        self.add_run(&record.fact);
        if let Some(run) = self.runs.get_mut(&record.fact.subject.run) {
            run.apply_record(record);
        }
        self.channel.apply_record(record);
    }

    /// Begins to check a run that no user submits at the start: a fork, or one from feedback.
    fn add_run(&mut self, fact: &Fact) {
        let FactBody::Spec(spec) = &fact.body else { return };
        if self.runs.contains_key(&fact.subject.run) {
            return;
        }
        // A fork has the results of the run that it forks, as far as those do not depend on faults.
        let source = spec.fork.as_ref().map(|fork| (fork.run.parse().ok(), fork.cycle));
        let results_may_differ = source.is_some_and(|(run, cycle)| {
            let source = run.and_then(|run: RunId| self.runs.get(&run));
            !source.is_some_and(|source| source.results().contains_key(&cycle))
        });
        let checker = RunChecker::new(&self.faults, results_may_differ);
        self.runs.insert(fact.subject.run.clone(), checker);
    }

    pub(crate) fn note_leased(&mut self, agent_and_order: (usize, String), others_work: bool) {
        // An answer that allows to decline may be followed by a later one that does not, before the
        // fact arrives: the agent was frozen, or cut off, and the order delivered to it again.
        *self.others_work.entry(agent_and_order).or_default() |= others_work;
    }

    /// Checks that no agent with free room declines an order while nobody works.
    pub(crate) fn check_declined(&mut self, agent: usize, fact: &Fact) {
        let FactKey::Declined { cycle, job, attempt, .. } = &fact.subject.key else { return };
        let order = format!("{} {cycle} {job} {attempt}", fact.subject.run);
        let others_work = self.others_work.get(&(agent, order)).copied().unwrap_or(false);
        self.require(others_work, || format!("{} was written while nobody works", fact.subject));
    }

    /// Checks that an archive holds each fact that is removed from the log.
    pub(crate) fn check_purge(
        &mut self,
        purged: &[Rc<Record>],
        archived: Option<Rc<Record>>,
        store: &Store,
    ) {
        let archive = archived.and_then(|record| match &record.fact.body {
            FactBody::Archived(archived) => {
                store.find_archive(archived.tree.as_ref().map_or("", |tree| &tree.manifest))
            }
            _ => None,
        });
        let lost = purged.iter().find(|r| !archive.is_some_and(|archive| archive.contains(r)));
        self.require(lost.is_none(), || {
            format!("{:?} was purged and is not archived", lost.map(|r| r.fact.subject.to_string()))
        });
    }

    pub(crate) fn lose_tail(&mut self, end: u64) {
        self.has_lost_facts = true;
        self.runs.values_mut().for_each(|run| run.lose_tail(end));
        let submitted = &self.submitted;
        self.runs.retain(|id, run| submitted.contains(id) || run.run().is_some());
        self.channel.lose_tail(end);
    }

    pub(crate) fn check_queues(&mut self, server: &Server) {
        let queued = server.longest_queue();
        self.require(queued <= QUEUED_MAX, || format!("{queued} facts wait in one queue"));
    }

    pub(crate) fn check_order(&mut self, order: &Fact, known: u64) {
        if !self.has_lost_facts
            && let Some(run) = self.runs.get_mut(&order.subject.run)
        {
            run.check_order(&order.subject, known);
        }
    }

    pub(crate) fn check_job_start(&mut self, job: &Record, known: u64) {
        if !self.has_lost_facts
            && let Some(run) = self.runs.get_mut(&job.fact.subject.run)
        {
            run.check_job_start(job, known);
        }
    }

    pub(crate) fn report_duplicate_start(&mut self, job: &Record) {
        self.require(false, || format!("{} was begun twice at once", job.fact.subject));
    }

    /// True if all runs have ended, and their cycles were archived and purged as far as they are to
    /// be.
    pub(crate) fn is_over(&self, server: &Server) -> bool {
        let is_done = |run: &RunChecker| run.run().is_some_and(|run| run.done.is_some());
        self.runs.values().all(is_done)
            && self.channel.is_settled(|run| self.runs.get(run)?.run())
            && self.faults.keep_cycles.is_none_or(|keep| {
                self.runs.values().all(|run| run.is_archived(server, keep as usize))
            })
    }

    pub(crate) fn describe(&self) -> String {
        let describe = |(id, checker): (&RunId, &RunChecker)| {
            checker.run().map_or(format!("{id} is not submitted"), |run| {
                let cycle = run.current_cycle();
                let jobs = run.cycles.get(&cycle).map(|cycle| cycle.jobs.values());
                let open = jobs.into_iter().flatten().filter(|job| !job.is_settled()).count();
                let phase = run.current_phase().as_str();
                let (paused, round) = (run.paused, run.round);
                format!(
                    "{id} in cycle {cycle}, phase {phase}, {open} jobs open, paused {paused}, \
                     round {round}"
                )
            })
        };
        self.runs.iter().map(describe).collect::<Vec<_>>().join("; ")
    }

    /// True if all runs must have the same results as without faults.
    pub(crate) fn is_comparable(&self) -> bool {
        let mut submitted = self.runs.iter().filter(|(id, _)| self.submitted.contains(*id));
        submitted.all(|(_, run)| run.is_comparable())
    }

    /// True if the log has lost facts, so that runs may stall or contradict themselves.
    pub(crate) fn has_lost_facts(&self) -> bool {
        self.has_lost_facts
    }

    /// Audits all runs. Returns the results of those without findings, and true if there are
    /// others, which only a log that has lost facts may have.
    pub(crate) fn finish(
        &self,
        server: &Server,
        store: &Store,
    ) -> Result<(BTreeMap<RunId, RunResults>, bool), String> {
        let mut results = BTreeMap::new();
        let mut is_damaged = !self.is_over(server);
        for (id, run) in &self.runs {
            let log: Vec<Rc<Record>> =
                server.records().filter(|record| record.fact.subject.run == *id).cloned().collect();
            match run.finish().and_then(|()| run.check_purged_log(&log, store)) {
                Ok(()) if id.as_str().starts_with(specs::LEARNING_RUN) => {}
                // A damaged store may fail it, and it does not decide whether others are compared.
                Ok(()) if id.as_str() == specs::FORKED_RUN && !run.is_comparable() => {}
                Ok(()) => drop(results.insert(id.clone(), run.results().clone())),
                Err(_) if self.has_lost_facts => is_damaged = true,
                Err(error) => return Err(format!("run {id}: {error}")),
            }
        }
        match self.check_fork(&results).and_then(|()| self.channel.finish()) {
            Ok(()) => {}
            Err(_) if self.has_lost_facts => is_damaged = true,
            Err(error) => return Err(error),
        }
        Ok((results, is_damaged))
    }

    /// Checks that a fork has the cycles of the run that it forks, and ends as that run did.
    fn check_fork(&self, results: &BTreeMap<RunId, RunResults>) -> Result<(), String> {
        let find = |name: &str| self.runs.get_key_value(&RunId::new(name).ok()?);
        let (Some((id, fork)), Some((source_id, source))) =
            (find(specs::FORKED_RUN), find(specs::FIRST_RUN))
        else {
            return Ok(());
        };
        let records = source.records().iter().map(|record| &**record);
        let spec = fork.records().iter().find_map(|record| match &record.fact.body {
            FactBody::Spec(spec) => spec.fork.as_ref(),
            _ => None,
        });
        if let Some(finding) = spec.and_then(|spec| check_fork(spec, records)) {
            return Err(format!("run {id}: {finding}"));
        }
        let (Some(ours), Some(theirs)) = (results.get(id), results.get(source_id)) else {
            return Ok(());
        };
        let other =
            ours.iter().find(|(cycle, found)| theirs.get(*cycle).is_some_and(|it| it != *found));
        match other {
            Some((cycle, _)) => Err(format!("cycle {cycle} of {id} is not that of {source_id}")),
            None => Ok(()),
        }
    }
}
