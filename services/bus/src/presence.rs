//! What a fleet says of itself outside the log: agents' status, commands to them, and
//! how to join. Nothing here needs to survive.

use std::{io, time::Duration};

use async_nats::HeaderMap;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use serde::{Serialize, de::DeserializeOwned};
use wire::{
    AgentId,
    v1::{AgentCommand, AgentStatus, FleetConfig},
};

use crate::{
    Bus,
    read::patiently,
    request::{RequestError, code},
};

const CONFIG_KEY: &str = "config";
const AGENT_PREFIX: &str = "agent.";
const STATUS_PREFIX: &str = "flotilla.agent.status.";
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
    #[error("{what}: what is stored there is not valid")]
    Malformed {
        what: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("command agent {agent}: it is not connected to the bus")]
    NotListening { agent: String },
    #[error("{what}: the connection to the bus is closed")]
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

fn lenient<M: DeserializeOwned>(subject: &str, payload: &[u8]) -> Option<M> {
    serde_json::from_slice(payload)
        .inspect_err(|error| tracing::warn!(subject, %error, "a message was not understood"))
        .ok()
}

fn closed(what: &str, error: impl std::error::Error + Send + Sync + 'static) -> PresenceError {
    PresenceError::Closed { what: what.to_owned(), source: io::Error::other(error) }
}
