//! Counts visited elements, in tests only: they assert how the cost of an operation grows with the
//! size of a run, instead of measuring time.

#[cfg(test)]
thread_local! {
    static VISITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts a job, agent or similar element that a loop visits.
#[inline]
pub(crate) fn count_visit() {
    #[cfg(test)]
    VISITS.set(VISITS.get() + 1);
}

#[cfg(test)]
pub(crate) fn visit_count() -> u64 {
    VISITS.get()
}
