//! The decisions of an agent: what to do with a delivered job, what to write when it fails, and
//! when to back off. The agent's role runner and the simulator in `tests/sim` carry them out.
//!
//! The crate contains no NATS, tokio, clock, process or model code. A fact is one write-once
//! message of the log; an order is a fact that requests work.

mod admission;
mod circuit_breaker;
mod job_failure;
mod micro_batch;
mod placement;
mod quarantine_state;
mod run_status;
mod throughput;

pub use admission::{
    DeliveryAction, InFlightState, NACK_PAUSE_MS, admit_delivery, dead_letter_message,
    defer_delay_ms, is_dead_letter,
};
pub use circuit_breaker::{CircuitBreaker, RoleBackoff};
pub use job_failure::{
    FailedAttempt, JobFault, RetryDecision, build_failure, decide_retry, errors_are_final,
    expected_results, hand_back_delay,
};
pub use micro_batch::halve_micro_batch;
pub use placement::{MemoryFit, TrainerPeer, TrainingPlacement, place_training};
pub use quarantine_state::QuarantineState;
pub use run_status::{RunStatus, RunStatuses};
pub use throughput::{OrderDecline, SamplingThroughput, decide_decline};
