//! Several judges, one after the other.

use wire::v1::{verdicts::Outcome, verifier};

use crate::{calls::Item, judge::Judge, opinion::Opinion, program::Desk};

#[derive(Debug)]
pub(crate) struct Chain {
    stages: Vec<(Judge, f64)>,
    stop_at_failure: bool,
}

impl Chain {
    /// # Errors
    /// What is wrong with the settings of a stage.
    pub(crate) fn new(chain: &verifier::Chain) -> Result<Self, String> {
        let stage = |(number, stage): (usize, &verifier::chain::Stage)| {
            let how = stage.verifier.as_ref().and_then(|verifier| verifier.how.as_ref());
            let how = how.filter(|how| !matches!(how, verifier::How::Chain(_)));
            let how = how.ok_or_else(|| format!("stage {number} names no verifier"))?;
            Ok((Judge::new(how)?, stage.weight))
        };
        let stages: Result<Vec<_>, String> = (1..).zip(&chain.stages).map(stage).collect();
        let stages = stages?;
        if stages.iter().map(|(_, weight)| weight).sum::<f64>() > 0.0 {
            Ok(Self { stages, stop_at_failure: chain.stop_at_failure })
        } else {
            Err("no stage has a weight above 0".into())
        }
    }

    pub(crate) fn stages(&self) -> impl Iterator<Item = &Judge> {
        self.stages.iter().map(|(judge, _)| judge)
    }

    /// Passes when all stages do. An error of one that is come to is the chain's.
    pub(crate) fn judge(&self, item: &Item, desk: &mut Desk<'_>) -> Opinion {
        let total: f64 = self.stages.iter().map(|(_, weight)| weight).sum();
        let mut paid = 0.0;
        let mut failed = None;
        for (number, (judge, weight)) in (1..).zip(&self.stages) {
            let opinion = judge.judge(item, desk);
            let detail = format!("stage {number}: {}", opinion.detail);
            match opinion.outcome {
                Outcome::Pass => paid += weight * opinion.reward,
                Outcome::Fail => {
                    paid += weight * opinion.reward;
                    failed.get_or_insert(detail);
                    if self.stop_at_failure {
                        break;
                    }
                }
                Outcome::Error | Outcome::Unspecified => return Opinion { detail, ..opinion },
            }
        }
        let opinion = failed.map_or_else(Opinion::pass, Opinion::fail);
        opinion.worth(paid / total)
    }
}
