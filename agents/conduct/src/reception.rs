//! What to do with a job that was just handed out.

use wire::{Body, v1};

use crate::Course;

/// A job handed out so often without a result takes its agents down with it.
const DELIVERIES_MAX: u64 = 20;

/// What an agent does with a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reception {
    /// Do it.
    Work,
    /// Keep it and do nothing until the run goes on: nobody would order it again.
    Wait,
    /// Acknowledge it: it need not be done, or has been ordered anew.
    Drop,
    /// Leave it: this agent works on it already and keeps its lease, which it had lost.
    Leave,
    /// Hand it back, and take nothing for `PASS_ON_MS`: it is meant for another agent, if there is
    /// one.
    PassOn,
    /// Give it up.
    Poison,
}

/// Whether the agent works on the same job already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtHand {
    No,
    /// By an earlier delivery of the same fact.
    Itself,
    /// By another order of it.
    Twin,
}

/// An agent that was handed what it works on already takes nothing for so long.
pub const PASS_ON_MS: u64 = 1000;

/// So often is such a job handed back.
const PASS_ON_MAX: u64 = 8;

/// Decides on a delivery. `body` is the fact that calls for work, `delivered` how often it
/// was handed out, this time included.
pub fn receive(body: &Body, delivered: u64, course: Course, at_hand: AtHand) -> Reception {
    let stale = match round(body) {
        // A leader that slept through a pause may still write orders of the round before.
        Some(round) => round < course.round || (course.paused && round <= course.round),
        None => false,
    };
    if at_hand == AtHand::Itself {
        // Acknowledged, it would be lost if the work in hand comes to nothing.
        Reception::Leave
    } else if course.over || stale {
        Reception::Drop
    } else if course.paused && round(body).is_none() {
        Reception::Wait
    } else if at_hand == AtHand::Twin {
        if delivered > PASS_ON_MAX { Reception::Drop } else { Reception::PassOn }
    } else if delivered > DELIVERIES_MAX {
        Reception::Poison
    } else {
        Reception::Work
    }
}

/// Why a job handed out so often is given up.
pub fn poison(delivered: u64, last: Option<&v1::Failure>) -> String {
    let last = last.map_or("it seems to end the agents that try", |failure| &failure.message);
    format!("handed out {} times and never done: {last}", delivered - 1)
}

/// The round of an order; `None` for what is a result itself.
fn round(body: &Body) -> Option<u32> {
    let (round, attempt) = match body {
        Body::GenerateOrder(order) => (order.round, order.attempt),
        Body::TrainOrder(order) => (order.round, order.attempt),
        _ => return None,
    };
    // Before there were rounds, each resume raised the attempt.
    Some(if round == 0 { attempt } else { round })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(round: u32) -> Body {
        Body::GenerateOrder(v1::GenerateOrder { round, ..Default::default() })
    }

    #[test]
    fn orders_of_an_earlier_round_and_those_of_a_paused_run_are_dropped() {
        let course = |round, paused| Course { round, paused, over: false };
        let of = |round, course| receive(&order(round), 1, course, AtHand::No);
        assert_eq!(of(1, course(1, false)), Reception::Work);
        assert_eq!(of(1, course(1, true)), Reception::Drop);
        assert_eq!(of(1, course(2, false)), Reception::Drop);
        assert_eq!(of(2, course(1, true)), Reception::Work, "we hear of the resume later");
        let over = Course { over: true, ..Course::default() };
        assert_eq!(of(1, over), Reception::Drop);
        let again = receive(&order(1), 99, over, AtHand::Itself);
        assert_eq!(again, Reception::Leave);
        let twice = |delivered| receive(&order(1), delivered, course(1, false), AtHand::Twin);
        assert_eq!((twice(8), twice(9)), (Reception::PassOn, Reception::Drop));
    }

    #[test]
    fn results_of_a_paused_run_wait_and_are_not_lost() {
        let samples = Body::Samples(v1::Samples::default());
        let paused = Course { paused: true, ..Course::default() };
        assert_eq!(receive(&samples, 99, paused, AtHand::No), Reception::Wait);
        assert_eq!(receive(&samples, 20, Course::default(), AtHand::No), Reception::Work);
        assert_eq!(receive(&samples, 21, Course::default(), AtHand::No), Reception::Poison);
    }
}
