//! What `llama-server` is asked for one sample, and what it answers. Pure.

use serde::Deserialize;
use serde_json::{Value, json};

/// How tokens are drawn; as in a generate order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// 0 keeps the whole vocabulary.
    pub top_k: u32,
    /// 1 keeps the whole distribution.
    pub top_p: f64,
    pub max_new_tokens: u32,
}

/// One sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Empty where the build does not tell them.
    pub tokens: Vec<u32>,
    pub text: String,
    /// How many were drawn, one that ended the sequence included.
    pub count: u32,
    pub stop: Stop,
    /// Of each token ln p, in nats, among the whole vocabulary at temperature 1. Empty where they
    /// were not asked for, or not each token has one: the server leaves out those of a character
    /// that was not whole yet.
    pub logprobs: Vec<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A token that ends the sequence was drawn.
    End,
    Limit,
}

#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    #[error("llama-server's answer is no completion: {start:?} (E104)")]
    Json { start: String, source: serde_json::Error },
    #[error(
        "llama-server's answer lacks {missing}; it says {stop_type:?} of {count} tokens (E104)"
    )]
    Incomplete { missing: &'static str, stop_type: String, count: u32 },
}

/// Of an answer that is none, for people.
const START_CHARS: usize = 200;

/// `prompt` is tokens, so that nothing is added or read as special that ours would not be. The
/// samplers are named, and so are all that are left out: a server's own defaults (`top_k` 40,
/// `min_p` 0.05, what a GGUF file suggests) would be another policy.
///
/// `logprobs` takes the server a sort of its vocabulary for each token: of 150 000 tokens, 10 to
/// 25 ms of one core.
pub fn request(prompt: &[u32], sampling: &Sampling, seed: u64, logprobs: bool) -> Value {
    let Sampling { temperature, top_k, top_p, max_new_tokens } = *sampling;
    let greedy = temperature == 0.0;
    let mut samplers = Vec::new();
    if greedy {
        samplers.push("top_k");
    } else {
        // The order in which transformers and our own engine cut.
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
        "seed": folded(seed),
        "return_tokens": true,
        // What a slot computed before is right for its tokens, but rounded otherwise.
        "cache_prompt": false,
        "stream": false,
        // The one drawn comes with the likeliest ones, of which there must be one.
        "n_probs": u32::from(logprobs),
        // Before any sampler, temperature included.
        "post_sampling_probs": false,
        "response_fields": fields,
    })
}

/// A seed as llama.cpp takes them. 2³² − 1 means a random one, and some builds read them as
/// signed: the topmost bit stays 0.
pub fn folded(seed: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "both halves are in it")]
    let low = (seed ^ (seed >> 32)) as u32;
    low & 0x7fff_ffff
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    content: String,
    #[serde(default)]
    tokens: Vec<u32>,
    #[serde(default)]
    tokens_predicted: u32,
    #[serde(default)]
    stop_type: String,
    #[serde(default)]
    completion_probabilities: Vec<Probability>,
}

#[derive(Deserialize)]
struct Probability {
    id: u32,
    /// None of a token whose probability is 0.
    logprob: Option<f64>,
}

/// # Errors
/// When it is no completion, or one that ended for no known reason.
pub fn answer(body: &[u8]) -> Result<Completion, AnswerError> {
    let answer: Answer = serde_json::from_slice(body).map_err(|source| {
        let start = String::from_utf8_lossy(body).chars().take(START_CHARS).collect();
        AnswerError::Json { start, source }
    })?;
    let Answer { content, tokens, tokens_predicted: count, stop_type, completion_probabilities } =
        answer;
    let stop = match stop_type.as_str() {
        "eos" => Stop::End,
        "limit" => Stop::Limit,
        _ => {
            let stop_type = stop_type.chars().take(START_CHARS).collect();
            return Err(AnswerError::Incomplete { missing: "how it ended", stop_type, count });
        }
    };
    if count == 0 || (!tokens.is_empty() && tokens.len() != count as usize) {
        return Err(AnswerError::Incomplete { missing: "tokens", stop_type, count });
    }
    let logprobs = each_of(&tokens, &completion_probabilities).unwrap_or_default();
    Ok(Completion { tokens, text: content, count, stop, logprobs })
}

