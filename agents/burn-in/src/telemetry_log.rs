//! Samples the host each second while the stages run.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hardware::{
    host_files::LiveFiles,
    telemetry::{HostTelemetry, TelemetrySampler, count_tlb_shootdowns},
};
use serde::Serialize;

const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Three hours of samples; later ones are dropped.
const SAMPLES_MAX: usize = 3 * 3600;

/// The host during a stage. A figure that the host does not report is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StageTelemetry {
    /// TLB shootdowns per second, on average.
    pub shootdowns_mean_per_s: Option<f64>,
    /// The highest rate of one second.
    pub shootdowns_max_per_s: Option<f64>,
    /// The hottest sensor of any GPU, in °C.
    pub celsius_max: Option<f64>,
    pub gpu_busy_percent_max: Option<f64>,
    pub watts_max: Option<f64>,
    pub memory_available_bytes_min: Option<u64>,
}

impl StageTelemetry {
    /// Summarizes samples. `shootdowns` is their number during the stage, and its seconds.
    pub(crate) fn summarize(samples: &[HostTelemetry], shootdowns: Option<(u64, f64)>) -> Self {
        let highest = |figure: fn(&HostTelemetry) -> Option<f64>| {
            samples.iter().filter_map(figure).reduce(f64::max)
        };
        #[expect(clippy::cast_precision_loss, reason = "a rate needs no sixteen digits")]
        let rate = |(count, seconds): (u64, f64)| count as f64 / seconds;
        Self {
            shootdowns_mean_per_s: shootdowns.filter(|(_, seconds)| *seconds > 0.0).map(rate),
            shootdowns_max_per_s: highest(|it| it.tlb_per_s),
            celsius_max: highest(HostTelemetry::max_celsius),
            gpu_busy_percent_max: highest(HostTelemetry::max_gpu_busy),
            watts_max: highest(|it| it.watts),
            memory_available_bytes_min: samples.iter().filter_map(|it| it.memory.available).min(),
        }
    }

    /// Returns the highest temperature, such as `71 °C`; empty if it is unknown.
    pub(crate) fn describe_heat(&self) -> String {
        self.celsius_max.map_or(String::new(), |celsius| format!("{celsius:.0} °C"))
    }
}

/// A thread that samples the host until this is dropped.
#[derive(Debug)]
pub(crate) struct TelemetryLog {
    files: LiveFiles,
    began: Instant,
    samples: Arc<Mutex<Vec<HostTelemetry>>>,
    stopped: Arc<AtomicBool>,
}

/// The moment at which a stage began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TelemetryMark {
    at_ms: u64,
    began: Instant,
    shootdowns: Option<u64>,
}

impl TelemetryLog {
    /// Starts the thread. If that fails, there are no samples.
    pub(crate) fn start(files: LiveFiles) -> Self {
        let log =
            Self { files, began: Instant::now(), samples: Arc::default(), stopped: Arc::default() };
        let (files, began) = (log.files.clone(), log.began);
        let (samples, stopped) = (log.samples.clone(), log.stopped.clone());
        let work = move || {
            let mut sampler = TelemetrySampler::default();
            while !stopped.load(Ordering::Relaxed) {
                let sample = sampler.take_sample(&files, to_ms(began), true);
                match samples.lock() {
                    Ok(mut samples) if samples.len() < SAMPLES_MAX => samples.push(sample),
                    Ok(_) | Err(_) => return,
                }
                std::thread::sleep(SAMPLE_INTERVAL);
            }
        };
        // Without the thread the report lacks its figures.
        drop(std::thread::Builder::new().name("burn-in".into()).spawn(work));
        log
    }

    pub(crate) fn mark_begin(&self) -> TelemetryMark {
        let shootdowns = count_tlb_shootdowns(&self.files);
        TelemetryMark { at_ms: to_ms(self.began), began: Instant::now(), shootdowns }
    }

    /// Summarizes the time since a mark.
    pub(crate) fn summarize_since(&self, mark: &TelemetryMark) -> StageTelemetry {
        let now = count_tlb_shootdowns(&self.files);
        // The counter is that of the cores that are online.
        let added = now.zip(mark.shootdowns).and_then(|(now, before)| now.checked_sub(before));
        let seconds = mark.began.elapsed().as_secs_f64();
        let all = self.all_samples();
        // The first sample of a stage has the rate of the second before it.
        let first = all.partition_point(|sample| sample.at_ms <= mark.at_ms + 500);
        StageTelemetry::summarize(&all[first..], added.map(|added| (added, seconds)))
    }

    pub(crate) fn all_samples(&self) -> Vec<HostTelemetry> {
        self.samples.lock().map(|samples| samples.clone()).unwrap_or_default()
    }
}

impl Drop for TelemetryLog {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

fn to_ms(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_extremes_and_the_mean_rate() {
        let sample = |tlb_per_s, available| {
            let mut it = HostTelemetry { tlb_per_s, ..HostTelemetry::default() };
            it.memory.available = available;
            it
        };
        let samples =
            [sample(Some(10.0), Some(7)), sample(None, Some(5)), sample(Some(30.0), None)];
        let summary = StageTelemetry::summarize(&samples, Some((50, 2.5)));
        assert_eq!(summary.shootdowns_mean_per_s, Some(20.0));
        assert_eq!(summary.shootdowns_max_per_s, Some(30.0));
        assert_eq!(summary.memory_available_bytes_min, Some(5));
        assert_eq!(summary.describe_heat(), "");
        assert_eq!(StageTelemetry::summarize(&[], None), StageTelemetry::default());
    }
}
