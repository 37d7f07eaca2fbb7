//! Summarises a finished cycle: pass rates, phase durations, energy, and samples per agent.

use std::collections::BTreeMap;

use wire::v1::{self, verdicts::Outcome};

use crate::{
    gates::{self, GateResult},
    state::{Cycle, PhaseTimes, Run},
};

pub(crate) fn summarize_cycle(run: &Run, number: u32, cycle: &Cycle) -> v1::CycleDone {
    let figures = compute_metrics(run, number, cycle);
    let GateResult { findings, best_cycle: best, action: then } =
        gates::evaluate_gates(run, number, cycle, &figures);
    v1::CycleDone { findings, best, then: then.into(), ..figures }
}

fn compute_metrics(run: &Run, number: u32, cycle: &Cycle) -> v1::CycleDone {
    let times = PhaseDurations::from_times(&cycle.times);
    let (joules, metered) = sampling_energy(cycle);
    v1::CycleDone {
        cycle: number,
        sampled: cycle
            .jobs_for(v1::Purpose::Train)
            .filter_map(|(_, job)| job.samples.as_ref())
            .map(|samples| samples.count)
            .sum(),
        kept: cycle.selected.as_ref().map_or(0, |selected| selected.kept),
        heldout: mean_rate(&judged_prompts(cycle, v1::Purpose::Heldout, "")),
        train: mean_rate(&judged_prompts(cycle, v1::Purpose::Train, "")),
        generate_s: times.generate,
        verify_s: times.verify,
        train_s: times.train,
        eval_s: times.evaluate,
        samples_by_agent: count_by_agent(cycle),
        set_aside: cycle
            .set_aside_samples(v1::Purpose::Train)
            .saturating_add(cycle.set_aside_samples(v1::Purpose::Heldout)),
        joules,
        metered,
        pass_at: run.raft_spec().map_or_else(Vec::new, |raft| {
            pass_at_k(&raft.pass_at, &judged_prompts(cycle, v1::Purpose::Heldout, ""))
        }),
        suites: suite_rates(run, cycle),
        ..Default::default()
    }
}

/// Returns joules spent on training samples, and the number of samples for which they were
/// measured.
fn sampling_energy(cycle: &Cycle) -> (f64, u32) {
    let drawn = cycle.jobs_for(v1::Purpose::Train).filter_map(|(_, job)| job.samples.as_ref());
    let measured = drawn.filter(|samples| samples.joules.is_finite() && samples.joules > 0.0);
    measured.fold((0.0, 0_u32), |(joules, metered), samples| {
        (joules + samples.joules, metered.saturating_add(samples.count))
    })
}

/// The duration of each phase in seconds. Phases follow each other: verification that overlaps
/// generation counts as generation, so the durations add up to the cycle. With staleness, the
/// samples of the next cycle overlap the current one.
struct PhaseDurations {
    generate: f64,
    verify: f64,
    train: f64,
    evaluate: f64,
}