fn each_of(tokens: &[u32], told: &[Probability]) -> Option<Vec<f64>> {
    let of = |(token, told): (&u32, &Probability)| told.logprob.filter(|_| told.id == *token);
    let whole = told.len() == tokens.len();
    tokens.iter().zip(told).map(of).collect::<Option<Vec<f64>>>().filter(|_| whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 0.7, top_k: 0, top_p: 1.0, max_new_tokens: 9 };

    #[test]
    fn only_what_the_order_says_cuts_the_distribution_and_in_its_order() {
        let samplers =
            |sampling: &Sampling| request(&[1, 2], sampling, 3, false)["samplers"].clone();
        assert_eq!(samplers(&PLAIN), json!(["temperature"]));
        let cut = Sampling { top_k: 40, top_p: 0.9, ..PLAIN };
        assert_eq!(samplers(&cut), json!(["temperature", "top_k", "top_p"]));
        let greedy = request(&[1, 2], &Sampling { temperature: 0.0, ..cut }, 3, false);
        assert_eq!((&greedy["samplers"], &greedy["top_k"]), (&json!(["top_k"]), &json!(1)));
    }

    #[test]
    fn no_seed_means_a_random_one() {
        for seed in [0, 7, u64::from(u32::MAX), u64::MAX, 1 << 31, 1 << 63] {
            assert!(folded(seed) <= i32::MAX as u32, "{seed}");
        }
        assert_ne!(folded(1 << 32), folded(1 << 33), "the upper half counts");
    }

    #[test]
    fn logprobs_are_those_of_all_tokens_or_none() {
        let asked = request(&[1], &PLAIN, 3, true);
        assert_eq!((&asked["n_probs"], &asked["post_sampling_probs"]), (&json!(1), &json!(false)));
        assert_eq!(request(&[1], &PLAIN, 3, false)["n_probs"], 0);
        let told = |probabilities: &str| {
            let body = format!(
                r#"{{"content":"ab","tokens":[5,6],"tokens_predicted":2,"stop_type":"eos",
                    "completion_probabilities":[{probabilities}]}}"#
            );
            answer(body.as_bytes()).unwrap().logprobs
        };
        let both = r#"{"id":5,"logprob":-0.5,"top_logprobs":[]},{"id":6,"logprob":-2}"#;
        assert_eq!(told(both), [-0.5, -2.0]);
        assert!(told(r#"{"id":6,"logprob":-2}"#).is_empty());
        assert!(told(r#"{"id":5,"logprob":-1},{"id":6,"logprob":null}"#).is_empty());
        assert!(told(&both.replace("\"id\":5", "\"id\":7")).is_empty());
        assert!(told("").is_empty());
    }

    #[test]
    fn an_answer_without_an_ending_or_tokens_is_no_sample() {
        let whole = br#"{"content":"ab","tokens":[5,6],"tokens_predicted":2,"stop_type":"eos"}"#;
        let sample = answer(whole).unwrap();
        assert_eq!((sample.tokens, sample.count, sample.stop), (vec![5, 6], 2, Stop::End));
        let old = answer(br#"{"content":"ab","tokens_predicted":2,"stop_type":"limit"}"#).unwrap();
        assert_eq!((old.tokens, old.text.as_str(), old.stop), (vec![], "ab", Stop::Limit));
        for broken in [
            &b"<html>"[..],
            b"{}",
            br#"{"tokens":[5],"tokens_predicted":2,"stop_type":"eos"}"#,
            br#"{"tokens":[],"tokens_predicted":0,"stop_type":"limit"}"#,
            br#"{"tokens":[5],"tokens_predicted":1,"stop_type":"none"}"#,
            br#"{"tokens":[-5],"tokens_predicted":1,"stop_type":"eos"}"#,
        ] {
            assert!(answer(broken).is_err(), "{}", String::from_utf8_lossy(broken));
        }
    }
}
