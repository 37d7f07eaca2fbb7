//! What a fleet says of itself outside the log: agents' status, commands to them, and
//! how to join. Nothing here needs to survive.

use std::{
    io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_nats::{HeaderMap, jetstream::message::StreamMessage};
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use serde::{Serialize, de::DeserializeOwned};
use wire::{
    AgentId,
    v1::{AgentCommand, AgentStatus, FleetConfig, agent_status::State},
};

use crate::{
    BUCKET, Bus, batch, kv,
    read::patiently,
    request::{RequestError, code},
};

const CONFIG_KEY: &str = "config";
const AGENT_PREFIX: &str = "agent.";
const STATUS_PREFIX: &str = "flotilla.agent.status.";
/// Agents record their status every ten seconds; clocks differ.
const RECENT: Duration = Duration::from_secs(45);
/// Of a small fleet, as many of the last writes to the bucket have all its agents.
const RECENT_RECORDS: u64 = 256;
/// Names a command, so that its answer can.
const COMMAND_HEADER: &str = "Flotilla-Command";
/// An agent that listens confirms a command at once.
const COMMAND_LIMIT: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum PresenceError {
    #[error("{what}")]
    Request {
        what: String,
        #[source]
        source: RequestError,
    },
    #[error("{what}: what is stored there is not valid (B113)")]
    Malformed {
        what: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("command agent {agent}: it is not connected to the bus (B115)")]
    NotListening { agent: String },
    #[error("{what}: the connection to the bus is closed (B102)")]
    Closed {
        what: String,
        #[source]
        source: io::Error,
    },
}

impl Bus {
    /// Tells everyone who watches; not stored, not confirmed.
    ///
    /// # Errors
    /// When the connection is closed for good.
    pub async fn announce(&self, status: &AgentStatus) -> Result<(), PresenceError> {
        let subject = format!("{STATUS_PREFIX}{}", status.agent);
        let sent = self.shared.client.publish(subject, json(status)).await;
        sent.map_err(|error| closed("announce the agent's status", error))
    }

    /// Keeps the status for those who come later.
    ///
    /// # Errors
    /// When the bucket cannot be written.
    pub async fn record_status(&self, status: &AgentStatus) -> Result<(), PresenceError> {
        let key = format!("{AGENT_PREFIX}{}", status.agent);
        self.put(&key, json(status), "record the agent's status").await
    }

    /// The last recorded status of every agent ever seen, by name; `seen_at` tells who is gone.
    ///
    /// # Errors
    /// When the bucket cannot be read. A single status that is not valid is left out.
    pub async fn statuses(&self) -> Result<Vec<AgentStatus>, PresenceError> {
        let values = patiently(|| self.kv_list(AGENT_PREFIX)).await.map_err(|source| {
            PresenceError::Request { what: "list the agents".to_owned(), source }
        })?;
        Ok(values.iter().filter_map(|(subject, value)| own_status(subject, value)).collect())
    }

    /// Some of the statuses that were recorded last, `most` at most: what one asks who needs some
    /// agents that are there, whatever the size of the fleet. Which ones of many is up to `chance`.
    ///
    /// # Errors
    /// When the bucket cannot be read.
    pub async fn recent_statuses(
        &self,
        most: usize,
        chance: u64,
    ) -> Result<Vec<AgentStatus>, PresenceError> {
        let what = || "see which agents are there".to_owned();
        let failed = |source| PresenceError::Request { what: what(), source };
        let stream = format!("KV_{BUCKET}");
        let (end, records) = self.stream_extent(&stream).await.map_err(failed)?;
        let most_records = most as u64;
        let from = if records <= most_records {
            1
        } else {
            // Each record stands where it was last written: the last ones are of who is there now,
            // between writes of others to the same bucket.
            let back = chance % (2 * records).max(RECENT_RECORDS);
            end.saturating_sub(back.max(RECENT_RECORDS / 2).max(most_records)) + 1
        };
        let filter = kv::subject(&format!("{AGENT_PREFIX}*"));
        let found = batch::fetch_some(self, &stream, &filter, from, most).await.map_err(failed)?;
        Ok(found.iter().filter_map(lately).collect())
    }

    /// What an agent recorded of itself lately; `None` when it is not there.
    ///
    /// # Errors
    /// When the bucket cannot be read.
    pub async fn recent_status(
        &self,
        agent: &AgentId,
    ) -> Result<Option<AgentStatus>, PresenceError> {
        let key = kv::subject(&format!("{AGENT_PREFIX}{agent}"));
        let found = self.last_message(&format!("KV_{BUCKET}"), &key).await.map_err(|source| {
            PresenceError::Request { what: format!("see whether {agent} is there"), source }
        })?;
        Ok(found.as_ref().and_then(lately))
    }

    /// Statuses as agents announce them, from now on.
    ///
    /// # Errors
    /// When the connection is closed for good.
    pub async fn watch_statuses(&self) -> Result<BoxStream<'static, AgentStatus>, PresenceError> {
        let subject = format!("{STATUS_PREFIX}*");
        let announced = self
            .shared
            .client
            .subscribe(subject)
            .await
            .map_err(|error| closed("watch the agents", error))?;
        let parse = |message: async_nats::Message| async move {
            own_status(&message.subject, &message.payload)
        };
        Ok(announced.filter_map(parse).boxed())
    }

    /// Commands an agent and waits until it has heard it.
    ///
    /// # Errors
    /// `NotListening` when no such agent is connected.
    pub async fn command(
        &self,
        agent: &AgentId,
        command: &AgentCommand,
    ) -> Result<(), PresenceError> {
        let not_listening = || PresenceError::NotListening { agent: agent.to_string() };
        let client = &self.shared.client;
        let heard = client.subscribe(answer_subject(agent)).await;
        let heard = heard.map_err(|error| closed("command an agent", error))?;
        let nonce = client.new_inbox();
        let ours = |message: &async_nats::Message| {
            let confirmed = message.payload == nonce.as_bytes();
            std::future::ready(confirmed)
        };
        let mut heard = std::pin::pin!(heard.filter(ours));
        let mut headers = HeaderMap::new();
        headers.insert(COMMAND_HEADER, nonce.as_str());
        let sent = self.ask(command_subject(agent), headers, json(command), COMMAND_LIMIT);
        let sent = tokio::select! {
            sent = sent => sent,
            Some(_) = heard.next() => return Ok(()),
        };
        match sent {
            Ok(_) => Ok(()),
            Err(RequestError::NoResponders { .. }) => Err(not_listening()),
            Err(source) => {
                Err(PresenceError::Request { what: format!("command agent {agent}"), source })
            }
        }
    }

    /// The commands to an agent, from now on; each is confirmed as it is yielded.
    ///
    /// # Errors
    /// When the connection is closed for good.
    pub async fn commands(
        &self,
        agent: &AgentId,
    ) -> Result<BoxStream<'static, AgentCommand>, PresenceError> {
        let heard = self
            .shared
            .client
            .subscribe(command_subject(agent))
            .await
            .map_err(|error| closed("listen for commands", error))?;
        let bus = self.clone();
        let answers = answer_subject(agent);
        let confirm = move |message: async_nats::Message| {
            let (bus, answers) = (bus.clone(), answers.clone());
            async move {
                let command = lenient(&message.subject, &message.payload)?;
                bus.confirm(answers, &message).await;
                Some(command)
            }
        };
        Ok(heard.filter_map(confirm).boxed())
    }

    /// The sender notices a lost confirmation by itself.
    async fn confirm(&self, answers: String, command: &async_nats::Message) {
        let client = &self.shared.client;
        // Where the sender wants its answer is, in an account of our own, nowhere.
        let nonce = command.headers.as_ref().and_then(|headers| headers.get(COMMAND_HEADER));
        if let Some(nonce) = nonce {
            let _ = client.publish(answers, Bytes::from(nonce.as_str().to_owned())).await;
        } else if let Some(reply) = &command.reply {
            let _ = client.publish(reply.clone(), Bytes::new()).await;
        }
        // Whoever is told to leave may drop the connection next.
        let _ = client.flush().await;
    }

    /// What a box must know to join; None when nobody has said yet.
    ///
    /// # Errors
    /// When the bucket cannot be read, or holds something else.
    pub async fn fleet_config(&self) -> Result<Option<FleetConfig>, PresenceError> {
        let what = || "read the fleet's configuration".to_owned();
        let entry = match patiently(|| self.kv_get(CONFIG_KEY)).await {
            // No coordinator was ever here.
            Err(source) if source.is_code(code::STREAM_NOT_FOUND) => return Ok(None),
            entry => entry.map_err(|source| PresenceError::Request { what: what(), source })?,
        };
        entry
            .value
            .map(|value| serde_json::from_slice(&value))
            .transpose()
            .map_err(|source| PresenceError::Malformed { what: what(), source })
    }

    /// # Errors
    /// When the bucket cannot be written.
    pub async fn set_fleet_config(&self, config: &FleetConfig) -> Result<(), PresenceError> {
        self.put(CONFIG_KEY, json(config), "write the fleet's configuration").await
    }

    async fn put(&self, key: &str, value: Bytes, what: &str) -> Result<(), PresenceError> {
        patiently(|| self.kv_put(key, value.clone(), None))
            .await
            .map(|_| ())
            .map_err(|source| PresenceError::Request { what: what.to_owned(), source })
    }
}

