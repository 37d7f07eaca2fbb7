//! The bucket of a closed fleet's members and join tokens: written by compare-and-set alone,
//! read from the leader, followed as it changes. Knows nothing of what its values mean.

use bytes::Bytes;
use futures::{Stream, stream};

use crate::{
    Bus, MEMBERS_BUCKET,
    kv::{self, Entry},
    prepare::PrepareError,
    read::patiently,
    request::{RequestError, code},
    tail::{Item, Tail, TailError},
};

/// What stands under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// To be named when it is written over; 0 when the key never existed.
    pub revision: u64,
    pub value: Option<Bytes>,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// At this revision.
    New(u64),
    /// Somebody else was faster: read it again.
    Changed,
}

/// What is told to those who follow the bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MembersEvent {
    Value {
        key: String,
        value: Bytes,
    },
    Removed {
        key: String,
    },
    /// Everything that stood there at the start was told.
    CaughtUp,
    /// The bucket was replaced; what is there now follows.
    Restarted,
}

#[derive(Debug, thiserror::Error)]
pub enum MembersError {
    #[error("{what} the fleet's members")]
    Request {
        what: &'static str,
        #[source]
        source: RequestError,
    },
    #[error(
        "{what} the fleet's members: there is no bucket {MEMBERS_BUCKET}; a closed fleet's coordinator makes it (B110)"
    )]
    NoBucket { what: &'static str },
}

impl Bus {
    /// Makes sure that the bucket exists. Idempotent.
    ///
    /// # Errors
    /// When the server refuses, or holds something else under that name.
    pub async fn prepare_members(&self, replicas: usize) -> Result<(), PrepareError> {
        let config =
            || self.bucket_config(MEMBERS_BUCKET, "flotilla: members and join tokens", replicas);
        self.ensure(config(), config()).await.map(|_| ())
    }

    /// # Errors
    /// When the bucket cannot be read.
    pub async fn member_slot(&self, key: &str) -> Result<Slot, MembersError> {
        let entry = patiently(|| self.kv_get_in(MEMBERS_BUCKET, key)).await;
        let Entry { revision, value } = entry.map_err(|source| failed("read", source))?;
        // An empty value is one that was let go.
        Ok(Slot { revision, value: value.filter(|value| !value.is_empty()) })
    }

    /// Every value whose key begins with `prefix`, by key.
    ///
    /// # Errors
    /// When the bucket cannot be read.
    pub async fn member_slots(&self, prefix: &str) -> Result<Vec<(String, Bytes)>, MembersError> {
        let values = patiently(|| self.kv_list_in(MEMBERS_BUCKET, prefix)).await;
        let values = values.map_err(|source| failed("list", source))?;
        let own = |(subject, value): (String, Bytes)| Some((key(&subject)?.to_owned(), value));
        Ok(values.into_iter().filter_map(own).collect())
    }

    /// Writes over this revision and no other. A write whose answer was lost is tried again, and
    /// may then find itself: whoever reads `Changed` must look whether it is its own.
    ///
    /// # Errors
    /// When the bucket cannot be written.
    pub async fn set_member_slot(
        &self,
        key: &str,
        value: Bytes,
        revision: u64,
    ) -> Result<Written, MembersError> {
        let put = || self.kv_put_in(MEMBERS_BUCKET, key, value.clone(), Some(revision));
        match patiently(put).await {
            Ok(revision) => Ok(Written::New(revision)),
            Err(source) if source.is_code(code::WRONG_LAST_SEQUENCE) => Ok(Written::Changed),
            Err(source) => Err(failed("write", source)),
        }
    }

    /// What stands in the bucket, and then every change. Goes on over broken connections; an
    /// error tells of a long one, and the stream goes on behind it.
    pub fn follow_members(
        &self,
    ) -> impl Stream<Item = Result<MembersEvent, MembersError>> + Send + use<> {
        let tail = |bus: &Bus| Tail::new(bus, format!("KV_{MEMBERS_BUCKET}"), Vec::new(), 0);
        let bus = self.clone();
        let first = tail(&bus);
        stream::unfold((bus, first), move |(bus, mut following)| async move {
            let event = match following.next().await {
                Ok(Item::CaughtUp) => Ok(MembersEvent::CaughtUp),
                Ok(Item::Message(message)) => {
                    let key = key(&message.subject).unwrap_or_default().to_owned();
                    Ok(match message.payload {
                        value if value.is_empty() => MembersEvent::Removed { key },
                        value => MembersEvent::Value { key, value },
                    })
                }
                Err(TailError::WentBack { .. }) => {
                    following = tail(&bus);
                    Ok(MembersEvent::Restarted)
                }
                Err(TailError::Request(source)) => Err(failed("follow", source)),
            };
            Some((event, (bus, following)))
        })
    }
}

fn key(subject: &str) -> Option<&str> {
    subject.strip_prefix(&kv::subject_in(MEMBERS_BUCKET, ""))
}

fn failed(what: &'static str, source: RequestError) -> MembersError {
    if source.is_code(code::STREAM_NOT_FOUND) {
        return MembersError::NoBucket { what };
    }
    MembersError::Request { what, source }
}
