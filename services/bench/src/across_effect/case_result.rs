//! A training on several boxes compared with one box: likelihood, and time to it.

use serde::Serialize;

use super::{cases::SharingCase, shared_training::TrainedShare, virtual_fleet::SplitSchedule};
use crate::raft_effect::run_result::MeanEstimate;

/// The share by which a likelihood may be worse than that of one box and still counts as close.
const CLOSE: f64 = 0.01;

/// The trainings of a case, one of each seed.
#[derive(Debug, Serialize)]
pub(super) struct CaseResult {
    #[serde(skip)]
    pub case: SharingCase,
    pub speeds: &'static [f64],
    pub every: u32,
    pub merge: &'static str,
    pub steps: u32,
    /// Of each seed, the change of the last negative log-likelihood against one box, as a share.
    pub changes: Vec<f64>,
    /// Mean of all merges.
    pub drift: f64,
    pub sent_bytes: f64,
    /// Virtual seconds of all steps, and how many times as long one box takes.
    pub end_s: f64,
    pub end_speedup: f64,
    /// The time to the last likelihood of one box.
    pub to_equal: QualityTime,
    /// The time to at most [`CLOSE`] more.
    pub to_close: QualityTime,
    /// The lowest negative log-likelihood after a merge: mean change against the last of one box, as
    /// a share, and mean virtual seconds.
    pub best_change: f64,
    pub best_s: f64,
}

/// The time in which trainings reach a likelihood.
#[derive(Debug, Serialize)]
pub(super) struct QualityTime {
    /// Seeds that reach it.
    pub reached: usize,
    /// Median of their virtual seconds.
    pub median_s: Option<f64>,
    /// Median of how many times as long one box takes to the same likelihood.
    pub speedup: Option<f64>,
}

/// Trainings of the same case with their schedule.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimedTrainings<'a> {
    pub schedule: &'a SplitSchedule,
    pub trained: &'a [&'a TrainedShare],
}

impl TimedTrainings<'_> {
    /// Returns the virtual seconds and the likelihood after each merge of a training.
    fn list_points(&self, number: usize) -> Vec<(f64, f64)> {
        let times = self.schedule.outer_steps.iter().map(|step| step.merged_s);
        let nlls = self.trained.get(number).map_or(&[][..], |trained| trained.nlls.as_slice());
        times.zip(nlls.iter().copied()).collect()
    }
}

impl CaseResult {
    /// Compares trainings with those on one box, seed by seed.
    pub(super) fn compare_trainings(
        case: SharingCase,
        one_box: TimedTrainings<'_>,
        shared: TimedTrainings<'_>,
    ) -> Self {
        let pairs = || one_box.trained.iter().zip(shared.trained);
        let change = |nll: f64, of_one: &TrainedShare| nll / of_one.final_nll() - 1.0;
        let changes = pairs().map(|(one, trained)| change(trained.final_nll(), one)).collect();
        let best: Vec<(f64, f64)> = (0..pairs().count())
            .filter_map(|number| {
                let points = shared.list_points(number);
                let (time_s, nll) = points.into_iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
                Some((time_s, change(nll, one_box.trained.get(number)?)))
            })
            .collect();
        let drifts = shared.trained.iter().flat_map(|trained| trained.drifts.iter().copied());
        let sent_bytes = shared.trained.iter().map(|trained| trained.sent_bytes);
        let mean = |values: Vec<f64>| MeanEstimate::from_values(&values).mean;
        let end_s = shared.schedule.end_s;
        Self {
            case,
            speeds: case.speeds,
            every: case.every,
            merge: case.method.name,
            steps: case.steps,
            changes,
            drift: mean(drifts.collect()),
            sent_bytes: mean(sent_bytes.collect()),
            end_s,
            end_speedup: one_box.schedule.end_s / end_s,
            to_equal: QualityTime::measure_time(one_box, shared, 0.0),
            to_close: QualityTime::measure_time(one_box, shared, CLOSE),
            best_change: mean(best.iter().map(|(_, change)| *change).collect()),
            best_s: mean(best.iter().map(|(time_s, _)| *time_s).collect()),
        }
    }

