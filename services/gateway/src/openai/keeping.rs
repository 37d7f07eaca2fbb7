//! Keeps requests and answers of channels that are set up for it.

use std::{
    collections::BTreeMap, convert::Infallible, path::PathBuf, process::Command, sync::Arc,
    time::Duration,
};

use bus::EXCHANGE_BYTES_MAX;
use control::FleetControl;
use process::RunLimits;
use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, mpsc};
use wire::{RunId, v1};

use super::channel_moves::ChannelMoves;

/// Exchanges that wait to be written; further ones are not kept.
const WAITING_MAX: usize = 1024;
/// Bytes of an answer as it is sent, with an event for each token; a longer one is not kept.
const ANSWER_BYTES_MAX: usize = 32 * EXCHANGE_BYTES_MAX;
/// A longer request is not kept. Its conversation is shorter, but for escapes and other fields.
const REQUEST_BYTES_MAX: usize = 4 * EXCHANGE_BYTES_MAX;
/// Redaction programs that run at a time.
const REDACTIONS_MAX: usize = 4;
const REDACTION_LIMITS: RunLimits = RunLimits {
    time: Duration::from_secs(10),
    poll: Duration::from_millis(5),
    stdout_bytes: 1 << 20,
    stderr_bytes: 4096,
    stderr_of_success: false,
};

/// The queue of what is to be kept, of channels that keep their requests. Clones share it.
#[derive(Clone)]
pub(super) struct ExchangeKeeper {
    control: FleetControl,
    moves: ChannelMoves,
    waiting: mpsc::Sender<KeptRequest>,
    receiver: Arc<tokio::sync::Mutex<mpsc::Receiver<KeptRequest>>>,
    /// A program that removes what must not be kept.
    redaction: Option<PathBuf>,
    redaction_permits: Arc<Semaphore>,
}

/// The redaction program failed, so that nothing may be kept.
#[derive(Debug, thiserror::Error)]
#[error("the redaction program {program} failed: {problem}; see its own log (G105)")]
pub(super) struct RedactionError {
    program: String,
    problem: String,
}

/// Texts by name.
pub(super) type Texts = BTreeMap<String, String>;

struct KeptRequest {
    channel: RunId,
    exchange: v1::KeptExchange,
    days: u32,
}

/// Collects an answer while it is sent to the client.
pub(super) struct AnswerRecorder {
    request: KeptRequest,
    waiting: mpsc::Sender<KeptRequest>,
    streams: bool,
    bytes: Vec<u8>,
}

impl ExchangeKeeper {
    pub(super) fn new(
        control: &FleetControl,
        moves: ChannelMoves,
        redaction: Option<PathBuf>,
    ) -> Self {
        let (waiting, receiver) = mpsc::channel(WAITING_MAX);
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        let redaction_permits = Arc::new(Semaphore::new(REDACTIONS_MAX));
        Self { control: control.clone(), moves, waiting, receiver, redaction, redaction_permits }
    }

    /// Writes what is to be kept, until dropped.
    pub(super) async fn write_exchanges(&self) -> Infallible {
        let mut receiver = self.receiver.lock().await;
        loop {
            let Some(KeptRequest { channel, exchange, days }) = receiver.recv().await else {
                // This holds a sender.
                return std::future::pending().await;
            };
            let Some(exchange) = self.redact_exchange(exchange).await else { continue };
            match self.control.keep_exchange(&channel, &exchange, days).await {
                Ok(true) => {}
                Ok(false) => tracing::warn!(%channel, "a request is too long to be kept"),
                Err(error) => {
                    let error = wire::format_error_chain(&error);
                    tracing::warn!(%channel, error, "a request was not kept");
                }
            }
        }
    }

    /// Returns `None` if the exchange must not be kept: the program says so, or failed.
    async fn redact_exchange(&self, exchange: v1::KeptExchange) -> Option<v1::KeptExchange> {
        let v1::KeptExchange { messages_json, prompt, answer, .. } = &exchange;
        let texts = [("messages", messages_json), ("prompt", prompt), ("answer", answer)];
        let texts = match self.redact_texts(name_texts(texts)).await {
            Ok(texts) => texts?,
            Err(error) => {
                tracing::warn!(%error, "a request was not kept");
                return None;
            }
        };
        let [messages_json, prompt, answer] =
            ["messages", "prompt", "answer"].map(|name| texts[name].clone());
        Some(v1::KeptExchange { messages_json, prompt, answer, ..exchange })
    }

