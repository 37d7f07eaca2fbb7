//! Verification without a fleet.

use std::time::Duration;

use wire::v1::{self, verdicts::Verdict};

use crate::{
    Toolchain, VerifyItem,
    pipeline::{ConfiguredVerifier, JudgePipeline, TimedResult},
    tools::required_tools,
};

/// A verifier and the toolchain of this host, used without a fleet.
#[derive(Debug)]
pub struct OfflineVerifier {
    settings: v1::Verifier,
    verifier: ConfiguredVerifier,
    toolchain: Toolchain,
    pipeline: JudgePipeline,
    threads: usize,
}

/// A verdict and the time that it took.
#[derive(Debug, Clone)]
pub struct TimedVerdict {
    pub verdict: Verdict,
    pub took: Duration,
}

impl OfflineVerifier {
    /// Compiles the settings, and fails with what is wrong with them. `jobs` completions are judged
    /// at once.
    pub fn new(settings: v1::Verifier, toolchain: Toolchain, jobs: usize) -> anyhow::Result<Self> {
        let verifier = ConfiguredVerifier::new(&settings).map_err(anyhow::Error::msg)?;
        Ok(Self {
            settings,
            verifier,
            pipeline: JudgePipeline::new(toolchain.clone()),
            toolchain,
            threads: jobs,
        })
    }

    /// Returns what this host lacks to judge these items, with advice.
    pub fn missing_needs(&self, items: &[VerifyItem]) -> Vec<String> {
        let needs = self.settings.how.as_ref().map(|how| required_tools(how, items.iter()));
        let needs = needs.unwrap_or_default();
        self.toolchain.missing_needs(&needs).into_iter().map(|(_, lacking)| lacking).collect()
    }

    /// Judges the items and returns the verdicts in their order.
    pub fn judge_items(&self, items: &[VerifyItem]) -> Vec<TimedVerdict> {
        let found = self.pipeline.judge_items(&self.verifier, items, self.threads, &|_| {});
        let judged = found.into_iter().zip(items);
        let judgement = |(found, item): (TimedResult, &VerifyItem)| TimedVerdict {
            took: found.took,
            verdict: found.result.into_verdict(item),
        };
        judged.map(judgement).collect()
    }
}
