//! The least speed of a transfer: a server that sends a byte a minute must not hold one for hours.

use std::time::Duration;

use tokio::time::{Instant, timeout};

/// The time that a receiver waits, in all, for [`PACE_BYTES_MIN`].
pub const PACE_INTERVAL: Duration = Duration::from_secs(60);
/// The bytes that must come in an interval of waiting, unless the transfer ends before.
pub const PACE_BYTES_MIN: u64 = 64 << 10;

/// The bytes of a transfer since its current interval of waiting began. One for each transfer.
#[derive(Debug, Default)]
pub struct TransferPace {
    bytes: u64,
    waited: Duration,
}

impl TransferPace {
    /// Waits for the next piece of a transfer, whose bytes `count_bytes` counts. Returns `None` once
    /// fewer than [`PACE_BYTES_MIN`] came in [`PACE_INTERVAL`] of waiting. The time in which the
    /// receiver does something else does not count.
    pub async fn wait_for<T>(
        &mut self,
        piece: impl Future<Output = T>,
        count_bytes: impl FnOnce(&T) -> usize,
    ) -> Option<T> {
        let began = Instant::now();
        let left = PACE_INTERVAL.saturating_sub(self.waited);
        let piece = timeout(left, piece).await.ok()?;
        self.waited += began.elapsed();
        self.bytes += count_bytes(&piece) as u64;
        if self.bytes >= PACE_BYTES_MIN {
            *self = Self::default();
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    async fn piece(seconds: u64, bytes: usize) -> usize {
        sleep(Duration::from_secs(seconds)).await;
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_brings_little_ends_and_a_slow_receiver_does_not_end_it() {
        let mut pace = TransferPace::default();
        let began = Instant::now();
        let mut pieces = 0;
        while pace.wait_for(piece(7, 1), |bytes| *bytes).await.is_some() {
            pieces += 1;
        }
        assert_eq!((pieces, began.elapsed()), (8, PACE_INTERVAL), "a byte now and then");
        let mut pace = TransferPace::default();
        let began = Instant::now();
        assert_eq!(pace.wait_for(piece(61, 1 << 20), |bytes| *bytes).await, None, "silence");
        assert_eq!(began.elapsed(), PACE_INTERVAL);
        let mut pace = TransferPace::default();
        for _ in 0..100 {
            assert!(pace.wait_for(piece(25, 40 << 10), |bytes| *bytes).await.is_some());
            sleep(PACE_INTERVAL * 2).await;
        }
    }
}