    /// Returns texts by name as the redaction program returned them; `None` if it printed nothing.
    ///
    /// # Errors
    /// The program fails, or prints something else than an object with the same names and texts.
    pub(super) async fn redact_texts(&self, given: Texts) -> Result<Option<Texts>, RedactionError> {
        let Some(program) = self.redaction.clone() else { return Ok(Some(given)) };
        // The semaphore is never closed.
        let _permit = self.redaction_permits.acquire().await;
        let failed =
            |problem: String| RedactionError { program: program.display().to_string(), problem };
        let (input, path) = (json!(given).to_string().into_bytes(), program.clone());
        let run =
            move || process::run_program(&mut Command::new(&path), input, REDACTION_LIMITS, |_| ());
        let output = tokio::task::spawn_blocking(run).await;
        let output = output.map_err(|error| failed(error.to_string()))?;
        let stdout = output.map_err(|error| failed(error.problem))?.stdout;
        if stdout.is_empty() {
            return Ok(None);
        }
        let redacted = serde_json::from_slice::<Texts>(&stdout);
        let redacted = redacted.map_err(|error| failed(format!("its output: {error}")))?;
        if !redacted.keys().eq(given.keys()) {
            return Err(failed("its output has other names than its input".to_owned()));
        }
        Ok(Some(redacted))
    }

    /// Starts to record the answer to a request, if its channel keeps requests.
    pub(super) fn record_request(
        &self,
        channel: &str,
        number: u64,
        body: &[u8],
        streams: bool,
    ) -> Option<AnswerRecorder> {
        let days = self.days_of(channel).filter(|days| *days > 0)?;
        let channel = RunId::new(channel).ok()?;
        if body.len() > REQUEST_BYTES_MAX {
            return None;
        }
        let (messages_json, prompt) = read_request(&serde_json::from_slice(body).ok()?)?;
        let exchange = v1::KeptExchange { number, messages_json, prompt, ..Default::default() };
        let request = KeptRequest { channel, exchange, days };
        Some(AnswerRecorder { request, waiting: self.waiting.clone(), streams, bytes: Vec::new() })
    }

    /// Returns true if a channel keeps its requests.
    pub(super) fn keeps(&self, channel: &str) -> bool {
        self.days_of(channel).is_some_and(|days| days > 0)
    }

    fn days_of(&self, channel: &str) -> Option<u32> {
        self.moves.find_newest(channel).map(|newest| newest.days)
    }
}

impl AnswerRecorder {
    /// Returns for how many days the exchange will be kept.
    pub(super) fn days(&self) -> u32 {
        self.request.days
    }

