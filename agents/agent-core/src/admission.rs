//! Admission of a delivery: run it, wait, return it, or drop it.

use wire::{FactBody, WorkKind, v1};

use crate::RunStatus;

/// Deliveries without a result after which a job is given up: it probably crashes the agents that
/// try it.
const DELIVERIES_MAX: u64 = 20;

/// Deliveries after which a job is given up whose last failure was not the work's, for example
/// because hosts lack what it needs: more than three hours at the longest delay between deliveries.
const UNFIT_DELIVERIES_MAX: u64 = 200;

/// Deliveries after which such a training is given up: one week at that delay. The only host that
/// can do it may be busy with other trainings for days, while the others return it.
const UNFIT_TRAINING_DELIVERIES_MAX: u64 = 10_000;

/// The action of an agent on a delivery of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryAction {
    Run,
    /// Keep the delivery and do nothing until the run is resumed: no other order of the job follows.
    Wait,
    /// Acknowledge the delivery without work: the job is not needed, or was ordered again.
    Acknowledge,
    /// Do nothing: this agent lost the lease of a job that it still runs, and now renews it again.
    Ignore,
    /// Return the delivery and take no jobs for [`NACK_PAUSE_MS`], so that another agent gets it.
    Nack,
    /// Return the delivery for [`defer_delay_ms`]: it is sized for another agent.
    DeferToAgent,
    /// Give up the job if [`is_dead_letter`] agrees.
    DeadLetter,
}

/// The state of a delivered job on this agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlightState {
    NotRunning,
    /// The job runs because of an earlier delivery of the same fact.
    SameDelivery,
    /// The job runs because of another order.
    OtherOrder,
}

/// Pause in milliseconds after [`DeliveryAction::Nack`].
pub const NACK_PAUSE_MS: u64 = 1000;

/// Returns of an order of a running job after which it is acknowledged.
const NACKS_MAX: u64 = 8;

/// Bounds of [`defer_delay_ms`].
const DEFER_DELAY_MS: std::ops::RangeInclusive<u64> = 50..=350;

/// Returns of an order that is sized for another agent after which any agent takes it.
const DEFERRALS_MAX: u64 = 8;

/// Decides what to do with a delivery. `body` is the fact that requests work, `delivered` the
/// number of its deliveries including this one, `status` that of its run (see
/// [`RunStatuses::status_for_fact`](crate::RunStatuses::status_for_fact)).
///
/// The first rule that applies decides: a redelivery of a running job is ignored; jobs of ended
/// runs and orders of stale rounds (of a paused run: all orders) are acknowledged; results of a
/// paused run wait; a second order of a running job is returned, and acknowledged after 8 returns;
/// a slice that is sized for another agent than `agent` is left to it, 8 times; a job delivered
/// more than 20 times is given up; any other job runs.
pub fn admit_delivery(
    agent: &str,
    body: &FactBody,
    delivered: u64,
    status: RunStatus,
    in_flight: InFlightState,
) -> DeliveryAction {
    let stale = match order_round(body) {
        // A leader with an outdated state may still write orders of the round before a pause.
        Some(round) => round < status.round || (status.paused && round <= status.round),
        None => false,
    };
    if in_flight == InFlightState::SameDelivery {
        // If it were acknowledged, the job would be lost when the running attempt fails.
        DeliveryAction::Ignore
    } else if status.is_over || stale {
        DeliveryAction::Acknowledge
    } else if status.paused && order_round(body).is_none() {
        DeliveryAction::Wait
    } else if in_flight == InFlightState::OtherOrder {
        if delivered > NACKS_MAX { DeliveryAction::Acknowledge } else { DeliveryAction::Nack }
    } else if delivered <= DEFERRALS_MAX && is_for_other_agent(agent, body) {
        DeliveryAction::DeferToAgent
    } else if delivered > DELIVERIES_MAX {
        DeliveryAction::DeadLetter
    } else {
        DeliveryAction::Run
    }
}

/// Returns the delay in milliseconds before the redelivery of a slice that is sized for another
/// agent. It differs by agent and delivery, so that two agents that hold each other's slice do not
/// receive the same ones again and again.
pub fn defer_delay_ms(agent: &str, delivered: u64) -> u64 {
    let (least, most) = DEFER_DELAY_MS.into_inner();
    least + wire::derive_seed(delivered, &["leave", agent]) % (most - least + 1)
}

/// Returns true if a job with this many deliveries is given up: more than 20, or more than 200
/// (10,000 for a training) if its newest failure `last` was not the work's, so that another host may
/// be able to do it.
pub fn is_dead_letter(kind: WorkKind, delivered: u64, last: Option<&v1::Failure>) -> bool {
    let unfit = last.is_some_and(|last| last.cause() == v1::failure::Cause::Surroundings);
    let most = match (unfit, kind) {
        (false, _) => DELIVERIES_MAX,
        (true, WorkKind::Train) => UNFIT_TRAINING_DELIVERIES_MAX,
        (true, WorkKind::Generate | WorkKind::Verify | WorkKind::Score | WorkKind::Eval) => {
            UNFIT_DELIVERIES_MAX
        }
    };
    delivered > most
}

