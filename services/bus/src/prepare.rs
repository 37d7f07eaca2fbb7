//! Creates the log's stream and the fleet's bucket, or checks those that exist.

use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType};
use serde::Deserialize;
use wire::STREAM_SUBJECTS;

use crate::{
    Bus, FLEET_BUCKET, LOG_STREAM, monitor_http,
    point_read::with_retries,
    request_error::{RequestError, code},
};

/// On any server; the NATS authors advise against more than 8 MiB.
const FACT_BYTES_MAX: i32 = 8 << 20;
const UNLIMITED: i64 = -1;

/// The durability that an acknowledgement of the server guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckDurability {
    /// On disk: survives power loss.
    Always,
    /// In the page cache for up to minutes; a power loss also loses acknowledged facts.
    Lazy,
    /// No monitoring URL was given, or it did not answer.
    Unknown,
}

/// The properties of a log that is ready for use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedLog {
    /// The weakest guarantee among the servers.
    pub durability: AckDurability,
    /// An existing log may have more replicas than requested.
    pub replicas: usize,
    /// Position of the newest fact; 0 for an empty log.
    pub last_sequence: u64,
}

/// Limits for the log's size on disk, in bytes. A full log refuses new facts and loses none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogLimit {
    /// Limit from now on; replaces an existing one.
    pub update_to: Option<u64>,
    /// Limit of a log that does not exist yet; ignored if `update_to` is given.
    pub at_creation: Option<u64>,
}

/// The reason why a stream could not be created or used.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("prepare the stream {stream}")]
    Request {
        stream: String,
        #[source]
        source: RequestError,
    },
    #[error(
        "prepare the stream {stream}: the nats-server has not enough storage left for it (B111)"
    )]
    Storage {
        stream: String,
        #[source]
        source: RequestError,
    },
    #[error(
        "the stream {stream} has {field} {found}, but the fleet needs {wanted}; another program \
         made it: rename or remove it with `nats stream rm {stream}` (this deletes its data) (B110)"
    )]
    IncompatibleSetting { stream: String, field: &'static str, found: String, wanted: String },
}

#[derive(Deserialize)]
pub(crate) struct StreamInfo {
    config: Config,
    state: StreamPosition,
}

#[derive(Deserialize)]
struct StreamPosition {
    last_seq: u64,
}

/// Response of `/varz`, reduced to JetStream.
#[derive(Deserialize)]
struct VarzResponse {
    #[serde(default)]
    jetstream: VarzJetStream,
}

#[derive(Default, Deserialize)]
struct VarzJetStream {
    #[serde(default)]
    config: VarzConfig,
}

#[derive(Default, Deserialize)]
struct VarzConfig {
    /// The server writes to disk before it acknowledges. Missing means false.
    #[serde(default)]
    sync_always: bool,
}

impl Bus {
    /// Creates the log and the fleet's bucket, or checks that existing ones have a suitable
    /// configuration, and determines the durability. Idempotent; existing streams keep their number
    /// of replicas. Fails if the server refuses, or if other streams have these names.
    pub async fn prepare_log(&self, replicas: usize) -> Result<PreparedLog, PrepareError> {
        self.prepare_log_within(replicas, LogLimit::default()).await
    }

    /// Does the same as [`Bus::prepare_log`], and limits the size of the log.
    pub async fn prepare_log_within(
        &self,
        replicas: usize,
        limit: LogLimit,
    ) -> Result<PreparedLog, PrepareError> {
        let fresh = log_config(replicas, limit.update_to.or(limit.at_creation));
        let log = self.ensure_stream(log_config(replicas, limit.update_to), fresh).await?;
        let about = "flotilla: leader, agents and how to join";
        let bucket = || self.bucket_config(FLEET_BUCKET, about, replicas);
        self.ensure_stream(bucket(), bucket()).await?;
        if log.config.num_replicas != replicas {
            tracing::info!(
                asked = replicas,
                found = log.config.num_replicas,
                "the log keeps its replicas; change them with `nats stream edit {LOG_STREAM}`"
            );
        }
        Ok(PreparedLog {
            durability: self.check_durability().await,
            replicas: log.config.num_replicas,
            last_sequence: log.state.last_seq,
        })
    }

    /// Returns the worst durability among the servers with a monitoring URL.
    pub async fn check_durability(&self) -> AckDurability {
        let mut durability = AckDurability::Unknown;
        for url in &self.shared.monitor_urls {
            let varz = monitor_http::get(url, "/varz").await.and_then(|body| {
                serde_json::from_slice::<VarzResponse>(&body).map_err(std::io::Error::from)
            });
            match varz {
                Ok(varz) if varz.jetstream.config.sync_always => durability = AckDurability::Always,
                Ok(_) => return AckDurability::Lazy,
                Err(error) => {
                    tracing::warn!(url, %error, "cannot check the durability of the bus");
                    return AckDurability::Unknown;
                }
            }
        }
        durability
    }

    /// Creates a stream as `fresh`, or checks the existing one against `wanted` and adds missing
    /// settings.
    pub(crate) async fn ensure_stream(
        &self,
        wanted: Config,
        fresh: Config,
    ) -> Result<StreamInfo, PrepareError> {
        let stream = wanted.name.clone();
        let info = match self.stream_request("INFO", &stream, &()).await {
            Err(error) if error.has_server_code(code::STREAM_NOT_FOUND) => {
                let created = self.stream_request("CREATE", &stream, &fresh).await;
                created.map_err(|source| prepare_error(&stream, source))?
            }
            found => found.map_err(|source| prepare_error(&stream, source))?,
        };
        // Always compare: an older server silently drops settings it does not know.
        check_compatible(&info.config, &wanted)?;
        let Some(update) = plan_update(&info.config, &wanted) else { return Ok(info) };
        let updated = self.stream_request("UPDATE", &stream, &update).await;
        updated.map_err(|source| prepare_error(&stream, source))
    }

