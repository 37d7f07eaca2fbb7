//! What `llama-server` is asked for one token's probability, and what it answers. Pure.
//!
//! It tells no probabilities of a prompt's tokens. But it tells those of what it draws, from the
//! logits as they are before any sampler; so the wanted token is forced on its samplers.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::completion::{self, Sampling};

/// What forces a token: above any difference of logits.
const FORCE: f64 = 1e6;

#[derive(Debug, thiserror::Error)]
pub enum ScoringError {
    #[error(
        "llama-server's answer tells no log-probabilities; use a build of 2025 or later (E102)"
    )]
    Json(#[from] serde_json::Error),
    #[error("llama-server tells of token {found:?} where {wanted} was forced (E104)")]
    Other { found: Option<u32>, wanted: u32 },
}

/// For a token behind others.
pub fn request(before: &[u32], token: u32) -> Value {
    let sampling = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0, max_new_tokens: 1 };
    let mut request = completion::request(before, &sampling, 0, true);
    request["logit_bias"] = json!([[token, FORCE]]);
    // The text grows by a token from one request to the next.
    request["cache_prompt"] = json!(true);
    request["response_fields"] = json!(["completion_probabilities"]);
    request
}

#[derive(Deserialize)]
struct Answer {
    completion_probabilities: Vec<Scored>,
}

#[derive(Deserialize)]
struct Scored {
    id: u32,
    logprob: f32,
}

/// The natural logarithm of the forced token's probability.
///
/// # Errors
/// When the answer is none, or of another token.
pub fn answer(body: &[u8], wanted: u32) -> Result<f32, ScoringError> {
    let answer: Answer = serde_json::from_slice(body)?;
    // A character that was not whole may have brought more.
    match answer.completion_probabilities.first() {
        Some(scored) if scored.id == wanted => Ok(scored.logprob),
        other => Err(ScoringError::Other { found: other.map(|scored| scored.id), wanted }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_forced_and_its_own_probability_read() {
        let request = request(&[5, 9], 31);
        assert_eq!(request["logit_bias"], json!([[31, 1e6]]));
        assert_eq!((&request["n_predict"], &request["n_probs"]), (&json!(1), &json!(1)));
        let body = br#"{"completion_probabilities":[{"id":31,"token":"x","logprob":-8.25,
            "top_logprobs":[{"id":100,"token":"y","logprob":-7.5}]}]}"#;
        assert_eq!(answer(body, 31).unwrap(), -8.25);
        assert!(answer(body, 30).unwrap_err().to_string().contains("30 was forced"));
        assert!(answer(br#"{"completion_probabilities":[]}"#, 31).is_err());
        assert!(answer(br#"{"content":"x"}"#, 31).unwrap_err().to_string().contains("build"));
    }
}
