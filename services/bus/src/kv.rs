//! The fleet's buckets: put, compare-and-set and leader reads. Raw, because async-nats
//! reads buckets from any replica, which may be behind.

use std::collections::BTreeMap;

use async_nats::{HeaderMap, header};
use bytes::Bytes;

use crate::{
    BUCKET, Bus,
    publish::Ack,
    request::{ANSWER_LIMIT, RequestError, parse},
    tail::{Item, Tail, TailError},
};

/// Set by `nats kv del` and `purge` on the marker they leave.
const OPERATION_HEADER: &str = "KV-Operation";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// 0 when the key never existed.
    pub(crate) revision: u64,
    /// None when missing or deleted.
    pub(crate) value: Option<Bytes>,
}

pub(crate) fn subject(key: &str) -> String {
    subject_in(BUCKET, key)
}

pub(crate) fn subject_in(bucket: &str, key: &str) -> String {
    format!("$KV.{bucket}.{key}")
}

impl Bus {
    /// Writes a key, with `expected` only over that revision. The new revision.
    pub(crate) async fn kv_put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<u64>,
    ) -> Result<u64, RequestError> {
        self.kv_put_in(BUCKET, key, value, expected).await
    }

    pub(crate) async fn kv_put_in(
        &self,
        bucket: &str,
        key: &str,
        value: Bytes,
        expected: Option<u64>,
    ) -> Result<u64, RequestError> {
        let mut headers = HeaderMap::new();
        if let Some(revision) = expected {
            headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, revision.to_string());
        }
        let message = self.ask(subject_in(bucket, key), headers, value, ANSWER_LIMIT).await?;
        parse::<Ack>(&message).map(|ack| ack.seq)
    }

    pub(crate) async fn kv_get(&self, key: &str) -> Result<Entry, RequestError> {
        self.kv_get_in(BUCKET, key).await
    }

    pub(crate) async fn kv_get_in(&self, bucket: &str, key: &str) -> Result<Entry, RequestError> {
        let stream = format!("KV_{bucket}");
        Ok(match self.last_message(&stream, &subject_in(bucket, key)).await? {
            None => Entry { revision: 0, value: None },
            Some(message) => Entry {
                revision: message.sequence,
                value: message.headers.get(OPERATION_HEADER).is_none().then_some(message.payload),
            },
        })
    }

    /// All values whose key begins with `prefix`, by key.
    pub(crate) async fn kv_list(
        &self,
        prefix: &str,
    ) -> Result<BTreeMap<String, Bytes>, RequestError> {
        self.kv_list_in(BUCKET, prefix).await
    }

    pub(crate) async fn kv_list_in(
        &self,
        bucket: &str,
        prefix: &str,
    ) -> Result<BTreeMap<String, Bytes>, RequestError> {
        let filters = vec![subject_in(bucket, &format!("{prefix}>"))];
        let mut tail = Tail::new(self, format!("KV_{bucket}"), filters, 0);
        let mut values = BTreeMap::new();
        loop {
            match tail.next().await {
                Ok(Item::CaughtUp) => break,
                Ok(Item::Message(message)) => {
                    values.insert(message.subject, message.payload);
                }
                Err(TailError::Request(error)) => return Err(error),
                Err(TailError::WentBack { .. }) => values.clear(),
            }
        }
        // Markers of deleted keys are empty.
        values.retain(|_, value| !value.is_empty());
        Ok(values)
    }
}
