//! The energy that a run took.

use crate::{
    fleet_evidence::sampling_watts,
    run_forecast::JOULES_PER_WH,
    run_history::{RunHistory, SamplingPeriod},
    workload::RunWorkload,
};

/// Returns the watt hours of a run: of its generators while they sampled, as they measured them,
/// and of its trainer while it trained. The facts of a training have no energy: its trainer counts
/// with its mean power while it sampled, in this run or in `others`.
///
/// `None` if no box measured its samples, if a trainer never sampled, or if a training was paused,
/// was ordered again or needed several boxes.
pub fn measure_watt_hours(run: &RunHistory, others: &[RunHistory]) -> Option<f64> {
    let workload = RunWorkload::from_spec(&run.spec)?;
    if workload.trainers != 1 || !run.is_training_undisturbed() {
        return None;
    }
    let histories = others.iter().chain([run]);
    let periods: Vec<SamplingPeriod> = histories.flat_map(RunHistory::sampling_periods).collect();
    let watts = sampling_watts(&periods);
    let trained = run.trainings().into_iter().map(|(seconds, checkpoint)| {
        watts.get(checkpoint.agent.as_str()).map(|watts| watts * seconds)
    });
    let trained: f64 = trained.sum::<Option<f64>>()?;
    Some((run.sampling_joules()? + trained) / JOULES_PER_WH)
}
