//! The generator: writes the samples that generate orders ask for. `GeneratorRole` runs in the
//! agent; `run_generate_worker` is the worker process that the role keeps warm. A [`PolicyWorker`]
//! can also score given samples, which the role of a scorer does.

mod backend;
mod calibration;
mod engine_speed;
mod episode_results;
mod episodes;
mod gguf_policy;
mod job_isolation;
mod messages;
mod offline;
mod open_episode;
mod policy_worker;
mod role;
mod throughput_meter;
mod worker;
mod worker_command;

pub use backend::{
    GeneratorBackend, GeneratorEngineChoice, GeneratorEngineOptions, GeneratorLimits,
    GeneratorPaths, LlamaCppGenerator, OpenAiEndpoint,
};
pub use calibration::EngineCalibration;
pub use engine_speed::{
    EngineCandidate, EngineRates, EngineSpeed, choose_fastest, measure_engines,
};
pub use gguf_policy::ConvertedBase;
pub use messages::{GeneratorAnswer, GeneratorRequest, SampleToScore, ScoreRequest, ScoredSamples};
pub use offline::{OfflineGenerator, OfflinePolicy, OfflineRequest, OfflineSamples};
pub use policy_worker::{GeneratorConfig, LoadedWorker, LoadedWorkerGuard, PolicyWorker};
pub use role::GeneratorRole;
pub use worker::{WorkerConfig, run_generate_worker};

/// Parsers of the worker's messages, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::messages::fuzz_messages as calls;
}
