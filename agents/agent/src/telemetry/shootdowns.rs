//! TLB shootdowns during one piece of work: their mean from the kernel's own count, their peak from
//! the telemetry samples.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use hardware::{host_files::LiveFiles, telemetry};
use wire::v1;

#[derive(Debug)]
pub(super) struct ShootdownCounters {
    files: Option<LiveFiles>,
    open_stats: Mutex<Vec<Weak<Mutex<ShootdownStats>>>>,
    /// True if the last sample was in a storm.
    is_storming: AtomicBool,
}

#[derive(Debug, Default)]
struct ShootdownStats {
    peak_per_s: f64,
    stormed: bool,
}

/// The TLB shootdowns during one piece of work, from its start to `finish_span`.
#[derive(Debug)]
pub struct ShootdownSpan {
    files: Option<LiveFiles>,
    began: Instant,
    count: Option<u64>,
    stats: Arc<Mutex<ShootdownStats>>,
}

impl ShootdownCounters {
    /// Without files, no shootdowns are counted.
    pub(super) fn new(files: Option<LiveFiles>) -> Self {
        Self { files, open_stats: Mutex::default(), is_storming: AtomicBool::new(false) }
    }

    pub(super) fn start_span(&self) -> ShootdownSpan {
        let stormed = self.is_storming.load(Ordering::Relaxed);
        let seen = Arc::new(Mutex::new(ShootdownStats { stormed, ..ShootdownStats::default() }));
        if let Ok(mut open) = self.open_stats.lock() {
            open.retain(|one| one.strong_count() > 0);
            open.push(Arc::downgrade(&seen));
        }
        let count = self.files.as_ref().and_then(|files| telemetry::count_tlb_shootdowns(files));
        ShootdownSpan { files: self.files.clone(), began: Instant::now(), count, stats: seen }
    }

    /// Adds a sample to all open spans.
    pub(super) fn record_rate(&self, per_s: Option<f64>, storms: bool) {
        self.is_storming.store(storms, Ordering::Relaxed);
        let Ok(open) = self.open_stats.lock() else { return };
        for seen in open.iter().filter_map(Weak::upgrade) {
            if let Ok(mut seen) = seen.lock() {
                seen.peak_per_s = seen.peak_per_s.max(per_s.unwrap_or(0.0));
                seen.stormed |= storms;
            }
        }
    }
}

impl ShootdownSpan {
    /// Returns the mean and peak shootdowns per second since the start; `None` if they are not
    /// counted on this host, or the kernel's count decreased meanwhile.
    pub fn finish_span(self) -> Option<v1::eval::Shootdowns> {
        let count = self.files.as_ref().and_then(|files| telemetry::count_tlb_shootdowns(files))?;
        let more = count.checked_sub(self.count?)?;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let mean_per_s = more as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        let seen = self.stats.lock().ok()?;
        // Work between two samples has no peak of its own, so the mean is the lower bound.
        let peak_per_s = seen.peak_per_s.max(mean_per_s);
        Some(v1::eval::Shootdowns { mean_per_s, peak_per_s, stormed: seen.stormed })
    }
}
