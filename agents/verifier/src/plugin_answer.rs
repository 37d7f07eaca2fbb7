//! The verdict of a plug-in: the JSON that a command prints or a server answers.

use serde::Deserialize;
use serde_json::{Map, Value};
use wire::v1::verdicts::Outcome;

use crate::judge_result::JudgeResult;

#[derive(Debug, Deserialize)]
struct PluginAnswer {
    outcome: PluginOutcome,
    reward: Option<f64>,
    #[serde(default)]
    detail: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PluginOutcome {
    Pass,
    Fail,
    Error,
}

/// Reads the verdict from a text. Fails with the reason if there is none.
pub(crate) fn parse_verdict(text: &[u8]) -> Result<JudgeResult, String> {
    let answer = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    convert_answer(answer)
}

/// Reads the verdict from an object. Fails with the reason if there is none.
pub(crate) fn read_verdict(answer: Map<String, Value>) -> Result<JudgeResult, String> {
    let answer = PluginAnswer::deserialize(Value::Object(answer));
    convert_answer(answer.map_err(|error| error.to_string())?)
}

fn convert_answer(answer: PluginAnswer) -> Result<JudgeResult, String> {
    let (outcome, default) = match answer.outcome {
        PluginOutcome::Pass => (Outcome::Pass, 1.0),
        PluginOutcome::Fail => (Outcome::Fail, 0.0),
        PluginOutcome::Error => (Outcome::Error, 0.0),
    };
    let reward = answer.reward.unwrap_or(default);
    if !reward.is_finite() {
        return Err("its reward is not a number".to_owned());
    }
    let result = JudgeResult::from_outcome(outcome, reward, answer.detail);
    Ok(JudgeResult { retry_elsewhere: outcome == Outcome::Error, ..result })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_an_outcome_with_the_reward_that_it_usually_has() {
        for (text, outcome, reward) in [
            (r#"{"outcome": "pass"}"#, Outcome::Pass, 1.0_f64),
            (r#"{"outcome": "fail", "reward": 0.25, "more": 1}"#, Outcome::Fail, 0.25),
            (r#"{"outcome": "error", "detail": "no model"}"#, Outcome::Error, 0.0),
        ] {
            let result = parse_verdict(text.as_bytes()).unwrap();
            assert_eq!((result.outcome, result.reward.to_bits()), (outcome, reward.to_bits()));
            assert_eq!(result.retry_elsewhere, outcome == Outcome::Error);
            let Value::Object(answer) = serde_json::from_str(text).unwrap() else { panic!() };
            assert_eq!(read_verdict(answer).unwrap(), result);
        }
        for text in
            ["", "{}", "[]", r#"{"outcome": "won"}"#, r#"{"outcome": "pass", "reward": 1e999}"#]
        {
            assert!(parse_verdict(text.as_bytes()).is_err(), "{text}");
        }
    }
}
