//! How well boxes share a generate phase: its length against work over total speed.
//!
//! The plan, the orders and their window are the core's own; the boxes are simulated in
//! virtual time (`machines`), so the figures are the same on every machine. They say
//! nothing of prefill, of loading the model, or of a step's cost that depends on lengths.

mod machine;
mod machines;

use anyhow::Context;

use super::{Figure, log::Workload};
use crate::output;

use self::machines::{Boxes, Outcome, simulate};

/// Tokens a second of a box with full slots: a 0.5 B model on a few cores.
const EQUAL: [f64; 4] = [500.0; 4];
const UNEVEN: [f64; 4] = [125.0, 250.0, 500.0, 1000.0];

const LIMIT: f64 = 1.05;
const LIMIT_LOST: f64 = 1.10;
/// Of boxes of which nobody knows how fast they are, as in a run's first cycle.
const LIMIT_UNKNOWN: f64 = 1.10;

/// Samples a prompt, and the longest a sample gets.
const SAMPLES: u32 = 8;
const TOKENS_MAX: u32 = 112;

/// Each draws other lengths.
const SEEDS: u64 = 16;

/// Prompts of a cycle.
const PROMPTS: u32 = 500;

struct Case {
    name: &'static str,
    speeds: [f64; 4],
    known: bool,
    /// Which of the boxes is lost midway.
    lost: Option<usize>,
    limit: f64,
}

const CASES: [Case; 6] = [
    case("share: equal", EQUAL, true, None, LIMIT),
    case("share: equal, unknown", EQUAL, false, None, LIMIT_UNKNOWN),
    case("share: 1:2:4:8", UNEVEN, true, None, LIMIT),
    case("share: 1:2:4:8, unknown", UNEVEN, false, None, LIMIT_UNKNOWN),
    case("share: 1:2:4:8, slowest lost", UNEVEN, true, Some(0), LIMIT_LOST),
    case("share: 1:2:4:8, fastest lost", UNEVEN, true, Some(3), LIMIT_LOST),
];

const fn case(
    name: &'static str,
    speeds: [f64; 4],
    known: bool,
    lost: Option<usize>,
    limit: f64,
) -> Case {
    Case { name, speeds, known, lost, limit }
}

pub(super) fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say("share: generate phases in virtual time …");
    CASES.iter().map(Case::figure).collect()
}

impl Case {
    fn figure(&self) -> anyhow::Result<Figure> {
        let outcomes: Vec<Outcome> =
            (1..=SEEDS).map(|seed| self.simulate(seed)).collect::<anyhow::Result<_>>()?;
        let ratios = || outcomes.iter().map(|Outcome { seconds, ideal_s, .. }| seconds / ideal_s);
        let worst = ratios().fold(0.0, f64::max);
        let mean = ratios().sum::<f64>() / f64::from(u32::try_from(outcomes.len())?);
        let Outcome { samples, jobs, again, shares, .. } = outcomes.first().context("seeds")?;
        let shares: Vec<String> = shares.iter().map(u32::to_string).collect();
        Ok(Figure {
            name: self.name,
            measured: worst,
            unit: "×",
            limit: Some(self.limit),
            how: format!(
                "worst of {SEEDS} seeds, mean {mean:.3}; {samples} samples in {jobs} jobs, {again} \
                 ordered again, by box {}",
                shares.join("/")
            ),
        })
    }

    fn simulate(&self, seed: u64) -> anyhow::Result<Outcome> {
        let workload = Workload {
            seed,
            cycles: 1,
            prompts: PROMPTS,
            samples_per_prompt: SAMPLES,
            heldout: 0,
            heldout_samples_per_prompt: 0,
            max_new_tokens: TOKENS_MAX,
        };
        let Self { known, lost, .. } = *self;
        simulate(workload, Boxes { speeds: &self.speeds, known, lost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fleet_beats_its_own_speed_and_boxes_end_together() {
        for case in &CASES {
            let Outcome { seconds, ideal_s, samples, .. } = case.simulate(1).unwrap();
            assert_eq!(samples, PROMPTS * SAMPLES);
            assert!(seconds > ideal_s, "{}: {seconds} s of {ideal_s}", case.name);
            assert!(seconds < ideal_s * case.limit, "{}: {seconds} s of {ideal_s}", case.name);
        }
    }

    #[test]
    fn a_seed_gives_the_same_phase_each_time() {
        let first = CASES[2].simulate(3).unwrap();
        let again = CASES[2].simulate(3).unwrap();
        assert_eq!((first.seconds, first.shares), (again.seconds, again.shares));
    }
}
