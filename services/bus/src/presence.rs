//! Presence of a fleet outside the log: status of agents, commands to agents, and the configuration
//! to join. None of it has to survive.

use std::{io, time::Duration};

use async_nats::{HeaderMap, jetstream::message::StreamMessage};
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use serde::{Serialize, de::DeserializeOwned};
use wire::{
    AgentId,
    v1::{AgentCommand, AgentStatus, FleetConfig, agent_status::State},
};

use crate::{
    Bus, FLEET_BUCKET, batch_get, kv,
    point_read::with_retries,
    request_error::{RequestError, code},
};

const CONFIG_KEY: &str = "config";
const AGENT_PREFIX: &str = "agent.";
const STATUS_PREFIX: &str = "flotilla.agent.status.";
/// Agents record their status every ten seconds; clocks differ.
const RECENT_STATUS_AGE: Duration = Duration::from_secs(45);
/// The newest positions of the bucket that contain all agents of a small fleet.
const RECENT_RECORDS: u64 = 256;
/// Nonce of a command; the confirmation repeats it.
const COMMAND_HEADER: &str = "Flotilla-Command";
/// A status that is longer is dropped: a full one of an honest agent has some 100 KiB.
const STATUS_BYTES_MAX: usize = 256 * 1024;
/// Jobs of one status, the rest is dropped. An agent holds at most 64 waiting jobs of each role.
const STATUS_JOBS_MAX: usize = 512;
/// A connected agent confirms at once.
const COMMAND_LIMIT: Duration = Duration::from_secs(3);

/// The reason why a status, a command or the fleet's configuration could not be transferred.
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
    #[error(
        "command agent {agent}: a user's command reaches agents only through the gateway: use the \
         fleet's web page, or call Fleet.Drain (B115)"
    )]
    OnlyByGateway { agent: String },
    #[error("{what}: the connection to the bus is closed (B102)")]
    Closed {
        what: String,
        #[source]
        source: io::Error,
    },
}

impl Bus {
    /// Sends the status to all current watchers, neither stored nor confirmed. Fails if the
    /// connection is closed for good.
    pub async fn announce_status(&self, status: &AgentStatus) -> Result<(), PresenceError> {
        let subject = format!("{STATUS_PREFIX}{}", status.agent);
        let sent = self.shared.client.publish(subject, to_json_bytes(status)).await;
        sent.map_err(|error| closed_error("announce the agent's status", error))
    }

    /// Stores the status in the fleet's bucket, for later readers.
    pub async fn record_status(&self, status: &AgentStatus) -> Result<(), PresenceError> {
        let key = format!("{AGENT_PREFIX}{}", status.agent);
        self.put_presence_key(&key, to_json_bytes(status), "record the agent's status").await
    }

    /// Returns the last recorded status of every agent ever seen, by name; `seen_at` shows the
    /// agents that are gone. Skips invalid ones.
    pub async fn list_statuses(&self) -> Result<Vec<AgentStatus>, PresenceError> {
        let values = with_retries(|| self.kv_list(AGENT_PREFIX)).await.map_err(|source| {
            PresenceError::Request { what: "list the agents".to_owned(), source }
        })?;
        Ok(values.iter().filter_map(|(subject, value)| parse_own_status(subject, value)).collect())
    }

    /// Returns up to `most` recently recorded statuses, for a caller that needs some connected
    /// agents in a fleet of any size. `chance`, a random number, selects among many.
    pub async fn sample_recent_statuses(
        &self,
        most: usize,
        chance: u64,
    ) -> Result<Vec<AgentStatus>, PresenceError> {
        let what = || "list the agents that are connected".to_owned();
        let failed = |source| PresenceError::Request { what: what(), source };
        let stream = format!("KV_{FLEET_BUCKET}");
        let (end, records) = self.stream_extent(&stream).await.map_err(failed)?;
        let most_records = most as u64;
        let from = if records <= most_records {
            1
        } else {
            // A key's position is that of its last write. The newest positions therefore belong to
            // agents that are connected now, mixed with other writes to the bucket.
            let back = chance % (2 * records).max(RECENT_RECORDS);
            end.saturating_sub(back.max(RECENT_RECORDS / 2).max(most_records)) + 1
        };
        let filter = kv::key_subject(&format!("{AGENT_PREFIX}*"));
        let found =
            batch_get::fetch_limited(self, &stream, &filter, from, most).await.map_err(failed)?;
        Ok(found.iter().filter_map(parse_recent_status).collect())
    }

