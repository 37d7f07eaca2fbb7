//! Counts, in tests, what is walked through: how that grows with a run is asserted, not timed.

#[cfg(test)]
thread_local! {
    static VISITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// One job, agent or the like was looked at in passing.
#[inline]
pub(crate) fn visit() {
    #[cfg(test)]
    VISITS.set(VISITS.get() + 1);
}

/// All of this thread.
#[cfg(test)]
pub(crate) fn visits() -> u64 {
    VISITS.get()
}
