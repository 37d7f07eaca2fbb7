//! The bucket of a closed fleet's members and join tokens: written by compare-and-set, read from
//! the leader, followed as it changes. Does not know what its values mean.

use bytes::Bytes;
use futures::{Stream, stream};

use crate::{
    Bus, MEMBERS_BUCKET,
    kv::{self, KvEntry},
    point_read::with_retries,
    prepare::PrepareError,
    request_error::{RequestError, code},
    stream_tail::{StreamTail, TailError, TailItem},
};

/// A value of the members' bucket with its revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberEntry {
    /// Pass it to write over this value; 0 if the key never existed.
    pub revision: u64,
    /// `None` if the key is missing, deleted or empty.
    pub value: Option<Bytes>,
}

/// The outcome of a compare-and-set write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CasOutcome {
    /// Revision of the written value.
    Written(u64),
    /// The key has another revision; read it again.
    Conflict,
}

/// An item of [`Bus::follow_members`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MembersEvent {
    Value {
        key: String,
        value: Bytes,
    },
    Removed {
        key: String,
    },
    /// All values that existed at the start have been yielded.
    CaughtUp,
    /// The bucket was replaced; its present values follow.
    Restarted,
}

/// The reason why the members' bucket could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum MembersError {
    #[error("{what} the fleet's members")]
    Request {
        what: &'static str,
        #[source]
        source: RequestError,
    },
    #[error(
        "{what} the fleet's members: there is no bucket {MEMBERS_BUCKET}; a closed fleet's coordinator creates it (B110)"
    )]
    NoBucket { what: &'static str },
}

impl Bus {
    /// Creates the members' bucket if it is missing. Fails if the server refuses, or if another
    /// stream has that name.
    pub async fn prepare_members(&self, replicas: usize) -> Result<(), PrepareError> {
        let config =
            || self.bucket_config(MEMBERS_BUCKET, "flotilla: members and join tokens", replicas);
        self.ensure_stream(config(), config()).await.map(|_| ())
    }

    /// Reads a key of the members' bucket from the leader.
    pub async fn get_member_entry(&self, key: &str) -> Result<MemberEntry, MembersError> {
        let entry = with_retries(|| self.kv_get_in(MEMBERS_BUCKET, key)).await;
        let KvEntry { revision, value } = entry.map_err(|source| members_error("read", source))?;
        // An empty value marks a removed key.
        Ok(MemberEntry { revision, value: value.filter(|value| !value.is_empty()) })
    }

    /// Returns all keys that begin with `prefix`, with their values.
    pub async fn list_member_entries(
        &self,
        prefix: &str,
    ) -> Result<Vec<(String, Bytes)>, MembersError> {
        let values = with_retries(|| self.kv_list_in(MEMBERS_BUCKET, prefix)).await;
        let values = values.map_err(|source| members_error("list", source))?;
        let own =
            |(subject, value): (String, Bytes)| Some((subject_key(&subject)?.to_owned(), value));
        Ok(values.into_iter().filter_map(own).collect())
    }

    /// Writes a key if `revision` is its current revision.
    ///
    /// A write whose answer was lost is retried and may then conflict with itself: after
    /// `Conflict`, the caller must check whether the stored value is its own.
    pub async fn put_member_entry(
        &self,
        key: &str,
        value: Bytes,
        revision: u64,
    ) -> Result<CasOutcome, MembersError> {
        let put = || self.kv_put_in(MEMBERS_BUCKET, key, value.clone(), Some(revision));
        match with_retries(put).await {
            Ok(revision) => Ok(CasOutcome::Written(revision)),
            Err(source) if source.has_server_code(code::WRONG_LAST_SEQUENCE) => {
                Ok(CasOutcome::Conflict)
            }
            Err(source) => Err(members_error("write", source)),
        }
    }

    /// Yields all values of the bucket and then every change. Survives broken connections; yields
    /// an error for a long outage and continues after it.
    pub fn follow_members(
        &self,
    ) -> impl Stream<Item = Result<MembersEvent, MembersError>> + Send + use<> {
        let tail = |bus: &Bus| StreamTail::new(bus, format!("KV_{MEMBERS_BUCKET}"), Vec::new(), 0);
        let bus = self.clone();
        let first = tail(&bus);
        stream::unfold((bus, first), move |(bus, mut following)| async move {
            let event = match following.next().await {
                Ok(TailItem::CaughtUp) => Ok(MembersEvent::CaughtUp),
                Ok(TailItem::Message(message)) => {
                    let key = subject_key(&message.subject).unwrap_or_default().to_owned();
                    Ok(match message.payload {
                        value if value.is_empty() => MembersEvent::Removed { key },
                        value => MembersEvent::Value { key, value },
                    })
                }
                Err(TailError::Truncated { .. }) => {
                    following = tail(&bus);
                    Ok(MembersEvent::Restarted)
                }
                Err(TailError::Request(source)) => Err(members_error("follow", source)),
            };
            Some((event, (bus, following)))
        })
    }
}

fn subject_key(subject: &str) -> Option<&str> {
    subject.strip_prefix(&kv::bucket_key_subject(MEMBERS_BUCKET, ""))
}

/// `what` names the action in the error.
fn members_error(what: &'static str, source: RequestError) -> MembersError {
    if source.has_server_code(code::STREAM_NOT_FOUND) {
        return MembersError::NoBucket { what };
    }
    MembersError::Request { what, source }
}
