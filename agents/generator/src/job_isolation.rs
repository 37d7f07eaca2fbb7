//! Finds the job that kills a worker which several jobs share.

use std::sync::atomic::{AtomicU32, Ordering};

/// Jobs that run one at a time after a worker died while it served several calls.
const ISOLATED_JOBS: u32 = 16;

/// The jobs that must still run one at a time, each with one call at a time, so that the one at
/// fault fails alone. Each answered job is one less.
#[derive(Debug, Default)]
pub(crate) struct JobIsolation {
    remaining: AtomicU32,
}

impl JobIsolation {
    /// Isolates the next jobs.
    pub(crate) fn begin(&self) {
        self.remaining.store(ISOLATED_JOBS, Ordering::Relaxed);
    }

    pub(crate) fn is_active(&self) -> bool {
        self.remaining.load(Ordering::Relaxed) > 0
    }

    /// Returns the number of calls that a job may send at once to a worker with `slots`.
    pub(crate) fn limit_calls(&self, slots: u32) -> usize {
        if self.is_active() { 1 } else { slots.max(1) as usize }
    }

    pub(crate) fn record_answered_job(&self) {
        let less = |remaining: u32| remaining.checked_sub(1);
        // The update fails only if no isolated job remains.
        let _ = self.remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_isolated_job_sends_one_call_at_a_time_until_enough_jobs_were_answered() {
        let isolation = JobIsolation::default();
        isolation.record_answered_job();
        assert_eq!((isolation.limit_calls(8), isolation.limit_calls(0)), (8, 1));
        isolation.begin();
        for _ in 0..ISOLATED_JOBS {
            assert_eq!((isolation.is_active(), isolation.limit_calls(8)), (true, 1));
            isolation.record_answered_job();
        }
        assert_eq!((isolation.is_active(), isolation.limit_calls(8)), (false, 8));
    }
}
