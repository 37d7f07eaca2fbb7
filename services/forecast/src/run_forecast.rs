//! The forecast of a run: many simulations of it, drawn from the same evidence.

use wire::v1::{self, forecast::Range};

use crate::{
    fleet_evidence::FleetEvidence,
    run_progress::RunProgress,
    run_timeline::{SimulatedDurations, simulate_run},
    workload::RunWorkload,
};

/// Number of simulations, and the cycles of all of them together. The latter keeps the forecast of
/// a run with many cycles below a second.
const SIMULATIONS_MAX: u32 = 4000;
const SIMULATIONS_MIN: u32 = 200;
const SIMULATED_CYCLES_MAX: u32 = 200_000;

/// A run that takes longer than all but this share of the simulations is unlike them.
const LONGER_SHARE_MIN: f64 = 0.05;

/// Outer quantiles of a 90 % interval.
const LOW: f64 = 0.05;
const HIGH: f64 = 0.95;

/// Joules of a watt-hour, and watt-hours of a kilowatt-hour.
pub(crate) const JOULES_PER_WH: f64 = 3600.0;
const WH_PER_KWH: f64 = 1000.0;

/// The questions that a forecast answers besides the duration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ForecastQuestion {
    /// Seconds in which the run is to end.
    pub within_s: Option<f64>,
    /// In any currency.
    pub price_per_kwh: Option<f64>,
    pub seed: u64,
}

/// Forecasts the seconds that a run will still take: those of the simulations that take longer than
/// it has taken so far. `None` if nearly none does.
pub fn forecast_remaining(
    workload: &RunWorkload,
    evidence: &FleetEvidence,
    progress: RunProgress,
    seed: u64,
) -> Option<Range> {
    let simulated = simulate_runs(workload, evidence, progress.trained_cycles, seed);
    let left = simulated.iter().map(|run| run.total_s - progress.elapsed_s);
    let mut left: Vec<f64> = left.filter(|seconds| *seconds > 0.0).collect();
    left.sort_by(f64::total_cmp);
    let is_alike = left.len() as f64 >= LONGER_SHARE_MIN * simulated.len() as f64;
    is_alike.then(|| to_range(&left))
}

/// Simulates a run many times, or the rest of one after a number of trained cycles.
fn simulate_runs(
    workload: &RunWorkload,
    evidence: &FleetEvidence,
    trained_cycles: Option<u32>,
    seed: u64,
) -> Vec<SimulatedDurations> {
    let count =
        (SIMULATED_CYCLES_MAX / workload.cycles.max(1)).clamp(SIMULATIONS_MIN, SIMULATIONS_MAX);
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| simulate_run(workload, evidence, trained_cycles, &mut random)).collect()
}

/// Forecasts a run that starts at once, without its memory needs.
pub fn forecast_run(
    workload: &RunWorkload,
    evidence: &FleetEvidence,
    question: ForecastQuestion,
) -> v1::Forecast {
    let simulated = simulate_runs(workload, evidence, None, question.seed);
    let sorted = |value: &dyn Fn(&SimulatedDurations) -> f64| {
        let mut values: Vec<f64> = simulated.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let watt_hours =
        has_power(workload, evidence).then(|| to_range(&sorted(&|run| watt_hours(evidence, run))));
    let price = question.price_per_kwh.zip(watt_hours).map(|(price, energy)| {
        let of = |watt_hours| compute_price(watt_hours, price);
        Range { low: of(energy.low), median: of(energy.median), high: of(energy.high) }
    });
    let in_time = |limit: f64| {
        let count = simulated.iter().filter(|run| run.total_s <= limit).count();
        count as f64 / simulated.len() as f64
    };
    let middle = |values: Vec<f64>| values[values.len() / 2];
    v1::Forecast {
        seconds: Some(to_range(&sorted(&|run| run.total_s))),
        watt_hours,
        price,
        probability: question.within_s.map(in_time),
        sampling_s: middle(sorted(&|run| run.sampling_s)),
        training_s: middle(sorted(&|run| run.training_s)),
        evaluation_s: middle(sorted(&|run| run.evaluation_s)),
        memory: Vec::new(),
        assumed: evidence.assumed.clone(),
        runs: evidence.runs.clone(),
    }
}

/// Returns the price of an amount of energy.
pub fn compute_price(watt_hours: f64, price_per_kwh: f64) -> f64 {
    watt_hours / WH_PER_KWH * price_per_kwh
}

/// Returns true if the power of each phase with much work is known.
fn has_power(workload: &RunWorkload, evidence: &FleetEvidence) -> bool {
    let samples = workload.train_samples + workload.heldout_samples > 0.0;
    (evidence.sampling_watts.is_some() || !samples) && evidence.training_watts.is_some()
}

fn watt_hours(evidence: &FleetEvidence, run: &SimulatedDurations) -> f64 {
    let joules = evidence.sampling_watts.unwrap_or(0.0) * run.sampling_s
        + evidence.training_watts.unwrap_or(0.0) * run.training_s;
    joules / JOULES_PER_WH
}

fn to_range(sorted: &[f64]) -> Range {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a length is an index"
    )]
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share).round() as usize];
    Range { low: at(LOW), median: at(0.5), high: at(HIGH) }
}

#[cfg(test)]
mod tests;
