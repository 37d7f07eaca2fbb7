//! Copying the fleet's streams out of a server and into another, as they are: every entry keeps
//! its sequence and time, every queue what it has handed out. The bytes are the server's own
//! format (JetStream API, `STREAM.SNAPSHOT` and `STREAM.RESTORE`).

use std::{io, time::Duration};

use async_nats::HeaderMap;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use crate::{
    BUCKET, Bus, MEMBERS_BUCKET, STREAM,
    read::patiently,
    request::{RequestError, code, parse},
};

/// Below what a server accepts as one message.
const CHUNK_BYTES: usize = 256 << 10;
/// Between two chunks, and until a restored stream is checked and there.
const CHUNK_LIMIT: Duration = Duration::from_secs(30);
const RESTORED_LIMIT: Duration = Duration::from_secs(600);

/// A stream that was copied out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub stream: String,
    /// As the server described it, for the one it is restored to.
    config: Value,
    state: Value,
}

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("copy the stream {stream}")]
    Request {
        stream: String,
        #[source]
        source: RequestError,
    },
    #[error("copy the stream {stream}: the server stopped sending (B114)")]
    Silent { stream: String },
    #[error("copy the stream {stream}: the server gave up: {said} (B114)")]
    GivenUp { stream: String, said: String },
    #[error("copy the stream {stream}")]
    Io {
        stream: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "restore the stream {stream}: there is one already; restore into a server without a fleet (B110)"
    )]
    WasThere { stream: String },
}

#[derive(Deserialize)]
struct SnapshotAnswer {
    config: Value,
    state: Value,
}

#[derive(Deserialize)]
struct RestoreAnswer {
    deliver_subject: String,
}

impl Snapshot {
    /// How many entries it holds.
    pub fn entries(&self) -> u64 {
        self.state["messages"].as_u64().unwrap_or(0)
    }

    /// The position of its newest entry.
    pub fn last_sequence(&self) -> u64 {
        self.state["last_seq"].as_u64().unwrap_or(0)
    }
}

impl Bus {
    /// The names of all streams a fleet consists of.
    pub fn streams() -> [String; 3] {
        [STREAM.to_owned(), format!("KV_{BUCKET}"), format!("KV_{MEMBERS_BUCKET}")]
    }

    /// Writes a stream as it is now; None where there is no such stream.
    ///
    /// # Errors
    /// When the server or the writer fails: what was written is then worth nothing.
    pub async fn snapshot(
        &self,
        stream: &str,
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Result<Option<Snapshot>, SnapshotError> {
        let failed = |source| SnapshotError::Request { stream: stream.to_owned(), source };
        let client = &self.shared.client;
        let inbox = client.new_inbox();
        let closed = |_| failed(RequestError::Closed);
        let mut chunks = client.subscribe(inbox.clone()).await.map_err(closed)?;
        let body = json!({ "deliver_subject": inbox, "chunk_size": CHUNK_BYTES, "jsck": true });
        let verb = format!("STREAM.SNAPSHOT.{stream}");
        let answer = match self.api::<SnapshotAnswer>(&verb, &body).await {
            Err(error) if error.is_code(code::STREAM_NOT_FOUND) => return Ok(None),
            answer => answer.map_err(failed)?,
        };
        let io = |source| SnapshotError::Io { stream: stream.to_owned(), source };
        loop {
            let next = timeout(CHUNK_LIMIT, chunks.next()).await.ok().flatten();
            let chunk = next.ok_or_else(|| SnapshotError::Silent { stream: stream.to_owned() })?;
            if let Some(said) = chunk.description.filter(|_| chunk.payload.is_empty()) {
                return Err(SnapshotError::GivenUp { stream: stream.to_owned(), said });
            }
            // An empty one is the end.
            if chunk.payload.is_empty() {
                break;
            }
            to.write_all(&chunk.payload).await.map_err(io)?;
            if let Some(reply) = chunk.reply {
                // Without it the server sends no more, and that is noticed.
                let _ = client.publish(reply, Bytes::new()).await;
            }
        }
        to.flush().await.map_err(io)?;
        let SnapshotAnswer { config, state } = answer;
        Ok(Some(Snapshot { stream: stream.to_owned(), config, state }))
    }

    /// Makes a stream of what `snapshot` wrote.
    ///
    /// # Errors
    /// When there is one of that name, or the server or the reader fails; no stream is there then.
    pub async fn restore(
        &self,
        snapshot: &Snapshot,
        from: &mut (impl AsyncRead + Unpin),
    ) -> Result<(), SnapshotError> {
        let stream = || snapshot.stream.clone();
        let failed = |source| SnapshotError::Request { stream: stream(), source };
        let body = json!({ "config": snapshot.config, "state": snapshot.state });
        let verb = format!("STREAM.RESTORE.{}", snapshot.stream);
        let answer = match self.api::<RestoreAnswer>(&verb, &body).await {
            Err(error) if error.is_code(code::STREAM_EXISTS) => {
                return Err(SnapshotError::WasThere { stream: stream() });
            }
            answer => answer.map_err(failed)?,
        };
        let subject = answer.deliver_subject;
        loop {
            let mut chunk = BytesMut::with_capacity(CHUNK_BYTES);
            while chunk.len() < CHUNK_BYTES {
                let read = from.read_buf(&mut chunk).await;
                if read.map_err(|source| SnapshotError::Io { stream: stream(), source })? == 0 {
                    break;
                }
            }
            let last = chunk.is_empty();
            let limit = if last { RESTORED_LIMIT } else { CHUNK_LIMIT };
            let answer = self.ask(subject.clone(), HeaderMap::new(), chunk.freeze(), limit).await;
            let answer = answer.map_err(failed)?;
            if last || !answer.payload.is_empty() {
                parse::<Value>(&answer).map_err(failed)?;
            }
            if last {
                return Ok(());
            }
        }
    }

    /// Whether a fleet's log is there.
    ///
    /// # Errors
    /// When the server does not say.
    pub async fn has_log(&self) -> Result<bool, RequestError> {
        let verb = format!("STREAM.INFO.{STREAM}");
        match patiently(|| self.api::<Value>(&verb, &())).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_code(code::STREAM_NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