    async fn stream_request(
        &self,
        verb: &str,
        stream: &str,
        body: &impl serde::Serialize,
    ) -> Result<StreamInfo, RequestError> {
        let verb = format!("STREAM.{verb}.{stream}");
        with_retries(|| self.call_api(&verb, body)).await
    }

    /// Returns the configuration that `nats kv add` creates, so that `nats kv get` works, with two
    /// differences: reads go to the leader, and a closed fleet allows no rollups, because a member
    /// with the right to write one key could replace all keys with a rollup.
    pub(crate) fn bucket_config(&self, bucket: &str, description: &str, replicas: usize) -> Config {
        Config {
            name: format!("KV_{bucket}"),
            description: Some(description.to_owned()),
            subjects: vec![format!("$KV.{bucket}.>")],
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            num_replicas: replicas,
            discard: DiscardPolicy::New,
            max_bytes: UNLIMITED,
            max_messages: UNLIMITED,
            max_messages_per_subject: 1,
            max_consumers: -1,
            allow_rollup: self.shared.author.is_none(),
            deny_delete: true,
            allow_direct: true,
            ..Config::default()
        }
    }
}

fn log_config(replicas: usize, bytes_max: Option<u64>) -> Config {
    Config {
        name: LOG_STREAM.to_owned(),
        description: Some("flotilla: one write-once fact a subject".to_owned()),
        subjects: STREAM_SUBJECTS.iter().map(|subject| (*subject).to_owned()).collect(),
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: replicas,
        discard: DiscardPolicy::New,
        max_bytes: bytes_max.map_or(UNLIMITED, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
        max_messages: UNLIMITED,
        // Not 1: with discard "new", the server would then report this limit instead of the wrong
        // sequence.
        max_messages_per_subject: UNLIMITED,
        max_consumers: -1,
        max_message_size: FACT_BYTES_MAX,
        // Entries are never deleted one by one; archived facts are purged by subject.
        deny_delete: true,
        // Members of closed fleets read in batches with direct gets; reads that decide anything go
        // to the leader.
        allow_direct: true,
        // Facts written as a batch wait for the disk once. Servers before 2.12 drop this setting.
        allow_atomic_publish: true,
        ..Config::default()
    }
}

/// Checks the settings that an update cannot correct.
fn check_compatible(found: &Config, wanted: &Config) -> Result<(), PrepareError> {
    let rows = [
        ("retention", format!("{:?}", found.retention), format!("{:?}", wanted.retention)),
        ("storage", format!("{:?}", found.storage), format!("{:?}", wanted.storage)),
        ("discard", format!("{:?}", found.discard), format!("{:?}", wanted.discard)),
        ("max_age", format!("{:?}", found.max_age), format!("{:?}", wanted.max_age)),
        (
            "max_msgs_per_subject",
            found.max_messages_per_subject.max(-1).to_string(),
            wanted.max_messages_per_subject.to_string(),
        ),
        ("no_ack", found.no_ack.to_string(), wanted.no_ack.to_string()),
        ("sealed", found.sealed.to_string(), wanted.sealed.to_string()),
        // Existing rollups can be forbidden by an update, so only the other direction counts.
        (
            "allow_rollup",
            (wanted.allow_rollup && found.allow_rollup).to_string(),
            wanted.allow_rollup.to_string(),
        ),
        ("deny_delete", found.deny_delete.to_string(), wanted.deny_delete.to_string()),
        ("deny_purge", found.deny_purge.to_string(), wanted.deny_purge.to_string()),
        ("a mirror", found.mirror.is_some().to_string(), false.to_string()),
        ("a subject transform", found.subject_transform.is_some().to_string(), false.to_string()),
    ];
    for (field, found, needed) in rows {
        if found != needed {
            let stream = wanted.name.clone();
            return Err(PrepareError::IncompatibleSetting { stream, field, found, wanted: needed });
        }
    }
    Ok(())
}

/// Adds the settings this version needs; returns `None` if the found configuration has them all.
/// Removes nothing that another version needs, so that versions can run side by side.
fn plan_update(found: &Config, wanted: &Config) -> Option<Config> {
    let missing: Vec<String> = wanted
        .subjects
        .iter()
        .filter(|subject| !found.subjects.contains(subject))
        .cloned()
        .collect();
    let too_small = found.max_message_size > 0
        && (wanted.max_message_size <= 0 || found.max_message_size < wanted.max_message_size);
    let other_bound = wanted.max_bytes > 0 && found.max_bytes != wanted.max_bytes;
    let direct = wanted.allow_direct && !found.allow_direct;
    let rollups = found.allow_rollup && !wanted.allow_rollup;
    let batches = wanted.allow_atomic_publish && !found.allow_atomic_publish;
    if missing.is_empty() && !too_small && !other_bound && !direct && !rollups && !batches {
        return None;
    }
    let mut update = found.clone();
    update.subjects.extend(missing);
    update.max_message_size = wanted.max_message_size;
    update.allow_direct |= wanted.allow_direct;
    update.allow_rollup &= wanted.allow_rollup;
    update.allow_atomic_publish |= wanted.allow_atomic_publish;
    if other_bound {
        update.max_bytes = wanted.max_bytes;
    }
    Some(update)
}

/// Recognises a full store.
fn prepare_error(stream: &str, source: RequestError) -> PrepareError {
    let stream = stream.to_owned();
    if code::STORE_FULL.iter().any(|code| source.has_server_code(*code)) {
        return PrepareError::Storage { stream, source };
    }
    PrepareError::Request { stream, source }
}
