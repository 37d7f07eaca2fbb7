//! An incremental index of the jobs of a cycle by stage, updated with each fact, so that planning
//! does not scan all jobs for each fact.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wire::{JobId, v1};

use crate::state::{Cycle, PlannedJob};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobStage {
    /// Not ordered in the current round.
    Unordered,
    /// Ordered, without samples yet.
    InFlight,
    /// Sampled, without all results that it needs.
    Sampled,
    Finished,
    SetAside,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct JobIndex(BTreeMap<v1::Purpose, PurposeIndex>);

/// The jobs of one purpose: ids of those to order and in flight, counts of the others, and sampling
/// statistics.
#[derive(Debug, Clone, Default)]
pub(crate) struct PurposeIndex {
    pub(crate) unordered: BTreeSet<JobId>,
    /// Ordered, without samples yet.
    pub(crate) in_flight: BTreeSet<JobId>,
    /// Jobs that wait for verdicts or scores.
    sampled: usize,
    finished: usize,
    pub(crate) set_aside: usize,
    /// Planned samples of the jobs in `unordered`.
    pub(crate) unordered_samples: u64,
    drawn_samples: u64,
    drawn_tokens: u64,
    /// Durations of the most recent jobs, newest first.
    recent_sample_ms: VecDeque<f64>,
}

/// Jobs from which the duration of a sample is estimated.
const RECENT_JOBS: usize = 64;

impl PurposeIndex {
    const EMPTY: &'static Self = &Self {
        unordered: BTreeSet::new(),
        in_flight: BTreeSet::new(),
        sampled: 0,
        finished: 0,
        set_aside: 0,
        unordered_samples: 0,
        drawn_samples: 0,
        drawn_tokens: 0,
        recent_sample_ms: VecDeque::new(),
    };

    pub(crate) fn job_count(&self) -> usize {
        self.missing_count() + self.sampled + self.finished + self.set_aside
    }

    /// Counts the jobs whose samples may still arrive.
    pub(crate) fn missing_count(&self) -> usize {
        self.unordered.len() + self.in_flight.len()
    }

    /// Counts the jobs that are neither finished nor set aside.
    pub(crate) fn unsettled_count(&self) -> usize {
        self.missing_count() + self.sampled
    }

    pub(crate) fn finished_count(&self) -> usize {
        self.finished
    }

    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(crate) fn tokens_per_sample(&self) -> Option<f64> {
        (self.drawn_samples > 0).then(|| self.drawn_tokens as f64 / self.drawn_samples as f64)
    }

    /// Returns the median over the recent jobs; `None` without any.
    pub(crate) fn ms_per_sample(&self) -> Option<f64> {
        let mut each: Vec<f64> = self.recent_sample_ms.iter().copied().collect();
        each.sort_by(f64::total_cmp);
        each.get(each.len() / 2).copied()
    }

    fn add_job(&mut self, id: &JobId, job: &PlannedJob, stage: JobStage) {
        match stage {
            JobStage::Unordered => {
                self.unordered.insert(id.clone());
                self.unordered_samples += u64::from(job.planned_samples());
            }
            JobStage::InFlight => drop(self.in_flight.insert(id.clone())),
            JobStage::Sampled => self.sampled += 1,
            JobStage::Finished => self.finished += 1,
            JobStage::SetAside => self.set_aside += 1,
        }
    }

    fn remove_job(&mut self, id: &JobId, job: &PlannedJob, stage: JobStage) {
        match stage {
            JobStage::Unordered => {
                self.unordered.remove(id);
                self.unordered_samples -= u64::from(job.planned_samples());
            }
            JobStage::InFlight => drop(self.in_flight.remove(id)),
            JobStage::Sampled => self.sampled -= 1,
            JobStage::Finished => self.finished -= 1,
            JobStage::SetAside => self.set_aside -= 1,
        }
    }
}

impl JobStage {
    fn from_job(job: &PlannedJob, round: u32) -> Self {
        if job.set_aside.is_some() {
            Self::SetAside
        } else if job.has_results() {
            Self::Finished
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
    pub(crate) fn purpose_index(&self, purpose: v1::Purpose) -> &PurposeIndex {
        self.job_index.0.get(&purpose).unwrap_or(PurposeIndex::EMPTY)
    }

    /// Must be called after each change of the job.
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

    /// Removes the job from the cycle, too.
    pub(crate) fn remove_job(&mut self, id: &JobId) -> Option<PlannedJob> {
        let job = self.jobs.remove(id)?;
        if let Some(stage) = job.indexed_stage {
            self.job_index.0.entry(job.purpose).or_default().remove_job(id, &job, stage);
        }
        Some(job)
    }

    pub(crate) fn reindex_all(&mut self, round: u32) {
        for id in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.reindex_job(&id, round);
        }
    }

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
