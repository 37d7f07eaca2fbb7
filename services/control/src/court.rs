//! Compares objectives on the samples of one cycle: each is trained several times from the cycle's
//! start, and ranked by the held-out pass rate of what it trains.

use cycle::{ObjectiveTrial, Run, prepare_trial};
use objective::{Objective, SettingError};
use serde::{Deserialize, Serialize};
use store::PutError;
use wire::{RunId, clock, derive_seed, v1};

use crate::{
    FleetControl, HistoryError, RunError, StoreAccessError, SubmitError, run_history::check_cycle,
    runs::find_equal_run,
};

/// The most seeds of each objective.
pub const SEEDS_MAX: u32 = 50;

/// The longest name of a run, whose number follows.
const NAME_MAX: usize = 48;

/// The reason why objectives cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CourtError {
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error("run {0} has no held-out prompts, by which objectives are ranked (R107)")]
    NoHeldout(RunId),
    #[error(
        "{objective} keeps none of the {considered} samples of cycle {cycle} of {run}: {dropped}; \
         leave it out, or choose another cycle (R107)"
    )]
    Empty { objective: String, run: RunId, cycle: u32, considered: u32, dropped: String },
    #[error("run {run}, cycle {cycle}: {source}")]
    Setting { run: RunId, cycle: u32, source: SettingError },
    #[error("store the training data of a trial")]
    Store(#[from] PutError),
    #[error(transparent)]
    OpenStore(#[from] StoreAccessError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(transparent)]
    Run(#[from] RunError),
}

/// The trials of a court, before their runs exist.
#[derive(Debug, Clone)]
pub struct Court {
    pub run: RunId,
    pub cycle: u32,
    /// Held-out pass rate before the cycle's training, if it was measured.
    pub before: Option<f64>,
    pub trials: Vec<CourtTrial>,
}

/// An objective of a court.
#[derive(Debug, Clone)]
pub struct CourtTrial {
    /// The objective's name, and its changed settings.
    pub objective: String,
    /// Kept samples, and their tokens.
    pub kept: usize,
    pub tokens: u64,
    trial: ObjectiveTrial,
}

/// A finished court: the objectives by descending pass rate.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CourtRanking {
    pub run: String,
    pub cycle: u32,
    pub before: Option<f64>,
    pub ranking: Vec<RankedObjective>,
}

/// The pass rates of an objective's runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankedObjective {
    pub objective: String,
    pub kept: usize,
    pub tokens: u64,
    /// The runs, and the held-out pass rate of each; `None` for a run that failed.
    pub runs: Vec<(String, Option<f64>)>,
    /// Mean pass rate, and its 95 % interval over seeds. `None` if no run succeeded; the interval
    /// needs two.
    pub mean: Option<f64>,
    pub interval: Option<(f64, f64)>,
    /// Mean difference from the best objective over common seeds, and its 95 % interval.
    pub behind: Option<(f64, f64, f64)>,
}

impl FleetControl {
    /// Selects the training data of each objective from the samples of a cycle; by default of the
    /// newest one that has selected.
    ///
    /// # Errors
    /// When the cycle has not selected, an objective keeps no sample, or the run has no held-out
    /// prompts.
    pub async fn prepare_court(
        &self,
        id: &RunId,
        cycle: Option<u32>,
        objectives: &[Objective],
    ) -> Result<Court, CourtError> {
        let records = self.records_without_samples(id).await.map_err(HistoryError::from)?;
        let whole = crate::runs::fold_run(&records).ok_or_else(|| RunError::Unknown(id.clone()))?;
        let raft = whole.raft_spec().ok_or_else(|| HistoryError::SelectsNothing(id.clone()))?;
        if raft.heldout_count == 0 {
            return Err(CourtError::NoHeldout(id.clone()));
        }
        let has_selected = |cycle: &u32| whole.cycles[cycle].selected.is_some();
        let newest = whole.cycles.keys().copied().rfind(has_selected);
        let cycle = cycle.or(newest).unwrap_or(1);
        let run = self.run_before_selection(id, cycle, records).await?;
        let trial = |objective| prepare_court_trial(&run, cycle, objective);
        let trials = objectives.iter().map(trial).collect::<Result<_, _>>()?;
        let start = run.training_cycle(cycle).and_then(|start| whole.cycles.get(&start));
        let before = start.and_then(|cycle| cycle.pass_rates.as_ref()?.heldout.map(|it| it.mean));
        Ok(Court { run: id.clone(), cycle, before, trials })
    }

