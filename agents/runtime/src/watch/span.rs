//! TLB shootdowns during one piece of work: their mean by the kernel's own count, their peak by
//! the agent's looks.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use hardware::{files::Live, telemetry};
use wire::v1;

/// Of all pieces of work at hand.
#[derive(Debug)]
pub(super) struct Spans {
    files: Option<Live>,
    open: Mutex<Vec<Weak<Mutex<Seen>>>>,
    /// By the last look.
    storms: AtomicBool,
}

#[derive(Debug, Default)]
struct Seen {
    peak_per_s: f64,
    stormed: bool,
}

/// One of them.
#[derive(Debug)]
pub struct Span {
    files: Option<Live>,
    began: Instant,
    count: Option<u64>,
    seen: Arc<Mutex<Seen>>,
}

impl Spans {
    pub(super) fn new(files: Option<Live>) -> Self {
        Self { files, open: Mutex::default(), storms: AtomicBool::new(false) }
    }

    pub(super) fn begin(&self) -> Span {
        let stormed = self.storms.load(Ordering::Relaxed);
        let seen = Arc::new(Mutex::new(Seen { stormed, ..Seen::default() }));
        if let Ok(mut open) = self.open.lock() {
            open.retain(|one| one.strong_count() > 0);
            open.push(Arc::downgrade(&seen));
        }
        let count = self.files.as_ref().and_then(|files| telemetry::tlb_shootdowns(files));
        Span { files: self.files.clone(), began: Instant::now(), count, seen }
    }

    pub(super) fn hear(&self, per_s: Option<f64>, storms: bool) {
        self.storms.store(storms, Ordering::Relaxed);
        let Ok(open) = self.open.lock() else { return };
        for seen in open.iter().filter_map(Weak::upgrade) {
            if let Ok(mut seen) = seen.lock() {
                seen.peak_per_s = seen.peak_per_s.max(per_s.unwrap_or(0.0));
                seen.stormed |= storms;
            }
        }
    }
}

impl Span {
    /// `None` where nobody counts, or the count went back meanwhile.
    pub fn finish(self) -> Option<v1::eval::Shootdowns> {
        let count = self.files.as_ref().and_then(|files| telemetry::tlb_shootdowns(files))?;
        let more = count.checked_sub(self.count?)?;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let mean_per_s = more as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        let seen = self.seen.lock().ok()?;
        // Work between two looks has no peak of its own.
        let peak_per_s = seen.peak_per_s.max(mean_per_s);
        Some(v1::eval::Shootdowns { mean_per_s, peak_per_s, stormed: seen.stormed })
    }
}
