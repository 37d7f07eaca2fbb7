//! The generation throughput of this host.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use agent::SamplingThroughput;
use wire::v1;

/// The shortest busy period that is measured while jobs overlap. In a busy period at least one job
/// is held.
const WINDOW_MIN: Duration = Duration::from_secs(2);

/// The weight of the newest period, and of the newest job, in the averages.
const NEWEST_WEIGHT: f64 = 0.5;

/// Tokens per second, as a moving average over busy periods.
#[derive(Debug, Default)]
pub(crate) struct ThroughputMeter(Mutex<ThroughputAverages>);

#[derive(Debug, Default)]
struct ThroughputAverages {
    tokens_per_s: f64,
    tokens_per_sample: f64,
    jobs_held: u32,
    period_start: Option<Instant>,
    period_tokens: u64,
}

/// A job that is being generated; it ends when this is dropped.
pub(crate) struct MeteredJob<'a> {
    meter: &'a ThroughputMeter,
    tokens: u64,
}

impl ThroughputMeter {
    pub(crate) fn current_throughput(&self, slots: u32) -> SamplingThroughput {
        let rates =
            |measured: &ThroughputAverages| (measured.tokens_per_s, measured.tokens_per_sample);
        let (tokens_per_s, tokens_per_sample) =
            self.0.lock().map(|measured| rates(&measured)).unwrap_or_default();
        SamplingThroughput { tokens_per_s, tokens_per_sample, slots }
    }

    pub(crate) fn start_job(&self) -> MeteredJob<'_> {
        if let Ok(mut measured) = self.0.lock() {
            measured.begin_job(Instant::now());
        }
        MeteredJob { meter: self, tokens: 0 }
    }
}

impl MeteredJob<'_> {
    /// Records the job's samples and ends the job.
    pub(crate) fn finish_samples(mut self, samples: &[v1::samples::Sample]) {
        self.tokens = samples.iter().map(|sample| u64::from(sample.tokens)).sum();
        if let (Ok(mut measured), false) = (self.meter.0.lock(), samples.is_empty()) {
            #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
            let each = self.tokens as f64 / samples.len() as f64;
            measured.tokens_per_sample = moving_average(measured.tokens_per_sample, each);
        }
    }
}

impl Drop for MeteredJob<'_> {
    fn drop(&mut self) {
        if let Ok(mut measured) = self.meter.0.lock() {
            measured.end_job(self.tokens, Instant::now());
        }
    }
}

impl ThroughputAverages {
    /// The first job starts a period.
    fn begin_job(&mut self, now: Instant) {
        if self.jobs_held == 0 {
            (self.period_start, self.period_tokens) = (Some(now), 0);
        }
        self.jobs_held += 1;
    }

    /// Updates the rate if the period is long enough or no job is left.
    fn end_job(&mut self, tokens: u64, now: Instant) {
        self.jobs_held = self.jobs_held.saturating_sub(1);
        self.period_tokens += tokens;
        let Some(since) = self.period_start else { return };
        let stretch = now.saturating_duration_since(since);
        if self.period_tokens == 0
            || stretch.is_zero()
            || (self.jobs_held > 0 && stretch < WINDOW_MIN)
        {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
        let rate = self.period_tokens as f64 / stretch.as_secs_f64();
        self.tokens_per_s = moving_average(self.tokens_per_s, rate);
        (self.period_start, self.period_tokens) = (Some(now), 0);
    }
}

/// The exponential moving average; the newest value if there is no earlier one.
fn moving_average(before: f64, newest: f64) -> f64 {
    if before > 0.0 { NEWEST_WEIGHT * newest + (1.0 - NEWEST_WEIGHT) * before } else { newest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_jobs_at_once_count_as_one_stretch() {
        let mut measured = ThroughputAverages::default();
        let start = Instant::now();
        measured.begin_job(start);
        measured.begin_job(start);
        measured.end_job(100, start + Duration::from_millis(990));
        measured.end_job(100, start + Duration::from_secs(1));
        assert!((measured.tokens_per_s - 200.0).abs() < 1e-9, "{measured:?}");
    }
}
