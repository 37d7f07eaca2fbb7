//! The evaluator: reacts to checkpoints by measuring perplexity, each time in a process
//! of its own. In a long-lived process an eval on unified-memory machines ends in a storm
//! of TLB shootdowns that freezes the box.

mod backend;
mod calls;
mod canary;
mod candle;
mod figures;
mod history;
mod llama_cpp;
mod role;
mod source;
mod worker;

pub use backend::{Backend, Choice};
pub use calls::Format;
pub use canary::WrongLogits;
pub use candle::measure as measure_with_candle;
pub use llama_cpp::{Dtype, Limits, LlamaCpp, Places, Step, measure as measure_with_llama_cpp};
pub use role::EvaluatorRole;
pub use source::{Figures, Source};
pub use worker::work;

#[doc(hidden)]
pub mod fuzzing {
    pub use crate::calls::fuzz as calls;
}
