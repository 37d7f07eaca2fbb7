//! What a finished cycle amounts to: pass rates, phases, who made what.

use std::collections::BTreeMap;

use wire::v1::{self, verdicts::Outcome};

use crate::state::{Cycle, Times};

/// The summary a `cycle.<c>.done` fact carries.
pub(crate) fn summarize(number: u32, cycle: &Cycle) -> v1::CycleDone {
    let times = Spans::of(&cycle.times);
    let (joules, metered) = energy(cycle);
    v1::CycleDone {
        cycle: number,
        sampled: cycle
            .jobs_for(v1::Purpose::Train)
            .filter_map(|(_, job)| job.samples.as_ref())
            .map(|samples| samples.count)
            .sum(),
        kept: cycle.selected.as_ref().map_or(0, |selected| selected.kept),
        heldout: rate(cycle, v1::Purpose::Heldout),
        train: rate(cycle, v1::Purpose::Train),
        generate_s: times.generate,
        verify_s: times.verify,
        train_s: times.train,
        eval_s: times.evaluate,
        samples_by_agent: samples_by_agent(cycle),
        set_aside: cycle
            .set_aside(v1::Purpose::Train)
            .saturating_add(cycle.set_aside(v1::Purpose::Heldout)),
        joules,
        metered,
    }
}

/// What drawing training samples took where it was measured, and how many those were.
fn energy(cycle: &Cycle) -> (f64, u32) {
    let drawn = cycle.jobs_for(v1::Purpose::Train).filter_map(|(_, job)| job.samples.as_ref());
    let measured = drawn.filter(|samples| samples.joules.is_finite() && samples.joules > 0.0);
    measured.fold((0.0, 0_u32), |(joules, metered), samples| {
        (joules + samples.joules, metered.saturating_add(samples.count))
    })
}

/// Seconds of each phase. They follow each other: verification that overlaps
/// generation counts as generation, so the phases add up to the cycle.
struct Spans {
    generate: f64,
    verify: f64,
    train: f64,
    evaluate: f64,
}

impl Spans {
    fn of(times: &Times) -> Self {
        let span = |from: Option<u64>, to: Option<u64>| match (from, to) {
            (Some(from), Some(to)) => seconds(to.saturating_sub(from)),
            _ => 0.0,
        };
        // Without training, what is measured is measured from the start.
        let measured_from = times.trained.max(times.planned);
        Self {
            generate: span(times.planned, times.last_samples),
            verify: span(times.last_samples, times.last_verdicts),
            train: span(times.train_ordered, times.trained),
            evaluate: span(measured_from, times.last_measure),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a duration of under 100 000 years")]
fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

fn samples_by_agent(cycle: &Cycle) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for samples in cycle.jobs.values().filter_map(|job| job.samples.as_ref()) {
        *counts.entry(samples.agent.clone()).or_default() += samples.count;
    }
    counts
}

/// The mean over prompts of each prompt's share of passes. Samples whose verifier
/// failed, and void ones, count neither way. `None` when there are no such jobs.
fn rate(cycle: &Cycle, purpose: v1::Purpose) -> Option<v1::cycle_done::Rate> {
    let mut prompts: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for (_, job) in cycle.jobs_for(purpose) {
        if job.samples.as_ref().is_none_or(|samples| samples.void.is_some()) {
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
    let judged: Vec<(u32, u32)> = prompts.into_values().filter(|(_, judged)| *judged > 0).collect();
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