fn answer_subject(agent: &AgentId) -> String {
    format!("flotilla.agent.answer.{agent}")
}

fn command_subject(agent: &AgentId) -> String {
    format!("flotilla.agent.command.{agent}")
}

fn json(message: &impl Serialize) -> Bytes {
    serde_json::to_vec(message).expect("a generated message has only string keys").into()
}

/// What an agent says of itself: under its own name, which the server sees to, and no other's.
fn own_status(subject: &str, payload: &[u8]) -> Option<AgentStatus> {
    let status: AgentStatus = lenient(subject, payload)?;
    let own = subject.rsplit('.').next() == Some(status.agent.as_str());
    if !own {
        tracing::warn!(subject, named = status.agent, "a status in another's name was dropped");
    }
    own.then_some(status)
}

/// A status whose record is not old, by the server's clock and ours.
fn lately(message: &StreamMessage) -> Option<AgentStatus> {
    let written = u64::try_from(message.time.unix_timestamp()).ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if now.abs_diff(written) > RECENT.as_secs() {
        return None;
    }
    let status = own_status(&message.subject, &message.payload)?;
    (status.state() != State::Stopped).then_some(status)
}

fn lenient<M: DeserializeOwned>(subject: &str, payload: &[u8]) -> Option<M> {
    serde_json::from_slice(payload)
        .inspect_err(|error| tracing::warn!(subject, %error, "a message was not understood"))
        .ok()
}

fn closed(what: &str, error: impl std::error::Error + Send + Sync + 'static) -> PresenceError {
    PresenceError::Closed { what: what.to_owned(), source: io::Error::other(error) }
}