    /// Returns the run of a trial with this seed: the one that exists, or a new one.
    ///
    /// # Errors
    /// When the training data cannot be stored, or the run cannot be submitted.
    pub async fn submit_trial(
        &self,
        court: &Court,
        trial: &CourtTrial,
        seed: u32,
        there: &[Run],
    ) -> Result<RunId, CourtError> {
        let name = trial_name(&court.run, &trial.objective);
        let seed = derive_seed(u64::from(seed), &["court"]);
        let spec = v1::Spec { name: name.clone(), seed, ..trial.trial.spec.clone() };
        if let Some(run) = find_equal_run(there, &spec) {
            return Ok(run.id.clone());
        }
        let dataset = trial.trial.selection.dataset.clone();
        self.open_store().await?.put_blob(dataset.into()).await?;
        let spec = v1::Spec { submitted_at: Some(clock::now()), ..spec };
        Ok(self.write_spec_fact(&name, spec).await?)
    }
}

fn prepare_court_trial(
    run: &Run,
    cycle: u32,
    objective: &Objective,
) -> Result<CourtTrial, CourtError> {
    let name = describe_objective(objective);
    if let Some(raft) = run.raft_spec() {
        check_cycle(&run.id, cycle, raft)?;
    }
    let not_yet = || HistoryError::NotYet { run: run.id.clone(), cycle };
    let trial = prepare_trial(run, cycle, objective).map_err(|source| {
        let run = run.id.clone();
        CourtError::Setting { run, cycle, source }
    })?;
    let trial = trial.ok_or_else(not_yet)?;
    let selection = &trial.selection;
    if selection.kept.is_empty() {
        let dropped = selection.dropped.iter().map(|(why, count)| format!("{count} {why}"));
        return Err(CourtError::Empty {
            objective: name,
            run: run.id.clone(),
            cycle,
            considered: selection.considered,
            dropped: dropped.collect::<Vec<_>>().join(", "),
        });
    }
    let tokens = selection.kept.iter().map(|kept| u64::from(kept.tokens)).sum();
    Ok(CourtTrial { objective: name, kept: selection.kept.len(), tokens, trial })
}

/// Returns the name with the changed settings, such as `dapo kl=0.001`.
fn describe_objective(objective: &Objective) -> String {
    let message = objective.to_message();
    let mut settings: Vec<_> = message.settings.iter().collect();
    settings.sort_by_key(|(key, _)| *key);
    let settings = settings.into_iter().map(|(key, value)| format!(" {key}={value}"));
    message.name + &settings.collect::<String>()
}

/// Returns a legal name of runs, with the objective at its end.
fn trial_name(run: &RunId, objective: &str) -> String {
    let legal = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let objective: String = objective.chars().map(legal).take(NAME_MAX / 2).collect();
    let room = NAME_MAX - objective.len() - 1;
    format!("{}-{objective}", &run.as_str()[..run.as_str().len().min(room)])
}

/// Ranks the objectives by the mean pass rate of their runs. Each has its runs in the same order of
/// seeds.
pub fn rank_objectives(court: &Court, runs: Vec<Vec<(String, Option<f64>)>>) -> CourtRanking {
    let ranked = court.trials.iter().zip(runs).map(|(trial, runs)| {
        let rates: Vec<f64> = runs.iter().filter_map(|(_, rate)| *rate).collect();
        let (mean, interval) =
            mean_interval(&rates).map_or((None, None), |(mean, interval)| (Some(mean), interval));
        let interval = interval.map(|(low, high)| (low.max(0.0), high.min(1.0)));
        RankedObjective {
            objective: trial.objective.clone(),
            kept: trial.kept,
            tokens: trial.tokens,
            runs,
            mean,
            interval,
            behind: None,
        }
    });
    let mut ranking: Vec<RankedObjective> = ranked.collect();
    ranking.sort_by(|a, b| b.mean.unwrap_or(-1.0).total_cmp(&a.mean.unwrap_or(-1.0)));
    if let Some((best, others)) = ranking.split_first_mut() {
        for other in others {
            let pairs = best.runs.iter().zip(&other.runs);
            let apart: Vec<f64> =
                pairs.filter_map(|((_, a), (_, b))| Some((*a)? - (*b)?)).collect();
            other.behind = mean_interval(&apart)
                .and_then(|(mean, interval)| interval.map(|(low, high)| (mean, low, high)));
        }
    }
    CourtRanking { run: court.run.to_string(), cycle: court.cycle, before: court.before, ranking }
}

