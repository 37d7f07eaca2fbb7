//! A chain of verifiers with weights.

use wire::v1::{verdicts::Outcome, verifier};

use crate::{
    calls::VerifyItem, judge::CompletionJudge, judge_result::JudgeResult, program::SandboxSlot,
};

/// The reward is the weighted mean of the stages' rewards.
#[derive(Debug)]
pub(crate) struct VerifierChain {
    stages: Vec<(CompletionJudge, f64)>,
    stop_at_failure: bool,
}

impl VerifierChain {
    /// Fails with what is wrong with the settings of a stage.
    pub(crate) fn new(chain: &verifier::Chain) -> Result<Self, String> {
        let stage = |(number, stage): (usize, &verifier::chain::Stage)| {
            let how = stage.verifier.as_ref().and_then(|verifier| verifier.how.as_ref());
            let how = how.filter(|how| !matches!(how, verifier::How::Chain(_)));
            let how = how.ok_or_else(|| format!("stage {number} names no verifier"))?;
            Ok((CompletionJudge::new(how)?, stage.weight))
        };
        let stages: Result<Vec<_>, String> = (1..).zip(&chain.stages).map(stage).collect();
        let stages = stages?;
        if stages.iter().map(|(_, weight)| weight).sum::<f64>() > 0.0 {
            Ok(Self { stages, stop_at_failure: chain.stop_at_failure })
        } else {
            Err("no stage has a weight above 0".into())
        }
    }

    pub(crate) fn stage_judges(&self) -> impl Iterator<Item = &CompletionJudge> {
        self.stages.iter().map(|(judge, _)| judge)
    }

    /// Passes if all stages pass. An error of a stage is the result of the chain; stages after it
    /// do not run.
    pub(crate) fn judge_item(&self, item: &VerifyItem, slot: &mut SandboxSlot<'_>) -> JudgeResult {
        let total: f64 = self.stages.iter().map(|(_, weight)| weight).sum();
        let mut paid = 0.0;
        let mut failed = None;
        for (number, (judge, weight)) in (1..).zip(&self.stages) {
            let result = judge.judge_item(item, slot);
            let detail = format!("stage {number}: {}", result.detail);
            match result.outcome {
                Outcome::Pass => paid += weight * result.reward,
                Outcome::Fail => {
                    paid += weight * result.reward;
                    failed.get_or_insert(detail);
                    if self.stop_at_failure {
                        break;
                    }
                }
                Outcome::Error | Outcome::Unspecified => return JudgeResult { detail, ..result },
            }
        }
        let result = failed.map_or_else(JudgeResult::full_pass, JudgeResult::failed_because);
        result.with_reward(paid / total)
    }
}
