//! Measures the server and its client without this crate, as a baseline for benchmarks: plain
//! acknowledged messages of a stream, read by a plain consumer.

use async_nats::jetstream::{
    consumer::{AckPolicy, pull},
    stream::{Config, StorageType},
};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use crate::{Bus, LOG_STREAM};

const SCRATCH: &str = "YARDSTICK";

type BaselineResult<T> = Result<T, async_nats::Error>;

impl Bus {
    /// Publishes payloads to a separate stream, one after the other, and waits for each
    /// acknowledgement.
    #[doc(hidden)]
    pub async fn publish_plain(&self, payloads: &[Vec<u8>]) -> BaselineResult<()> {
        let context = &self.shared.context;
        let config = Config {
            name: SCRATCH.to_owned(),
            subjects: vec![format!("{SCRATCH}.>")],
            storage: StorageType::File,
            ..Config::default()
        };
        context.get_or_create_stream(config).await?;
        for (number, payload) in payloads.iter().enumerate() {
            let payload = Bytes::from(payload.clone());
            context.publish(format!("{SCRATCH}.{number}"), payload).await?.await?;
        }
        Ok(())
    }

    /// Reads `entries` entries of the log with a plain consumer, unparsed, and returns their size
    /// in bytes.
    #[doc(hidden)]
    pub async fn read_plain(&self, entries: usize) -> BaselineResult<u64> {
        let stream = self.shared.context.get_stream(LOG_STREAM).await?;
        let config = pull::Config { ack_policy: AckPolicy::None, ..pull::Config::default() };
        let consumer = stream.create_consumer(config).await?;
        let messages = consumer.stream().max_messages_per_batch(1000).messages().await?;
        let mut messages = messages.take(entries);
        let mut bytes = 0;
        while let Some(message) = messages.try_next().await? {
            bytes += message.payload.len() as u64;
        }
        Ok(bytes)
    }
}
