//! Builds the `llama-server` request for the probability of one token, and parses its reply. Pure.
//!
//! The server reports no probabilities of a prompt's tokens. It reports those of the tokens it
//! draws, from the logits before any sampler. Therefore the request forces its samplers to draw the
//! wanted token.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::completion::{self, LlamaSampling};

/// The logit bias that forces a token; larger than any difference of logits.
const FORCE: f64 = 1e6;

/// An error in a reply to a scoring request.
#[derive(Debug, thiserror::Error)]
pub enum ScoringError {
    #[error(
        "llama-server's answer is not one of the forms of 2025 or later; use such a build (E102)"
    )]
    Json(#[from] serde_json::Error),
    #[error(
        "llama-server reported no probability of token {0}, because it is only part of a \
         character, or because the build is older than 2025 (E102)"
    )]
    Missing(u32),
    #[error("llama-server reported token {found} where {wanted} was forced (E104)")]
    Other { found: u32, wanted: u32 },
}

/// Returns the body of a request for the probability of `token` after the tokens `before`, on a
/// slot of the server; `None` for any.
pub fn build_request(before: &[u32], token: u32, slot: Option<u32>) -> Value {
    let sampling = LlamaSampling { temperature: 0.0, top_k: 1, top_p: 1.0, max_new_tokens: 1 };
    let mut request = completion::build_request(before, &sampling, 0, true, slot);
    request["logit_bias"] = json!([[token, FORCE]]);
    request["response_fields"] = json!(["completion_probabilities"]);
    request
}

#[derive(Deserialize)]
struct ScoringReply {
    #[serde(default)]
    completion_probabilities: Vec<ForcedToken>,
}

#[derive(Deserialize)]
struct ForcedToken {
    id: u32,
    logprob: f32,
}

/// Parses the log-probability of the forced token, in nats. A reply about another token is an
/// error.
pub fn parse_logprob(body: &[u8], wanted: u32) -> Result<f32, ScoringError> {
    let answer: ScoringReply = serde_json::from_slice(body)?;
    // There may be further entries if a character was incomplete.
    match answer.completion_probabilities.first() {
        Some(scored) if scored.id == wanted => Ok(scored.logprob),
        Some(scored) => Err(ScoringError::Other { found: scored.id, wanted }),
        None => Err(ScoringError::Missing(wanted)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_forced_and_its_own_probability_read() {
        let request = build_request(&[5, 9], 31, Some(2));
        assert_eq!(request["logit_bias"], json!([[31, 1e6]]));
        assert_eq!((&request["n_predict"], &request["n_probs"]), (&json!(1), &json!(1)));
        assert_eq!(request["id_slot"], json!(2));
        let body = br#"{"completion_probabilities":[{"id":31,"token":"x","logprob":-8.25,
            "top_logprobs":[{"id":100,"token":"y","logprob":-7.5}]}]}"#;
        assert_eq!(parse_logprob(body, 31).unwrap(), -8.25);
        assert!(parse_logprob(body, 30).unwrap_err().to_string().contains("30 was forced"));
        for missing in [&br#"{"completion_probabilities":[]}"#[..], br#"{"content":"x"}"#] {
            let error = parse_logprob(missing, 31).unwrap_err();
            assert!(matches!(error, ScoringError::Missing(31)), "{error}");
        }
        assert!(parse_logprob(b"[]", 31).is_err());
    }
}
