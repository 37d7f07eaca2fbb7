//! How fast this box generates, from the jobs it finished.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

/// Weight of the newest job.
const NEWEST: f64 = 0.3;

/// Tokens a second, as a moving average over jobs.
#[derive(Debug, Default)]
pub(crate) struct Rate(Mutex<Measured>);

#[derive(Debug, Default)]
struct Measured {
    tokens_per_s: f64,
    last_end: Option<Instant>,
}

impl Rate {
    pub(crate) fn tokens_per_s(&self) -> f64 {
        self.0.lock().map(|measured| measured.tokens_per_s).unwrap_or(0.0)
    }

    /// Counts a job. Jobs overlap: only the time since the last one ended is this one's.
    pub(crate) fn note(&self, tokens: u64, began: Instant, ended: Instant) {
        let Ok(mut measured) = self.0.lock() else { return };
        let since = measured.last_end.map_or(began, |end| end.max(began));
        let seconds = ended.saturating_duration_since(since).max(Duration::from_millis(1));
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
        let rate = tokens as f64 / seconds.as_secs_f64();
        measured.tokens_per_s = if measured.last_end.is_none() {
            rate
        } else {
            NEWEST * rate + (1.0 - NEWEST) * measured.tokens_per_s
        };
        measured.last_end = Some(ended);
    }
}
