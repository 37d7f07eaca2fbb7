//! Measures the server and its client without this crate, as a baseline for benchmarks: plain
//! acknowledged messages of a stream, read by a plain consumer.

use async_nats::jetstream::{
    consumer::{AckPolicy, pull},
    stream::{Config, StorageType},
};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use crate::{Bus, STREAM};

const SCRATCH: &str = "YARDSTICK";
const MESSAGES_IN_FLIGHT: usize = 64;

type BaselineResult<T> = Result<T, async_nats::Error>;

impl Bus {
    /// Publishes payloads to a separate stream and waits for each acknowledgement; with `at_once`,
    /// up to 64 are in flight.
    #[doc(hidden)]
    pub async fn publish_plain(&self, payloads: &[Vec<u8>], at_once: bool) -> BaselineResult<()> {
        let context = &self.shared.context;
        let config = Config {
            name: SCRATCH.to_owned(),
            subjects: vec![format!("{SCRATCH}.>")],
            storage: StorageType::File,
            ..Config::default()
        };
        context.get_or_create_stream(config).await?;
        let publish = |(number, payload): (usize, &Vec<u8>)| {
            let subject = format!("{SCRATCH}.{number}");
            let payload = Bytes::from(payload.clone());
            async move {
                context.publish(subject, payload).await?.await?;
                BaselineResult::Ok(())
            }
        };
        let each = payloads.iter().enumerate().map(publish);
        let in_flight = if at_once { MESSAGES_IN_FLIGHT } else { 1 };
        futures::stream::iter(each)
            .buffered(in_flight)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await
    }

    /// Reads `entries` entries of the log with a plain consumer, unparsed, and returns their size
    /// in bytes.
    #[doc(hidden)]
    pub async fn read_plain(&self, entries: usize) -> BaselineResult<u64> {
        let stream = self.shared.context.get_stream(STREAM).await?;
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
