//! The evaluator: reacts to checkpoints by measuring perplexity, each time in a process
//! of its own. In a long-lived process an eval on unified-memory machines ends in a storm
//! of TLB shootdowns that freezes the box.

mod calls;
mod figures;
mod history;
mod role;
mod worker;

pub use calls::Format;
pub use role::EvaluatorRole;
pub use worker::{Source, measure, work};

#[doc(hidden)]
pub mod fuzzing {
    pub use crate::calls::fuzz as calls;
}
