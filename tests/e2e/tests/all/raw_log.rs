//! The log of an open fleet, read and written with a plain NATS client.

use std::collections::BTreeSet;

use async_nats::jetstream;
use e2e::Fleet;
use futures::TryStreamExt;
use serde_json::Value;

pub(crate) struct RawLog {
    runtime: tokio::runtime::Runtime,
    context: jetstream::Context,
    log: jetstream::stream::Stream,
}

/// The orders of one work queue, as its server counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueState {
    /// Orders that no agent has received.
    pub pending: u64,
    /// Requests of agents for an order.
    pub waiting: usize,
    /// Deliveries that were acknowledged, counted up to the first one that was not.
    pub acknowledged: u64,
}

impl RawLog {
    pub(crate) fn open(fleet: &Fleet) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let (context, log) = runtime.block_on(async {
            let client = async_nats::connect(fleet.nats_url()).await.expect("the bus");
            let context = jetstream::new(client);
            let log = context.get_stream("FLOTILLA").await.expect("the log");
            (context, log)
        });
        Self { runtime, context, log }
    }

    pub(crate) fn publish_raw(&self, subject: String, payload: &'static str) {
        self.runtime.block_on(async {
            let sent = self.context.publish(subject, payload.into()).await.expect("it is sent");
            sent.await.expect("it is stored");
        });
    }

    /// Returns the last fact under a subject.
    pub(crate) fn read(&self, subject: &str) -> Option<Value> {
        let message = self.log.get_last_raw_message_by_subject(subject);
        let message = self.runtime.block_on(message).ok()?;
        serde_json::from_slice(&message.payload).ok()
    }

    /// Returns the subjects of all facts that match a filter.
    pub(crate) fn subjects(&self, filter: &str) -> BTreeSet<String> {
        let subjects: Vec<(String, usize)> = self.runtime.block_on(async {
            let subjects = self.log.info_with_subjects(filter).await.expect("the log");
            subjects.try_collect().await.expect("its subjects")
        });
        subjects.into_iter().map(|(subject, _)| subject).collect()
    }

    /// Returns the state of a work queue, such as `train-default`. `None` if it does not exist.
    pub(crate) fn queue_state(&self, name: &str) -> Option<QueueState> {
        let info = self.runtime.block_on(self.log.consumer_info(name)).ok()?;
        Some(QueueState {
            pending: info.num_pending,
            waiting: info.num_waiting,
            acknowledged: info.ack_floor.consumer_sequence,
        })
    }

    /// Returns the largest size of the log in bytes; negative if it has no limit.
    pub(crate) fn size_limit(&self) -> i64 {
        let info = self.runtime.block_on(self.log.get_info()).expect("the log");
        info.config.max_bytes
    }
}
