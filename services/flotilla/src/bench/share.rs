//! How well boxes share a generate phase: its length against work over total speed.
//!
//! The plan, the orders and their window are the core's own; the boxes are simulated in
//! virtual time (`machines`), so the figures are the same on every machine. They say
//! nothing of prefill, of loading the model, or of a step's cost that depends on lengths.

mod machine;
mod machines;

use anyhow::Context;
use cycle::{Fleet, Member};

use super::{Figure, log::Workload};
use crate::output;

use self::machines::{Outcome, simulate};

/// Tokens a second of a box with full slots: a 0.5 B model on a few cores.
const EQUAL: [f64; 4] = [500.0; 4];
const UNEVEN: [f64; 4] = [125.0, 250.0, 500.0, 1000.0];

const LIMIT_EQUAL: f64 = 1.08;
const LIMIT_UNEVEN: f64 = 1.10;

/// Samples a prompt, and the longest a sample gets.
const SAMPLES: u32 = 8;
const TOKENS_MAX: u32 = 112;

/// Each draws other lengths.
const SEEDS: u64 = 16;

/// Prompts of a large cycle, which the limits are for, and of the demo's.
const LARGE: u32 = 1024;
const SMALL: u32 = 256;

struct Case {
    name: &'static str,
    speeds: [f64; 4],
    known: bool,
    prompts: u32,
    limit: f64,
}

const CASES: [Case; 6] = [
    case("share: equal", EQUAL, true, LARGE, LIMIT_EQUAL),
    case("share: equal, unknown", EQUAL, false, LARGE, LIMIT_EQUAL),
    case("share: 1:2:4:8", UNEVEN, true, LARGE, LIMIT_UNEVEN),
    case("share: 1:2:4:8, unknown", UNEVEN, false, LARGE, LIMIT_UNEVEN),
    case("share: equal, small", EQUAL, true, SMALL, LIMIT_EQUAL),
    case("share: 1:2:4:8, small", UNEVEN, true, SMALL, LIMIT_UNEVEN),
];

const fn case(name: &'static str, speeds: [f64; 4], known: bool, prompts: u32, limit: f64) -> Case {
    Case { name, speeds, known, prompts, limit }
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
        let Outcome { samples, jobs, shares, .. } = outcomes.first().context("seeds")?;
        let shares: Vec<String> = shares.iter().map(u32::to_string).collect();
        Ok(Figure {
            name: self.name,
            measured: worst,
            unit: "×",
            limit: Some(self.limit),
            how: format!(
                "worst of {SEEDS} seeds, mean {mean:.3}; {samples} samples in {jobs} jobs, by box {}",
                shares.join("/")
            ),
        })
    }

    fn simulate(&self, seed: u64) -> anyhow::Result<Outcome> {
        let member = |speed: &f64| Member {
            tokens_per_s: if self.known { *speed } else { 0.0 },
            ..Member::default()
        };
        let generators = self.speeds.iter().map(member).collect();
        let fleet = Fleet { generators, ..Fleet::default() };
        let workload = Workload {
            seed,
            cycles: 1,
            prompts: self.prompts,
            samples_per_prompt: SAMPLES,
            heldout: 0,
            heldout_samples_per_prompt: 0,
            max_new_tokens: TOKENS_MAX,
        };
        simulate(workload, fleet, &self.speeds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fleet_beats_its_own_speed_and_equal_boxes_come_close() {
        for case in &CASES {
            let Outcome { seconds, ideal_s, samples, .. } = case.simulate(1).unwrap();
            assert_eq!(samples, case.prompts * SAMPLES);
            assert!(seconds > ideal_s, "{}: {seconds} s of {ideal_s}", case.name);
            let equal = case.speeds == EQUAL && case.prompts == LARGE;
            assert!(!equal || seconds < ideal_s * LIMIT_EQUAL, "{}: {seconds} s", case.name);
        }
    }

    #[test]
    fn a_seed_gives_the_same_phase_each_time() {
        let first = CASES[2].simulate(3).unwrap();
        let again = CASES[2].simulate(3).unwrap();
        assert_eq!((first.seconds, first.shares), (again.seconds, again.shares));
    }
}
