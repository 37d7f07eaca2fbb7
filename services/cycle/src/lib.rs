//! The coordinator's pure core: what a run has done so far, and what it needs next.
//!
//! [`Run::fold`] takes the facts of one run in log order; [`decide`] says which facts
//! should now be written. Both are deterministic and facts are write-once, so two
//! coordinators deciding at once repeat each other and do no harm.
//!
//! Knows nothing of NATS, tokio, clocks, disks or models.

mod audit;
mod decide;
mod fold;
mod measure;
mod plan;
mod select;
mod state;

pub use audit::{Audit, audit};
pub use decide::{Command, Inputs, decide};
pub use plan::{Fleet, Generator, Sizing};
pub use state::{Anomaly, Cycle, Job, Phase, Policy, Run};

#[cfg(test)]
mod tests;