    /// Reads the status that an agent recorded within the last 45 s. Returns `None` if there is
    /// none or the agent has stopped.
    pub async fn read_recent_status(
        &self,
        agent: &AgentId,
    ) -> Result<Option<AgentStatus>, PresenceError> {
        let key = kv::key_subject(&format!("{AGENT_PREFIX}{agent}"));
        let found = self.read_last_message(&format!("KV_{FLEET_BUCKET}"), &key).await.map_err(
            |source| PresenceError::Request {
                what: format!("check whether {agent} is connected"),
                source,
            },
        )?;
        Ok(found.as_ref().and_then(parse_recent_status))
    }

    /// Yields statuses from now on, as agents announce them. Fails if the connection is closed for
    /// good.
    pub async fn watch_statuses(&self) -> Result<BoxStream<'static, AgentStatus>, PresenceError> {
        let subject = format!("{STATUS_PREFIX}*");
        let announced = self
            .shared
            .client
            .subscribe(subject)
            .await
            .map_err(|error| closed_error("watch the agents", error))?;
        let parse = |message: async_nats::Message| async move {
            parse_own_status(&message.subject, &message.payload)
        };
        Ok(announced.filter_map(parse).boxed())
    }

    /// Sends a command and waits up to 3 s for its confirmation. Fails with `NotListening` if no
    /// agent of that name is connected.
    pub async fn send_command(
        &self,
        agent: &AgentId,
        command: &AgentCommand,
    ) -> Result<(), PresenceError> {
        let not_listening = || match self.shared.restricted {
            true => PresenceError::OnlyByGateway { agent: agent.to_string() },
            false => PresenceError::NotListening { agent: agent.to_string() },
        };
        let client = &self.shared.client;
        let answers = client.subscribe(answer_subject(agent)).await;
        let answers = answers.map_err(|error| closed_error("command an agent", error))?;
        let nonce = client.new_inbox();
        let ours = |message: &async_nats::Message| {
            let confirmed = message.payload == nonce.as_bytes();
            std::future::ready(confirmed)
        };
        let mut confirmations = std::pin::pin!(answers.filter(ours));
        let mut headers = HeaderMap::new();
        headers.insert(COMMAND_HEADER, nonce.as_str());
        let sent = self.send_request(
            command_subject(agent),
            headers,
            to_json_bytes(command),
            COMMAND_LIMIT,
        );
        let sent = tokio::select! {
            sent = sent => sent,
            Some(_) = confirmations.next() => return Ok(()),
        };
        match sent {
            Ok(_) => Ok(()),
            Err(RequestError::NoResponders { .. }) => Err(not_listening()),
            Err(source) => {
                Err(PresenceError::Request { what: format!("command agent {agent}"), source })
            }
        }
    }

    /// Yields the commands to an agent from now on. Each is confirmed before it is yielded.
    pub async fn receive_commands(
        &self,
        agent: &AgentId,
    ) -> Result<BoxStream<'static, AgentCommand>, PresenceError> {
        let commands = self
            .shared
            .client
            .subscribe(command_subject(agent))
            .await
            .map_err(|error| closed_error("listen for commands", error))?;
        let bus = self.clone();
        let answers = answer_subject(agent);
        let confirm = move |message: async_nats::Message| {
            let (bus, answers) = (bus.clone(), answers.clone());
            async move {
                let command = parse_or_warn(&message.subject, &message.payload)?;
                bus.confirm_command(answers, &message).await;
                Some(command)
            }
        };
        Ok(commands.filter_map(confirm).boxed())
    }

    /// Ignores failures; the sender notices a lost confirmation by its time limit.
    async fn confirm_command(&self, answers: String, command: &async_nats::Message) {
        let client = &self.shared.client;
        // A reply subject of the sender leads nowhere from a member's own account; use the agent's
        // answer subject.
        let nonce = command.headers.as_ref().and_then(|headers| headers.get(COMMAND_HEADER));
        if let Some(nonce) = nonce {
            let _ = client.publish(answers, Bytes::from(nonce.as_str().to_owned())).await;
        } else if let Some(reply) = &command.reply {
            let _ = client.publish(reply.clone(), Bytes::new()).await;
        }
        // The receiver of a drain command may drop the connection next.
        let _ = client.flush().await;
    }

    /// Reads the configuration that a host needs to join, if one was written.
    pub async fn read_fleet_config(&self) -> Result<Option<FleetConfig>, PresenceError> {
        let what = || "read the fleet's configuration".to_owned();
        let entry = match with_retries(|| self.kv_get(CONFIG_KEY)).await {
            // No coordinator has created the bucket yet.
            Err(source) if source.has_server_code(code::STREAM_NOT_FOUND) => return Ok(None),
            entry => entry.map_err(|source| PresenceError::Request { what: what(), source })?,
        };
        entry
            .value
            .map(|value| serde_json::from_slice(&value))
            .transpose()
            .map_err(|source| PresenceError::Malformed { what: what(), source })
    }

    /// Writes the configuration that a host needs to join.
    pub async fn write_fleet_config(&self, config: &FleetConfig) -> Result<(), PresenceError> {
        self.put_presence_key(CONFIG_KEY, to_json_bytes(config), "write the fleet's configuration")
            .await
    }

    /// Writes a key of the fleet's bucket; `what` names the action in the error.
    async fn put_presence_key(
        &self,
        key: &str,
        value: Bytes,
        what: &str,
    ) -> Result<(), PresenceError> {
        with_retries(|| self.kv_put(key, value.clone(), None))
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

fn to_json_bytes(message: &impl Serialize) -> Bytes {
    serde_json::to_vec(message).expect("a generated message has only string keys").into()
}

/// Drops a status that is too long, or names another agent than its subject. The server ensures
/// that an agent writes only to its own subject.
fn parse_own_status(subject: &str, payload: &[u8]) -> Option<AgentStatus> {
    if payload.len() > STATUS_BYTES_MAX {
        tracing::warn!(subject, bytes = payload.len(), "dropped a status that is too long");
        return None;
    }
    let mut status: AgentStatus = parse_or_warn(subject, payload)?;
    status.jobs.truncate(STATUS_JOBS_MAX);
    let own = subject.rsplit('.').next() == Some(status.agent.as_str());
    if !own {
        tracing::warn!(
            subject,
            named = status.agent,
            "dropped a status published under another \
                                                       agent's name"
        );
    }
    own.then_some(status)
}

/// Returns a status recorded within the last 45 s, by the server's clock and the local one, whose
/// agent has not stopped.
fn parse_recent_status(message: &StreamMessage) -> Option<AgentStatus> {
    let written = u64::try_from(message.time.unix_timestamp()).ok()?;
    if wire::clock::unix_seconds().abs_diff(written) > RECENT_STATUS_AGE.as_secs() {
        return None;
    }
    let status = parse_own_status(&message.subject, &message.payload)?;
    (status.state() != State::Stopped).then_some(status)
}

/// Logs a warning and returns `None` if the message is invalid.
fn parse_or_warn<M: DeserializeOwned>(subject: &str, payload: &[u8]) -> Option<M> {
    serde_json::from_slice(payload)
        .inspect_err(|error| tracing::warn!(subject, %error, "a message was not understood"))
        .ok()
}

/// `what` names the action in the error.
fn closed_error(
    what: &str,
    error: impl std::error::Error + Send + Sync + 'static,
) -> PresenceError {
    PresenceError::Closed { what: what.to_owned(), source: io::Error::other(error) }
}

#[cfg(test)]
mod tests {
    use wire::v1::ActiveJob;

    use super::*;

    #[test]
    fn an_agent_s_status_has_a_limit() {
        let status = |jobs: usize, trouble: usize| AgentStatus {
            agent: "a1".to_owned(),
            jobs: vec![ActiveJob { role: "generator".to_owned(), ..ActiveJob::default() }; jobs],
            trouble: "x".repeat(trouble),
            ..AgentStatus::default()
        };
        let read = |status: &AgentStatus| {
            parse_own_status("flotilla.agent.status.a1", &to_json_bytes(status))
        };
        assert_eq!(read(&status(2, 9)), Some(status(2, 9)));
        let jobs = read(&status(STATUS_JOBS_MAX + 1, 0)).map(|status| status.jobs.len());
        assert_eq!(jobs, Some(STATUS_JOBS_MAX));
        assert_eq!(read(&status(0, STATUS_BYTES_MAX)), None);
    }
}
