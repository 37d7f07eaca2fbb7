//! Counts of the samples of a cycle by outcome.

use wire::v1::{self, verdicts::Outcome};

use crate::histogram::RewardHistogram;

#[derive(Debug, Clone, Default)]
pub(crate) struct SampleCounts {
    pub(crate) samples: v1::board::Samples,
    pub(crate) rewards: RewardHistogram,
}

impl SampleCounts {
    /// Counts the jobs in their present state.
    pub(crate) fn from_jobs<'a>(jobs: impl Iterator<Item = &'a cycle::PlannedJob>) -> Self {
        let mut tally = Self::default();
        for job in jobs {
            tally.count_planned(job);
            tally.count_drawn(job);
            tally.count_judged(job);
        }
        tally
    }

    /// Counts samples by the results of a done cycle. `drawn` has those that were not judged too. The
    /// passed ones are those that the mean rates make likely, and errors are not known.
    pub(crate) fn from_rates<'a>(
        drawn: u32,
        rates: impl IntoIterator<Item = Option<&'a v1::cycle_done::Rate>>,
    ) -> Self {
        let mut tally = Self::default();
        for rate in rates.into_iter().flatten() {
            add_saturating(&mut tally.samples.judged, rate.samples);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a share of a count is a count"
            )]
            let passed = (rate.mean.clamp(0.0, 1.0) * f64::from(rate.samples)).round() as u32;
            add_saturating(&mut tally.samples.passed, passed);
        }
        tally.samples.drawn = drawn.max(tally.samples.judged);
        tally.samples.planned = tally.samples.drawn;
        tally
    }

    fn count_planned(&mut self, job: &cycle::PlannedJob) {
        add_saturating(&mut self.samples.planned, job.planned_samples());
    }

    /// Ignores void samples.
    pub(crate) fn count_drawn(&mut self, job: &cycle::PlannedJob) {
        let counts = job.samples.as_ref().filter(|samples| samples.void_reason.is_none());
        add_saturating(&mut self.samples.drawn, counts.map_or(0, |samples| samples.count));
    }

    /// Ignores the verdicts of void samples.
    pub(crate) fn count_judged(&mut self, job: &cycle::PlannedJob) {
        let counts = job.samples.as_ref().is_some_and(|samples| samples.void_reason.is_none());
        if let Some(verdicts) = job.verdicts.as_ref().filter(|_| counts) {
            self.add_verdicts(verdicts);
        }
    }

    /// Does not check whether the samples are void. An error of the verifier counts as an error,
    /// not as judged.
    pub(crate) fn add_verdicts(&mut self, verdicts: &v1::Verdicts) {
        for verdict in &verdicts.verdicts {
            match verdict.outcome() {
                Outcome::Pass => add_saturating(&mut self.samples.passed, 1),
                Outcome::Fail => {}
                Outcome::Error | Outcome::Unspecified => {
                    add_saturating(&mut self.samples.errors, 1);
                    continue;
                }
            }
            add_saturating(&mut self.samples.judged, 1);
            self.rewards.add_reward(verdict.reward);
        }
    }
}

pub(crate) fn add_saturating(count: &mut u32, more: u32) {
    *count = count.saturating_add(more);
}
