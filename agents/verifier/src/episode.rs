//! Episodes as they were drawn, and the requests to environments.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A turn of the model, and what the environment answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlayedTurn {
    pub action: String,
    pub observation: String,
}

/// An episode as it was drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlayedEpisode {
    /// See `wire::derive_environment_seed`.
    pub seed: u64,
    pub turns: Vec<PlayedTurn>,
    /// True if the model had no room for another token, so that the environment had not ended it.
    pub is_cut: bool,
}

/// The request for an answer, as an environment reads it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ActionRequest {
    pub prompt: Map<String, Value>,
    pub seed: u64,
    pub history: Vec<PlayedTurn>,
    pub action: String,
    pub last: bool,
}

/// An environment's answer to an action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnvironmentAnswer {
    #[serde(default)]
    pub observation: String,
    #[serde(default)]
    pub reward: f64,
    /// True if the episode has ended.
    #[serde(default, rename = "done")]
    pub is_done: bool,
}

impl EnvironmentAnswer {
    /// Parses the answer to a request. The error describes what is wrong with it.
    pub(crate) fn parse(answer: Map<String, Value>, is_last: bool) -> Result<Self, String> {
        let answer: Self = serde_json::from_value(Value::Object(answer))
            .map_err(|error| format!("it answered no observation, reward and done: {error}"))?;
        if !answer.reward.is_finite() {
            return Err("its reward is not a number".into());
        }
        if is_last && !answer.is_done {
            return Err("it did not end the episode at the last turn, which has \"last\": true: \
                        answer \"done\": true then"
                .into());
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_that_are_none_are_described() {
        let parse = |answer: Value, is_last| {
            let Value::Object(answer) = answer else { panic!("an object") };
            EnvironmentAnswer::parse(answer, is_last)
        };
        let bare = EnvironmentAnswer { observation: String::new(), reward: 0.0, is_done: true };
        assert_eq!(parse(json!({ "done": true, "more": 1 }), true), Ok(bare));
        for (answer, is_last, words) in [
            (json!({ "observation": 4 }), false, "no observation"),
            (json!({ "reward": "1" }), false, "no observation"),
            (json!({ "observation": "x" }), true, "at the last turn"),
        ] {
            let error = parse(answer, is_last).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
