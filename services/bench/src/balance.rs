//! Measures how evenly boxes share a generate phase: its duration relative to total work divided by
//! total speed.
//!
//! The plan, the orders and their window come from the real core. The boxes are simulated in
//! virtual time (`simulation`), so the figures are the same on every machine. They do not cover
//! prefill, model loading, or the dependence of a step's cost on sequence lengths.

mod simulated_generator;
mod simulation;

use anyhow::Context;
use cli::output;

use super::{BenchFigure, memory_log::RaftWorkload};

use self::simulation::{PhaseBoxes, PhaseOutcome, simulate_phase};

pub(super) use self::simulation::{SimulatedFleet, SimulatedRun, simulate_run};

/// Tokens per second of boxes with full slots: a model of 0.5 B parameters on a few cores.
const EQUAL: [f64; 4] = [500.0; 4];
/// Tokens per second of boxes whose speeds differ by a factor of eight.
const UNEVEN: [f64; 4] = [125.0, 250.0, 500.0, 1000.0];

/// Accepted mean ratio to the ideal duration.
const LIMIT: f64 = 1.05;
/// Accepted ratio if a box is lost.
const LIMIT_LOST: f64 = 1.10;
/// Accepted ratio if the speeds of the boxes are unknown, as in a run's first cycle.
const LIMIT_UNKNOWN: f64 = 1.10;

/// Samples of each prompt.
const SAMPLES: u32 = 8;
/// Maximum tokens of a sample.
const TOKENS_MAX: u32 = 112;

/// Number of seeds; each one gives different sample lengths.
const SEEDS: u64 = 32;

/// Prompts of a cycle.
const PROMPTS: u32 = 500;

struct BalanceCase {
    name: &'static str,
    speeds: [f64; 4],
    known: bool,
    /// Index of the box that is lost halfway, if any.
    lost: Option<usize>,
    limit: f64,
}

/// The simulated fleets.
const CASES: [BalanceCase; 6] = [
    balance_case("share: equal", EQUAL, true, None, LIMIT),
    balance_case("share: equal, unknown", EQUAL, false, None, LIMIT_UNKNOWN),
    balance_case("share: 1:2:4:8", UNEVEN, true, None, LIMIT),
    balance_case("share: 1:2:4:8, unknown", UNEVEN, false, None, LIMIT_UNKNOWN),
    balance_case("share: 1:2:4:8, slowest lost", UNEVEN, true, Some(0), LIMIT_LOST),
    balance_case("share: 1:2:4:8, fastest lost", UNEVEN, true, Some(3), LIMIT_LOST),
];

const fn balance_case(
    name: &'static str,
    speeds: [f64; 4],
    known: bool,
    lost: Option<usize>,
    limit: f64,
) -> BalanceCase {
    BalanceCase { name, speeds, known, lost, limit }
}

pub(super) fn measure_balance() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message("share: generate phases in virtual time …");
    CASES.iter().map(BalanceCase::measure_figure).collect()
}

impl BalanceCase {
    fn measure_figure(&self) -> anyhow::Result<BenchFigure> {
        let outcomes: Vec<PhaseOutcome> =
            (1..=SEEDS).map(|seed| self.simulate_seed(seed)).collect::<anyhow::Result<_>>()?;
        let ratios =
            || outcomes.iter().map(|PhaseOutcome { seconds, ideal_s, .. }| seconds / ideal_s);
        let worst = ratios().fold(0.0, f64::max);
        let mean = ratios().sum::<f64>() / f64::from(u32::try_from(outcomes.len())?);
        let PhaseOutcome { samples, jobs, again, shares, .. } =
            outcomes.first().context("seeds")?;
        let shares: Vec<String> = shares.iter().map(u32::to_string).collect();
        Ok(BenchFigure {
            name: self.name,
            measured: mean,
            unit: "×",
            limit: Some(self.limit),
            how: format!(
                "mean of {SEEDS} seeds, worst {worst:.3}; {samples} samples, {jobs} jobs, {again} \
                 reissued; by box {}",
                shares.join("/")
            ),
        })
    }

    fn simulate_seed(&self, seed: u64) -> anyhow::Result<PhaseOutcome> {
        let workload = RaftWorkload {
            seed,
            cycles: 1,
            prompts: PROMPTS,
            samples_per_prompt: SAMPLES,
            heldout: 0,
            heldout_samples_per_prompt: 0,
            max_new_tokens: TOKENS_MAX,
        };
        let Self { known, lost, .. } = *self;
        simulate_phase(workload, PhaseBoxes { speeds: &self.speeds, known, lost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fleet_beats_its_own_speed_and_boxes_end_together() {
        for case in &CASES {
            let PhaseOutcome { seconds, ideal_s, samples, .. } = case.simulate_seed(1).unwrap();
            assert_eq!(samples, PROMPTS * SAMPLES);
            assert!(seconds > ideal_s, "{}: {seconds} s of {ideal_s}", case.name);
            let figure = case.measure_figure().unwrap();
            assert!(figure.measured < case.limit, "{}: {}", case.name, figure.measured);
        }
    }

    #[test]
    fn a_seed_gives_the_same_phase_each_time() {
        let first = CASES[2].simulate_seed(3).unwrap();
        let again = CASES[2].simulate_seed(3).unwrap();
        assert_eq!((first.seconds, first.shares), (again.seconds, again.shares));
    }
}