/// Formats, for users, why a job with too many deliveries is given up. `delivered` includes the
/// delivery that is not run; `last` is the job's newest failure, if any.
pub fn dead_letter_message(delivered: u64, last: Option<&v1::Failure>) -> String {
    let last = last.map_or("it seems to crash the agents that run it", |failure| &failure.message);
    format!("delivered {} times and never completed: {last}", delivered - 1)
}

/// Returns true for a slice of a training that is sized for the speed of another agent.
fn is_for_other_agent(agent: &str, body: &FactBody) -> bool {
    let FactBody::TrainOrder(order) = body else { return false };
    let Some(v1::train_order::Part::Slice(slice)) = &order.part else { return false };
    slice.planned.as_ref().is_some_and(|slice| !slice.agent.is_empty() && slice.agent != agent)
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
        let status = |round, paused| RunStatus { round, paused, is_over: false };
        let of = |round, status| {
            admit_delivery("a", &order(round), 1, status, InFlightState::NotRunning)
        };
        assert_eq!(of(1, status(1, false)), DeliveryAction::Run);
        assert_eq!(of(1, status(1, true)), DeliveryAction::Acknowledge);
        assert_eq!(of(1, status(2, false)), DeliveryAction::Acknowledge);
        assert_eq!(of(2, status(1, true)), DeliveryAction::Run, "the resume is received later");
        let over = RunStatus { is_over: true, ..RunStatus::default() };
        assert_eq!(of(1, over), DeliveryAction::Acknowledge);
        let redelivered = admit_delivery("a", &order(1), 99, over, InFlightState::SameDelivery);
        assert_eq!(redelivered, DeliveryAction::Ignore);
        let without_round = |round| {
            let order = v1::TrainOrder { attempt: 1, ..Default::default() };
            let order = FactBody::TrainOrder(order);
            admit_delivery("a", &order, 1, status(round, false), InFlightState::NotRunning)
        };
        assert_eq!([1, 2].map(without_round), [DeliveryAction::Run, DeliveryAction::Acknowledge]);
        let twice = |delivered| {
            admit_delivery("a", &order(1), delivered, status(1, false), InFlightState::OtherOrder)
        };
        assert_eq!((twice(8), twice(9)), (DeliveryAction::Nack, DeliveryAction::Acknowledge));
    }

    #[test]
    fn a_slice_is_left_to_its_agent_for_some_time() {
        let planned = v1::slice_plan::Slice { agent: "b".into(), ..Default::default() };
        let slice = v1::train_order::Slice { planned: Some(planned), ..Default::default() };
        let part = Some(v1::train_order::Part::Slice(slice));
        let order = v1::TrainOrder { round: 1, part, ..Default::default() };
        let order = FactBody::TrainOrder(order);
        let status = RunStatus { round: 1, ..RunStatus::default() };
        let admit = |agent, n| admit_delivery(agent, &order, n, status, InFlightState::NotRunning);
        assert_eq!(admit("a", 8), DeliveryAction::DeferToAgent);
        assert_eq!((admit("a", 9), admit("b", 1)), (DeliveryAction::Run, DeliveryAction::Run));
    }

    #[test]
    fn a_job_with_unmet_needs_is_given_up_much_later() {
        let of = |cause: v1::failure::Cause| v1::Failure { cause: cause.into(), ..<_>::default() };
        let (work, lacking) = (of(v1::failure::Cause::Work), of(v1::failure::Cause::Surroundings));
        for (kind, most) in [(WorkKind::Eval, 200), (WorkKind::Train, 10_000)] {
            let ended = |delivered, last| is_dead_letter(kind, delivered, last);
            assert!(ended(21, None) && ended(21, Some(&work)));
            assert!(!ended(20, None) && !ended(21, Some(&lacking)));
            assert!(!ended(most, Some(&lacking)) && ended(most + 1, Some(&lacking)));
        }
        let last = v1::Failure { message: "no GPU".into(), ..lacking };
        let cases = [(None, "it seems to crash the agents that run it"), (Some(&last), "no GPU")];
        for (last, why) in cases {
            let message = format!("delivered 20 times and never completed: {why}");
            assert_eq!(dead_letter_message(21, last), message);
        }
    }

    #[test]
    fn results_of_a_paused_run_wait_and_are_not_lost() {
        let samples = FactBody::Samples(v1::Samples::default());
        let paused = RunStatus { paused: true, ..RunStatus::default() };
        assert_eq!(
            admit_delivery("a", &samples, 99, paused, InFlightState::NotRunning),
            DeliveryAction::Wait
        );
        assert_eq!(
            admit_delivery("a", &samples, 20, RunStatus::default(), InFlightState::NotRunning),
            DeliveryAction::Run
        );
        assert_eq!(
            admit_delivery("a", &samples, 21, RunStatus::default(), InFlightState::NotRunning),
            DeliveryAction::DeadLetter
        );
    }
}