    pub(super) fn record_bytes(&mut self, bytes: &[u8]) {
        // One byte more tells that it is too long.
        let room = (ANSWER_BYTES_MAX + 1).saturating_sub(self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Keeps the exchange. The answer is complete.
    pub(super) fn finish(mut self) {
        if self.bytes.len() > ANSWER_BYTES_MAX {
            return;
        }
        let read = if self.streams { read_streamed_answer } else { read_answer };
        let Some((id, answer)) = read(&self.bytes).filter(|(_, answer)| !answer.is_empty()) else {
            return;
        };
        (self.request.exchange.id, self.request.exchange.answer) = (id, answer);
        if self.waiting.try_send(self.request).is_err() {
            tracing::warn!("too many requests wait to be kept; one was not kept");
        }
    }
}

pub(super) fn name_texts<const N: usize>(texts: [(&str, &String); N]) -> Texts {
    texts.map(|(name, text)| (name.to_owned(), text.clone())).into()
}

/// Returns the conversation as JSON, or the prompt, of a request whose answer can be learned from: it
/// consists of texts, ends before the model's turn, is not too long, is not part of the answer, and
/// the model was free to answer as it likes.
fn read_request(fields: &Map<String, Value>) -> Option<(String, String)> {
    if fields.get("echo") == Some(&Value::Bool(true)) || has_other_inputs(fields) {
        return None;
    }
    let is_text = |message: &Value| message["role"].is_string() && message["content"].is_string();
    let request = match (fields.get("messages"), fields.get("prompt")) {
        (Some(Value::Array(messages)), None) => {
            let ends_before = messages.last().is_some_and(|it| it["role"] != "assistant");
            let is_plain = ends_before && messages.iter().all(is_text);
            is_plain.then(|| (json!(messages).to_string(), String::new()))?
        }
        (None, Some(Value::String(prompt))) if !prompt.is_empty() => {
            (String::new(), prompt.clone())
        }
        _ => return None,
    };
    (request.0.len() + request.1.len() < EXCHANGE_BYTES_MAX).then_some(request)
}

/// Returns true if more than the conversation decides the answer: tools, which the model reads as
/// well, or limits on the tokens that it may write.
fn has_other_inputs(fields: &Map<String, Value>) -> bool {
    let is_set = |name: &&str| match fields.get(*name) {
        None | Some(Value::Null) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        // llama-server writes an object for an empty schema.
        Some(Value::Object(fields)) => !fields.is_empty() || *name == "json_schema",
        Some(Value::String(text)) => !text.is_empty(),
        Some(_) => true,
    };
    let format = fields.get("response_format").filter(|_| is_set(&"response_format"));
    let inputs = ["tools", "functions", "grammar", "json_schema", "logit_bias"];
    format.is_some_and(|it| it["type"] != "text") || inputs.iter().any(is_set)
}

/// Returns the id and the text of the first choice.
fn read_answer(bytes: &[u8]) -> Option<(String, String)> {
    let answer: Value = serde_json::from_slice(bytes).ok()?;
    let choices = answer["choices"].as_array()?;
    let is_first = |choice: &&Value| choice["index"].as_u64().unwrap_or(0) == 0;
    let choice = choices.iter().find(is_first)?;
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str())?;
    Some((answer["id"].as_str()?.to_owned(), text.to_owned()))
}

/// Reads the events of a streamed answer.
fn read_streamed_answer(bytes: &[u8]) -> Option<(String, String)> {
    let (mut id, mut text) = (None, String::new());
    for line in std::str::from_utf8(bytes).ok()?.lines() {
        let Some(data) = line.strip_prefix("data:") else { continue };
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        id = id.or_else(|| event["id"].as_str().map(str::to_owned));
        let choices = event["choices"].as_array().map(Vec::as_slice).unwrap_or_default();
        for choice in choices.iter().filter(|choice| choice["index"].as_u64() == Some(0)) {
            let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str());
            text.push_str(piece.unwrap_or_default());
        }
    }
    Some((id?, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_that_can_be_learned_from_are_kept() {
        let read = |request: Value| read_request(request.as_object().unwrap());
        let user = json!({ "role": "user", "content": "hi" });
        assert!(read(json!({ "messages": [user] })).unwrap().0.contains("hi"));
        assert_eq!(read(json!({ "prompt": "1+1=" })).unwrap().1, "1+1=");
        let free = json!({
            "prompt": "1+1=", "tools": [], "response_format": { "type": "text" }, "grammar": null
        });
        assert!(read(free).is_some());
        let empty =
            json!({ "prompt": "1+1=", "response_format": {}, "grammar": "", "logit_bias": {} });
        assert!(read(empty).is_some());
        let image = json!({ "role": "user", "content": [{ "type": "image_url" }] });
        let assistant = json!({ "role": "assistant", "content": "a" });
        for other in [
            json!({ "messages": [image] }),
            json!({ "messages": [user, assistant] }),
            json!({ "messages": [] }),
            json!({ "prompt": ["a", "b"] }),
            json!({ "prompt": "" }),
            json!({ "prompt": "a", "echo": true }),
            json!({ "messages": [user], "tools": [{ "type": "function" }] }),
            json!({ "messages": [user], "response_format": { "type": "json_object" } }),
            json!({ "prompt": "a", "grammar": "root ::= [0-9]" }),
            json!({ "prompt": "a", "logit_bias": { "7": -100 } }),
            json!({ "prompt": "a", "json_schema": {} }),
            json!({ "prompt": "x".repeat(EXCHANGE_BYTES_MAX) }),
        ] {
            assert_eq!(read(other.clone()), None, "{other}");
        }
    }

    #[test]
    fn an_answer_is_read_whole_or_in_pieces() {
        let whole = br#"{"id": "c-1", "choices": [{"message": {"content": "46"}}]}"#;
        assert_eq!(read_answer(whole).unwrap(), ("c-1".into(), "46".into()));
        let text = br#"{"id": "c-2", "choices": [{"text": "46"}]}"#;
        assert_eq!(read_answer(text).unwrap(), ("c-2".into(), "46".into()));
        assert_eq!(read_answer(br#"{"error": {}}"#), None);
        let streamed = "data: {\"id\":\"c-3\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"}}]}\n\n\
            data: {\"id\":\"c-3\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"4\"}}]}\n\n\
            data: {\"id\":\"c-3\",\"choices\":[{\"index\":1,\"delta\":{\"content\":\"x\"}}]}\n\n\
            data: {\"id\":\"c-3\",\"choices\":[{\"index\":0,\"text\":\"6\"}]}\n\n\
            data: [DONE]\n\n";
        assert_eq!(read_streamed_answer(streamed.as_bytes()).unwrap(), ("c-3".into(), "46".into()));
    }
}
