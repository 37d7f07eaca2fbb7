//! How far a run is.

/// The progress of a run that has not ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunProgress {
    /// Done cycles that have trained. `None` before the base's cycle is done.
    pub trained_cycles: Option<u32>,
    /// Seconds of work since the last of these cycles was done, or since the submission.
    pub elapsed_s: f64,
}
