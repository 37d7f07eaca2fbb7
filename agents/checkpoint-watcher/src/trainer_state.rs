//! Parses `trainer_state.json`: the progress and the loss history of a training.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The used fields of `trainer_state.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TrainerState {
    pub global_step: u64,
    /// 0 or less if unknown.
    #[serde(default)]
    max_steps: i64,
    #[serde(default)]
    num_input_tokens_seen: Option<f64>,
    #[serde(default)]
    log_history: Vec<Map<String, Value>>,
}

/// Metrics of the steps before a checkpoint, for its fact.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, Deserialize)]
pub struct TrainingFigures {
    /// The mean training loss, if one was logged.
    pub loss: Option<f64>,
    /// The last logged one, 0 without.
    pub learning_rate: f64,
    /// Input tokens since the training began, 0 if unknown.
    pub tokens: u64,
}

impl TrainerState {
    /// Returns `None` if the file is invalid or incomplete.
    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(&replace_nan(text)).ok()
    }

    /// Returns the number of planned steps, if it is known.
    pub(crate) fn planned_steps(&self) -> Option<u32> {
        u32::try_from(self.max_steps).ok().filter(|steps| *steps > 0)
    }

    /// Returns the metrics since a step: the mean of the losses logged after it, or the last logged
    /// loss before it.
    pub(crate) fn figures_since(&self, after: u32) -> TrainingFigures {
        let of_step = |entry: &&Map<String, Value>| {
            let step = entry.get("step").and_then(Value::as_f64);
            step.is_some_and(|step| step > f64::from(after))
        };
        let losses = |entry: &Map<String, Value>| read_number(entry, "loss");
        let since: Vec<f64> = self.log_history.iter().filter(of_step).filter_map(losses).collect();
        #[expect(clippy::cast_precision_loss, reason = "as many steps as a file of text has lines")]
        let mean = || since.iter().sum::<f64>() / since.len() as f64;
        let last = || self.log_history.iter().rev().find_map(losses);
        let rate =
            self.log_history.iter().rev().find_map(|entry| read_number(entry, "learning_rate"));
        TrainingFigures {
            loss: if since.is_empty() { last() } else { Some(mean()) },
            learning_rate: rate.unwrap_or(0.0),
            tokens: self.num_input_tokens_seen.map_or(0, saturating_count),
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
fn saturating_count(count: f64) -> u64 {
    count as u64
}

/// Reads `null` as NaN.
fn read_number(entry: &Map<String, Value>, key: &str) -> Option<f64> {
    match entry.get(key)? {
        Value::Null => Some(f64::NAN),
        value => value.as_f64(),
    }
}

/// Replaces `NaN` and `Infinity` by `null`. Python writes them if a training diverged, but they are
/// not JSON.
fn replace_nan(text: &[u8]) -> Cow<'_, [u8]> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut out: Option<Vec<u8>> = None;
    let (mut at, mut in_string) = (0, false);
    while at < text.len() {
        let rest = &text[at..];
        let word = WORDS.iter().find(|word| !in_string && rest.starts_with(word));
        let (taken, written): (usize, &[u8]) = match (word, in_string, rest[0]) {
            (Some(word), ..) => (word.len(), b"null"),
            (None, true, b'\\') => (rest.len().min(2), &rest[..rest.len().min(2)]),
            (None, _, byte) => {
                in_string ^= byte == b'"';
                (1, &rest[..1])
            }
        };
        if word.is_some() {
            out.get_or_insert_with(|| text[..at].to_vec());
        }
        if let Some(out) = &mut out {
            out.extend_from_slice(written);
        }
        at += taken;
    }
    out.map_or(Cow::Borrowed(text), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: &str = r#"{"global_step": 30, "max_steps": 90, "num_input_tokens_seen": 1234,
        "log_history": [
            {"step": 10, "loss": 3.0, "learning_rate": 0.3},
            {"step": 20, "loss": 2.0, "learning_rate": 0.2},
            {"step": 30, "loss": 1.0, "learning_rate": 0.1, "grad_norm": NaN},
            {"step": 30, "eval_loss": 9.0}]}"#;

    #[test]
    fn the_loss_is_the_mean_of_what_was_logged_since_the_checkpoint_before() {
        let state = TrainerState::parse(STATE.as_bytes()).unwrap();
        assert_eq!((state.global_step, state.planned_steps()), (30, Some(90)));
        let figures = |after| state.figures_since(after);
        let expected = TrainingFigures { loss: Some(1.5), learning_rate: 0.1, tokens: 1234 };
        assert_eq!(figures(10), expected);
        assert_eq!(figures(0).loss, Some(2.0));
        assert_eq!(figures(30).loss, Some(1.0), "nothing was logged since");
    }

    #[test]
    fn a_training_that_diverged_is_still_readable() {
        let text = STATE.replace("1.0", "NaN").replace("2.0", "-Infinity");
        let state = TrainerState::parse(text.as_bytes()).unwrap();
        assert!(state.figures_since(20).loss.unwrap().is_nan());
        let quoted = br#"{"global_step": 1, "best": "a \" NaN \\", "x": Infinity}"#;
        assert!(TrainerState::parse(quoted).is_some());
        assert_eq!(
            &*replace_nan(br#"{"NaN": "NaN\"", "y": NaN}"#),
            br#"{"NaN": "NaN\"", "y": null}"#
        );
    }

    #[test]
    fn what_is_half_written_is_no_state() {
        for cut in 0..STATE.len() {
            assert_eq!(TrainerState::parse(&STATE.as_bytes()[..cut]), None, "{cut} bytes");
        }
        let bare = TrainerState::parse(br#"{"global_step": 5, "max_steps": -1}"#).unwrap();
        assert_eq!(
            (bare.planned_steps(), bare.figures_since(0)),
            (None, TrainingFigures::default())
        );
    }
}
