//! How an agent and its worker process talk: one JSON object a line. Calls go to the
//! worker's stdin; progress, replies and errors come from its stdout. A worker that is
//! sent several calls may answer them in any order.

use std::{
    io::{BufRead, Write},
    sync::mpsc,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Longest line either side accepts: a job's samples fit many times over.
pub(crate) const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Calls a worker holds unread; the agent sends only as many as it holds leases.
const CALLS_MAX: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ToWorker {
    pub call: u64,
    pub request: Value,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FromWorker {
    pub call: u64,
    #[serde(flatten)]
    pub answer: Answer,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Progress(Value),
    Reply(Value),
    Error(String),
}

/// The worker's side: calls as they come. Ends when the agent closes the pipe or dies.
#[derive(Debug)]
pub struct Inbox<Q> {
    calls: mpsc::Receiver<Call<Q>>,
}

/// One call, to be answered once.
#[derive(Debug)]
pub struct Call<Q> {
    pub request: Q,
    pub respond: Responder,
}

/// Where a call's answers go.
#[derive(Debug, Clone)]
pub struct Responder {
    call: u64,
}

impl<Q: DeserializeOwned + Send + 'static> Inbox<Q> {
    /// Starts reading this process's stdin. A call that cannot be read is answered with an error.
    pub fn open() -> Self {
        let (send, calls) = mpsc::sync_channel(CALLS_MAX);
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { return };
                let Some(call) = read_call(&line) else { continue };
                if send.send(call).is_err() {
                    return;
                }
            }
        });
        Self { calls }
    }

    /// The next call, waiting for it. `None` when there will be no more.
    pub fn next(&self) -> Option<Call<Q>> {
        self.calls.recv().ok()
    }

    /// The next call if one is there. The error says whether more may come.
    ///
    /// # Errors
    /// When none is there now, or none will come.
    pub fn try_next(&self) -> Result<Call<Q>, mpsc::TryRecvError> {
        self.calls.try_recv()
    }
}

/// Reads a line as its other end does, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    /// What a worker answered.
    pub fn answer(line: &[u8]) -> Option<serde_json::Value> {
        match serde_json::from_slice::<super::FromWorker>(line).ok()?.answer {
            super::Answer::Progress(value) | super::Answer::Reply(value) => Some(value),
            super::Answer::Error(_) => None,
        }
    }

    /// What an agent asked.
    pub fn request(line: &[u8]) -> Option<serde_json::Value> {
        serde_json::from_slice::<super::ToWorker>(line).ok().map(|call| call.request)
    }
}

fn read_call<Q: DeserializeOwned>(line: &str) -> Option<Call<Q>> {
    let message: ToWorker = match serde_json::from_str(line) {
        Ok(message) => message,
        Err(error) => {
            tracing::error!(%error, "a line that is no call");
            return None;
        }
    };
    let respond = Responder { call: message.call };
    match serde_json::from_value(message.request) {
        Ok(request) => Some(Call { request, respond }),
        Err(error) => {
            respond.error(&format!("read the request: {error}"));
            None
        }
    }
}

impl Responder {
    pub fn progress(&self, progress: &impl Serialize) {
        self.send(json(progress).map_or_else(Answer::Error, Answer::Progress));
    }

    pub fn reply(&self, reply: &impl Serialize) {
        self.send(json(reply).map_or_else(Answer::Error, Answer::Reply));
    }

    pub fn error(&self, message: &str) {
        self.send(Answer::Error(message.to_owned()));
    }

    /// Writing fails only when the agent is gone; then there is nobody to tell.
    fn send(&self, answer: Answer) {
        let message = FromWorker { call: self.call, answer };
        let mut line = serde_json::to_vec(&message).expect("answers are plain JSON");
        line.push(b'\n');
        let mut stdout = std::io::stdout().lock();
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}

fn json(value: &impl Serialize) -> Result<Value, String> {
    serde_json::to_value(value).map_err(|error| format!("write the answer: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_apart_by_their_key() {
        let line = |answer| serde_json::to_string(&FromWorker { call: 3, answer }).unwrap();
        assert_eq!(line(Answer::Reply(1.into())), r#"{"call":3,"reply":1}"#);
        assert_eq!(line(Answer::Error("x".into())), r#"{"call":3,"error":"x"}"#);
        let read: FromWorker = serde_json::from_str(r#"{"call":3,"progress":{"done":1}}"#).unwrap();
        assert!(matches!(read.answer, Answer::Progress(_)), "{read:?}");
    }
}
