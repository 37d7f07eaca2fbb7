//! candle models for the embedded backend: load, sample, fine-tune and score small language models
//! in Hugging Face directories. Synchronous; does not know the bus, the store or jobs.
//!
//! Threads: everything parallel, matrix products included, runs on rayon's current pool. Only
//! `RAYON_NUM_THREADS` (or a pool that the caller installs) bounds it, and no result depends on the
//! number of threads.

mod adapter;
mod canary;
mod completion_scores;
mod dropout;
mod generate;
mod huge_pages;
mod layout;
mod load;
mod machine_limits;
mod model;
mod ops;
mod perplexity;
mod random;
mod scratch;
mod sequence;
mod tensor_file;
mod tokenizer;
mod train;

pub use adapter::{
    AdapterError, AdapterMerge, LoraAdapter, MergeErrors, MergeRule, OuterOptimizer, SoupChoice,
    WeightChange, check_left_out,
};
pub use canary::{CanaryError, CanaryText};
pub use candle_core::Device;
pub use completion_scores::score_completions;
pub use formats::{Architecture, LayerModule, LoraSpec, ModelConfig, ModelConfigError};
pub use generate::{
    AdmitError, BatchGenerator, FinishReason, GenerateError, PromptInput, PromptRequest,
    RequestResult, RunningTokens, SampleCompletion, SamplingParameters, ScoreOptions, TokenScore,
    generate_all,
};
pub use layout::{ChunkLayout, layout_chunks};
pub use load::{ModelLoadError, load_model};
pub use machine_limits::MachineLimits;
pub use model::{LanguageModel, MatrixDtype, ModelError, check_architecture, parse_device};
pub use perplexity::{
    PerplexityError, PerplexityScore, ScoredDocument, score_chunks, score_documents, score_sliding,
};
pub use scratch::{ScratchError, ScratchShape, write_scratch_model};
pub use sequence::{CompletionExample, CompletionTokens, SequenceError, TokenSequence};
pub use tensor_file::TensorFileError;
pub use tokenizer::{ModelTokenizer, TokenizerError};
pub use train::{
    LearningRateDecay, ModelTrainer, ResumeError, StepReport, TrainError, TrainMethod, TrainSpec,
    TrainingSignal, WeightReport,
};

/// The name of the engine in records, `candle-<version>`.
pub const ENGINE: &str = "candle-0.11.1";

#[cfg(test)]
mod tests {
    #[test]
    fn the_engine_s_name_has_the_version_that_is_linked() {
        let lock = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
        let lock = std::fs::read_to_string(lock).unwrap();
        let version = super::ENGINE.strip_prefix("candle-").unwrap();
        assert!(lock.contains(&format!("name = \"candle-core\"\nversion = \"{version}\"")));
    }
}