/// Returns the mean and, of two values or more, its 95 % interval by Student's t; `None` of no
/// values.
pub fn mean_interval(values: &[f64]) -> Option<(f64, Option<(f64, f64)>)> {
    let count = u32::try_from(values.len()).ok().filter(|count| *count > 0).map(f64::from)?;
    let mean = values.iter().sum::<f64>() / count;
    if values.len() < 2 {
        return Some((mean, None));
    }
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let deviation = (squares / (count - 1.0)).sqrt();
    let spread = t_quantile(values.len() - 1) * deviation / count.sqrt();
    Some((mean, Some((mean - spread, mean + spread))))
}

/// Returns the 97.5 % quantile of Student's t, by degrees of freedom; of the normal distribution
/// beyond 30.
fn t_quantile(freedom: usize) -> f64 {
    const QUANTILES: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042,
    ];
    freedom.checked_sub(1).and_then(|place| QUANTILES.get(place)).copied().unwrap_or(1.96)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_that_of_student_s_t() {
        assert_eq!(mean_interval(&[]), None);
        assert_eq!(mean_interval(&[0.5]), Some((0.5, None)));
        let (mean, interval) = mean_interval(&[0.1, 0.2, 0.3, 0.4, 0.5]).unwrap();
        let (low, high) = interval.unwrap();
        // 2.776 · 0.158114 / √5
        assert!((mean - 0.3).abs() < 1e-12 && (low - 0.10371).abs() < 1e-4, "{mean} {low}");
        assert!((high - 0.49629).abs() < 1e-4, "{high}");
    }

    #[test]
    fn names_of_trials_are_legal_and_short() {
        let run = RunId::new("a-run-with-a-rather-long-name-of-forty-eight-aa-12").unwrap();
        let name = trial_name(&run, "dapo clip_high=0.3 kl=0.001 and more");
        assert!(name.len() <= NAME_MAX && RunId::new(name.as_str()).is_ok(), "{name}");
        assert_eq!(trial_name(&RunId::new("raft-1").unwrap(), "dr_grpo"), "raft-1-dr-grpo");
    }

    #[test]
    fn objectives_are_ranked_with_their_distance_from_the_best() {
        let trial = |objective: &str| CourtTrial {
            objective: objective.into(),
            kept: 1,
            tokens: 2,
            trial: ObjectiveTrial {
                spec: v1::Spec::default(),
                selection: cycle::SelectionOutcome::default(),
            },
        };
        let court = Court {
            run: RunId::new("r1").unwrap(),
            cycle: 1,
            before: None,
            trials: ["raft", "rloo", "dpo"].map(trial).into(),
        };
        let runs = |rates: [Option<f64>; 3]| rates.map(|rate| ("x".to_owned(), rate)).to_vec();
        let ranking = rank_objectives(
            &court,
            vec![
                runs([Some(0.5), Some(0.6), None]),
                runs([Some(0.7), Some(0.8), Some(0.9)]),
                runs([None, None, None]),
            ],
        );
        let names: Vec<&str> = ranking.ranking.iter().map(|it| &*it.objective).collect();
        assert_eq!(names, ["rloo", "raft", "dpo"]);
        let (mean, low, high) = ranking.ranking[1].behind.unwrap();
        assert!((mean - 0.2).abs() < 1e-12 && low <= mean && mean <= high);
        assert_eq!(ranking.ranking[2].mean, None);
    }
}
