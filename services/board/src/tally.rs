//! What became of the samples of a cycle.

use wire::v1::{self, verdicts::Outcome};

use crate::histogram::Histogram;

#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    pub(crate) samples: v1::board::Samples,
    pub(crate) rewards: Histogram,
}

impl Tally {
    /// Of jobs as they are: after something that counted does no more.
    pub(crate) fn of<'a>(jobs: impl Iterator<Item = &'a cycle::Job>) -> Self {
        let mut tally = Self::default();
        for job in jobs {
            tally.plan(job);
            tally.draw(job);
            tally.judge(job);
        }
        tally
    }

    fn plan(&mut self, job: &cycle::Job) {
        add(&mut self.samples.planned, job.planned());
    }

    pub(crate) fn draw(&mut self, job: &cycle::Job) {
        let counts = job.samples.as_ref().filter(|samples| samples.void.is_none());
        add(&mut self.samples.drawn, counts.map_or(0, |samples| samples.count));
    }

    pub(crate) fn judge(&mut self, job: &cycle::Job) {
        let counts = job.samples.as_ref().is_some_and(|samples| samples.void.is_none());
        if let Some(verdicts) = job.verdicts.as_ref().filter(|_| counts) {
            self.add(verdicts);
        }
    }

    /// As they are.
    pub(crate) fn add(&mut self, verdicts: &v1::Verdicts) {
        for verdict in &verdicts.verdicts {
            match verdict.outcome() {
                Outcome::Pass => add(&mut self.samples.passed, 1),
                Outcome::Fail => {}
                Outcome::Error | Outcome::Unspecified => {
                    add(&mut self.samples.errors, 1);
                    continue;
                }
            }
            add(&mut self.samples.judged, 1);
            self.rewards.add(verdict.reward);
        }
    }
}

pub(crate) fn add(count: &mut u32, more: u32) {
    *count = count.saturating_add(more);
}
