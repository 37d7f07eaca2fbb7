//! How fast this box generates, while it does.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use runtime::Pace;
use wire::v1;

/// Jobs overlap, so a rate is that of a stretch of time in which at least one is held.
const STRETCH: Duration = Duration::from_secs(2);

/// Weight of the newest stretch, and of the newest job.
const NEWEST: f64 = 0.5;

/// Tokens a second, as a moving average over busy stretches.
#[derive(Debug, Default)]
pub(crate) struct Rate(Mutex<Measured>);

#[derive(Debug, Default)]
struct Measured {
    tokens_per_s: f64,
    tokens_a_sample: f64,
    held: u32,
    since: Option<Instant>,
    tokens: u64,
}

/// A job being generated. Dropping it says that it is no longer.
pub(crate) struct Held<'a> {
    rate: &'a Rate,
    tokens: u64,
}

impl Rate {
    pub(crate) fn pace(&self, slots: u32) -> Pace {
        let rates = |measured: &Measured| (measured.tokens_per_s, measured.tokens_a_sample);
        let (tokens_per_s, tokens_a_sample) =
            self.0.lock().map(|measured| rates(&measured)).unwrap_or_default();
        Pace { tokens_per_s, tokens_a_sample, slots }
    }

    pub(crate) fn hold(&self) -> Held<'_> {
        if let Ok(mut measured) = self.0.lock() {
            measured.begin(Instant::now());
        }
        Held { rate: self, tokens: 0 }
    }
}

impl Held<'_> {
    pub(crate) fn made(mut self, samples: &[v1::samples::Sample]) {
        self.tokens = samples.iter().map(|sample| u64::from(sample.tokens)).sum();
        if let (Ok(mut measured), false) = (self.rate.0.lock(), samples.is_empty()) {
            #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
            let each = self.tokens as f64 / samples.len() as f64;
            measured.tokens_a_sample = average(measured.tokens_a_sample, each);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Ok(mut measured) = self.rate.0.lock() {
            measured.end(self.tokens, Instant::now());
        }
    }
}

impl Measured {
    fn begin(&mut self, now: Instant) {
        if self.held == 0 {
            (self.since, self.tokens) = (Some(now), 0);
        }
        self.held += 1;
    }

    fn end(&mut self, tokens: u64, now: Instant) {
        self.held = self.held.saturating_sub(1);
        self.tokens += tokens;
        let Some(since) = self.since else { return };
        let stretch = now.saturating_duration_since(since);
        if self.tokens == 0 || stretch.is_zero() || (self.held > 0 && stretch < STRETCH) {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
        let rate = self.tokens as f64 / stretch.as_secs_f64();
        self.tokens_per_s = average(self.tokens_per_s, rate);
        (self.since, self.tokens) = (Some(now), 0);
    }
}

fn average(before: f64, newest: f64) -> f64 {
    if before > 0.0 { NEWEST * newest + (1.0 - NEWEST) * before } else { newest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_jobs_at_once_count_as_one_stretch() {
        let mut measured = Measured::default();
        let start = Instant::now();
        measured.begin(start);
        measured.begin(start);
        measured.end(100, start + Duration::from_millis(990));
        measured.end(100, start + Duration::from_secs(1));
        assert!((measured.tokens_per_s - 200.0).abs() < 1e-9, "{measured:?}");
    }
}
