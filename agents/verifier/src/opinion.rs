//! What a judge thinks of one completion.

use wire::v1::verdicts::{Outcome, Verdict};

use crate::calls::Item;

/// Longest detail a verdict carries.
const DETAIL_BYTES_MAX: usize = 500;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Opinion {
    pub outcome: Outcome,
    pub reward: f64,
    pub detail: String,
    /// Of an error: another box, or another try, may fare better.
    pub elsewhere: bool,
}

impl Opinion {
    pub(crate) fn pass() -> Self {
        Self { outcome: Outcome::Pass, reward: 1.0, detail: String::new(), elsewhere: false }
    }

    pub(crate) fn fail(detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { outcome: Outcome::Fail, reward: 0.0, detail, elsewhere: false }
    }

    /// The prompt or the settings are at fault: nobody can judge it.
    pub(crate) fn error(detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { outcome: Outcome::Error, reward: 0.0, detail, elsewhere: false }
    }

    /// Something of this box is at fault, as far as is known.
    pub(crate) fn trouble(detail: impl Into<String>) -> Self {
        Self { elsewhere: true, ..Self::error(detail) }
    }

    /// With part of a pass's reward.
    pub(crate) fn worth(self, reward: f64) -> Self {
        Self { reward, ..self }
    }

    pub(crate) fn on(mut self, item: &Item) -> Verdict {
        self.detail.truncate(cut(&self.detail, DETAIL_BYTES_MAX));
        Verdict {
            prompt_id: item.prompt_id.clone(),
            index: item.index,
            outcome: self.outcome.into(),
            reward: self.reward,
            detail: self.detail,
        }
    }
}

/// Where a text may be cut so that it has at most so many bytes.
fn cut(text: &str, most: usize) -> usize {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}
