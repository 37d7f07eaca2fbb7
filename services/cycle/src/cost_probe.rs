//! A counter of visited elements, compiled for tests only. Tests assert how the cost of an
//! operation grows with the size of a run, instead of measuring time.

#[cfg(test)]
thread_local! {
    static VISITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts one job, agent or similar element that a loop visits.
#[inline]
pub(crate) fn count_visit() {
    #[cfg(test)]
    VISITS.set(VISITS.get() + 1);
}

/// Returns the number of visits counted on this thread.
#[cfg(test)]
pub(crate) fn visit_count() -> u64 {
    VISITS.get()
}
