//! The steps of an upgrade, and what follows when one fails. Pure: `commands/upgrade` performs the
//! steps.

/// A step of an upgrade, which either succeeds or fails with a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpgradeStep {
    /// Drain the agents of this box.
    Drain,
    /// Wait until the agents have exited.
    AwaitExit,
    /// Put the new program in place of the installed one, which is kept.
    Swap,
    /// Start the agents with the new program.
    Restart,
    /// Wait until the agents are ready with the new version.
    AwaitNew,
    /// Put the old program back in place.
    RollBack,
    /// Start the agents with the old program.
    RestartOld,
    /// Wait until the agents are ready with the old version.
    AwaitOld,
}

/// The result of an upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UpgradeOutcome {
    Upgraded,
    /// Nothing was changed.
    Unchanged {
        why: String,
    },
    /// The program was not replaced, and the agents are still draining.
    StillDraining {
        why: String,
    },
    /// The upgrade failed, and the agents work with the old program.
    RolledBack {
        why: String,
    },
    /// The upgrade and its rollback failed; the agents need manual help.
    Down {
        why: String,
        then: String,
    },
}

/// The decision after a step.
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
    /// Returns the first step: a box without agents has nothing to drain.
    pub(crate) fn first_step(agents: usize) -> UpgradeStep {
        if agents == 0 { UpgradeStep::Swap } else { UpgradeStep::Drain }
    }

    /// Returns the decision after a step and its result.
    pub(crate) fn next_decision(
        &mut self,
        step: UpgradeStep,
        went: Result<(), String>,
    ) -> UpgradeDecision {
        match (step, went) {
            (UpgradeStep::Drain, Ok(())) => UpgradeDecision::Run(UpgradeStep::AwaitExit),
            (UpgradeStep::Drain, Err(why)) => {
                UpgradeDecision::Finish(UpgradeOutcome::Unchanged { why })
            }
            (UpgradeStep::AwaitExit, Ok(())) => UpgradeDecision::Run(UpgradeStep::Swap),
            (UpgradeStep::AwaitExit, Err(why)) => {
                UpgradeDecision::Finish(UpgradeOutcome::StillDraining { why })
            }
            (UpgradeStep::Swap, Ok(())) => UpgradeDecision::Run(UpgradeStep::Restart),
            // The agents have exited and must be started with the old program.
            (UpgradeStep::Swap, Err(why)) => self.start_rollback(why, UpgradeStep::RestartOld),
            (UpgradeStep::Restart, Ok(())) => UpgradeDecision::Run(UpgradeStep::AwaitNew),
            (UpgradeStep::Restart | UpgradeStep::AwaitNew, Err(why)) => {
                self.start_rollback(why, UpgradeStep::RollBack)
            }
            (UpgradeStep::AwaitNew, Ok(())) => UpgradeDecision::Finish(UpgradeOutcome::Upgraded),
            (UpgradeStep::RollBack, Ok(())) => UpgradeDecision::Run(UpgradeStep::RestartOld),
            (UpgradeStep::RestartOld, Ok(())) => UpgradeDecision::Run(UpgradeStep::AwaitOld),
            (UpgradeStep::AwaitOld, Ok(())) => {
                UpgradeDecision::Finish(UpgradeOutcome::RolledBack { why: self.take_failure() })
            }
            (
                UpgradeStep::RollBack | UpgradeStep::RestartOld | UpgradeStep::AwaitOld,
                Err(then),
            ) => UpgradeDecision::Finish(UpgradeOutcome::Down { why: self.take_failure(), then }),
        }
    }

    /// Records the failure and continues with the first step of the rollback.
    fn start_rollback(&mut self, why: String, first: UpgradeStep) -> UpgradeDecision {
        self.failure = Some(why);
        UpgradeDecision::Run(first)
    }

    /// Returns the reason for the rollback.
    fn take_failure(&mut self) -> String {
        self.failure.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps of an upgrade in which these fail, and its end.
    fn course(fail: &[UpgradeStep]) -> (Vec<UpgradeStep>, UpgradeOutcome) {
        let (mut plan, mut steps, mut step) =
            (UpgradePlan::default(), Vec::new(), UpgradePlan::first_step(1));
        loop {
            assert!(steps.len() < 10, "an upgrade ends: {steps:?}");
            steps.push(step);
            let fails = fail.contains(&step);
            let went = if fails { Err(format!("{step:?} failed")) } else { Ok(()) };
            match plan.next_decision(step, went) {
                UpgradeDecision::Run(next) => step = next,
                UpgradeDecision::Finish(outcome) => return (steps, outcome),
            }
        }
    }

    const ALL: [UpgradeStep; 8] = [
        UpgradeStep::Drain,
        UpgradeStep::AwaitExit,
        UpgradeStep::Swap,
        UpgradeStep::Restart,
        UpgradeStep::AwaitNew,
        UpgradeStep::RollBack,
        UpgradeStep::RestartOld,
        UpgradeStep::AwaitOld,
    ];

    #[test]
    fn agents_leave_before_the_binary_is_replaced_and_are_back_before_it_is_done() {
        let (steps, outcome) = course(&[]);
        assert_eq!(steps, ALL[..5]);
        assert_eq!(outcome, UpgradeOutcome::Upgraded);
        assert_eq!(UpgradePlan::first_step(0), UpgradeStep::Swap);
    }

    #[test]
    fn a_new_binary_that_does_not_work_is_taken_back() {
        for failing in [UpgradeStep::Restart, UpgradeStep::AwaitNew] {
            let (steps, outcome) = course(&[failing]);
            assert!(steps.ends_with(&[
                failing,
                UpgradeStep::RollBack,
                UpgradeStep::RestartOld,
                UpgradeStep::AwaitOld
            ]));
            assert_eq!(outcome, UpgradeOutcome::RolledBack { why: format!("{failing:?} failed") });
        }
    }

    #[test]
    fn whatever_fails_nothing_is_replaced_while_an_agent_works_and_no_new_binary_stays_unproven() {
        for one in ALL {
            for other in ALL {
                let (steps, outcome) = course(&[one, other]);
                let at = |step| steps.iter().position(|&done| done == step);
                if let Some(swap) = at(UpgradeStep::Swap) {
                    assert_eq!(at(UpgradeStep::AwaitExit), Some(swap - 1), "{steps:?}");
                    let fails = |step: UpgradeStep| step == one || step == other;
                    let replaced = !fails(UpgradeStep::Swap);
                    let proven =
                        at(UpgradeStep::AwaitNew).is_some() && !fails(UpgradeStep::AwaitNew);
                    assert_eq!(outcome == UpgradeOutcome::Upgraded, proven, "{steps:?}");
                    assert!(
                        !replaced || proven || at(UpgradeStep::RollBack).is_some(),
                        "{steps:?}"
                    );
                } else {
                    assert!(matches!(
                        outcome,
                        UpgradeOutcome::Unchanged { .. } | UpgradeOutcome::StillDraining { .. }
                    ));
                }
            }
        }
    }

    #[test]
    fn when_the_old_one_does_not_come_back_either_both_reasons_are_told() {
        let (_, outcome) = course(&[UpgradeStep::AwaitNew, UpgradeStep::AwaitOld]);
        let why = "AwaitNew failed".to_owned();
        assert_eq!(outcome, UpgradeOutcome::Down { why, then: "AwaitOld failed".into() });
    }
}
