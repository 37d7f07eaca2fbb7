//! Counters of calls and their durations, for metrics.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use store::UploadLeftovers;
use tonic::Code;

use crate::status::code_name;

/// The counters of all calls by method and outcome, whose number is bounded.
#[derive(Debug, Clone, Default)]
pub struct CallCounts {
    calls: Arc<Mutex<BTreeMap<(&'static str, &'static str), CallStats>>>,
    streams: Arc<AtomicU64>,
    leftovers: Arc<Mutex<UploadLeftovers>>,
}

/// The number and duration of calls.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CallStats {
    pub calls: u64,
    /// Sum of the times until an answer was ready or a stream was open.
    pub seconds: f64,
}

/// An open stream, counted until dropped.
pub(crate) struct StreamGuard(Arc<AtomicU64>);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CallCounts {
    pub(crate) fn count_call(&self, method: &'static str, code: Code, took: Duration) {
        let code = if code == Code::Ok { "ok" } else { code_name(code) };
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let count = calls.entry((method, code)).or_default();
        count.calls += 1;
        count.seconds += took.as_secs_f64();
    }

    /// Creates counters with one successful call.
    pub fn from_call(method: &'static str, seconds: f64) -> Self {
        let counts = Self::default();
        counts.count_call(method, Code::Ok, Duration::from_secs_f64(seconds));
        counts
    }

    pub(crate) fn record_leftovers(&self, removed: UploadLeftovers) {
        let mut all = self.leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        all.count += removed.count;
        all.bytes += removed.bytes;
    }

    /// Returns the leftovers of uploads that were removed since the start.
    pub fn removed_leftovers(&self) -> UploadLeftovers {
        *self.leftovers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count_stream(&self) -> StreamGuard {
        self.streams.fetch_add(1, Ordering::Relaxed);
        StreamGuard(self.streams.clone())
    }

    /// Returns the counters by method, such as `Runs.Get`, and code in Connect's spelling, or `ok`.
    pub(crate) fn calls_by_outcome(&self) -> BTreeMap<(&'static str, &'static str), CallStats> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of open streams.
    pub(crate) fn open_streams(&self) -> u64 {
        self.streams.load(Ordering::Relaxed)
    }
}
