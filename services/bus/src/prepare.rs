//! Creating the log and the fleet's bucket, or checking those that exist.

use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType};
use serde::Deserialize;
use wire::STREAM_SUBJECTS;

use crate::{
    BUCKET, Bus, STREAM, http,
    read::patiently,
    request::{RequestError, code},
};

/// The biggest fact of any server; the NATS authors advise against more.
const MAX_FACT_BYTES: i32 = 8 << 20;
const UNLIMITED: i64 = -1;

/// What an acknowledgement is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// On disk: survives power loss.
    Always,
    /// In the page cache for up to minutes: power loss takes acknowledged facts along.
    Lazy,
    /// Nobody could say: no monitoring URL was given, or it did not answer.
    Unknown,
}

/// The log, ready for use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    pub durability: Durability,
    /// Of the log as it is, which may be more than asked for.
    pub replicas: usize,
    pub last_sequence: u64,
}

/// What the log may take of the disk, in bytes. A full log refuses new facts and loses none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogLimit {
    /// From now on, whatever it was.
    pub set: Option<u64>,
    /// For a log that does not exist yet, when nothing is set.
    pub at_creation: Option<u64>,
}

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
    Differs { stream: String, field: &'static str, found: String, wanted: String },
}

#[derive(Deserialize)]
pub(crate) struct StreamInfo {
    config: Config,
    state: State,
}

#[derive(Deserialize)]
struct State {
    last_seq: u64,
}

#[derive(Deserialize)]
struct Varz {
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
    /// Absent means lazy.
    #[serde(default)]
    sync_always: bool,
}

impl Bus {
    /// Makes sure that the log and the bucket exist with a configuration that holds what
    /// this crate promises, and finds out what an acknowledgement is worth. Idempotent; the
    /// replicas of what exists are left as they are.
    ///
    /// # Errors
    /// When the server refuses, or holds something else under our names.
    pub async fn prepare(&self, replicas: usize) -> Result<Prepared, PrepareError> {
        self.prepare_within(replicas, LogLimit::default()).await
    }

    /// As `prepare`, with a bound on the log.
    ///
    /// # Errors
    /// As `prepare`.
    pub async fn prepare_within(
        &self,
        replicas: usize,
        limit: LogLimit,
    ) -> Result<Prepared, PrepareError> {
        let fresh = log_config(replicas, limit.set.or(limit.at_creation));
        let log = self.ensure(log_config(replicas, limit.set), fresh).await?;
        let about = "flotilla: leader, agents and how to join";
        let bucket = || self.bucket_config(BUCKET, about, replicas);
        self.ensure(bucket(), bucket()).await?;
        if log.config.num_replicas != replicas {
            tracing::info!(
                asked = replicas,
                found = log.config.num_replicas,
                "the log keeps its replicas; change them with `nats stream edit {STREAM}`"
            );
        }
        Ok(Prepared {
            durability: self.durability().await,
            replicas: log.config.num_replicas,
            last_sequence: log.state.last_seq,
        })
    }

    /// What an acknowledgement of this bus is worth: the worst of its servers.
    pub async fn durability(&self) -> Durability {
        let mut durability = Durability::Unknown;
        for url in &self.shared.monitor_urls {
            let varz = http::get(url, "/varz").await.and_then(|body| {
                serde_json::from_slice::<Varz>(&body).map_err(std::io::Error::from)
            });
            match varz {
                Ok(varz) if varz.jetstream.config.sync_always => durability = Durability::Always,
                Ok(_) => return Durability::Lazy,
                Err(error) => {
                    tracing::warn!(url, %error, "cannot check the durability of the bus");
                    return Durability::Unknown;
                }
            }
        }
        durability
    }

    pub(crate) async fn ensure(
        &self,
        wanted: Config,
        fresh: Config,
    ) -> Result<StreamInfo, PrepareError> {
        let stream = wanted.name.clone();
        let info = match self.stream_request("INFO", &stream, &()).await {
            Err(error) if error.is_code(code::STREAM_NOT_FOUND) => {
                let created = self.stream_request("CREATE", &stream, &fresh).await;
                created.map_err(|source| prepare_error(&stream, source))?
            }
            found => found.map_err(|source| prepare_error(&stream, source))?,
        };
        // An older server drops settings it does not know without a word: always compare.
        compare(&info.config, &wanted)?;
        let Some(update) = addition(&info.config, &wanted) else { return Ok(info) };
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
        patiently(|| self.api(&verb, body)).await
    }

    /// What `nats kv add` makes, so that `nats kv get` works on it; but read from the leader, and in
    /// a closed fleet without rollups: whoever may write one key could replace them all with it.
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
        name: STREAM.to_owned(),
        description: Some("flotilla: one write-once fact a subject".to_owned()),
        subjects: STREAM_SUBJECTS.iter().map(|subject| (*subject).to_owned()).collect(),
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: replicas,
        discard: DiscardPolicy::New,
        max_bytes: bytes_max.map_or(UNLIMITED, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
        max_messages: UNLIMITED,
        // Not 1: with discard new, the server would name that limit instead of the sequence.
        max_messages_per_subject: UNLIMITED,
        max_consumers: -1,
        max_message_size: MAX_FACT_BYTES,
        // Nobody edits history entry by entry; what is archived is purged by subject.
        deny_delete: true,
        // In batches, by members of closed fleets; what a read decides is asked of the leader.
        allow_direct: true,
        // Facts that are written together wait for the disk once; servers before 2.12 drop this.
        allow_atomic_publish: true,
        ..Config::default()
    }
}

/// What cannot be repaired by adding to it.
fn compare(found: &Config, wanted: &Config) -> Result<(), PrepareError> {
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
        // Rollups that are there can be forbidden.
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
            return Err(PrepareError::Differs { stream, field, found, wanted: needed });
        }
    }
    Ok(())
}

/// The found configuration with what a newer version of us needs; never takes anything away that
/// another needs, so that versions can run side by side.
fn addition(found: &Config, wanted: &Config) -> Option<Config> {
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

fn prepare_error(stream: &str, source: RequestError) -> PrepareError {
    let stream = stream.to_owned();
    if code::STORE_FULL.iter().any(|code| source.is_code(*code)) {
        return PrepareError::Storage { stream, source };
    }
    PrepareError::Request { stream, source }
}
