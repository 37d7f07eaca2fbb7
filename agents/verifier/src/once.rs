//! Judging without a fleet.

use std::time::Duration;

use wire::v1::{self, verdicts::Verdict};

use crate::{
    Item, Kit,
    bench::{Bench, Found, Verifier},
    tools::needs,
};

/// A verifier with what this box has to judge with.
#[derive(Debug)]
pub struct Once {
    settings: v1::Verifier,
    verifier: Verifier,
    kit: Kit,
    bench: Bench,
    jobs: usize,
}

/// A verdict and what it took.
#[derive(Debug, Clone)]
pub struct Judgement {
    pub verdict: Verdict,
    pub took: Duration,
}

impl Once {
    /// `jobs` completions are judged at a time.
    ///
    /// # Errors
    /// What is wrong with the settings.
    pub fn new(settings: v1::Verifier, kit: Kit, jobs: usize) -> anyhow::Result<Self> {
        let verifier = Verifier::new(&settings).map_err(anyhow::Error::msg)?;
        Ok(Self { settings, verifier, bench: Bench::new(kit.clone()), kit, jobs })
    }

    /// What this box lacks to judge these, with what helps.
    pub fn lacking(&self, items: &[Item]) -> Vec<String> {
        let needs = self.settings.how.as_ref().map(|how| needs(how, items.iter()));
        let needs = needs.unwrap_or_default();
        self.kit.lacking(&needs).into_iter().map(|need| need.lacking()).collect()
    }

    /// In the order of the items.
    pub fn judge(&self, items: &[Item]) -> Vec<Judgement> {
        let found = self.bench.judge_all(&self.verifier, items, self.jobs, &|_| {});
        let judged = found.into_iter().zip(items);
        let judgement = |(found, item): (Found, &Item)| Judgement {
            took: found.took,
            verdict: found.opinion.on(item),
        };
        judged.map(judgement).collect()
    }
}

/// `python/0.1.0+1f3a9c02b7de`: the version, and a digest of the settings.
pub fn version(settings: &v1::Verifier) -> String {
    crate::bench::version(settings)
}
