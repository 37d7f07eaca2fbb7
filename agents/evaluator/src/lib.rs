//! The evaluator: measures the perplexity of each checkpoint, each time in a new process. In a
//! long-lived process, an evaluation on a machine with unified memory ends in a storm of TLB
//! shootdowns that freezes the host.

mod backend;
mod candle;
mod device_check;
mod eval_history;
mod llama_cpp;
mod llama_cpp_measurement;
mod measurement;
mod messages;
mod offline;
mod process_stats;
mod role;
mod worker;
mod worker_call;

pub use backend::{EvaluatorBackend, EvaluatorEngineChoice};
pub use candle::measure_perplexity as measure_with_candle;
pub use device_check::WrongLogits;
pub use llama_cpp::{EvaluatorLimits, EvaluatorPaths, LlamaCppEvaluator};
pub use llama_cpp_measurement::{MeasureStep, measure_perplexity as measure_with_llama_cpp};
pub use measurement::{MeasurementInput, PerplexityResult};
pub use messages::TextFormat;
pub use offline::{OfflineMeasurement, measure_in_worker};
pub use role::EvaluatorRole;
pub use worker::run_eval_worker;

/// Parsers of the worker's messages, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::messages::fuzz_messages as calls;
}
