//! Keeping a lease: the server is told, again and again, that the work goes on.

use bus::Delivery;

use crate::legacy::Note;

/// Keeps a delivery ours for as long as it is polled. Never returns.
pub(crate) async fn lease(delivery: &Delivery, note: &Note) -> std::convert::Infallible {
    // Two beats may be lost before the lease is.
    let mut beat = tokio::time::interval(delivery.lease() / 3);
    beat.tick().await;
    loop {
        beat.tick().await;
        if let Err(error) = delivery.progress().await {
            tracing::warn!(%error, "keeping a lease");
        }
        note.renew();
    }
}
