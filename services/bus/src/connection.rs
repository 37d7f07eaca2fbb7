//! The state of the connection, as its events tell it.

use std::time::Duration;

use async_nats::Event;
use tokio::{
    sync::{broadcast, watch},
    time::{Instant, timeout_at},
};

use crate::{backoff::jitter, request::RequestError};

/// The first attempt comes quickly, yet expired credentials cannot cause a storm of them.
const RECONNECT_FIRST: Duration = Duration::from_millis(20);
const RECONNECT_CAP: Duration = Duration::from_secs(1);
/// Violations are read as they come; more than this many at once are repeats.
const VIOLATIONS_KEPT: usize = 64;

/// What the server tells outside of answers.
pub(crate) struct Connection {
    pub(crate) connected: watch::Sender<bool>,
    /// Set once nobody tries to connect any more.
    pub(crate) closed: watch::Sender<bool>,
    /// Counts connections made: an answer or a pull of an earlier one never comes.
    pub(crate) generation: watch::Sender<u64>,
    pub(crate) violations: broadcast::Sender<String>,
}

impl Connection {
    pub(crate) fn new() -> Self {
        Self {
            connected: watch::Sender::new(false),
            closed: watch::Sender::new(false),
            generation: watch::Sender::new(0),
            violations: broadcast::Sender::new(VIOLATIONS_KEPT),
        }
    }

    /// What async-nats reports besides answers.
    pub(crate) fn note(&self, event: Event) {
        match event {
            Event::Connected => {
                self.generation.send_modify(|count| *count += 1);
                self.connected.send_replace(true);
                tracing::info!("connected to the bus");
            }
            Event::Disconnected => {
                self.connected.send_replace(false);
                tracing::warn!("connection to the bus lost; reconnecting");
            }
            Event::ServerError(error) => {
                tracing::warn!(%error, "the bus server reported an error");
                // Nobody listening is fine: it is in the log.
                let _ = self.violations.send(error.to_string());
            }
            Event::ClientError(error) => tracing::warn!(%error, "the bus client reported an error"),
            Event::SlowConsumer(subscription) => {
                tracing::warn!(subscription, "messages of the bus were dropped unread");
            }
            Event::LameDuckMode => tracing::info!("the bus server is about to stop"),
            Event::Draining => tracing::debug!("the bus connection is closing"),
            Event::Closed => {
                self.closed.send_replace(true);
                tracing::debug!("the bus connection is closed");
            }
        }
    }

    pub(crate) async fn wait_connected(&self, limit: Duration) -> Result<(), RequestError> {
        let deadline = Instant::now() + limit;
        let mut state = self.connected.subscribe();
        match timeout_at(deadline, state.wait_for(|connected| *connected)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(RequestError::Closed),
            Err(_) => Err(RequestError::Disconnected { limit }),
        }
    }
}

pub(crate) fn reconnect_delay(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX).min(10);
    let delay = RECONNECT_CAP.min(RECONNECT_FIRST * 2_u32.pow(doublings));
    delay.mul_f64(0.5 + 0.5 * jitter())
}
