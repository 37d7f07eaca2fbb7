//! The log-probabilities of a completion in OpenAI's form: parallel lists of its tokens. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// A token of a completion, with its log-probability and those of likely tokens.
pub(crate) struct ScoredToken {
    pub text: String,
    /// `None` for the first token of a prompt, which nothing precedes.
    pub logprob: Option<f64>,
    /// Likely tokens, the likeliest first.
    pub alternatives: Vec<(String, f64)>,
}

/// The tokens of a completion as parallel lists.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TokenLists {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    /// Log-probabilities of the likeliest tokens and of the drawn one, by text.
    top_logprobs: Vec<Option<BTreeMap<String, f64>>>,
    /// Numbers of characters before each token.
    text_offset: Vec<usize>,
}

impl TokenLists {
    /// Adds a token, which begins after `offset` characters, and advances `offset`. Of likely tokens
    /// with the same text, the likeliest counts.
    pub(crate) fn add_token(&mut self, token: ScoredToken, offset: &mut usize) {
        let ScoredToken { text, logprob, alternatives } = token;
        self.text_offset.push(*offset);
        *offset += text.chars().count();
        self.top_logprobs.push(logprob.map(|logprob| {
            let mut likely = BTreeMap::new();
            for (text, logprob) in alternatives {
                likely.entry(text).or_insert(logprob);
            }
            likely.entry(text.clone()).or_insert(logprob);
            likely
        }));
        self.token_logprobs.push(logprob);
        self.tokens.push(text);
    }
}

/// An object whose values stay as they are written. A value takes hundreds of times the memory of a
/// small number.
type RawObject = BTreeMap<String, Box<RawValue>>;

/// A token as llama-server writes it.
#[derive(Deserialize)]
struct LlamaToken {
    token: String,
    logprob: f64,
    #[serde(default)]
    top_logprobs: Vec<LlamaAlternative>,
}

#[derive(Deserialize)]
struct LlamaAlternative {
    token: String,
    logprob: f64,
}

/// Log-probabilities in both forms.
#[derive(Serialize)]
struct ExtendedLogprobs<'a> {
    #[serde(flatten)]
    given: &'a RawObject,
    #[serde(flatten)]
    lists: &'a TokenLists,
}

/// Adds the lists to the log-probabilities of a completion, or of an event of a streamed one, which
/// llama-server writes only as `content`. `offsets` has the numbers of characters of the choices
/// before it, by index, and is advanced.
///
/// Returns `None` if there is nothing to add.
pub fn add_token_lists(answer: &[u8], offsets: &mut BTreeMap<u64, usize>) -> Option<Vec<u8>> {
    let mut answer: RawObject = serde_json::from_slice(answer).ok()?;
    let mut choices: Vec<RawObject> = serde_json::from_str(answer.get("choices")?.get()).ok()?;
    let mut has_lists = false;
    for choice in &mut choices {
        let index = choice.get("index").and_then(|it| it.get().parse().ok()).unwrap_or(0);
        let offset = offsets.entry(index).or_default();
        let extended = choice.get("logprobs").and_then(|it| extend_logprobs(it, offset));
        if let Some(extended) = extended {
            choice.insert("logprobs".to_owned(), extended);
            has_lists = true;
        }
    }
    if !has_lists {
        return None;
    }
    answer.insert("choices".to_owned(), to_raw_value(&choices).ok()?);
    serde_json::to_vec(&answer).ok()
}

