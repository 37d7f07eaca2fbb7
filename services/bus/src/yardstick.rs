//! What the server and its client do without us, for benches to measure against: plain messages of
//! a stream, acknowledged, and read by a plain consumer.

use async_nats::jetstream::{
    consumer::{AckPolicy, pull},
    stream::{Config, StorageType},
};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use crate::{Bus, STREAM};

const SCRATCH: &str = "YARDSTICK";
const IN_FLIGHT: usize = 64;

type Outcome<T> = Result<T, async_nats::Error>;

impl Bus {
    /// Publishes payloads to a stream of its own, so many at once, each acknowledged.
    ///
    /// # Errors
    /// When the server refuses one.
    #[doc(hidden)]
    pub async fn publish_plain(&self, payloads: &[Vec<u8>], at_once: bool) -> Outcome<()> {
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
                Outcome::Ok(())
            }
        };
        let each = payloads.iter().enumerate().map(publish);
        let in_flight = if at_once { IN_FLIGHT } else { 1 };
        futures::stream::iter(each)
            .buffered(in_flight)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await
    }

    /// Reads so many entries of the log with a plain consumer, and nothing of what they say; yields
    /// their bytes.
    ///
    /// # Errors
    /// When the server refuses, or there are fewer.
    #[doc(hidden)]
    pub async fn read_plain(&self, entries: usize) -> Outcome<u64> {
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
