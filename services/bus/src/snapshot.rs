//! Copies the fleet's streams from one server to another unchanged: every entry keeps its sequence
//! and time, every queue its delivery state. The bytes are in the server's own format (JetStream
//! API, `STREAM.SNAPSHOT` and `STREAM.RESTORE`).

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
    Bus, EXCHANGES_STREAM, FLEET_BUCKET, LOG_STREAM, MEMBERS_BUCKET,
    request::parse_answer,
    request_error::{RequestError, code},
};

/// Below the server's payload limit.
const CHUNK_BYTES: usize = 256 << 10;
const CHUNK_LIMIT: Duration = Duration::from_secs(30);
/// For the server to check and open a restored stream.
const RESTORED_LIMIT: Duration = Duration::from_secs(600);

/// The description of a copied stream, needed to restore it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StreamSnapshot {
    pub stream: String,
    /// As the server described it; passed on when restoring.
    config: Value,
    state: Value,
}

/// The reason why a stream was not copied or restored.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("copy the stream {stream}")]
    Request {
        stream: String,
        #[source]
        source: RequestError,
    },
    #[error("copy the stream {stream}: the server stopped sending (B114)")]
    NoAnswer { stream: String },
    #[error("copy the stream {stream}: the server gave up: {reason} (B114)")]
    Aborted { stream: String, reason: String },
    #[error("copy the stream {stream}")]
    Io {
        stream: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "restore the stream {stream}: it already exists; restore into a server without a fleet \
         (B110)"
    )]
    AlreadyExists { stream: String },
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

impl StreamSnapshot {
    /// Returns the number of entries in the copied stream.
    pub fn entry_count(&self) -> u64 {
        self.state["messages"].as_u64().unwrap_or(0)
    }

    /// Returns the position of the last entry.
    pub fn last_sequence(&self) -> u64 {
        self.state["last_seq"].as_u64().unwrap_or(0)
    }
}

impl Bus {
    /// Returns the names of all streams of a fleet: the log, both buckets and the kept requests.
    pub fn stream_names() -> [String; 4] {
        let [fleet, members] = [FLEET_BUCKET, MEMBERS_BUCKET].map(|bucket| format!("KV_{bucket}"));
        [LOG_STREAM.to_owned(), fleet, members, EXCHANGES_STREAM.to_owned()]
    }

    /// Writes the present state of a stream to `to`. Returns `None` if there is no such stream. On
    /// an error the bytes written so far are useless.
    pub async fn snapshot_stream(
        &self,
        stream: &str,
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Result<Option<StreamSnapshot>, SnapshotError> {
        let failed = |source| SnapshotError::Request { stream: stream.to_owned(), source };
        let client = &self.shared.client;
        let inbox = client.new_inbox();
        let closed = |_| failed(RequestError::Closed);
        let mut chunks = client.subscribe(inbox.clone()).await.map_err(closed)?;
        let body = json!({ "deliver_subject": inbox, "chunk_size": CHUNK_BYTES, "jsck": true });
        let verb = format!("STREAM.SNAPSHOT.{stream}");
        let answer = match self.call_api::<SnapshotAnswer>(&verb, &body).await {
            Err(error) if error.has_server_code(code::STREAM_NOT_FOUND) => return Ok(None),
            answer => answer.map_err(failed)?,
        };
        let io = |source| SnapshotError::Io { stream: stream.to_owned(), source };
        loop {
            let next = timeout(CHUNK_LIMIT, chunks.next()).await.ok().flatten();
            let chunk =
                next.ok_or_else(|| SnapshotError::NoAnswer { stream: stream.to_owned() })?;
            if let Some(reason) = chunk.description.filter(|_| chunk.payload.is_empty()) {
                return Err(SnapshotError::Aborted { stream: stream.to_owned(), reason });
            }
            // An empty chunk is the end.
            if chunk.payload.is_empty() {
                break;
            }
            to.write_all(&chunk.payload).await.map_err(io)?;
            if let Some(reply) = chunk.reply {
                // If this acknowledgement is lost, the server stops sending, and the time limit
                // reports it.
                let _ = client.publish(reply, Bytes::new()).await;
            }
        }
        to.flush().await.map_err(io)?;
        let SnapshotAnswer { config, state } = answer;
        Ok(Some(StreamSnapshot { stream: stream.to_owned(), config, state }))
    }

    /// Creates a stream from the bytes of [`Bus::snapshot_stream`]. Fails if a stream of that name
    /// exists; creates none on an error.
    pub async fn restore_stream(
        &self,
        snapshot: &StreamSnapshot,
        from: &mut (impl AsyncRead + Unpin),
    ) -> Result<(), SnapshotError> {
        let stream = || snapshot.stream.clone();
        let failed = |source| SnapshotError::Request { stream: stream(), source };
        let body = json!({ "config": snapshot.config, "state": snapshot.state });
        let verb = format!("STREAM.RESTORE.{}", snapshot.stream);
        let answer = match self.call_api::<RestoreAnswer>(&verb, &body).await {
            Err(error) if error.has_server_code(code::STREAM_EXISTS) => {
                return Err(SnapshotError::AlreadyExists { stream: stream() });
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
            let answer =
                self.send_request(subject.clone(), HeaderMap::new(), chunk.freeze(), limit).await;
            let answer = answer.map_err(failed)?;
            if last || !answer.payload.is_empty() {
                parse_answer::<Value>(&answer).map_err(failed)?;
            }
            if last {
                return Ok(());
            }
        }
    }
}
