//! The result of judging one completion.

use wire::v1::verdicts::{Outcome, Verdict};

use crate::calls::VerifyItem;

/// In a verdict's detail.
const DETAIL_BYTES_MAX: usize = 500;

/// The result for one completion, before it is attached to a sample.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JudgeResult {
    pub outcome: Outcome,
    pub reward: f64,
    pub detail: String,
    /// True for an error that another host or another attempt may not produce.
    pub retry_elsewhere: bool,
    /// True for such an error that other completions would get too, because the verifier's server or
    /// executable is not there.
    pub is_unreachable: bool,
}

impl JudgeResult {
    pub(crate) fn full_pass() -> Self {
        Self::from_outcome(Outcome::Pass, 1.0, String::new())
    }

    pub(crate) fn failed_because(detail: impl Into<String>) -> Self {
        Self::from_outcome(Outcome::Fail, 0.0, detail.into())
    }

    /// Returns an error that every host would produce.
    pub(crate) fn input_error(detail: impl Into<String>) -> Self {
        Self::from_outcome(Outcome::Error, 0.0, detail.into())
    }

    /// Returns an error that this host probably causes.
    pub(crate) fn host_error(detail: impl Into<String>) -> Self {
        Self { retry_elsewhere: true, ..Self::input_error(detail) }
    }

    /// Returns an error because the verifier's server or executable is not there.
    pub(crate) fn unreachable_error(detail: impl Into<String>) -> Self {
        Self { is_unreachable: true, ..Self::host_error(detail) }
    }

    /// Returns a result that another host would produce too.
    pub(crate) fn from_outcome(outcome: Outcome, reward: f64, detail: String) -> Self {
        Self { outcome, reward, detail, retry_elsewhere: false, is_unreachable: false }
    }

    pub(crate) fn with_reward(self, reward: f64) -> Self {
        Self { reward, ..self }
    }

    /// Truncates the detail.
    pub(crate) fn into_verdict(mut self, item: &VerifyItem) -> Verdict {
        self.detail.truncate(truncation_index(&self.detail, DETAIL_BYTES_MAX));
        Verdict {
            prompt_id: item.prompt_id.clone(),
            index: item.index,
            outcome: self.outcome.into(),
            reward: self.reward,
            detail: self.detail,
        }
    }
}

fn truncation_index(text: &str, most: usize) -> usize {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}
