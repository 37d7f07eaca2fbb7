//! Admission of a delivery: run it, wait, return it, or drop it.

use wire::{FactBody, v1};

use crate::RunStatus;

/// Number of deliveries without a result after which a job is given up: it probably crashes the
/// agents that try it.
const DELIVERIES_MAX: u64 = 20;

/// The same for a job whose last failure was of the surroundings, for example because the hosts
/// that got it lack what it needs: more than three hours at the longest delay between deliveries.
const UNFIT_DELIVERIES_MAX: u64 = 200;

/// The action of an agent on a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryAction {
    /// Run the job.
    Run,
    /// Keep the delivery and do nothing until the run is resumed: the job would not be ordered
    /// again.
    Wait,
    /// Acknowledge the delivery: the job is not needed, or was ordered again.
    Acknowledge,
    /// Do nothing: this agent already works on the job and renews its lease again, after losing it.
    Ignore,
    /// Return the delivery and take no jobs for [`NACK_PAUSE_MS`]: the order is meant for another
    /// agent, if there is one.
    Nack,
    /// Give up the job, if its last failure agrees ([`is_dead_letter`]).
    DeadLetter,
}

/// The state of a job that is delivered: does this agent already work on it?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlightState {
    /// This agent does not work on the job.
    NotRunning,
    /// This agent works on the job because of an earlier delivery of the same fact.
    SameDelivery,
    /// This agent works on the job because of another order of it.
    OtherOrder,
}

/// Pause in milliseconds of an agent that was delivered another order of a job it already works on.
pub const NACK_PAUSE_MS: u64 = 1000;

/// Maximum number of times such an order is returned; after that it is acknowledged.
const NACKS_MAX: u64 = 8;

/// Decides on a delivery. `body` is the fact that requests work, `delivered` the number of its
/// deliveries including this one.
///
/// The first rule that applies decides: a redelivery of a running job is ignored; jobs of ended
/// runs and orders of stale rounds (of a paused run: all orders) are acknowledged; results of a
/// paused run wait; a second order of a running job is returned; a job delivered more than 20 times
/// is given up; any other job runs.
pub fn admit_delivery(
    body: &FactBody,
    delivered: u64,
    course: RunStatus,
    at_hand: InFlightState,
) -> DeliveryAction {
    let stale = match order_round(body) {
        // A leader with an outdated state may still write orders of the round before a pause.
        Some(round) => round < course.round || (course.paused && round <= course.round),
        None => false,
    };
    if at_hand == InFlightState::SameDelivery {
        // If it were acknowledged, the job would be lost when the running attempt fails.
        DeliveryAction::Ignore
    } else if course.is_over || stale {
        DeliveryAction::Acknowledge
    } else if course.paused && order_round(body).is_none() {
        DeliveryAction::Wait
    } else if at_hand == InFlightState::OtherOrder {
        if delivered > NACKS_MAX { DeliveryAction::Acknowledge } else { DeliveryAction::Nack }
    } else if delivered > DELIVERIES_MAX {
        DeliveryAction::DeadLetter
    } else {
        DeliveryAction::Run
    }
}

/// Returns true if a job with too many deliveries ([`DeliveryAction::DeadLetter`]) is given up. A
/// job whose last failure was of the surroundings is given to more hosts, one of which may be able
/// to do it.
pub fn is_dead_letter(delivered: u64, last: Option<&v1::Failure>) -> bool {
    let unfit = last.is_some_and(|last| last.cause() == v1::failure::Cause::Surroundings);
    delivered > if unfit { UNFIT_DELIVERIES_MAX } else { DELIVERIES_MAX }
}

/// Formats the reason why a job with too many deliveries is given up.
pub fn dead_letter_message(delivered: u64, last: Option<&v1::Failure>) -> String {
    let last = last.map_or("it seems to crash the agents that run it", |failure| &failure.message);
    format!("delivered {} times and never completed: {last}", delivered - 1)
}

/// Returns the round of an order; `None` for facts that are results.
fn order_round(body: &FactBody) -> Option<u32> {
    let (round, attempt) = match body {
        FactBody::GenerateOrder(order) => (order.round, order.attempt),
        FactBody::TrainOrder(order) => (order.round, order.attempt),
        _ => return None,
    };
    // Orders without a round: their attempt increases with each resume.
    Some(if round == 0 { attempt } else { round })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(round: u32) -> FactBody {
        FactBody::GenerateOrder(v1::GenerateOrder { round, ..Default::default() })
    }

    #[test]
    fn orders_of_an_earlier_round_and_those_of_a_paused_run_are_dropped() {
        let course = |round, paused| RunStatus { round, paused, is_over: false };
        let of =
            |round, course| admit_delivery(&order(round), 1, course, InFlightState::NotRunning);
        assert_eq!(of(1, course(1, false)), DeliveryAction::Run);
        assert_eq!(of(1, course(1, true)), DeliveryAction::Acknowledge);
        assert_eq!(of(1, course(2, false)), DeliveryAction::Acknowledge);
        assert_eq!(of(2, course(1, true)), DeliveryAction::Run, "we hear of the resume later");
        let over = RunStatus { is_over: true, ..RunStatus::default() };
        assert_eq!(of(1, over), DeliveryAction::Acknowledge);
        let again = admit_delivery(&order(1), 99, over, InFlightState::SameDelivery);
        assert_eq!(again, DeliveryAction::Ignore);
        let twice = |delivered| {
            admit_delivery(&order(1), delivered, course(1, false), InFlightState::OtherOrder)
        };
        assert_eq!((twice(8), twice(9)), (DeliveryAction::Nack, DeliveryAction::Acknowledge));
    }

    #[test]
    fn a_job_that_boxes_lacked_something_for_is_given_up_much_later() {
        let of = |cause: v1::failure::Cause| v1::Failure { cause: cause.into(), ..<_>::default() };
        let (work, lacking) = (of(v1::failure::Cause::Work), of(v1::failure::Cause::Surroundings));
        assert!(is_dead_letter(21, None) && is_dead_letter(21, Some(&work)));
        assert!(!is_dead_letter(21, Some(&lacking)) && !is_dead_letter(200, Some(&lacking)));
        assert!(is_dead_letter(201, Some(&lacking)));
    }

    #[test]
    fn results_of_a_paused_run_wait_and_are_not_lost() {
        let samples = FactBody::Samples(v1::Samples::default());
        let paused = RunStatus { paused: true, ..RunStatus::default() };
        assert_eq!(
            admit_delivery(&samples, 99, paused, InFlightState::NotRunning),
            DeliveryAction::Wait
        );
        assert_eq!(
            admit_delivery(&samples, 20, RunStatus::default(), InFlightState::NotRunning),
            DeliveryAction::Run
        );
        assert_eq!(
            admit_delivery(&samples, 21, RunStatus::default(), InFlightState::NotRunning),
            DeliveryAction::DeadLetter
        );
    }
}
