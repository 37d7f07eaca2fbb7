//! Summarises runs, and computes statistics over several seeds.

use std::time::Duration;

use cycle::Run;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RunResult {
    pub run: String,
    pub seed: u64,
    pub cycles: Vec<CycleResult>,
    pub best: u32,
    pub message: String,
    pub wall_s: f64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CycleResult {
    pub cycle: u32,
    /// Pass rate on held-out prompts; its standard error treats prompts as independent.
    pub pass_rate: f64,
    pub stderr: f64,
    pub sampled: u32,
    pub kept: u32,
    pub solved: u32,
    pub prompts: u32,
    pub generate_s: f64,
    pub train_s: f64,
}

impl RunResult {
    pub(crate) fn from_run(run: &Run, seed: u64, wall: Duration) -> Self {
        let done = run.cycles.values().filter_map(|cycle| Some((cycle, cycle.done.as_ref()?)));
        let figures = done.map(|(cycle, done)| {
            let rate = done.heldout.unwrap_or_default();
            let passed = cycle.selected.as_ref().map_or(&[][..], |selected| &selected.passed);
            CycleResult {
                cycle: done.cycle,
                pass_rate: rate.mean,
                stderr: rate.stderr,
                sampled: done.sampled,
                kept: done.kept,
                solved: count_items(passed.iter().filter(|passed| **passed > 0)),
                prompts: count_items(passed.iter()),
                generate_s: done.generate_s,
                train_s: done.train_s,
            }
        });
        let newest = run.cycles.values().rev().find_map(|cycle| cycle.done.as_ref());
        let best = newest.map_or(0, |done| done.best);
        Self {
            run: run.id.to_string(),
            seed,
            cycles: figures.collect(),
            best,
            message: run.done.as_ref().map(|done| done.message.clone()).unwrap_or_default(),
            wall_s: wall.as_secs_f64(),
        }
    }

    pub(crate) fn last_rate(&self) -> f64 {
        self.cycles.last().map_or(0.0, |cycle| cycle.pass_rate)
    }
}

fn count_items<'a>(of: impl Iterator<Item = &'a u32>) -> u32 {
    u32::try_from(of.count()).unwrap_or(u32::MAX)
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct MeanEstimate {
    pub mean: f64,
    pub stderr: f64,
}

impl MeanEstimate {
    /// Estimates the mean of values. With fewer than two values the standard error is infinite.
    pub(crate) fn from_values(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
        let stderr = match values.len() {
            0 | 1 => f64::INFINITY,
            _ => (squares / (count - 1.0) / count).sqrt(),
        };
        Self { mean, stderr }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_of_the_mean_and_of_a_sample() {
        let mean = MeanEstimate::from_values(&[0.8, 0.9, 1.0]);
        assert!((mean.mean - 0.9).abs() < 1e-12);
        assert!((mean.stderr - 0.1 / 3_f64.sqrt()).abs() < 1e-12, "{}", mean.stderr);
        assert_eq!(MeanEstimate::from_values(&[0.5]).stderr, f64::INFINITY);
    }
}
