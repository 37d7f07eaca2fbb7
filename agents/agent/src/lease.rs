//! Lease renewal: the heartbeat that keeps a delivery assigned to this agent.
//!
//! A lease is an unacknowledged delivery, and expires when it is not renewed in time:
//!
//! ```text
//! held       renewed every third of the lease
//! settled    acknowledged, or returned for redelivery
//! expired    no renewal arrived for a whole lease: the server gives the job to another agent
//! ```
//!
//! With a lease of 30 s, renewals are 10 s apart; two may be lost before the lease expires.

use bus::Delivery;

use crate::lease_journal::LeaseFile;

/// Renews a lease, and its entry in the lease journal, for as long as it is polled.
pub(crate) async fn renew_until_done(
    delivery: &Delivery,
    lease_file: &LeaseFile,
) -> std::convert::Infallible {
    let mut renewal = tokio::time::interval(delivery.lease_duration() / 3);
    renewal.tick().await;
    loop {
        renewal.tick().await;
        if let Err(error) = delivery.renew_lease().await {
            tracing::warn!(%error, "lease renewal failed");
        }
        lease_file.mark_renewed();
    }
}
