//! Compares forecasts of runs with their duration on simulated fleets.
//!
//! Each fleet has other boxes and runs twice: a small run, whose facts are all that the forecast
//! sees, and then the run that was forecast. Orders, phases and their overlap come from the real
//! planner. Speeds, lengths and pass rates differ by a few percent between runs, cycles and jobs.

use anyhow::Context;
use cli::output;
use forecast::{
    FleetAgent, FleetEvidence, ForecastQuestion, RunHistory, RunWorkload, forecast_run,
};
use wire::{FactBody, derive_seed, v1};

use super::{
    BenchFigure,
    balance::{SimulatedFleet, SimulatedRun, simulate_run},
    memory_log::RaftWorkload,
};

/// Accepted median of the relative errors, and share of runs outside of the 90 % interval, in
/// percent.
const ERROR_MAX: f64 = 10.0;
const OUTSIDE_MAX: f64 = 15.0;

/// Probability that a box of the first run is gone at the second.
const LEAVES: f64 = 0.15;

/// One forecast beside the run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ForecastOutcome {
    /// Relative to the forecast's median.
    error: f64,
    is_within: bool,
    /// The probability that the forecast gave to ending as early as the run did, or earlier.
    rank: f64,
    /// Width of the interval relative to the median.
    width: f64,
}

pub(super) fn measure_forecasts(fleets: u32, seed: u64) -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message(&format!("forecast: {fleets} fleets in virtual time …"));
    let outcomes: Vec<ForecastOutcome> = (0..fleets)
        .map(|fleet| forecast_fleet(derive_seed(seed, &["fleet", &fleet.to_string()])))
        .collect::<anyhow::Result<_>>()?;
    let median_of = |value: &dyn Fn(&ForecastOutcome) -> f64| {
        let mut values: Vec<f64> = outcomes.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    };
    let share = |counts: &dyn Fn(&ForecastOutcome) -> bool| {
        100.0 * outcomes.iter().filter(|outcome| counts(outcome)).count() as f64 / f64::from(fleets)
    };
    let early = share(&|outcome| !outcome.is_within && outcome.error < 0.0);
    let late = share(&|outcome| !outcome.is_within && outcome.error > 0.0);
    let ranks: Vec<String> = (0..5)
        .map(|fifth| {
            let (from, to) = (f64::from(fifth) * 0.2, f64::from(fifth + 1) * 0.2 + 1e-9);
            format!("{:.0}", share(&|it| it.rank >= from && it.rank < to))
        })
        .collect();
    Ok(vec![
        BenchFigure {
            name: "forecast: error",
            measured: 100.0 * median_of(&|outcome| outcome.error.abs()),
            unit: "%",
            limit: Some(ERROR_MAX),
            how: format!(
                "median of {fleets} fleets; bias {:+.1} %",
                100.0 * median_of(&|outcome| outcome.error)
            ),
        },
        BenchFigure {
            name: "forecast: outside the interval",
            measured: early + late,
            unit: "%",
            limit: Some(OUTSIDE_MAX),
            how: format!(
                "a 90 % interval; {early:.0} % early, {late:.0} % late; width {:.0} %; runs by fifth \
                 of the forecast {}",
                100.0 * median_of(&|outcome| outcome.width),
                ranks.join("/")
            ),
        },
    ])
}

fn forecast_fleet(seed: u64) -> anyhow::Result<ForecastOutcome> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut fleet = draw_fleet(&mut random);
    let small = RaftWorkload { cycles: 2, ..draw_workload(&mut random, (60, 300)) };
    let earlier = simulate_run("earlier", small, &fleet)?;
    if fleet.speeds.len() > 1 && random.f64() < LEAVES {
        fleet.speeds.pop();
    }
    let large = RaftWorkload {
        cycles: random.u32(2..=5),
        max_new_tokens: small.max_new_tokens,
        samples_per_prompt: small.samples_per_prompt,
        ..draw_workload(&mut random, (100, 800))
    };
    let run = simulate_run("later", large, &fleet)?;
    compare_forecast(&earlier, &run, &fleet, seed)
}

