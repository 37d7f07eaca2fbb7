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
