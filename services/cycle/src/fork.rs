//! Forks: runs that take over the first cycles of another run and continue with other settings.
//!
//! A fork's spec contains what later cycles depend on: selections, checkpoints, results and the
//! history of each prompt. The fork's own log begins with the cycle after them. Pure.

use wire::{Record, SuiteName, v1};

use crate::state::{Cycle, PromptHistory, Run};

/// Returns what a fork takes over: cycles 0 to `cycle` of the run whose facts these are, in log
/// order. Samples and verdicts are not needed. `None` if it is no RAFT run, one of the cycles is not
/// done, or the run itself took over `cycle` from another one.
pub fn fork_after<'a>(
    records: impl IntoIterator<Item = &'a Record>,
    cycle: u32,
) -> Option<v1::spec::Fork> {
    let mut records = records.into_iter();
    let mut run = records.by_ref().find_map(Run::start)?;
    run.raft_spec()?;
    if cycle < run.first_cycle {
        return None;
    }
    // Later cycles may have begun before this one was done, and changed the prompts' histories.
    let is_before = |record: &&Record| {
        record.fact.subject.key.cycle_number().is_some_and(|number| number <= cycle)
    };
    records.filter(is_before).for_each(|record| run.fold_record(record));
    let last_selected =
        run.cycles.iter().rfind(|(_, cycle)| cycle.selected.is_some()).map(|(number, _)| *number);
    let cycles: Option<Vec<v1::spec::ForkedCycle>> = (0..=cycle)
        .map(|number| {
            let done = run.cycles.get(&number).filter(|cycle| cycle.done.is_some())?;
            Some(to_forked_cycle(done, last_selected == Some(number)))
        })
        .collect();
    let histories = run.prompt_histories.iter();
    Some(v1::spec::Fork {
        run: run.id.to_string(),
        cycle,
        cycles: cycles?,
        prompts: histories.clone().map(|(line, _)| *line).collect(),
        judged: histories.clone().map(|(_, history)| history.judged).collect(),
        passed: histories.map(|(_, history)| history.passed).collect(),
    })
}

fn to_forked_cycle(cycle: &Cycle, with_prompts: bool) -> v1::spec::ForkedCycle {
    let mut selected = cycle.selected.clone();
    if let Some(selected) = selected.as_mut().filter(|_| !with_prompts) {
        (selected.prompts, selected.judged, selected.passed) = (vec![], vec![], vec![]);
    }
    v1::spec::ForkedCycle {
        selected,
        checkpoints: cycle.checkpoints.values().cloned().collect(),
        evals: cycle.evals.values().cloned().collect(),
        pass_rates: cycle.pass_rates.clone(),
        done: cycle.done.clone(),
        canary: cycle.canary_text.clone(),
    }
}

/// Returns an audit finding if `fork` differs from the facts of the run that it names, given in log
/// order. Evals that were written after the fork are ignored.
pub fn check_fork<'a>(
    fork: &v1::spec::Fork,
    records: impl IntoIterator<Item = &'a Record>,
) -> Option<String> {
    let (run, cycle) = (&fork.run, fork.cycle);
    let Some(mut facts) = fork_after(records, cycle) else {
        return Some(format!("run {run} has no done cycle {cycle} of its own"));
    };
    for (forked, found) in fork.cycles.iter().zip(&mut facts.cycles) {
        found.evals.retain(|eval| forked.evals.contains(eval));
    }
    (facts != *fork).then(|| format!("its cycles 0 to {cycle} are not those of run {run}"))
}

impl Run {
    /// Takes over the cycles of a fork up to the first that is not done, and the histories of
    /// prompts.
    pub(crate) fn take_over_cycles(&mut self, fork: v1::spec::Fork) {
        if self.raft_spec().is_none() {
            return;
        }
        let done = fork.cycles.into_iter().take_while(|cycle| cycle.done.is_some());
        for (number, forked) in (0..).zip(done) {
            self.cycles.insert(number, to_cycle(forked));
            self.first_cycle = number + 1;
        }
        let counts = fork.judged.into_iter().zip(fork.passed);
        for (line, (judged, passed)) in fork.prompts.into_iter().zip(counts) {
            self.prompt_histories.insert(line, PromptHistory { judged, passed });
        }
    }
}

fn to_cycle(forked: v1::spec::ForkedCycle) -> Cycle {
    let evals = forked.evals.into_iter().filter_map(|eval| {
        let suite = SuiteName::new(eval.suite.as_str()).ok()?;
        Some(((eval.step, suite), eval))
    });
    Cycle {
        selected: forked.selected,
        checkpoints: forked.checkpoints.into_iter().map(|it| (it.step, it)).collect(),
        evals: evals.collect(),
        pass_rates: forked.pass_rates,
        done: forked.done,
        canary_text: forked.canary,
        ..Cycle::default()
    }
}
