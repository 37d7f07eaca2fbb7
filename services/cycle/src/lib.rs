//! The coordinator's pure core: what a run has done so far, and what it needs next.
//!
//! [`Run::fold`] takes the facts of one run in log order; [`decide`] says which facts
//! should now be written. Both are deterministic and facts are write-once, so two
//! coordinators deciding at once repeat each other and do no harm.
//!
//! Knows nothing of NATS, tokio, clocks, disks or models.

mod again;
mod audit;
mod behind;
mod curriculum;
mod decide;
mod desk;
mod draw;
mod ending;
mod fleet;
mod fold;
mod gates;
mod ledger;
mod measure;
mod plan;
mod proof;
mod schedule;
mod select;
mod state;
mod visits;
mod yields;

pub use again::Waiting;
pub use audit::{Audit, Auditor, Finding, Tally, audit};
pub use curriculum::{BUDGET_SAMPLES_MAX, Seen};
pub use decide::{Command, Inputs, decide};
pub use desk::{Desk, give_up};
pub use fleet::{Fleet, Held, Member};
pub use plan::Sizing;
pub use proof::{Agreement, Figure, Proofs, agreement};
pub use schedule::{at as scheduled, generate_seed, sampling};
pub use select::{Kept, Outcome, fates, select_again};
pub use state::{Anomaly, Cycle, Job, Ordered, Phase, Policy, Run};
pub use yields::{Yield, yields};

#[cfg(test)]
mod tests;
