//! Where the jobs of a cycle stand, noted as facts come in: what is next is found without walking
//! through all of them for every fact.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wire::{JobId, v1};

use crate::state::{Cycle, Job};

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nobody was told of it in this round.
    Unordered,
    /// Ordered, and not there yet.
    Out,
    /// Drawn, and not judged.
    Drawn,
    Judged,
    SetAside,
}

/// The jobs of a cycle, by purpose.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(BTreeMap<v1::Purpose, Account>);

/// The jobs of one purpose.
#[derive(Debug, Clone, Default)]
pub(crate) struct Account {
    pub(crate) unordered: BTreeSet<JobId>,
    pub(crate) out: BTreeSet<JobId>,
    drawn: usize,
    judged: usize,
    pub(crate) set_aside: usize,
    /// Samples of those that are not ordered.
    pub(crate) unordered_samples: u64,
    /// Of those that were drawn.
    samples: u64,
    tokens: u64,
    /// Milliseconds a sample of the newest jobs.
    newest: VecDeque<f64>,
}

/// Jobs that tell how long one takes now.
const NEWEST: usize = 64;

impl Account {
    const NONE: &'static Self = &Self {
        unordered: BTreeSet::new(),
        out: BTreeSet::new(),
        drawn: 0,
        judged: 0,
        set_aside: 0,
        unordered_samples: 0,
        samples: 0,
        tokens: 0,
        newest: VecDeque::new(),
    };

    pub(crate) fn jobs(&self) -> usize {
        self.missing() + self.drawn + self.judged + self.set_aside
    }

    /// Jobs whose samples may still come.
    pub(crate) fn missing(&self) -> usize {
        self.unordered.len() + self.out.len()
    }

    /// Jobs that are neither judged nor set aside.
    pub(crate) fn unsettled(&self) -> usize {
        self.missing() + self.drawn
    }

    pub(crate) fn judged(&self) -> usize {
        self.judged
    }

    /// Of a sample, on average; `None` while there is none.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(crate) fn tokens_a_sample(&self) -> Option<f64> {
        (self.samples > 0).then(|| self.tokens as f64 / self.samples as f64)
    }

    /// What a sample takes, as the middle one of the newest jobs says.
    pub(crate) fn milliseconds_a_sample(&self) -> Option<f64> {
        let mut each: Vec<f64> = self.newest.iter().copied().collect();
        each.sort_by(f64::total_cmp);
        each.get(each.len() / 2).copied()
    }

    fn add(&mut self, id: &JobId, job: &Job, standing: Standing) {
        match standing {
            Standing::Unordered => {
                self.unordered.insert(id.clone());
                self.unordered_samples += u64::from(job.planned());
            }
            Standing::Out => drop(self.out.insert(id.clone())),
            Standing::Drawn => self.drawn += 1,
            Standing::Judged => self.judged += 1,
            Standing::SetAside => self.set_aside += 1,
        }
    }

    fn remove(&mut self, id: &JobId, job: &Job, standing: Standing) {
        match standing {
            Standing::Unordered => {
                self.unordered.remove(id);
                self.unordered_samples -= u64::from(job.planned());
            }
            Standing::Out => drop(self.out.remove(id)),
            Standing::Drawn => self.drawn -= 1,
            Standing::Judged => self.judged -= 1,
            Standing::SetAside => self.set_aside -= 1,
        }
    }
}

impl Standing {
    fn of(job: &Job, round: u32) -> Self {
        if job.set_aside.is_some() {
            Self::SetAside
        } else if job.verdicts.is_some() {
            Self::Judged
        } else if job.samples.is_some() {
            Self::Drawn
        } else if job.ordered.round >= round {
            Self::Out
        } else {
            Self::Unordered
        }
    }
}

impl Cycle {
    pub(crate) fn account(&self, purpose: v1::Purpose) -> &Account {
        self.ledger.0.get(&purpose).unwrap_or(Account::NONE)
    }

    /// Notes where a job stands now. To be called whenever it has changed.
    pub(crate) fn book(&mut self, id: &JobId, round: u32) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let (before, now) = (job.booked, Standing::of(job, round));
        if before == Some(now) {
            return;
        }
        job.booked = Some(now);
        let account = self.ledger.0.entry(job.purpose).or_default();
        if let Some(before) = before {
            account.remove(id, job, before);
        }
        account.add(id, job, now);
    }

    /// Strikes out a job that another takes the place of.
    pub(crate) fn strike(&mut self, id: &JobId) -> Option<Job> {
        let job = self.jobs.remove(id)?;
        if let Some(standing) = job.booked {
            self.ledger.0.entry(job.purpose).or_default().remove(id, &job, standing);
        }
        Some(job)
    }

    /// Notes where each job stands in a new round.
    pub(crate) fn book_all(&mut self, round: u32) {
        for id in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.book(&id, round);
        }
    }

    /// Notes what was drawn.
    pub(crate) fn count(&mut self, purpose: v1::Purpose, samples: &v1::Samples) {
        let account = self.ledger.0.entry(purpose).or_default();
        account.samples += samples.samples.len() as u64;
        let tokens = samples.samples.iter().map(|sample| u64::from(sample.tokens));
        account.tokens = account.tokens.saturating_add(tokens.sum());
        let count = u32::try_from(samples.samples.len()).unwrap_or(u32::MAX).max(1);
        if samples.wall_s.is_finite() && samples.wall_s >= 0.0 {
            account.newest.truncate(NEWEST - 1);
            account.newest.push_front(1000.0 * samples.wall_s / f64::from(count));
        }
    }
}
