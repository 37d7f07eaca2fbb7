//! What a coordinator tells of open runs and of its agents, for those who collect figures.

use std::collections::BTreeMap;

use cycle::{Job, Run};
use wire::v1;

/// Told of, the newest; what collects figures pays for each name.
const RUNS_MAX: usize = 32;

/// As it was at the last look.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    pub runs: Vec<RunFigures>,
    /// How many agents are in each state, as `AgentStatus.State` writes it in lower case.
    pub agents: BTreeMap<String, u64>,
}

/// Of the cycle that is worked on, where nothing else is said.
#[derive(Debug, Clone, PartialEq)]
pub struct RunFigures {
    pub run: String,
    pub name: String,
    pub kind: &'static str,
    pub phase: &'static str,
    pub paused: bool,
    pub cycle: u32,
    pub cycles: u32,
    pub samples: Samples,
    /// Kept of the last cycle that selected.
    pub kept: Option<u32>,
    /// Of the last cycle that measured them, 0..1.
    pub heldout_pass_rate: Option<f64>,
    pub train_pass_rate: Option<f64>,
    /// Of the last checkpoint.
    pub loss: Option<f64>,
    pub learning_rate: Option<f64>,
    /// The last of each suite: perplexity, and bits per byte.
    pub evals: BTreeMap<String, (f64, f64)>,
    pub failures: usize,
    /// Place of its last fact in the log.
    pub sequence: u64,
}

/// Of training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Samples {
    pub planned: u64,
    pub drawn: u64,
    pub judged: u64,
}

impl Figures {
    pub(crate) fn of<'a>(
        runs: impl Iterator<Item = &'a Run>,
        agents: BTreeMap<String, u64>,
    ) -> Self {
        let mut newest: Vec<&Run> = runs.collect();
        newest.sort_by_key(|run| std::cmp::Reverse(run.submitted_ms));
        newest.truncate(RUNS_MAX);
        Self { runs: newest.into_iter().map(RunFigures::of).collect(), agents }
    }
}

impl RunFigures {
    fn of(run: &Run) -> Self {
        let number = run.cycle_at_work();
        let newest = || run.cycles.values().rev();
        let done = newest().find_map(|cycle| cycle.done.as_ref());
        let checkpoint = newest().find_map(|cycle| cycle.checkpoints.values().next_back());
        let rate = |rate: Option<v1::cycle_done::Rate>| rate.map(|rate| rate.mean);
        let evals = run.cycles.values().flat_map(|cycle| &cycle.evals);
        Self {
            run: run.id.to_string(),
            name: run.spec.name.clone(),
            kind: run.kind(),
            phase: run.phase().as_str(),
            paused: run.paused,
            cycle: number,
            cycles: run.last_cycle(),
            samples: run.cycles.get(&number).map_or(Samples::default(), Samples::of),
            kept: newest().find_map(|cycle| cycle.selected.as_ref()).map(|it| it.kept),
            heldout_pass_rate: done.and_then(|done| rate(done.heldout)),
            train_pass_rate: done.and_then(|done| rate(done.train)),
            loss: checkpoint.map(|checkpoint| checkpoint.loss),
            learning_rate: checkpoint.map(|checkpoint| checkpoint.learning_rate),
            // The last one counts.
            evals: evals
                .map(|((_, suite), eval)| {
                    (suite.to_string(), (eval.perplexity, eval.bits_per_byte))
                })
                .collect(),
            failures: run.failures.len(),
            sequence: run.sequence,
        }
    }
}

impl Samples {
    fn of(cycle: &cycle::Cycle) -> Self {
        let mut samples = Self::default();
        for (_, job) in cycle.jobs_for(v1::Purpose::Train) {
            let planned = u64::from(job.planned());
            let counts = |is: bool| if is { planned } else { 0 };
            samples.planned += planned;
            samples.drawn += counts(is_drawn(job));
            samples.judged += counts(job.verdicts.is_some());
        }
        samples
    }
}

fn is_drawn(job: &Job) -> bool {
    job.samples.as_ref().is_some_and(|samples| samples.void.is_none())
}
