//! Splits the samples of a cycle into jobs.
//!
//! Agents pull jobs when they have capacity, so a fast agent takes more of them. Only the size of
//! each job is decided here: large jobs first, to keep batches full, small jobs last, so that all
//! agents finish together (guided self-scheduling, Polychronopoulos and Kuck, 1987).

use wire::{LAST_OBSERVATION_BYTES_MAX, v1};

use crate::FleetSnapshot;

/// Bounds on the size of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobSizing {
    /// Smaller jobs cost more in facts than they save in waiting.
    pub samples_min: u32,
    pub samples_max: u32,
    /// Maximum estimated size of a job's facts. Must be well below the payload limit of the bus, 1
    /// MiB by default.
    pub bytes_max: u64,
}

impl Default for JobSizing {
    fn default() -> Self {
        Self { samples_min: 8, samples_max: 1024, bytes_max: 512 * 1024 }
    }
}

/// Assumed ratio of the average to the slowest generator while speeds are unknown.
const UNKNOWN_SPREAD: f64 = 4.0;

/// Share of the remaining samples that goes into the next job, divided by the number of
/// slowest-agent equivalents.
const REMAINING_SHARE: f64 = 0.5;

/// Maximum bytes of a generated token in a samples fact, after JSON escaping.
const TOKEN_BYTES: u64 = 8;
/// Bytes in addition to the text.
const SAMPLE_BYTES: u64 = 128;
/// Maximum bytes of a token's log-probability: two bytes in base64, and its id if the text has other
/// tokens.
const LOGPROB_BYTES: u64 = 10;

/// Maximum bytes of a token's id and of its text in a turn, beside its text in the sample.
const TURN_TOKEN_BYTES: u64 = 8 + TOKEN_BYTES;

/// Returns the maximum bytes of a sample in a samples fact.
pub(crate) fn estimate_sample_bytes(
    max_new_tokens: u32,
    token_logprobs: bool,
    episodes: bool,
) -> u64 {
    let each = TOKEN_BYTES
        + if token_logprobs { LOGPROB_BYTES } else { 0 }
        + if episodes { TURN_TOKEN_BYTES } else { 0 };
    let last = if episodes { LAST_OBSERVATION_BYTES_MAX as u64 } else { 0 };
    SAMPLE_BYTES + last + each * u64::from(max_new_tokens)
}

/// Returns how many copies of the slowest generator would be as fast as the whole fleet.
fn slowest_equivalents(fleet: &FleetSnapshot) -> f64 {
    let rates = || fleet.generators.iter().map(|generator| generator.tokens_per_s);
    let slowest = rates().fold(f64::INFINITY, f64::min);
    let boxes = u32::try_from(fleet.generators.len().max(1)).unwrap_or(u32::MAX);
    if slowest.is_finite() && slowest > 0.0 {
        rates().sum::<f64>() / slowest
    } else {
        f64::from(boxes) * UNKNOWN_SPREAD
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromptDraw {
    /// Counted from 0.
    pub line: u32,
    pub prompt_bytes: usize,
    pub count: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct JobTemplate<'a> {
    /// Job names are `<prefix><n>`.
    pub prefix: &'a str,
    pub purpose: v1::Purpose,
    pub suite: &'a str,
}

/// Keeps the samples of one prompt together if they fit, so that their prefill is shared.
pub(crate) fn split_into_jobs(
    kind: JobTemplate<'_>,
    prompts: &[PromptDraw],
    sample_bytes: u64,
    fleet: &FleetSnapshot,
    sizing: &JobSizing,
) -> Vec<v1::plan::Job> {
    let equivalents = slowest_equivalents(fleet);
    let mut left: u64 = prompts.iter().map(|prompt| u64::from(prompt.count)).sum();
    let most = prompts.iter().map(|prompt| prompt.count).max().unwrap_or(1).max(1);
    let mut jobs = Vec::new();
    let next = |left| JobBuilder::new(sizing.next_size(left, equivalents).next_multiple_of(most));
    let mut open = next(left);
    for PromptDraw { line, prompt_bytes, count } in prompts.iter().copied() {
        let mut first = 0;
        while first < count {
            let fits = (sizing.bytes_max.saturating_sub(open.bytes + prompt_bytes as u64)
                / sample_bytes)
                .min(u64::from(open.remaining_room()));
            let take = u32::try_from(fits).unwrap_or(u32::MAX).min(count - first);
            if take > 0 || open.is_empty() {
                let take = take.max(1);
                open.add_draw(
                    line,
                    first,
                    take,
                    prompt_bytes as u64 + sample_bytes * u64::from(take),
                );
                first += take;
                left -= u64::from(take);
            }
            if first < count || open.remaining_room() == 0 {
                jobs.push(open.into_job(kind, jobs.len()));
                open = next(left);
            }
        }
    }
    if !open.is_empty() {
        jobs.push(open.into_job(kind, jobs.len()));
    }
    jobs
}

/// Returns the minimum number of jobs for the samples of one prompt set.
pub(crate) fn job_count_min(samples: u64, sample_bytes: u64, sizing: &JobSizing) -> u64 {
    samples.div_ceil((sizing.bytes_max / sample_bytes).max(1))
}

impl JobSizing {
    fn next_size(&self, left: u64, equivalents: f64) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a sample count, clamped below"
        )]
        let share = (left as f64 * REMAINING_SHARE / equivalents).ceil() as u32;
        share.clamp(self.samples_min.max(1), self.samples_max.max(1))
    }
}

struct JobBuilder {
    size: u32,
    filled: u32,
    bytes: u64,
    draws: Vec<v1::plan::Draw>,
}

impl JobBuilder {
    fn new(size: u32) -> Self {
        Self { size, filled: 0, bytes: 0, draws: Vec::new() }
    }

    fn remaining_room(&self) -> u32 {
        self.size.saturating_sub(self.filled)
    }

    fn is_empty(&self) -> bool {
        self.draws.is_empty()
    }

    fn add_draw(&mut self, prompt: u32, first: u32, count: u32, bytes: u64) {
        self.draws.push(v1::plan::Draw { prompt, first, count });
        self.filled += count;
        self.bytes += bytes;
    }

    fn into_job(self, kind: JobTemplate<'_>, number: usize) -> v1::plan::Job {
        let JobTemplate { prefix, purpose, suite } = kind;
        v1::plan::Job {
            job: format!("{prefix}{number:05}"),
            purpose: purpose.into(),
            draws: self.draws,
            suite: suite.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
