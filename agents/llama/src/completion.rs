//! Builds the `llama-server` requests for a prompt and for one sample, and parses the reply to the
//! latter. Pure.

use serde::Deserialize;
use serde_json::{Value, json};

/// The sampling parameters of a request, as in a generate order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlamaSampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Samples from this number of most likely tokens; 0 keeps the whole vocabulary.
    pub top_k: u32,
    /// Samples from this share of the probability; 1 keeps the whole distribution.
    pub top_p: f64,
    pub max_new_tokens: u32,
}

/// One sample that `llama-server` drew.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaCompletion {
    /// Empty if the build does not report them.
    pub tokens: Vec<u32>,
    pub text: String,
    /// The number of drawn tokens, including the one that ended the sequence.
    pub count: u32,
    pub stop: CompletionStop,
    /// The log-probability of each token in nats, over the whole vocabulary at temperature 1. Empty
    /// if not requested, or if a token lacks one: the server omits tokens of a character that was
    /// still incomplete.
    pub logprobs: Vec<f64>,
}

/// The reason why a sample ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionStop {
    /// The model drew a token that ends the sequence.
    End,
    /// The sample reached its token limit.
    Limit,
}

/// An error in a reply of `llama-server`.
#[derive(Debug, thiserror::Error)]
pub enum CompletionError {
    #[error("llama-server's answer is not a completion: {start:?} (E104)")]
    Json { start: String, source: serde_json::Error },
    /// The reply lacks a field, or its fields contradict each other.
    #[error(
        "llama-server's answer lacks {missing}; it reports {stop_type:?} after {count} tokens \
         (E104)"
    )]
    Incomplete { missing: &'static str, stop_type: String, count: u32 },
}

const ERROR_CHARS_MAX: usize = 200;

/// Returns the body of a request that computes a prompt and keeps its state on a slot.
pub fn build_prefill(prompt: &[u32], slot: u32) -> Value {
    json!({
        "prompt": prompt,
        "id_slot": slot,
        // One token, which is drawn from the prompt's own logits.
        "n_predict": 1,
        "samplers": ["top_k"],
        "top_k": 1,
        "cache_prompt": true,
        "stream": false,
        "response_fields": ["id_slot"],
    })
}

/// Returns the path and the body of a request that writes the state of a slot to a file in the
/// server's directory for them.
pub fn build_state_save(slot: u32, file: &str) -> (String, Value) {
    (format!("/slots/{slot}?action=save"), json!({ "filename": file }))
}

/// Returns the path and the body of a request that reads the state of a slot from such a file.
pub fn build_state_restore(slot: u32, file: &str) -> (String, Value) {
    (format!("/slots/{slot}?action=restore"), json!({ "filename": file }))
}

/// Returns the body of a request for one sample on a slot; any free one if `None`. A slot that
/// holds the beginning of the prompt computes only the rest, from state that other requests left.
///
/// `prompt` is a list of tokens, so that the server adds no token and interprets none as special
/// that our tokenizer would not. All samplers are listed explicitly, including those that are
/// switched off: the server's defaults (`top_k` 40, `min_p` 0.05, suggestions in the GGUF file)
/// would be another policy. With `logprobs`, the server computes the probabilities of its whole
/// vocabulary a second time, and builds before 2026 sort it: 10 to 25 ms of one core for 150 000
/// tokens.
pub fn build_request(
    prompt: &[u32],
    sampling: &LlamaSampling,
    seed: u64,
    logprobs: bool,
    slot: Option<u32>,
) -> Value {
    let LlamaSampling { temperature, top_k, top_p, max_new_tokens } = *sampling;
    let greedy = temperature == 0.0;
    let mut samplers = Vec::new();
    if greedy {
        samplers.push("top_k");
    } else {
        // The order in which transformers and the embedded engine apply them.
        samplers.push("temperature");
        samplers.extend((top_k > 0).then_some("top_k"));
        samplers.extend((top_p < 1.0).then_some("top_p"));
    }
    let mut fields = vec!["content", "tokens", "tokens_predicted", "stop_type"];
    fields.extend(logprobs.then_some("completion_probabilities"));
    json!({
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "samplers": samplers,
        "temperature": if greedy { 1.0 } else { temperature },
        "top_k": if greedy { 1 } else { top_k },
        "top_p": top_p,
        "min_p": 0.0,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "ignore_eos": false,
        "seed": fold_seed(seed),
        "return_tokens": true,
        "cache_prompt": true,
        // −1 means any.
        "id_slot": slot.map_or(-1, i64::from),
        "stream": false,
        // The drawn token is reported together with the most likely ones, of which at least one
        // must be requested.
        "n_probs": u32::from(logprobs),
        // Probabilities before any sampler, temperature included.
        "post_sampling_probs": false,
        "response_fields": fields,
    })
}

/// Returns a seed in llama.cpp's format. 2³² − 1 means a random seed, and some builds read seeds as
/// signed, so the highest bit stays 0.
pub fn fold_seed(seed: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "both halves are in it")]
    let low = (seed ^ (seed >> 32)) as u32;
    low & 0x7fff_ffff
}

#[derive(Deserialize)]
struct CompletionReply {
    #[serde(default)]
    content: String,
    #[serde(default)]
    tokens: Vec<u32>,
    #[serde(default)]
    tokens_predicted: u32,
    #[serde(default)]
    stop_type: String,
    #[serde(default)]
    completion_probabilities: Vec<TokenProbability>,
}

#[derive(Deserialize)]
struct TokenProbability {
    id: u32,
    /// In nats; `None` if the probability is 0.
    logprob: Option<f64>,
}

