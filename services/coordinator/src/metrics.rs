//! Metrics of open runs and of agents, for collectors.

use std::collections::BTreeMap;

use cycle::{PlannedJob, Run};
use wire::v1;

/// Newest first. Bounded because each run adds time series to the collector.
const REPORTED_RUNS_MAX: usize = 32;

/// A snapshot of the metrics.
#[derive(Debug, Clone, Default)]
pub struct FleetMetrics {
    /// Metrics of the newest open runs.
    pub runs: Vec<RunMetrics>,
    /// Agents in each state; the keys are the names of `AgentStatus.State` in lower case.
    pub agents: BTreeMap<String, u64>,
}

/// The metrics of one run; of its active cycle unless noted.
#[derive(Debug, Clone, PartialEq)]
pub struct RunMetrics {
    pub run: String,
    pub name: String,
    pub kind: &'static str,
    pub phase: &'static str,
    pub paused: bool,
    /// The active cycle.
    pub cycle: u32,
    /// The last cycle.
    pub cycles: u32,
    pub samples: TrainSampleCounts,
    /// Samples kept by the latest selection.
    pub kept: Option<u32>,
    /// Rate of the latest finished cycle, 0..1.
    pub heldout_pass_rate: Option<f64>,
    /// Rate of the latest finished cycle, 0..1.
    pub train_pass_rate: Option<f64>,
    /// Value at the latest checkpoint.
    pub loss: Option<f64>,
    /// Value at the latest checkpoint.
    pub learning_rate: Option<f64>,
    /// Latest eval of each suite: perplexity and bits per byte.
    pub evals: BTreeMap<String, (f64, f64)>,
    /// Failures reported so far.
    pub failures: usize,
    /// Sequence of the run's last fact in the log.
    pub sequence: u64,
}

/// The training samples of a cycle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrainSampleCounts {
    pub planned: u64,
    /// Samples of jobs with valid samples.
    pub drawn: u64,
    /// Samples of jobs with verdicts.
    pub judged: u64,
}

impl FleetMetrics {
    pub(crate) fn from_runs<'a>(
        runs: impl Iterator<Item = &'a Run>,
        agents: BTreeMap<String, u64>,
    ) -> Self {
        let mut newest: Vec<&Run> = runs.collect();
        newest.sort_by_key(|run| std::cmp::Reverse(run.submitted_ms));
        newest.truncate(REPORTED_RUNS_MAX);
        Self { runs: newest.into_iter().map(RunMetrics::from_run).collect(), agents }
    }
}

impl RunMetrics {
    fn from_run(run: &Run) -> Self {
        let number = run.active_cycle();
        let newest = || run.cycles.values().rev();
        let done = newest().find_map(|cycle| cycle.done.as_ref());
        let checkpoint = newest().find_map(|cycle| cycle.checkpoints.values().next_back());
        let rate = |rate: Option<v1::cycle_done::Rate>| rate.map(|rate| rate.mean);
        let evals = run.cycles.values().flat_map(|cycle| &cycle.evals);
        Self {
            run: run.id.to_string(),
            name: run.spec.name.clone(),
            kind: run.kind_name(),
            phase: run.current_phase().as_str(),
            paused: run.paused,
            cycle: number,
            cycles: run.last_cycle(),
            samples: run
                .cycles
                .get(&number)
                .map_or(TrainSampleCounts::default(), TrainSampleCounts::from_cycle),
            kept: newest().find_map(|cycle| cycle.selected.as_ref()).map(|it| it.kept),
            heldout_pass_rate: done.and_then(|done| rate(done.heldout)),
            train_pass_rate: done.and_then(|done| rate(done.train)),
            loss: checkpoint.map(|checkpoint| checkpoint.loss),
            learning_rate: checkpoint.map(|checkpoint| checkpoint.learning_rate),
            // Later cycles replace earlier ones.
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

impl TrainSampleCounts {
    fn from_cycle(cycle: &cycle::Cycle) -> Self {
        let mut samples = Self::default();
        for (_, job) in cycle.jobs_for(v1::Purpose::Train) {
            let planned = u64::from(job.planned_samples());
            let counts = |is: bool| if is { planned } else { 0 };
            samples.planned += planned;
            samples.drawn += counts(is_drawn(job));
            samples.judged += counts(job.verdicts.is_some());
        }
        samples
    }
}

/// Returns true if the job has samples that may be used.
fn is_drawn(job: &PlannedJob) -> bool {
    job.samples.as_ref().is_some_and(|samples| samples.void_reason.is_none())
}
