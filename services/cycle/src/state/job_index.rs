//! An incremental index of the jobs of a cycle by stage. It is updated with each fact, so that
//! planning does not have to scan all jobs for each fact.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wire::{JobId, v1};

use crate::state::{Cycle, PlannedJob};

/// The stage of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobStage {
    /// Not ordered in the current round.
    Unordered,
    /// Ordered, without samples yet.
    InFlight,
    /// Sampled, without verdicts yet.
    Sampled,
    /// Sampled and judged.
    Judged,
    /// Given up after its final failure.
    SetAside,
}

/// The index of a cycle's jobs, by purpose.
#[derive(Debug, Clone, Default)]
pub(crate) struct JobIndex(BTreeMap<v1::Purpose, PurposeIndex>);

/// The jobs of one purpose: ids of those to order and in flight, counts of the others, and sampling
/// statistics.
#[derive(Debug, Clone, Default)]
pub(crate) struct PurposeIndex {
    /// Jobs to order.
    pub(crate) unordered: BTreeSet<JobId>,
    /// Jobs that are ordered and have no samples yet.
    pub(crate) in_flight: BTreeSet<JobId>,
    /// Number of jobs that wait for verdicts.
    sampled: usize,
    /// Number of jobs with verdicts.
    judged: usize,
    /// Number of jobs that were given up.
    pub(crate) set_aside: usize,
    /// Number of planned samples of the jobs in `unordered`.
    pub(crate) unordered_samples: u64,
    /// Number of samples drawn.
    drawn_samples: u64,
    /// Number of tokens of the samples drawn.
    drawn_tokens: u64,
    /// Milliseconds per sample of the most recent jobs, newest first.
    recent_sample_ms: VecDeque<f64>,
}

/// Number of recent jobs from which the duration of a sample is estimated.
const RECENT_JOBS: usize = 64;

impl PurposeIndex {
    /// The index of a purpose without jobs.
    const EMPTY: &'static Self = &Self {
        unordered: BTreeSet::new(),
        in_flight: BTreeSet::new(),
        sampled: 0,
        judged: 0,
        set_aside: 0,
        unordered_samples: 0,
        drawn_samples: 0,
        drawn_tokens: 0,
        recent_sample_ms: VecDeque::new(),
    };

    /// Returns the number of jobs.
    pub(crate) fn job_count(&self) -> usize {
        self.missing_count() + self.sampled + self.judged + self.set_aside
    }

    /// Returns the number of jobs whose samples may still arrive.
    pub(crate) fn missing_count(&self) -> usize {
        self.unordered.len() + self.in_flight.len()
    }

    /// Returns the number of jobs that are neither judged nor set aside.
    pub(crate) fn unsettled_count(&self) -> usize {
        self.missing_count() + self.sampled
    }

    /// Returns the number of judged jobs.
    pub(crate) fn judged_count(&self) -> usize {
        self.judged
    }

    /// Returns the mean number of tokens of a sample; `None` if there are no samples.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(crate) fn tokens_per_sample(&self) -> Option<f64> {
        (self.drawn_samples > 0).then(|| self.drawn_tokens as f64 / self.drawn_samples as f64)
    }

    /// Returns the median duration of a sample over the recent jobs, in milliseconds; `None`
    /// without any.
    pub(crate) fn ms_per_sample(&self) -> Option<f64> {
        let mut each: Vec<f64> = self.recent_sample_ms.iter().copied().collect();
        each.sort_by(f64::total_cmp);
        each.get(each.len() / 2).copied()
    }

    /// Adds a job at a stage.
    fn add_job(&mut self, id: &JobId, job: &PlannedJob, standing: JobStage) {
        match standing {
            JobStage::Unordered => {
                self.unordered.insert(id.clone());
                self.unordered_samples += u64::from(job.planned_samples());
            }
            JobStage::InFlight => drop(self.in_flight.insert(id.clone())),
            JobStage::Sampled => self.sampled += 1,
            JobStage::Judged => self.judged += 1,
            JobStage::SetAside => self.set_aside += 1,
        }
    }

    /// Removes a job from the stage at which it was added.
    fn remove_job(&mut self, id: &JobId, job: &PlannedJob, standing: JobStage) {
        match standing {
            JobStage::Unordered => {
                self.unordered.remove(id);
                self.unordered_samples -= u64::from(job.planned_samples());
            }
            JobStage::InFlight => drop(self.in_flight.remove(id)),
            JobStage::Sampled => self.sampled -= 1,
            JobStage::Judged => self.judged -= 1,
            JobStage::SetAside => self.set_aside -= 1,
        }
    }
}

impl JobStage {
    /// Determines the stage of a job in the given round.
    fn from_job(job: &PlannedJob, round: u32) -> Self {
        if job.set_aside.is_some() {
            Self::SetAside
        } else if job.verdicts.is_some() {
            Self::Judged
        } else if job.samples.is_some() {
            Self::Sampled
        } else if job.orders.round >= round {
            Self::InFlight
        } else {
            Self::Unordered
        }
    }
}

impl Cycle {
    /// Returns the index of one purpose.
    pub(crate) fn purpose_index(&self, purpose: v1::Purpose) -> &PurposeIndex {
        self.job_index.0.get(&purpose).unwrap_or(PurposeIndex::EMPTY)
    }

    /// Updates the index for one job. Must be called after each change of the job.
    pub(crate) fn reindex_job(&mut self, id: &JobId, round: u32) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let (before, now) = (job.indexed_stage, JobStage::from_job(job, round));
        if before == Some(now) {
            return;
        }
        job.indexed_stage = Some(now);
        let account = self.job_index.0.entry(job.purpose).or_default();
        if let Some(before) = before {
            account.remove_job(id, job, before);
        }
        account.add_job(id, job, now);
    }

    /// Removes a job from the cycle and from the index, and returns it.
    pub(crate) fn remove_job(&mut self, id: &JobId) -> Option<PlannedJob> {
        let job = self.jobs.remove(id)?;
        if let Some(standing) = job.indexed_stage {
            self.job_index.0.entry(job.purpose).or_default().remove_job(id, &job, standing);
        }
        Some(job)
    }

    /// Updates the index for all jobs, for a new round.
    pub(crate) fn reindex_all(&mut self, round: u32) {
        for id in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.reindex_job(&id, round);
        }
    }

    /// Adds accepted samples to the sampling statistics of their purpose.
    pub(crate) fn record_samples(&mut self, purpose: v1::Purpose, samples: &v1::Samples) {
        let account = self.job_index.0.entry(purpose).or_default();
        account.drawn_samples += samples.samples.len() as u64;
        let tokens = samples.samples.iter().map(|sample| u64::from(sample.tokens));
        account.drawn_tokens = account.drawn_tokens.saturating_add(tokens.sum());
        let count = u32::try_from(samples.samples.len()).unwrap_or(u32::MAX).max(1);
        if samples.wall_s.is_finite() && samples.wall_s >= 0.0 {
            account.recent_sample_ms.truncate(RECENT_JOBS - 1);
            account.recent_sample_ms.push_front(1000.0 * samples.wall_s / f64::from(count));
        }
    }
}