/// Parses the reply to a completion request. An unknown reason for the end is an error.
pub fn parse_completion(body: &[u8]) -> Result<LlamaCompletion, CompletionError> {
    let answer: CompletionReply = serde_json::from_slice(body).map_err(|source| {
        let start = String::from_utf8_lossy(body).chars().take(ERROR_CHARS_MAX).collect();
        CompletionError::Json { start, source }
    })?;
    let CompletionReply {
        content,
        tokens,
        tokens_predicted: count,
        stop_type,
        completion_probabilities,
    } = answer;
    let stop = match stop_type.as_str() {
        "eos" => CompletionStop::End,
        "limit" => CompletionStop::Limit,
        _ => {
            let stop_type = stop_type.chars().take(ERROR_CHARS_MAX).collect();
            return Err(CompletionError::Incomplete { missing: "how it ended", stop_type, count });
        }
    };
    if count == 0 || (!tokens.is_empty() && tokens.len() != count as usize) {
        return Err(CompletionError::Incomplete { missing: "tokens", stop_type, count });
    }
    let logprobs = match_logprobs(&tokens, &completion_probabilities).unwrap_or_default();
    Ok(LlamaCompletion { tokens, text: content, count, stop, logprobs })
}

/// `None` unless every token has one.
fn match_logprobs(tokens: &[u32], reported: &[TokenProbability]) -> Option<Vec<f64>> {
    let of = |(token, reported): (&u32, &TokenProbability)| {
        reported.logprob.filter(|_| reported.id == *token)
    };
    let whole = reported.len() == tokens.len();
    tokens.iter().zip(reported).map(of).collect::<Option<Vec<f64>>>().filter(|_| whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: LlamaSampling =
        LlamaSampling { temperature: 0.7, top_k: 0, top_p: 1.0, max_new_tokens: 9 };

    #[test]
    fn only_the_order_s_samplers_cut_the_distribution_and_in_its_sequence() {
        let samplers = |sampling: &LlamaSampling| {
            build_request(&[1, 2], sampling, 3, false, None)["samplers"].clone()
        };
        assert_eq!(samplers(&PLAIN), json!(["temperature"]));
        let cut = LlamaSampling { top_k: 40, top_p: 0.9, ..PLAIN };
        assert_eq!(samplers(&cut), json!(["temperature", "top_k", "top_p"]));
        let greedy = LlamaSampling { temperature: 0.0, ..cut };
        let greedy = build_request(&[1, 2], &greedy, 3, false, None);
        assert_eq!((&greedy["samplers"], &greedy["top_k"]), (&json!(["top_k"]), &json!(1)));
    }

    #[test]
    fn no_seed_means_a_random_one() {
        for seed in [0, 7, u64::from(u32::MAX), u64::MAX, 1 << 31, 1 << 63] {
            assert!(fold_seed(seed) <= i32::MAX as u32, "{seed}");
        }
        assert_ne!(fold_seed(1 << 32), fold_seed(1 << 33), "the upper half counts");
    }

    #[test]
    fn logprobs_are_those_of_all_tokens_or_none() {
        let asked = build_request(&[1], &PLAIN, 3, true, None);
        assert_eq!((&asked["n_probs"], &asked["post_sampling_probs"]), (&json!(1), &json!(false)));
        assert_eq!(build_request(&[1], &PLAIN, 3, false, None)["n_probs"], 0);
        let reported = |probabilities: &str| {
            let body = format!(
                r#"{{"content":"ab","tokens":[5,6],"tokens_predicted":2,"stop_type":"eos",
                    "completion_probabilities":[{probabilities}]}}"#
            );
            parse_completion(body.as_bytes()).unwrap().logprobs
        };
        let both = r#"{"id":5,"logprob":-0.5,"top_logprobs":[]},{"id":6,"logprob":-2}"#;
        assert_eq!(reported(both), [-0.5, -2.0]);
        assert!(reported(r#"{"id":6,"logprob":-2}"#).is_empty());
        assert!(reported(r#"{"id":5,"logprob":-1},{"id":6,"logprob":null}"#).is_empty());
        assert!(reported(&both.replace("\"id\":5", "\"id\":7")).is_empty());
        assert!(reported("").is_empty());
    }

    #[test]
    fn an_answer_without_an_ending_or_tokens_is_no_sample() {
        let whole = br#"{"content":"ab","tokens":[5,6],"tokens_predicted":2,"stop_type":"eos"}"#;
        let sample = parse_completion(whole).unwrap();
        assert_eq!(
            (sample.tokens, sample.count, sample.stop),
            (vec![5, 6], 2, CompletionStop::End)
        );
        let old = parse_completion(br#"{"content":"ab","tokens_predicted":2,"stop_type":"limit"}"#)
            .unwrap();
        assert_eq!(
            (old.tokens, old.text.as_str(), old.stop),
            (vec![], "ab", CompletionStop::Limit)
        );
        for broken in [
            &b"<html>"[..],
            b"{}",
            br#"{"tokens":[5],"tokens_predicted":2,"stop_type":"eos"}"#,
            br#"{"tokens":[],"tokens_predicted":0,"stop_type":"limit"}"#,
            br#"{"tokens":[5],"tokens_predicted":1,"stop_type":"none"}"#,
            br#"{"tokens":[-5],"tokens_predicted":1,"stop_type":"eos"}"#,
        ] {
            assert!(parse_completion(broken).is_err(), "{}", String::from_utf8_lossy(broken));
        }
    }
}
