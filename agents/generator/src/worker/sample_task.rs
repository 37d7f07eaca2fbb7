//! One sample to draw from a server over HTTP, in the form that every server client takes.

use std::{rc::Rc, time::Duration};

use llama::completion::LlamaSampling;

use super::{pending_calls::SampleTag, slot_planner::SlotId};

/// The longest time for one token of one sequence, prompt or new, however slow the host.
pub(super) const TOKEN_TIME_MAX: Duration = Duration::from_secs(2);
const SAMPLE_TIMEOUT_MIN: Duration = Duration::from_secs(120);

const ANSWER_BYTES_BASE: usize = 256 * 1024;
const ANSWER_BYTES_PER_TOKEN: usize = 256;

/// Each token comes with its log-probability and the likeliest token, each spelt out byte by byte.
const ANSWER_BYTES_PER_LOGPROB: usize = 4096;

#[derive(Debug, Clone)]
pub(super) enum HttpPrompt {
    Tokens(Vec<u32>),
    Text(String),
}

/// The log-probabilities that samples must have, even if they cost time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum WantedLogprobs {
    #[default]
    None,
    OfSamples,
    OfTokens,
}

impl WantedLogprobs {
    pub(super) fn any(self) -> bool {
        self != Self::None
    }
}

pub(super) struct PreparedRequest {
    pub prompt: HttpPrompt,
    pub sampling: LlamaSampling,
    /// The positions that its longest sample uses.
    pub positions: usize,
    pub wanted: WantedLogprobs,
}

impl PreparedRequest {
    /// Returns the limits of an answer with a number of tokens in time and bytes.
    pub(super) fn answer_limits(&self, new_tokens: u32) -> (Duration, usize) {
        let tokens = u32::try_from(self.positions).unwrap_or(u32::MAX).max(new_tokens);
        let time = TOKEN_TIME_MAX.saturating_mul(tokens).max(SAMPLE_TIMEOUT_MIN);
        let each =
            if self.wanted.any() { ANSWER_BYTES_PER_LOGPROB } else { ANSWER_BYTES_PER_TOKEN };
        (time, ANSWER_BYTES_BASE + each * new_tokens as usize)
    }
}

#[derive(Clone)]
pub(super) struct SampleTask {
    pub tag: SampleTag,
    pub nth: u32,
    pub seed: u64,
    pub request: Rc<PreparedRequest>,
    /// The slot that draws it; without a meaning for an external server.
    pub slot: SlotId,
}

#[derive(Debug)]
pub(super) struct SampleError {
    pub message: String,
    /// True if the connection broke off, so that the server may be gone.
    pub connection_lost: bool,
}
