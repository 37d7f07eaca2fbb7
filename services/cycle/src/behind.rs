//! What a fleet has still to do behind an order, so that slow boxes know when to stop: what they
//! began last would keep all others waiting.

use wire::v1;

use crate::{Fleet, ledger::Account, state::Job};

/// What is planned behind the order that is next, and how fast the fleet is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Behind(v1::generate_order::Behind);

impl Behind {
    /// Before anything more is ordered.
    pub(crate) fn of(account: &Account, fleet: &Fleet) -> Self {
        let rates = || fleet.generators.iter().map(|generator| generator.tokens_per_s);
        Self(v1::generate_order::Behind {
            samples: account.unordered_samples,
            tokens_per_s: rates().sum(),
            fastest_tokens_per_s: rates().fold(0.0, f64::max),
        })
    }

    /// Orders a job.
    pub(crate) fn pass(&mut self, job: &Job) {
        self.0.samples = self.0.samples.saturating_sub(u64::from(job.planned()));
    }

    /// Of an order that a box of this speed is to take, or one as fast.
    pub(crate) fn meant_for(mut self, tokens_per_s: f64) -> Self {
        self.0.fastest_tokens_per_s = tokens_per_s;
        self
    }

    /// Absent where no box has said how fast it is.
    pub(crate) fn told(&self) -> Option<v1::generate_order::Behind> {
        (self.0.fastest_tokens_per_s > 0.0).then_some(self.0)
    }
}
