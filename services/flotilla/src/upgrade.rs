//! What an upgrade does, step by step, and what becomes of it when a step fails. Pure: the shell is
//! in `commands/upgrade`.

/// Something to do; each either succeeds or fails with a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Have the box's agents finish what they hold and leave.
    Drain,
    AwaitLeft,
    /// The new binary in place of the installed one, which is kept.
    Swap,
    Restart,
    /// The agents work again, with the new version.
    AwaitBack,
    /// The old binary in its place again.
    PutBack,
    RestartOld,
    AwaitOld,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Upgraded,
    /// Nothing was changed.
    Unchanged {
        why: String,
    },
    /// Nothing was replaced, and the agents leave when they are done.
    StillLeaving {
        why: String,
    },
    /// The old binary works again.
    PutBack {
        why: String,
    },
    /// The box needs somebody.
    Down {
        why: String,
        then: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    Do(Step),
    End(Outcome),
}

/// Where an upgrade is.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Why it is being undone.
    why: Option<String>,
}

impl Plan {
    /// A box without agents has nothing to drain.
    pub(crate) fn first(agents: usize) -> Step {
        if agents == 0 { Step::Swap } else { Step::Drain }
    }

    /// What follows a step, by how it went.
    pub(crate) fn after(&mut self, step: Step, went: Result<(), String>) -> Next {
        match (step, went) {
            (Step::Drain, Ok(())) => Next::Do(Step::AwaitLeft),
            (Step::Drain, Err(why)) => Next::End(Outcome::Unchanged { why }),
            (Step::AwaitLeft, Ok(())) => Next::Do(Step::Swap),
            (Step::AwaitLeft, Err(why)) => Next::End(Outcome::StillLeaving { why }),
            (Step::Swap, Ok(())) => Next::Do(Step::Restart),
            // The agents have left: they are to work on, with what they had.
            (Step::Swap, Err(why)) => self.undo(why, Step::RestartOld),
            (Step::Restart, Ok(())) => Next::Do(Step::AwaitBack),
            (Step::Restart | Step::AwaitBack, Err(why)) => self.undo(why, Step::PutBack),
            (Step::AwaitBack, Ok(())) => Next::End(Outcome::Upgraded),
            (Step::PutBack, Ok(())) => Next::Do(Step::RestartOld),
            (Step::RestartOld, Ok(())) => Next::Do(Step::AwaitOld),
            (Step::AwaitOld, Ok(())) => Next::End(Outcome::PutBack { why: self.reason() }),
            (Step::PutBack | Step::RestartOld | Step::AwaitOld, Err(then)) => {
                Next::End(Outcome::Down { why: self.reason(), then })
            }
        }
    }

    fn undo(&mut self, why: String, first: Step) -> Next {
        self.why = Some(why);
        Next::Do(first)
    }

    fn reason(&mut self) -> String {
        self.why.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps of an upgrade in which these fail, and its end.
    fn course(fail: &[Step]) -> (Vec<Step>, Outcome) {
        let (mut plan, mut steps, mut step) = (Plan::default(), Vec::new(), Plan::first(1));
        loop {
            assert!(steps.len() < 10, "an upgrade ends: {steps:?}");
            steps.push(step);
            let fails = fail.contains(&step);
            let went = if fails { Err(format!("{step:?} failed")) } else { Ok(()) };
            match plan.after(step, went) {
                Next::Do(next) => step = next,
                Next::End(outcome) => return (steps, outcome),
            }
        }
    }

    const ALL: [Step; 8] = [
        Step::Drain,
        Step::AwaitLeft,
        Step::Swap,
        Step::Restart,
        Step::AwaitBack,
        Step::PutBack,
        Step::RestartOld,
        Step::AwaitOld,
    ];

    #[test]
    fn agents_leave_before_the_binary_is_replaced_and_are_back_before_it_is_done() {
        let (steps, outcome) = course(&[]);
        assert_eq!(steps, ALL[..5]);
        assert_eq!(outcome, Outcome::Upgraded);
        assert_eq!(Plan::first(0), Step::Swap);
    }

    #[test]
    fn a_new_binary_that_does_not_work_is_taken_back() {
        for failing in [Step::Restart, Step::AwaitBack] {
            let (steps, outcome) = course(&[failing]);
            assert!(steps.ends_with(&[failing, Step::PutBack, Step::RestartOld, Step::AwaitOld]));
            assert_eq!(outcome, Outcome::PutBack { why: format!("{failing:?} failed") });
        }
    }

    #[test]
    fn whatever_fails_nothing_is_replaced_while_an_agent_works_and_no_new_binary_stays_unproven() {
        for one in ALL {
            for other in ALL {
                let (steps, outcome) = course(&[one, other]);
                let at = |step| steps.iter().position(|&done| done == step);
                if let Some(swap) = at(Step::Swap) {
                    assert_eq!(at(Step::AwaitLeft), Some(swap - 1), "{steps:?}");
                    let fails = |step: Step| step == one || step == other;
                    let replaced = !fails(Step::Swap);
                    let proven = at(Step::AwaitBack).is_some() && !fails(Step::AwaitBack);
                    assert_eq!(outcome == Outcome::Upgraded, proven, "{steps:?}");
                    assert!(!replaced || proven || at(Step::PutBack).is_some(), "{steps:?}");
                } else {
                    assert!(matches!(
                        outcome,
                        Outcome::Unchanged { .. } | Outcome::StillLeaving { .. }
                    ));
                }
            }
        }
    }

    #[test]
    fn when_the_old_one_does_not_come_back_either_both_reasons_are_told() {
        let (_, outcome) = course(&[Step::AwaitBack, Step::AwaitOld]);
        let why = "AwaitBack failed".to_owned();
        assert_eq!(outcome, Outcome::Down { why, then: "AwaitOld failed".into() });
    }
}