fn compare_forecast(
    earlier: &SimulatedRun,
    run: &SimulatedRun,
    fleet: &SimulatedFleet,
    seed: u64,
) -> anyhow::Result<ForecastOutcome> {
    let history = RunHistory::from_records(&earlier.records).context("a run begins with a spec")?;
    let spec = run.records.first().and_then(|record| match &record.fact.body {
        FactBody::Spec(spec) => Some(spec),
        _ => None,
    });
    let workload = spec.and_then(RunWorkload::from_spec).context("a run that trains")?;
    let evidence = FleetEvidence::from_histories(&workload, &[history], false, &list_agents(fleet));
    let question =
        ForecastQuestion { within_s: Some(run.seconds), seed, ..ForecastQuestion::default() };
    let forecast = forecast_run(&workload, &evidence, question);
    let v1::forecast::Range { low, median, high } = forecast.seconds.context("a duration")?;
    Ok(ForecastOutcome {
        error: run.seconds / median - 1.0,
        is_within: (low..=high).contains(&run.seconds),
        rank: forecast.probability.unwrap_or(0.0),
        width: (high - low) / median,
    })
}

fn list_agents(fleet: &SimulatedFleet) -> Vec<FleetAgent> {
    let agent = |name: String, role: &str| FleetAgent {
        name,
        roles: vec![role.to_owned()],
        tokens_per_s: 0.0,
        watts: None,
    };
    let generators = (0..fleet.speeds.len()).map(|it| agent(it.to_string(), "generator"));
    let evaluators = (0..fleet.evaluators).map(|it| agent(format!("evaluator-{it}"), "evaluator"));
    let trainer = agent("trainer-1".to_owned(), "trainer");
    generators.chain(evaluators).chain([trainer]).collect()
}

fn draw_fleet(random: &mut fastrand::Rng) -> SimulatedFleet {
    let between =
        |random: &mut fastrand::Rng, low: f64, high: f64| low * (high / low).powf(random.f64());
    let generators = random.usize(1..=5);
    SimulatedFleet {
        speeds: (0..generators).map(|_| between(random, 200.0, 1600.0)).collect(),
        verifiers: random.usize(1..=3),
        verify_sample_s: between(random, 0.001, 0.03),
        evaluators: random.usize(1..=2),
        evaluation_s: between(random, 2.0, 60.0),
        trained_tokens_per_s: between(random, 200.0, 3000.0),
        training_start_s: between(random, 1.0, 15.0),
        pass_share: 0.1 + 0.6 * random.f64(),
    }
}

fn draw_workload(random: &mut fastrand::Rng, prompts: (u32, u32)) -> RaftWorkload {
    RaftWorkload {
        seed: random.u64(..),
        cycles: 1,
        prompts: random.u32(prompts.0..=prompts.1),
        samples_per_prompt: random.u32(4..=8),
        heldout: random.u32(20..=80),
        heldout_samples_per_prompt: random.u32(1..=4),
        max_new_tokens: random.u32(64..=256),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forecasts_of_simulated_fleets_are_close_and_their_intervals_hold() {
        let figures = measure_forecasts(12, 7).unwrap();
        assert!(figures[0].measured <= 1.5 * ERROR_MAX, "{figures:?}");
        // 90 % intervals miss four or more of 12 runs once in 40 times.
        assert!(figures[1].measured <= 25.0, "{figures:?}");
        assert!(!figures[1].how.contains("0/0/100/0/0"), "too wide: {figures:?}");
    }

    #[test]
    fn a_fleet_has_the_same_forecast_each_time() {
        assert_eq!(forecast_fleet(3).unwrap(), forecast_fleet(3).unwrap());
    }
}
