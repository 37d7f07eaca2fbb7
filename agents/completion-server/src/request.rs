//! Requests in the form of OpenAI's API, checked field by field. Pure.
//!
//! An unknown field that would change the answer is refused by its name. Tools are only offers, which
//! a model may decline: these models call none, and refuse a `tool_choice` that demands a call.

use chat_template::ChatMessage;
use engine::PromptInput;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

/// Maximum number of likely tokens reported per position.
const ALTERNATIVES_MAX: usize = 20;
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Maximum number of prompts of a request, times the choices of each.
const CHOICES_MAX: usize = 512;

/// The endpoint of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiKind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// The prompt of a request: a conversation, or texts and tokens to continue.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum AskedPrompt {
    Conversation(Vec<ChatMessage>),
    Prompts(Vec<PromptInput>),
}

/// A request whose fields are valid by themselves.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiRequest {
    pub prompt: AskedPrompt,
    /// Index of the adapter; `None` for the base alone.
    pub adapter: Option<usize>,
    /// The number of choices for each prompt.
    pub choices: usize,
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: usize,
    /// Maximum number of tokens to draw; `None` for as many as fit into the context.
    pub max_tokens: Option<usize>,
    pub seed: Option<u64>,
    pub stops: Vec<String>,
    /// The number of likely tokens to report; `None` for no log-probabilities.
    pub logprobs: Option<usize>,
    /// True if the answer begins with the prompt.
    pub echo: bool,
    /// True if the answer is sent in pieces.
    pub stream: bool,
    /// True if a stream ends with the number of tokens.
    pub stream_usage: bool,
}

/// The reason why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {problem} (G101)")]
pub(crate) struct RequestFieldError {
    pub field: String,
    problem: String,
}

