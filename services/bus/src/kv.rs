//! Access to key-value buckets: put, compare-and-set, and reads from the leader. async-nats reads
//! buckets from any replica, which may be outdated.

use std::collections::BTreeMap;

use async_nats::{HeaderMap, header};
use bytes::Bytes;

use crate::{
    Bus, FLEET_BUCKET,
    publish::PublishAck,
    request::{ANSWER_LIMIT, parse_answer},
    request_error::RequestError,
    stream_tail::{StreamTail, TailError, TailItem},
};

/// Set by `nats kv del` and `nats kv purge` on the marker of a deleted key.
const OPERATION_HEADER: &str = "KV-Operation";

/// Times that a list is read up to the new end of its bucket, in which keys are written all the time.
/// A key is missed only if it is written again during each of them.
const ROUNDS_MAX: u32 = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KvEntry {
    /// 0 if the key never existed.
    pub(crate) revision: u64,
    /// `None` if the key is missing or deleted.
    pub(crate) value: Option<Bytes>,
}

pub(crate) fn key_subject(key: &str) -> String {
    bucket_key_subject(FLEET_BUCKET, key)
}

pub(crate) fn bucket_key_subject(bucket: &str, key: &str) -> String {
    format!("$KV.{bucket}.{key}")
}

impl Bus {
    /// Returns the new revision. With `expected`, writes only over that revision.
    pub(crate) async fn kv_put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<u64>,
    ) -> Result<u64, RequestError> {
        self.kv_put_in(FLEET_BUCKET, key, value, expected).await
    }

    /// Does the same as [`Bus::kv_put`], in any bucket.
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
        let message = self
            .send_request(bucket_key_subject(bucket, key), headers, value, ANSWER_LIMIT)
            .await?;
        parse_answer::<PublishAck>(&message).map(|ack| ack.seq)
    }

    pub(crate) async fn kv_get(&self, key: &str) -> Result<KvEntry, RequestError> {
        self.kv_get_in(FLEET_BUCKET, key).await
    }

    pub(crate) async fn kv_get_in(&self, bucket: &str, key: &str) -> Result<KvEntry, RequestError> {
        let stream = format!("KV_{bucket}");
        Ok(match self.read_last_message(&stream, &bucket_key_subject(bucket, key)).await? {
            None => KvEntry { revision: 0, value: None },
            Some(message) => KvEntry {
                revision: message.sequence,
                value: message.headers.get(OPERATION_HEADER).is_none().then_some(message.payload),
            },
        })
    }

    /// Returns the values whose keys begin with `prefix`, by the full subject of the key.
    pub(crate) async fn kv_list(
        &self,
        prefix: &str,
    ) -> Result<BTreeMap<String, Bytes>, RequestError> {
        self.kv_list_in(FLEET_BUCKET, prefix).await
    }

    /// Does the same as [`Bus::kv_list`], in any bucket.
    pub(crate) async fn kv_list_in(
        &self,
        bucket: &str,
        prefix: &str,
    ) -> Result<BTreeMap<String, Bytes>, RequestError> {
        let filters = vec![bucket_key_subject(bucket, &format!("{prefix}>"))];
        let mut tail = StreamTail::new(self, format!("KV_{bucket}"), filters, 0);
        let (mut values, mut rounds) = (BTreeMap::new(), 0);
        loop {
            match tail.next().await {
                // A key that was written again meanwhile has moved to the end.
                Ok(TailItem::CaughtUp) => {
                    if rounds == ROUNDS_MAX || !tail.extend_target().await? {
                        break;
                    }
                    rounds += 1;
                }
                Ok(TailItem::Message(message)) => {
                    values.insert(message.subject, message.payload);
                }
                Err(TailError::Request(error)) => return Err(error),
                Err(TailError::Truncated { .. }) => values.clear(),
            }
        }
        // The markers of deleted keys are empty.
        values.retain(|_, value| !value.is_empty());
        Ok(values)
    }
}
