//! Lease renewal: the heartbeat that keeps a delivery assigned to this agent.

use bus::Delivery;

use crate::lease_journal::LeaseFile;

/// Renews a delivery's lease, and its entry in the lease journal, for as long as it is polled.
/// Never returns.
pub(crate) async fn renew_until_done(
    delivery: &Delivery,
    note: &LeaseFile,
) -> std::convert::Infallible {
    // Three heartbeats a lease: two may be lost before the lease expires.
    let mut beat = tokio::time::interval(delivery.lease_duration() / 3);
    beat.tick().await;
    loop {
        beat.tick().await;
        if let Err(error) = delivery.renew_lease().await {
            tracing::warn!(%error, "lease renewal failed");
        }
        note.mark_renewed();
    }
}
