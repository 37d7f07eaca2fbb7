//! How many calls there were, and what they took: for those who collect figures.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tonic::Code;

use crate::json;

/// Of all calls of a gateway, by method and outcome: a table of known size.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    calls: Arc<Mutex<BTreeMap<(&'static str, &'static str), Count>>>,
    streams: Arc<AtomicU64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Count {
    pub calls: u64,
    /// Until an answer was there, or a stream was open.
    pub seconds: f64,
}

/// A stream that is open, until dropped.
pub(crate) struct Open(Arc<AtomicU64>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counts {
    pub(crate) fn note(&self, method: &'static str, code: Code, took: Duration) {
        let code = if code == Code::Ok { "ok" } else { json::code_name(code) };
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let count = calls.entry((method, code)).or_default();
        count.calls += 1;
        count.seconds += took.as_secs_f64();
    }

    /// Of one call that went well.
    pub fn of(method: &'static str, seconds: f64) -> Self {
        let counts = Self::default();
        counts.note(method, Code::Ok, Duration::from_secs_f64(seconds));
        counts
    }

    pub(crate) fn open(&self) -> Open {
        self.streams.fetch_add(1, Ordering::Relaxed);
        Open(self.streams.clone())
    }

    /// By method, such as `Runs.Get`, and code, as Connect writes it, or `ok`.
    pub fn told(&self) -> BTreeMap<(&'static str, &'static str), Count> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Open now.
    pub fn streams(&self) -> u64 {
        self.streams.load(Ordering::Relaxed)
    }
}
