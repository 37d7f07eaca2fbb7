//! The protocol between an agent and its worker process: one JSON object a line. Calls go to the
//! worker's stdin; progress, replies and errors come from its stdout. A worker may answer several
//! calls in any order.

use std::{
    io::{BufRead, Write},
    sync::mpsc,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

/// The longest line that either side accepts; the samples of a job are much smaller.
pub(crate) const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The agent sends only as many calls as it holds leases.
const UNREAD_CALLS_MAX: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CallMessage {
    pub call: u64,
    pub request: Value,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AnswerMessage {
    pub call: u64,
    #[serde(flatten)]
    pub answer: WorkerAnswer,
}

/// Progress any number of times, then one reply or error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerAnswer {
    Progress(Value),
    Reply(Value),
    Error(String),
}

/// The worker's queue of calls. It ends when the agent closes the pipe or dies.
#[derive(Debug)]
pub struct CallInbox<Q> {
    calls: mpsc::Receiver<WorkerCall<Q>>,
}

/// One call, to be answered with exactly one reply or error.
#[derive(Debug)]
pub struct WorkerCall<Q> {
    pub request: Q,
    pub responder: CallResponder,
}

/// A sender of answers to one call. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CallResponder {
    call: u64,
}

impl<Q: DeserializeOwned + Send + 'static> CallInbox<Q> {
    /// Starts a thread that reads calls from this process's stdin until it closes; the inbox then
    /// ends. A request that is not a `Q` is answered with an error on stdout; a line that is no
    /// call is logged and skipped.
    pub fn read_stdin() -> Self {
        let (send, calls) = mpsc::sync_channel(UNREAD_CALLS_MAX);
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { return };
                let Some(call) = parse_call(&line) else { continue };
                if send.send(call).is_err() {
                    return;
                }
            }
        });
        Self { calls }
    }

    /// Waits for the next call. Returns `None` if stdin was closed and no calls are left.
    pub fn next(&self) -> Option<WorkerCall<Q>> {
        self.calls.recv().ok()
    }

    /// Returns the next call without waiting. The error is `Empty` if there is none yet, or
    /// `Disconnected` if stdin was closed and no calls are left.
    pub fn try_next(&self) -> Result<WorkerCall<Q>, mpsc::TryRecvError> {
        self.calls.try_recv()
    }
}

/// Parsers of both directions, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    /// Parses one line of a worker's stdout and returns the value of its progress or reply. `None`
    /// for an error answer or another line.
    pub fn parse_answer(line: &[u8]) -> Option<serde_json::Value> {
        match serde_json::from_slice::<super::AnswerMessage>(line).ok()?.answer {
            super::WorkerAnswer::Progress(value) | super::WorkerAnswer::Reply(value) => Some(value),
            super::WorkerAnswer::Error(_) => None,
        }
    }

    /// Parses one line of a worker's stdin, `{"call": NUMBER, "request": VALUE}`, and returns the
    /// value of `request`. `None` for any other line.
    pub fn parse_request(line: &[u8]) -> Option<serde_json::Value> {
        serde_json::from_slice::<super::CallMessage>(line).ok().map(|call| call.request)
    }
}

/// A request that does not fit the worker's type is answered with an error; a line that is no call
/// at all is only logged.
fn parse_call<Q: DeserializeOwned>(line: &str) -> Option<WorkerCall<Q>> {
    let message: CallMessage = match serde_json::from_str(line) {
        Ok(message) => message,
        Err(error) => {
            tracing::error!(%error, "line is not a call; ignored");
            return None;
        }
    };
    let respond = CallResponder { call: message.call };
    match serde_json::from_value(message.request) {
        Ok(request) => Some(WorkerCall { request, responder: respond }),
        Err(error) => {
            respond.send_error(&format!("read the request: {error}"));
            None
        }
    }
}

impl CallResponder {
    /// Sends a progress message to the agent; any number of times before the reply.
    pub fn send_progress(&self, progress: &impl Serialize) {
        self.send(to_json(progress).map_or_else(WorkerAnswer::Error, WorkerAnswer::Progress));
    }

    /// Sends the reply, which ends the call; a value that cannot be written as JSON is sent as an
    /// error.
    pub fn send_reply(&self, reply: &impl Serialize) {
        self.send(to_json(reply).map_or_else(WorkerAnswer::Error, WorkerAnswer::Reply));
    }

    /// Refuses the call with a message for users, which ends the call.
    pub fn send_error(&self, message: &str) {
        self.send(WorkerAnswer::Error(message.to_owned()));
    }

    /// Errors are ignored, because writing fails only when the agent is gone.
    fn send(&self, answer: WorkerAnswer) {
        let message = AnswerMessage { call: self.call, answer };
        let mut line = serde_json::to_vec(&message).expect("answers are plain JSON");
        line.push(b'\n');
        let mut stdout = std::io::stdout().lock();
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}

/// The error is a message for the caller.
fn to_json(value: &impl Serialize) -> Result<Value, String> {
    serde_json::to_value(value).map_err(|error| format!("write the answer: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_distinguished_by_their_key() {
        let line = |answer| serde_json::to_string(&AnswerMessage { call: 3, answer }).unwrap();
        assert_eq!(line(WorkerAnswer::Reply(1.into())), r#"{"call":3,"reply":1}"#);
        assert_eq!(line(WorkerAnswer::Error("x".into())), r#"{"call":3,"error":"x"}"#);
        let read: AnswerMessage =
            serde_json::from_str(r#"{"call":3,"progress":{"done":1}}"#).unwrap();
        assert!(matches!(read.answer, WorkerAnswer::Progress(_)), "{read:?}");
    }
}
