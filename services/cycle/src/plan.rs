//! How a cycle's samples are cut into jobs.
//!
//! Agents pull jobs as they have room, so a fast box takes more of them. What is left
//! to decide is the size of each: large ones first, to keep batches full, small ones
//! last, so that all boxes finish together (guided self-scheduling, Polychronopoulos
//! and Kuck, 1987).

use wire::v1;

use crate::Fleet;

/// Bounds on the size of jobs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizing {
    /// Smaller jobs cost more in facts than they save in waiting.
    pub samples_min: u32,
    pub samples_max: u32,
    /// A job's facts must fit well under the bus's payload limit, 1 MiB by default.
    pub bytes_max: u64,
}

impl Default for Sizing {
    fn default() -> Self {
        Self { samples_min: 8, samples_max: 1024, bytes_max: 512 * 1024 }
    }
}

/// How much slower the slowest of boxes of unknown speed may be than the average.
const SPREAD_UNKNOWN: f64 = 4.0;

/// A share of what is left goes into each next job, per slowest-box-equivalent.
const SHARE: f64 = 0.5;

/// Bytes a generated token may take in a samples fact, escaped; and a sample beside its text.
const TOKEN_BYTES: u64 = 8;
const SAMPLE_BYTES: u64 = 128;

/// How many of the slowest box would be as fast as the whole fleet.
fn slowest_equivalents(fleet: &Fleet) -> f64 {
    let rates = || fleet.generators.iter().map(|generator| generator.tokens_per_s);
    let slowest = rates().fold(f64::INFINITY, f64::min);
    let boxes = u32::try_from(fleet.generators.len().max(1)).unwrap_or(u32::MAX);
    if slowest.is_finite() && slowest > 0.0 {
        rates().sum::<f64>() / slowest
    } else {
        f64::from(boxes) * SPREAD_UNKNOWN
    }
}

/// What is to be drawn of one prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub line: u32,
    /// Of the prompt's text.
    pub bytes: usize,
    pub count: u32,
}

/// What the jobs of a set of prompts have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind<'a> {
    /// They are named `<prefix><n>`.
    pub prefix: &'a str,
    pub purpose: v1::Purpose,
    pub suite: &'a str,
}

/// Cuts the samples of each prompt into jobs. A prompt's samples stay together where they fit, so
/// that its prefill is shared.
pub(crate) fn cut(
    kind: Kind<'_>,
    prompts: &[Wanted],
    max_new_tokens: u32,
    fleet: &Fleet,
    sizing: &Sizing,
) -> Vec<v1::plan::Job> {
    let sample_bytes = SAMPLE_BYTES + TOKEN_BYTES * u64::from(max_new_tokens);
    let equivalents = slowest_equivalents(fleet);
    let mut left: u64 = prompts.iter().map(|prompt| u64::from(prompt.count)).sum();
    let most = prompts.iter().map(|prompt| prompt.count).max().unwrap_or(1).max(1);
    let mut jobs = Vec::new();
    let next = |left| Open::new(sizing.size(left, equivalents).next_multiple_of(most));
    let mut open = next(left);
    for Wanted { line, bytes: prompt_bytes, count } in prompts.iter().copied() {
        let mut first = 0;
        while first < count {
            let fits = (sizing.bytes_max.saturating_sub(open.bytes + prompt_bytes as u64)
                / sample_bytes)
                .min(u64::from(open.room()));
            let take = u32::try_from(fits).unwrap_or(u32::MAX).min(count - first);
            if take > 0 || open.is_empty() {
                let take = take.max(1);
                open.add(line, first, take, prompt_bytes as u64 + sample_bytes * u64::from(take));
                first += take;
                left -= u64::from(take);
            }
            if first < count || open.room() == 0 {
                jobs.push(open.close(kind, jobs.len()));
                open = next(left);
            }
        }
    }
    if !open.is_empty() {
        jobs.push(open.close(kind, jobs.len()));
    }
    jobs
}

/// The fewest jobs so many samples of one set of prompts can be cut into.
pub(crate) fn jobs_at_least(samples: u64, max_new_tokens: u32, sizing: &Sizing) -> u64 {
    let sample_bytes = SAMPLE_BYTES + TOKEN_BYTES * u64::from(max_new_tokens);
    samples.div_ceil((sizing.bytes_max / sample_bytes).max(1))
}

impl Sizing {
    fn size(&self, left: u64, equivalents: f64) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a sample count, clamped below"
        )]
        let share = (left as f64 * SHARE / equivalents).ceil() as u32;
        share.clamp(self.samples_min.max(1), self.samples_max.max(1))
    }
}

/// A job being filled.
struct Open {
    size: u32,
    filled: u32,
    bytes: u64,
    draws: Vec<v1::plan::Draw>,
}

impl Open {
    fn new(size: u32) -> Self {
        Self { size, filled: 0, bytes: 0, draws: Vec::new() }
    }

    fn room(&self) -> u32 {
        self.size.saturating_sub(self.filled)
    }

    fn is_empty(&self) -> bool {
        self.draws.is_empty()
    }

    fn add(&mut self, prompt: u32, first: u32, count: u32, bytes: u64) {
        self.draws.push(v1::plan::Draw { prompt, first, count });
        self.filled += count;
        self.bytes += bytes;
    }

    fn close(self, kind: Kind<'_>, number: usize) -> v1::plan::Job {
        let Kind { prefix, purpose, suite } = kind;
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
