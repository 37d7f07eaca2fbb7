//! The results of an order's episodes.

use std::time::Duration;

use agent::JobError;
use wire::v1::samples::Sample;

/// An order without a played episode fails once its failed ones have waited so long, in total, for
/// answers that they did not get.
const LOST_TIME_MAX: Duration = Duration::from_secs(600);

/// The end of an episode.
#[derive(Debug)]
pub(crate) enum EpisodeEnd {
    /// The environment ended it, or it had no room for another turn.
    Played(Sample),
    /// The environment failed. The sample ends with the action that it did not answer; judging it
    /// is an error too.
    Failed {
        sample: Sample,
        error: JobError,
        /// The time that was spent on the unanswered action.
        lost: Duration,
    },
}

/// The episodes of an order that have ended. An order fails if a worker failed, or if the
/// environment failed in all of its episodes.
#[derive(Debug, Default)]
pub(crate) struct EpisodeResults {
    /// Samples with their places in the order.
    samples: Vec<(usize, Sample)>,
    has_played: bool,
    /// The error of the first failed episode.
    environment_error: Option<JobError>,
    lost: Duration,
    /// The error that fails the order, if any.
    fatal_error: Option<JobError>,
}

impl EpisodeResults {
    /// Records the end of the episode at a place of the order.
    pub(crate) fn record_end(&mut self, place: usize, end: Result<EpisodeEnd, JobError>) {
        match end {
            Ok(EpisodeEnd::Played(sample)) => {
                self.has_played = true;
                self.samples.push((place, sample));
            }
            Ok(EpisodeEnd::Failed { sample, error, lost }) => {
                self.samples.push((place, sample));
                if self.environment_error.is_none() {
                    tracing::warn!(%error, "an environment did not answer an action");
                    self.environment_error = Some(error);
                }
                self.lost = self.lost.saturating_add(lost);
                if !self.has_played && self.lost > LOST_TIME_MAX && self.fatal_error.is_none() {
                    self.fatal_error = self.environment_error.take();
                }
            }
            Err(error) => {
                self.fatal_error.get_or_insert(error);
            }
        }
    }

    /// Returns true if the other episodes should not continue.
    pub(crate) fn has_failed(&self) -> bool {
        self.fatal_error.is_some()
    }

    pub(crate) fn sample_count(&self) -> u32 {
        u32::try_from(self.samples.len()).unwrap_or(u32::MAX)
    }

    /// Returns the samples by their places.
    pub(crate) fn into_samples(mut self) -> Result<Vec<Sample>, JobError> {
        let error = self.fatal_error.or(self.environment_error.filter(|_| !self.has_played));
        if let Some(error) = error {
            return Err(error);
        }
        self.samples.sort_by_key(|(place, _)| *place);
        Ok(self.samples.into_iter().map(|(_, sample)| sample).collect())
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn error(message: &'static str) -> JobError {
        JobError::retryable_failure(anyhow!("{message} (V106)"))
    }

    fn sample(index: u32) -> Sample {
        Sample { index, ..Sample::default() }
    }

    fn failed(index: u32, message: &'static str, lost_s: u64) -> EpisodeEnd {
        let lost = Duration::from_secs(lost_s);
        EpisodeEnd::Failed { sample: sample(index), error: error(message), lost }
    }

    #[test]
    fn failed_episodes_are_samples_unless_all_have_failed() {
        let mut results = EpisodeResults::default();
        results.record_end(2, Ok(failed(2, "first", 1)));
        results.record_end(0, Ok(failed(0, "second", 1)));
        assert!(!results.has_failed());
        results.record_end(1, Ok(EpisodeEnd::Played(sample(1))));
        assert_eq!(results.sample_count(), 3);
        let samples = results.into_samples().unwrap();
        assert_eq!(samples.iter().map(|one| one.index).collect::<Vec<_>>(), [0, 1, 2]);

        let mut results = EpisodeResults::default();
        results.record_end(0, Ok(failed(0, "first", 1)));
        results.record_end(1, Ok(failed(1, "second", 1)));
        let error = results.into_samples().unwrap_err().to_string();
        assert!(error.starts_with("first"), "{error}");
        assert!(EpisodeResults::default().into_samples().unwrap().is_empty());
    }

    #[test]
    fn an_environment_that_only_hangs_does_not_keep_an_order_for_hours() {
        let mut results = EpisodeResults::default();
        results.record_end(0, Ok(failed(0, "first", 599)));
        assert!(!results.has_failed());
        results.record_end(1, Ok(failed(1, "second", 2)));
        assert!(results.has_failed());
        results.record_end(2, Ok(EpisodeEnd::Played(sample(2))));
        results.record_end(3, Err(JobError::Stopped));
        let error = results.into_samples().unwrap_err().to_string();
        assert!(error.starts_with("first"), "{error}");

        let mut results = EpisodeResults::default();
        results.record_end(0, Ok(EpisodeEnd::Played(sample(0))));
        results.record_end(1, Ok(failed(1, "first", 9999)));
        assert!(!results.has_failed());
    }

    #[test]
    fn a_failed_worker_fails_the_order() {
        let mut results = EpisodeResults::default();
        results.record_end(0, Ok(EpisodeEnd::Played(sample(0))));
        results.record_end(1, Ok(failed(1, "environment", 1)));
        results.record_end(2, Err(error("worker")));
        results.record_end(3, Err(JobError::Stopped));
        assert!(results.has_failed());
        let error = results.into_samples().unwrap_err().to_string();
        assert!(error.starts_with("worker"), "{error}");
    }
}
