//! The steps of an upgrade, and what follows when one fails. Pure: `commands/upgrade` performs the
//! steps.

use self::{UpgradeDecision as Decision, UpgradeOutcome as Outcome, UpgradeStep as Step};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpgradeStep {
    Drain,
    AwaitExit,
    Swap,
    Restart,
    AwaitNew,
    RollBack,
    RestartOld,
    AwaitOld,
}

/// After `StillDraining` the program was not replaced. After `Down` the rollback failed too, and
/// the agents need manual help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UpgradeOutcome {
    Upgraded,
    Unchanged { why: String },
    StillDraining { why: String },
    RolledBack { why: String },
    Down { why: String, then: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UpgradeDecision {
    Run(UpgradeStep),
    Finish(UpgradeOutcome),
}

/// The planner of an upgrade.
///
/// It decides which step follows the one that ended, by whether it succeeded:
///
/// ```text
/// Drain → AwaitExit → Swap → Restart → AwaitNew → Upgraded
/// Drain fails:                Unchanged
/// AwaitExit fails:            StillDraining
/// Swap fails:                 RestartOld → AwaitOld → RolledBack
/// Restart or AwaitNew fails:  RollBack → RestartOld → AwaitOld → RolledBack
/// ```
///
/// A failure of `RollBack`, `RestartOld` or `AwaitOld` ends in `Down`. Without agents the plan
/// starts with `Swap`.
#[derive(Debug, Default)]
pub(crate) struct UpgradePlan {
    /// Reason for the rollback, once a step failed.
    failure: Option<String>,
}

impl UpgradePlan {
    pub(crate) fn first_step(agents: usize) -> Step {
        if agents == 0 { Step::Swap } else { Step::Drain }
    }

    pub(crate) fn next_decision(&mut self, step: Step, went: Result<(), String>) -> Decision {
        use Decision::{Finish, Run};
        match (step, went) {
            (Step::Drain, Ok(())) => Run(Step::AwaitExit),
            (Step::Drain, Err(why)) => Finish(Outcome::Unchanged { why }),
            (Step::AwaitExit, Ok(())) => Run(Step::Swap),
            (Step::AwaitExit, Err(why)) => Finish(Outcome::StillDraining { why }),
            (Step::Swap, Ok(())) => Run(Step::Restart),
            // The agents have exited and must be started with the old program.
            (Step::Swap, Err(why)) => self.start_rollback(why, Step::RestartOld),
            (Step::Restart, Ok(())) => Run(Step::AwaitNew),
            (Step::Restart | Step::AwaitNew, Err(why)) => self.start_rollback(why, Step::RollBack),
            (Step::AwaitNew, Ok(())) => Finish(Outcome::Upgraded),
            (Step::RollBack, Ok(())) => Run(Step::RestartOld),
            (Step::RestartOld, Ok(())) => Run(Step::AwaitOld),
            (Step::AwaitOld, Ok(())) => Finish(Outcome::RolledBack { why: self.take_failure() }),
            (Step::RollBack | Step::RestartOld | Step::AwaitOld, Err(then)) => {
                Finish(Outcome::Down { why: self.take_failure(), then })
            }
        }
    }

    fn start_rollback(&mut self, why: String, first: Step) -> Decision {
        self.failure = Some(why);
        Decision::Run(first)
    }

    fn take_failure(&mut self) -> String {
        self.failure.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_plan(fail: &[Step]) -> (Vec<Step>, Outcome) {
        let (mut plan, mut steps, mut step) =
            (UpgradePlan::default(), Vec::new(), UpgradePlan::first_step(1));
        loop {
            assert!(steps.len() < 10, "an upgrade ends: {steps:?}");
            steps.push(step);
            let fails = fail.contains(&step);
            let went = if fails { Err(format!("{step:?} failed")) } else { Ok(()) };
            match plan.next_decision(step, went) {
                Decision::Run(next) => step = next,
                Decision::Finish(outcome) => return (steps, outcome),
            }
        }
    }

    const ALL: [Step; 8] = [
        Step::Drain,
        Step::AwaitExit,
        Step::Swap,
        Step::Restart,
        Step::AwaitNew,
        Step::RollBack,
        Step::RestartOld,
        Step::AwaitOld,
    ];

    #[test]
    fn agents_leave_before_the_binary_is_replaced_and_are_back_before_it_is_done() {
        let (steps, outcome) = run_plan(&[]);
        assert_eq!(steps, ALL[..5]);
        assert_eq!(outcome, Outcome::Upgraded);
        assert_eq!(UpgradePlan::first_step(0), Step::Swap);
    }

    #[test]
    fn a_new_binary_that_does_not_work_is_taken_back() {
        for failing in [Step::Restart, Step::AwaitNew] {
            let (steps, outcome) = run_plan(&[failing]);
            assert!(steps.ends_with(&[failing, Step::RollBack, Step::RestartOld, Step::AwaitOld]));
            assert_eq!(outcome, Outcome::RolledBack { why: format!("{failing:?} failed") });
        }
    }

    #[test]
    fn whatever_fails_nothing_is_replaced_while_an_agent_works_and_no_new_binary_stays_unproven() {
        for one in ALL {
            for other in ALL {
                let (steps, outcome) = run_plan(&[one, other]);
                let at = |step| steps.iter().position(|&done| done == step);
                if let Some(swap) = at(Step::Swap) {
                    assert_eq!(at(Step::AwaitExit), Some(swap - 1), "{steps:?}");
                    let fails = |step: Step| step == one || step == other;
                    let replaced = !fails(Step::Swap);
                    let proven = at(Step::AwaitNew).is_some() && !fails(Step::AwaitNew);
                    assert_eq!(outcome == Outcome::Upgraded, proven, "{steps:?}");
                    assert!(!replaced || proven || at(Step::RollBack).is_some(), "{steps:?}");
                } else {
                    assert!(matches!(
                        outcome,
                        Outcome::Unchanged { .. } | Outcome::StillDraining { .. }
                    ));
                }
            }
        }
    }

    #[test]
    fn when_the_old_one_does_not_come_back_either_both_reasons_are_told() {
        let (_, outcome) = run_plan(&[Step::AwaitNew, Step::AwaitOld]);
        let why = "AwaitNew failed".to_owned();
        assert_eq!(outcome, Outcome::Down { why, then: "AwaitOld failed".into() });
    }
}
