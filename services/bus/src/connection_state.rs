//! Tracks the state of the connection from the events of the NATS client.

use std::time::Duration;

use async_nats::Event;
use tokio::{
    sync::{broadcast, watch},
    time::{Instant, timeout_at},
};

use crate::{backoff::jitter_fraction, request_error::RequestError};

/// Long enough that expired credentials do not cause a storm of attempts.
const RECONNECT_FIRST: Duration = Duration::from_millis(20);
const RECONNECT_MAX: Duration = Duration::from_secs(1);
/// Violations are read as they arrive; more than this at once are repeats.
const VIOLATIONS_KEPT: usize = 64;

/// State of the connection, and the errors that the server reports outside of answers.
pub(crate) struct ConnectionState {
    pub(crate) connected: watch::Sender<bool>,
    /// True once the client has given up reconnecting.
    pub(crate) closed: watch::Sender<bool>,
    /// Connections made so far. Answers and pulls of an earlier connection never arrive.
    pub(crate) generation: watch::Sender<u64>,
    /// Errors of the server, such as denied permissions.
    pub(crate) violations: broadcast::Sender<String>,
}

impl ConnectionState {
    pub(crate) fn new() -> Self {
        Self {
            connected: watch::Sender::new(false),
            closed: watch::Sender::new(false),
            generation: watch::Sender::new(0),
            violations: broadcast::Sender::new(VIOLATIONS_KEPT),
        }
    }

    pub(crate) fn handle_event(&self, event: Event) {
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
                tracing::warn!(target: "bus::server_error", %error, "the bus server reported an error");
                // Having no receiver is fine: the error is in the log.
                let _ = self.violations.send(error.to_string());
            }
            // Each attempt to reconnect fails in its own way; the lost connection was reported.
            Event::ClientError(error) if !*self.connected.borrow() => {
                tracing::debug!(%error, "the bus client reported an error");
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

    /// Fails with `Disconnected` after `limit`.
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

/// Returns 20 ms, doubled for each attempt up to 1 s, shortened by a random 0 to 50 %.
pub(crate) fn reconnect_delay(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX).min(10);
    let delay = RECONNECT_MAX.min(RECONNECT_FIRST * 2_u32.pow(doublings));
    delay.mul_f64(0.5 + 0.5 * jitter_fraction())
}
