//! Passes one request to the process of its model, and its answer back in parts.

use std::{collections::BTreeMap, time::Duration};

use bus::{AnswerHead, AnswerPart, AnswerSender, ServingClosed, ServingRequest};
use bytes::Bytes;
use reqwest::{Response, StatusCode, header::CONTENT_TYPE};
use serde_json::{json, value::RawValue};
use wire::RunId;

use crate::{
    hang_watch::ActiveRequest,
    logprobs_rewriter::LogprobsRewriter,
    model_process::{MODEL_ALIAS, ModelProcess},
};

/// Interval of messages to the gateway that the request is still in progress, while there is no
/// data.
const WAITING_INTERVAL: Duration = Duration::from_secs(1);
const DATA_BYTES_MAX: usize = 256 << 10;

/// Answers a request. An error becomes a part of the answer.
pub(crate) async fn answer_request(
    process: &ModelProcess,
    channel: &RunId,
    request: &ServingRequest,
    answer: &AnswerSender,
) -> Result<(), ServingClosed> {
    let active = process.count_request();
    answer.send_part(AnswerPart::Waiting).await?;
    // A request may have a million small values, which would take hundreds of megabytes.
    let body: BTreeMap<String, Box<RawValue>> = match serde_json::from_slice(&request.body) {
        Ok(body) => body,
        Err(error) => {
            let message = format!("the body is no JSON object: {error}");
            return answer.send_part(AnswerPart::Refused { message }).await;
        }
    };
    if body.get("echo").is_some_and(|it| it.get() == "true") && !process.echoes_prompts {
        return refuse_echo(answer).await;
    }
    let lacks_lists = request.path == "/v1/completions"
        && body.contains_key("logprobs")
        && !process.writes_token_lists;
    let sent = process.post(channel, &request.path, body);
    let response = match await_sending_waits(answer, sent).await? {
        // It is loading or ending, or has too many requests.
        Ok(response) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
            let message = "the model's process is not ready, or has too many requests".to_owned();
            return answer.send_part(AnswerPart::Refused { message }).await;
        }
        Ok(response) => response,
        Err(error) => return refuse_answer(answer, &error).await,
    };
    let is_stream = has_events(&response);
    let rewriter = (lacks_lists && response.status() == StatusCode::OK)
        .then(|| LogprobsRewriter::new(is_stream));
    forward_response(response, channel, rewriter, answer, &active).await
}

/// Returns true if an answer is streamed, as events.
fn has_events(response: &Response) -> bool {
    let kind = response.headers().get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// Another engine could answer it, but the gateway does not know which agents have it.
async fn refuse_echo(answer: &AnswerSender) -> Result<(), ServingClosed> {
    let message = "`echo` needs the embedded engine, and this channel is served with llama.cpp: start \
                   the agents that serve it with --server-engine candle (G101)";
    let error = json!({ "message": message, "type": "invalid_request_error", "param": "echo", "code": null });
    let head = AnswerHead {
        status: StatusCode::BAD_REQUEST.as_u16(),
        content_type: "application/json".to_owned(),
    };
    answer.send_part(AnswerPart::Begin(head)).await?;
    let body = json!({ "error": error }).to_string();
    answer.send_part(AnswerPart::Data(body.into())).await?;
    answer.send_part(AnswerPart::End).await
}

async fn forward_response(
    mut response: Response,
    channel: &RunId,
    mut rewriter: Option<LogprobsRewriter>,
    answer: &AnswerSender,
    active: &ActiveRequest<'_>,
) -> Result<(), ServingClosed> {
    let content_type = response.headers().get(CONTENT_TYPE).and_then(|it| it.to_str().ok());
    let content_type = content_type.unwrap_or("application/json").to_owned();
    let head = AnswerHead { status: response.status().as_u16(), content_type };
    answer.send_part(AnswerPart::Begin(head)).await?;
    loop {
        let received = match await_sending_waits(answer, response.chunk()).await? {
            Ok(received) => received,
            Err(error) => return refuse_answer(answer, &error).await,
        };
        let has_ended = received.is_none();
        if !has_ended {
            active.note_part();
        }
        let bytes = match (&mut rewriter, received) {
            (None, received) => received.unwrap_or_default(),
            (Some(rewriter), Some(bytes)) => rewriter.take_bytes(&bytes),
            (Some(rewriter), None) => rewriter.finish(),
        };
        let mut bytes = name_channel(bytes, channel);
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(DATA_BYTES_MAX));
            answer.send_part(AnswerPart::Data(piece)).await?;
        }
        if has_ended {
            return answer.send_part(AnswerPart::End).await;
        }
    }
}

/// Puts the channel's name in place of the process's name for its model. A name that is split between
/// two pieces stays. Texts of the model cannot contain it: their quotes are escaped.
fn name_channel(bytes: Bytes, channel: &RunId) -> Bytes {
    let name = format!(r#""model":"{MODEL_ALIAS}""#);
    let own_name = format!(r#""model":"{channel}""#);
    // A piece may begin and end within a character.
    let mut named = Vec::new();
    let mut rest = &bytes[..];
    while let Some(at) = rest.windows(name.len()).position(|part| part == name.as_bytes()) {
        named.extend_from_slice(&rest[..at]);
        named.extend_from_slice(own_name.as_bytes());
        rest = &rest[at + name.len()..];
    }
    if named.is_empty() {
        return bytes;
    }
    named.extend_from_slice(rest);
    named.into()
}

async fn refuse_answer(answer: &AnswerSender, error: &reqwest::Error) -> Result<(), ServingClosed> {
    tracing::warn!(%error, "the model's process did not answer a request");
    let message = format!("the model's process did not answer: {error}");
    answer.send_part(AnswerPart::Refused { message }).await
}

/// Waits for a future, and reports to the gateway at intervals that the request is in progress.
async fn await_sending_waits<T>(
    answer: &AnswerSender,
    work: impl Future<Output = T>,
) -> Result<T, ServingClosed> {
    tokio::pin!(work);
    loop {
        match tokio::time::timeout(WAITING_INTERVAL, &mut work).await {
            Ok(done) => return Ok(done),
            Err(_) => answer.send_part(AnswerPart::Waiting).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_name_the_channel_as_their_model() {
        let channel = "stable".parse().unwrap();
        let named =
            |text: &'static str| name_channel(Bytes::from_static(text.as_bytes()), &channel);
        let answer = r#"{"model":"flotilla-channel","text":"\"model\":\"flotilla-channel\""}"#;
        let expected = r#"{"model":"stable","text":"\"model\":\"flotilla-channel\""}"#;
        assert_eq!(named(answer), expected);
        assert_eq!(named(r#"{"a":1}"#), r#"{"a":1}"#);
        // The first byte of a character, whose second one is in the next piece.
        let cut = |text: &str| [text.as_bytes(), b"\xc3"].concat();
        let piece = name_channel(cut(r#"{"model":"flotilla-channel","a":""#).into(), &channel);
        assert_eq!(piece, cut(r#"{"model":"stable","a":""#));
    }
}