impl RequestFieldError {
    fn new(field: &str, problem: impl Into<String>) -> Self {
        Self { field: field.to_owned(), problem: problem.into() }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum StopField {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// An adapter and its scale, in the form of llama-server's field `lora`.
#[derive(Deserialize)]
struct AdapterScale {
    id: usize,
    scale: f64,
}

/// The fields of a request that were not read yet.
struct RequestFields(Map<String, Value>);

impl RequestFields {
    /// Removes and parses a field. `null` counts as a missing field.
    fn take<T: DeserializeOwned>(
        &mut self,
        field: &str,
        expected: &str,
    ) -> Result<Option<T>, RequestFieldError> {
        match self.0.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|_| RequestFieldError::new(field, format!("must be {expected}"))),
        }
    }

    /// Removes a number, and checks its range.
    fn take_in_range(
        &mut self,
        field: &str,
        expected: &str,
        is_valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, RequestFieldError> {
        let found = self.take(field, expected)?;
        match found {
            Some(number) if !is_valid(number) => {
                Err(RequestFieldError::new(field, format!("must be {expected}")))
            }
            found => Ok(found),
        }
    }

    /// Removes a whole number, and checks that it is at most `most`.
    fn take_count(&mut self, field: &str, most: usize) -> Result<Option<usize>, RequestFieldError> {
        let expected = format!("a whole number from 0 to {most}");
        let found = self.take::<usize>(field, &expected)?;
        match found {
            Some(number) if number > most => {
                Err(RequestFieldError::new(field, format!("must be {expected}")))
            }
            found => Ok(found),
        }
    }

    /// Removes a boolean field, which is false if missing.
    fn take_flag(&mut self, field: &str) -> Result<bool, RequestFieldError> {
        Ok(self.take::<bool>(field, "true or false")?.unwrap_or(false))
    }
}

impl ApiRequest {
    /// Reads a request to a server with `adapters` adapters.
    ///
    /// # Errors
    /// A field has a wrong value, or is unknown and would change the answer.
    pub(crate) fn read(
        kind: ApiKind,
        fields: Map<String, Value>,
        adapters: usize,
    ) -> Result<Self, RequestFieldError> {
        let mut fields = RequestFields(fields);
        fields.0.remove("model");
        let prompt = read_prompt(kind, &mut fields)?;
        let prompts = match &prompt {
            AskedPrompt::Conversation(_) => 1,
            AskedPrompt::Prompts(prompts) => prompts.len(),
        };
        let choices = fields.take_count("n", CHOICES_MAX)?.unwrap_or(1).max(1);
        if prompts * choices > CHOICES_MAX {
            let problem = format!("and `n` ask for more than {CHOICES_MAX} answers; send less");
            return Err(RequestFieldError::new("prompt", problem));
        }
        if let Some(best) = fields.take_count("best_of", CHOICES_MAX)?
            && best.max(1) != choices
        {
            return Err(RequestFieldError::new("best_of", "must be that of `n`; omit it"));
        }
        let temperature = "a number from 0 to 100";
        let temperature =
            fields.take_in_range("temperature", temperature, |it| (0.0..=100.0).contains(&it))?;
        let top_p = "a number above 0 and at most 1";
        let top_p = fields.take_in_range("top_p", top_p, |it| it > 0.0 && it <= 1.0)?;
        // Other servers take -1 as well for no limit.
        let top_k = fields.take::<i64>("top_k", "a whole number, 0 for no limit")?;
        let seed = fields.take::<i64>("seed", "a whole number")?;
        let stops = read_stops(&mut fields)?;
        let logprobs = read_logprobs(kind, &mut fields)?;
        let echo = kind == ApiKind::Text && fields.take_flag("echo")?;
        let max_tokens = read_max_tokens(&mut fields, echo)?;
        let (stream, options) = (
            fields.take_flag("stream")?,
            fields.take::<StreamOptions>("stream_options", "an object with include_usage")?,
        );
        let adapter = read_adapter(&mut fields, adapters)?;
        if let Some((field, _)) = fields.0.iter().find(|(name, value)| !is_neutral(name, value)) {
            let problem = "is not supported by the embedded engine; remove it, or serve the channel \
                           with llama.cpp";
            return Err(RequestFieldError::new(field, problem));
        }
        Ok(Self {
            prompt,
            adapter,
            choices,
            temperature: temperature.unwrap_or(1.0),
            top_p: top_p.unwrap_or(1.0),
            top_k: top_k.and_then(|it| usize::try_from(it).ok()).unwrap_or(0),
            max_tokens,
            seed: seed.map(i64::cast_unsigned),
            stops,
            logprobs,
            echo,
            stream,
            stream_usage: options.and_then(|it| it.include_usage).unwrap_or(false),
        })
    }
}

fn read_prompt(
    kind: ApiKind,
    fields: &mut RequestFields,
) -> Result<AskedPrompt, RequestFieldError> {
    if kind == ApiKind::Chat {
        let messages = fields.take("messages", "a list of messages")?;
        let messages = messages.ok_or_else(|| RequestFieldError::new("messages", "is missing"))?;
        return Ok(AskedPrompt::Conversation(messages));
    }
    let expected = "a text, a list of texts, a list of token ids, or a list of such lists";
    let prompt: PromptField = fields
        .take("prompt", expected)?
        .ok_or_else(|| RequestFieldError::new("prompt", "is missing"))?;
    let prompts: Vec<PromptInput> = match prompt {
        PromptField::Text(text) => vec![PromptInput::Text(text)],
        PromptField::Tokens(tokens) => vec![PromptInput::Tokens(tokens)],
        PromptField::Texts(texts) => texts.into_iter().map(PromptInput::Text).collect(),
        PromptField::TokenLists(lists) => lists.into_iter().map(PromptInput::Tokens).collect(),
    };
    Ok(AskedPrompt::Prompts(prompts))
}

fn read_stops(fields: &mut RequestFields) -> Result<Vec<String>, RequestFieldError> {
    let stops = match fields.take("stop", "a text, or a list of texts")? {
        None => Vec::new(),
        Some(StopField::One(stop)) => vec![stop],
        Some(StopField::Several(stops)) => stops,
    };
    if stops.len() > STOPS_MAX || stops.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
        let problem =
            format!("must have at most {STOPS_MAX} texts, each of at most {STOP_BYTES_MAX} bytes");
        return Err(RequestFieldError::new("stop", problem));
    }
    Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
}

fn read_logprobs(
    kind: ApiKind,
    fields: &mut RequestFields,
) -> Result<Option<usize>, RequestFieldError> {
    if kind == ApiKind::Text {
        return fields.take_count("logprobs", ALTERNATIVES_MAX);
    }
    let wanted = fields.take_flag("logprobs")?;
    let alternatives = fields.take_count("top_logprobs", ALTERNATIVES_MAX)?;
    match (wanted, alternatives) {
        (false, Some(1..)) => Err(RequestFieldError::new("top_logprobs", "needs `logprobs: true`")),
        (wanted, alternatives) => Ok(wanted.then(|| alternatives.unwrap_or(0))),
    }
}

/// Without an echoed prompt, an answer has at least one token.
fn read_max_tokens(
    fields: &mut RequestFields,
    echo: bool,
) -> Result<Option<usize>, RequestFieldError> {
    let mut found = None;
    for field in ["max_tokens", "max_completion_tokens"] {
        let number = fields.take_count(field, u32::MAX as usize)?;
        if number == Some(0) && !echo {
            return Err(RequestFieldError::new(field, "must be 1 or more, unless `echo` is true"));
        }
        found = number.or(found);
    }
    Ok(found)
}

fn read_adapter(
    fields: &mut RequestFields,
    adapters: usize,
) -> Result<Option<usize>, RequestFieldError> {
    let scales: Option<Vec<AdapterScale>> = fields.take("lora", "a list of id and scale")?;
    let mut chosen = None;
    for AdapterScale { id, scale } in scales.unwrap_or_default() {
        let is_known = id < adapters && (scale == 0.0 || scale == 1.0);
        if !is_known || (scale == 1.0 && chosen.is_some()) {
            let problem = "must give one adapter of this server the scale 1, and others 0";
            return Err(RequestFieldError::new("lora", problem));
        }
        chosen = chosen.or((scale == 1.0).then_some(id));
    }
    Ok(chosen)
}

/// Returns true if an unknown field with this value does not change the answer.
fn is_neutral(field: &str, value: &Value) -> bool {
    if value.is_null() {
        return true;
    }
    let is_empty = || match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    match field {
        "user"
        | "metadata"
        | "store"
        | "service_tier"
        | "safety_identifier"
        | "prompt_cache_key"
        | "cache_prompt"
        | "tools"
        | "functions"
        | "parallel_tool_calls" => true,
        "presence_penalty" | "frequency_penalty" | "min_p" => value.as_f64() == Some(0.0),
        "repeat_penalty" | "repetition_penalty" => value.as_f64() == Some(1.0),
        "logit_bias" | "suffix" => is_empty(),
        "tool_choice" | "function_call" => value == "none" || value == "auto",
        "response_format" => value["type"] == "text",
        _ => false,
    }
}

/// Reads a body as a request to each path, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz_body(body: &[u8]) {
    let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(body) else { return };
    for kind in [ApiKind::Chat, ApiKind::Text] {
        // The result does not matter; only a panic would.
        let _ = ApiRequest::read(kind, fields.clone(), 2);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(kind: ApiKind, request: &Value) -> Result<ApiRequest, String> {
        let fields = request.as_object().unwrap().clone();
        ApiRequest::read(kind, fields, 2).map_err(|error| error.to_string())
    }

    #[test]
    fn a_request_is_read_with_the_defaults_of_openai() {
        let found = read(ApiKind::Text, &json!({ "model": "m", "prompt": "a" })).unwrap();
        assert_eq!(found.prompt, AskedPrompt::Prompts(vec![PromptInput::Text("a".into())]));
        assert_eq!((found.temperature, found.top_p, found.top_k), (1.0, 1.0, 0));
        assert_eq!((found.choices, found.max_tokens, found.logprobs), (1, None, None));
        assert!(!found.stream && !found.echo && found.adapter.is_none());
        let found = json!({
            "messages": [{ "role": "user", "content": "a" }], "max_completion_tokens": 3,
            "stop": "\n", "seed": -1, "logprobs": true, "top_logprobs": 2, "stream": true,
            "stream_options": { "include_usage": true }, "presence_penalty": 0,
            "tools": [{ "type": "function" }], "tool_choice": "auto", "user": "me",
            "logit_bias": null, "temperature": null,
            "lora": [{ "id": 0, "scale": 0.0 }, { "id": 1, "scale": 1.0 }],
        });
        let found = read(ApiKind::Chat, &found).unwrap();
        assert_eq!(
            (found.max_tokens, found.seed, found.logprobs),
            (Some(3), Some(u64::MAX), Some(2))
        );
        assert!(found.stream && found.stream_usage && found.adapter == Some(1));
        assert_eq!(found.stops, ["\n"]);
    }

    #[test]
    fn prompts_are_texts_or_tokens_one_or_several() {
        let prompts = |prompt: Value| {
            let request = json!({ "prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 1 });
            match read(ApiKind::Text, &request)?.prompt {
                AskedPrompt::Prompts(prompts) => Ok(prompts),
                AskedPrompt::Conversation(_) => Err("a conversation".to_owned()),
            }
        };
        let tokens = |ids: &[u32]| PromptInput::Tokens(ids.to_vec());
        assert_eq!(prompts(json!(["a", "b"])).unwrap().len(), 2);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [tokens(&[1, 2])]);
        assert_eq!(prompts(json!([[1], [2, 3]])).unwrap(), [tokens(&[1]), tokens(&[2, 3])]);
        for wrong in [json!(7), json!(["a", 1]), json!([-1]), json!({}), json!(vec!["a"; 513])] {
            assert!(prompts(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_wrong_or_unknown_field_is_named() {
        let text = |field: &str, value: Value| {
            let request = json!({ "prompt": "a", field: value });
            (field.to_owned(), read(ApiKind::Text, &request))
        };
        let wrong = [
            text("temperature", json!(-1)),
            text("temperature", json!("hot")),
            text("top_p", json!(0)),
            text("n", json!(1.5)),
            text("n", json!(100_000)),
            text("max_tokens", json!(0)),
            text("logprobs", json!(21)),
            text("stop", json!([1])),
            text("stop", json!(vec!["a"; 17])),
            text("best_of", json!(3)),
            text("stream", json!("yes")),
            text("lora", json!([{ "id": 2, "scale": 1 }])),
            text("lora", json!([{ "id": 0, "scale": 0.5 }])),
            text("lora", json!([{ "id": 0, "scale": 1 }, { "id": 1, "scale": 1 }])),
            text("tool_choice", json!("required")),
            text("tool_choice", json!({ "type": "function" })),
            text("response_format", json!({ "type": "json_object" })),
            text("frequency_penalty", json!(0.5)),
            text("mirostat", json!(2)),
        ];
        for (field, found) in wrong {
            let error = found.unwrap_err();
            assert!(
                error.starts_with(&format!("`{field}` ")) && error.ends_with("(G101)"),
                "{error}"
            );
        }
        let missing = read(ApiKind::Text, &json!({})).unwrap_err();
        assert!(missing.starts_with("`prompt` is missing"), "{missing}");
        let echo = json!({ "messages": [], "echo": true });
        assert!(read(ApiKind::Chat, &echo).unwrap_err().contains("`echo` is not supported"));
    }
}