    /// Returns the mean change of the likelihood.
    pub(super) fn mean_change(&self) -> MeanEstimate {
        MeanEstimate::from_values(&self.changes)
    }

    pub(super) fn worst_change(&self) -> f64 {
        self.changes.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

impl QualityTime {
    /// Measures the time to the last likelihood of one box, or to one that is worse by a share.
    fn measure_time(one_box: TimedTrainings<'_>, shared: TimedTrainings<'_>, worse: f64) -> Self {
        let (mut times, mut speedups) = (Vec::new(), Vec::new());
        for (number, one) in one_box.trained.iter().enumerate() {
            let limit = one.final_nll() * (1.0 + worse);
            let reach = |trainings: TimedTrainings<'_>| {
                let points = trainings.list_points(number);
                points.into_iter().find(|(_, nll)| *nll <= limit).map(|(time_s, _)| time_s)
            };
            if let (Some(alone_s), Some(time_s)) = (reach(one_box), reach(shared)) {
                times.push(time_s);
                speedups.push(alone_s / time_s);
            }
        }
        Self { reached: times.len(), median_s: median_of(times), speedup: median_of(speedups) }
    }
}

/// Returns the median; `None` without values.
fn median_of(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values.get(low)? + values.get(high)?) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::across_effect::{cases::GOAL_CASES, virtual_fleet::ScheduledOuterStep};

    fn schedule(merges_s: &[f64]) -> SplitSchedule {
        let step = |merged_s: &f64| ScheduledOuterStep {
            slices: Vec::new(),
            cut_off: Vec::new(),
            merged_s: *merged_s,
        };
        let end_s = merges_s.last().copied().unwrap();
        let outer_steps = merges_s.iter().map(step).collect();
        SplitSchedule { outer_steps, end_s, contradictions: 0 }
    }

    fn trained(nlls: &[f64]) -> TrainedShare {
        TrainedShare { nlls: nlls.to_vec(), drifts: vec![0.25, 0.75], ..Default::default() }
    }

    #[test]
    fn the_time_to_a_likelihood_is_that_of_the_first_merge_that_reaches_it() {
        let one = [trained(&[3.0, 2.0, 1.0]), trained(&[3.0, 1.005, 1.0])];
        let shared = [trained(&[1.5, 1.0, 0.9]), trained(&[1.5, 1.008, 1.02])];
        let (of_one, of_shared) = (schedule(&[10.0, 20.0, 30.0]), schedule(&[2.0, 5.0, 8.0]));
        let (one, shared): (Vec<_>, Vec<_>) = (one.iter().collect(), shared.iter().collect());
        let one = TimedTrainings { schedule: &of_one, trained: &one };
        let shared = TimedTrainings { schedule: &of_shared, trained: &shared };
        let result = CaseResult::compare_trainings(GOAL_CASES[1], one, shared);
        let QualityTime { reached, median_s, speedup } = result.to_equal;
        assert_eq!((reached, median_s, speedup), (1, Some(5.0), Some(6.0)), "the second never");
        // One box comes as close after 30 and 20 s.
        let QualityTime { reached, median_s, speedup } = result.to_close;
        assert_eq!((reached, median_s, speedup), (2, Some(5.0), Some(5.0)));
        assert_eq!((result.end_speedup, result.drift), (3.75, 0.5));
        assert!((result.changes[0] + 0.1).abs() < 1e-9 && (result.changes[1] - 0.02).abs() < 1e-9);
        assert_eq!(result.best_s, 6.5);
        assert!((result.best_change - (0.008 - 0.1) / 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_median_of_nothing_is_unknown() {
        assert_eq!(median_of(Vec::new()), None);
        assert_eq!(median_of(vec![3.0, 1.0]), Some(2.0));
        assert_eq!(median_of(vec![3.0, 1.0, 7.0]), Some(3.0));
    }
}