fn extend_logprobs(logprobs: &RawValue, offset: &mut usize) -> Option<Box<RawValue>> {
    let given: RawObject = serde_json::from_str(logprobs.get()).ok()?;
    if given.contains_key("tokens") {
        return None;
    }
    let tokens: Vec<LlamaToken> = serde_json::from_str(given.get("content")?.get()).ok()?;
    let mut lists = TokenLists::default();
    for LlamaToken { token, logprob, top_logprobs } in tokens {
        let alternatives = top_logprobs.into_iter().map(|it| (it.token, it.logprob)).collect();
        let token = ScoredToken { text: token, logprob: Some(logprob), alternatives };
        lists.add_token(token, offset);
    }
    to_raw_value(&ExtendedLogprobs { given: &given, lists: &lists }).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// An answer of llama-server b11669 to `logprobs: 2`.
    const WHOLE: &str = r#"{"choices":[{"text":"21","index":0,"logprobs":{"content":[{"id":17,"token":"2","bytes":[50],"logprob":-1.833252191543579,"top_logprobs":[{"id":17,"token":"2","bytes":[50],"logprob":-1.833252191543579},{"id":16,"token":"1","bytes":[49],"logprob":-1.947521448135376}]},{"id":16,"token":"1","bytes":[49],"logprob":-1.8476715087890625,"top_logprobs":[{"id":16,"token":"1","bytes":[49],"logprob":-1.8476715087890625},{"id":17,"token":"2","bytes":[50],"logprob":-1.895737648010254}]}]},"finish_reason":"length"}],"created":1795990723,"model":"flotilla-channel","system_fingerprint":"b11669-Debian","object":"text_completion","usage":{"completion_tokens":4,"prompt_tokens":4,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":0}},"id":"chatcmpl-YvBGwokRvsQOicunNmUR86hsCuQl7PxI"}"#;

    /// Two events of one of its streamed answers, at a temperature of 1.
    const EVENTS: [&str; 2] = [
        r#"{"choices":[{"text":"2","index":1,"logprobs":{"content":[{"id":17,"token":"2","bytes":[50],"logprob":-1.6142123937606812,"top_logprobs":[{"id":17,"token":"2","bytes":[50],"logprob":-1.6142123937606812}]}]},"finish_reason":null}],"object":"text_completion"}"#,
        r#"{"choices":[{"text":"5","index":1,"logprobs":{"content":[{"id":20,"token":"5","bytes":[53],"logprob":-3.043213367462158,"top_logprobs":[{"id":17,"token":"2","bytes":[50],"logprob":-1.7901644706726074}]}]},"finish_reason":null}],"object":"text_completion"}"#,
    ];

    fn add(answer: &str, offsets: &mut BTreeMap<u64, usize>) -> Value {
        serde_json::from_slice(&add_token_lists(answer.as_bytes(), offsets).unwrap()).unwrap()
    }

    #[test]
    fn a_completion_of_llama_server_gets_openai_s_lists() {
        let mut expected: Value = serde_json::from_str(WHOLE).unwrap();
        let logprobs = &mut expected["choices"][0]["logprobs"];
        logprobs["tokens"] = json!(["2", "1"]);
        logprobs["token_logprobs"] = json!([-1.833252191543579, -1.8476715087890625]);
        logprobs["top_logprobs"] = json!([
            { "2": -1.833252191543579, "1": -1.947521448135376 },
            { "2": -1.895737648010254, "1": -1.8476715087890625 },
        ]);
        logprobs["text_offset"] = json!([0, 1]);
        assert_eq!(add(WHOLE, &mut BTreeMap::new()), expected);
    }

    #[test]
    fn the_offsets_of_a_streamed_choice_continue() {
        let mut offsets = BTreeMap::new();
        let [first, second] =
            EVENTS.map(|event| add(event, &mut offsets)["choices"][0]["logprobs"].clone());
        assert_eq!((&first["text_offset"], &second["text_offset"]), (&json!([0]), &json!([1])));
        assert_eq!(second["tokens"], json!(["5"]));
        // The drawn token is listed too.
        let likely = json!([{ "2": -1.7901644706726074, "5": -3.043213367462158 }]);
        assert_eq!(second["top_logprobs"], likely);
        assert_eq!(offsets, BTreeMap::from([(1, 2)]));
    }

    #[test]
    fn other_answers_stay_as_they_are() {
        for answer in [
            r#"{"choices":[{"text":"2","index":0,"logprobs":null,"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"logprobs":{"tokens":[],"content":[]}}]}"#,
            r#"{"choices":[]}"#,
            r#"{"error":{"code":400}}"#,
            "[DONE]",
            "",
        ] {
            assert_eq!(add_token_lists(answer.as_bytes(), &mut BTreeMap::new()), None, "{answer}");
        }
    }
}