impl PhaseDurations {
    /// Uses 0 for a phase that did not happen.
    fn from_times(times: &PhaseTimes) -> Self {
        let span = |from: Option<u64>, to: Option<u64>| match (from, to) {
            (Some(from), Some(to)) => to_seconds(to.saturating_sub(from)),
            _ => 0.0,
        };
        // In a cycle without training, evaluation starts with the plan.
        let measured_from = times.trained.max(times.planned);
        Self {
            generate: span(times.planned, times.last_samples),
            verify: span(times.last_samples, times.last_verdicts),
            train: span(times.train_ordered, times.trained),
            evaluate: span(measured_from, times.last_evaluation),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a duration of under 100 000 years")]
fn to_seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

fn count_by_agent(cycle: &Cycle) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for samples in cycle.jobs.values().filter_map(|job| job.samples.as_ref()) {
        *counts.entry(samples.agent.clone()).or_default() += samples.count;
    }
    counts
}

fn suite_rates(run: &Run, cycle: &Cycle) -> Vec<v1::cycle_done::SuiteRate> {
    let measured = cycle.final_checkpoint().is_some();
    let suites = run.raft_spec().filter(|_| measured).map_or(&[][..], |raft| &raft.prompt_suites);
    let of = |suite: &v1::PromptSuite| {
        let judged = judged_prompts(cycle, v1::Purpose::Heldout, &suite.name);
        let pass_at = pass_at_k(&suite.pass_at, &judged);
        v1::cycle_done::SuiteRate { suite: suite.name.clone(), rate: mean_rate(&judged), pass_at }
    };
    suites.iter().map(of).collect()
}

/// Returns the pass rates of the final checkpoint. `None` if no held-out sample was judged.
pub(crate) fn pass_rates(run: &Run, number: u32, cycle: &Cycle) -> Option<v1::PassRates> {
    let checkpoint = cycle.final_checkpoint()?;
    let v1::CycleDone { heldout, pass_at, suites, .. } = compute_metrics(run, number, cycle);
    let is_measured = heldout.is_some() || suites.iter().any(|suite| suite.rate.is_some());
    is_measured.then(|| v1::PassRates {
        run: run.id.to_string(),
        cycle: number,
        step: checkpoint.step,
        manifest: checkpoint.tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone()),
        heldout,
        pass_at,
        suites,
    })
}

/// Samples of a prompt that passed, and that were judged.
type PassTally = (u32, u32);

/// Returns the mean over prompts of each prompt's pass rate, with its standard error. `None` if no
/// prompt was judged.
fn mean_rate(judged: &[PassTally]) -> Option<v1::cycle_done::Rate> {
    let count = u32::try_from(judged.len()).unwrap_or(u32::MAX);
    if count == 0 {
        return None;
    }
    let shares = || judged.iter().map(|(passed, judged)| f64::from(*passed) / f64::from(*judged));
    let mean = shares().sum::<f64>() / f64::from(count);
    let squares = shares().map(|share| (share - mean).powi(2)).sum::<f64>();
    let variance = squares / f64::from(count.saturating_sub(1).max(1));
    Some(v1::cycle_done::Rate {
        mean,
        stderr: (variance / f64::from(count)).sqrt(),
        prompts: count,
        samples: judged.iter().map(|(_, judged)| judged).sum(),
    })
}

/// Ignores verifier errors and void samples.
fn judged_prompts(cycle: &Cycle, purpose: v1::Purpose, suite: &str) -> Vec<PassTally> {
    let mut prompts: BTreeMap<&str, PassTally> = BTreeMap::new();
    for (_, job) in cycle.jobs_for_suite(purpose, suite) {
        if job.samples.as_ref().is_none_or(|samples| samples.void_reason.is_some()) {
            continue;
        }
        for verdict in job.verdicts.iter().flat_map(|verdicts| &verdicts.verdicts) {
            let (passed, judged) = prompts.entry(verdict.prompt_id.as_str()).or_default();
            match verdict.outcome() {
                Outcome::Pass => (*passed, *judged) = (*passed + 1, *judged + 1),
                Outcome::Fail => *judged += 1,
                Outcome::Error | Outcome::Unspecified => {}
            }
        }
    }
    prompts.into_values().filter(|(_, judged)| *judged > 0).collect()
}

/// Returns the mean pass@k and its 95 % interval, for each k for which at least one prompt has
/// enough samples.
fn pass_at_k(wanted: &[u32], judged: &[PassTally]) -> Vec<v1::cycle_done::PassAt> {
    let of = |k: u32| {
        let prompts: Vec<f64> = judged
            .iter()
            .filter(|(_, judged)| *judged >= k && k > 0)
            .map(|(passed, judged)| pass_at_k_estimate(*judged, *passed, k))
            .collect();
        let count = f64::from(u32::try_from(prompts.len()).unwrap_or(u32::MAX));
        let mean = prompts.iter().sum::<f64>() / count;
        let (low, high) = wilson_interval(mean, count);
        (count > 0.0).then_some(v1::cycle_done::PassAt { k, mean, low, high })
    };
    wanted.iter().filter_map(|k| of(*k)).collect()
}

/// Estimates the probability that at least one of `k` samples passes, given that `passed` of
/// `samples` did. Unbiased (Chen et al., 2021, arXiv:2107.03374, in the product form without
/// factorials).
fn pass_at_k_estimate(samples: u32, passed: u32, k: u32) -> f64 {
    if samples - passed < k {
        return 1.0;
    }
    let fails: f64 =
        (samples - passed + 1..=samples).map(|n| 1.0 - f64::from(k) / f64::from(n)).product();
    1.0 - fails
}

/// Computes Wilson's score interval at 95 %. It assumes that each value is 0 or 1; values between
/// vary less, so the interval is never too narrow.
fn wilson_interval(mean: f64, count: f64) -> (f64, f64) {
    const Z: f64 = 1.959_963_984_540_054;
    let square = Z * Z / count;
    let middle = (mean + square / 2.0) / (1.0 + square);
    let spread =
        Z / (1.0 + square) * (mean * (1.0 - mean) / count + square / (4.0 * count)).max(0.0).sqrt();
    ((middle - spread).max(0.0), (middle + spread).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_at_k_is_what_drawing_k_of_them_gives() {
        assert!((pass_at_k_estimate(5, 2, 1) - 0.4).abs() < 1e-12);
        // 1 - C(3,2)/C(5,2)
        assert!((pass_at_k_estimate(5, 2, 2) - 0.7).abs() < 1e-12);
        assert_eq!(
            pass_at_k_estimate(5, 2, 4),
            1.0,
            "of any four, two of which passed of five, one did"
        );
        assert_eq!(pass_at_k_estimate(5, 0, 3), 0.0);
        assert_eq!(pass_at_k_estimate(1, 1, 1), 1.0);
    }

    #[test]
    fn an_interval_holds_its_mean_and_knows_that_few_prompts_say_little() {
        // As in Wilson's own table: 0 of 10 leaves up to 0.278.
        let (low, high) = wilson_interval(0.0, 10.0);
        assert!(low.abs() < 1e-12 && (high - 0.2775).abs() < 1e-3, "{low} {high}");
        let (low, high) = wilson_interval(0.5, 100.0);
        assert!((low - 0.4038).abs() < 1e-3 && (high - 0.5962).abs() < 1e-3, "{low} {high}");
    }
}
