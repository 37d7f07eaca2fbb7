//! candle models for the embedded backend: load, generate, fine-tune and score small language
//! models in Hugging Face directories. Synchronous; knows nothing of the bus, the store or jobs.
//!
//! Threads: everything parallel, matrix products included, runs on rayon's current pool. One knob,
//! `RAYON_NUM_THREADS` (or a pool the caller installs), bounds it, and no result depends on it.

mod adapter;
mod canary;
mod dropout;
mod generate;
mod layout;
mod load;
mod model;
mod ops;
mod perplexity;
mod random;
mod scratch;
mod sequence;
mod tensors;
mod tokenizer;
mod train;

pub use adapter::{Adapter, AdapterError};
pub use canary::{Canary, CanaryError};
pub use candle_core::Device;
pub use formats::{Architecture, Config, ConfigError, LoraSpec, Module};
pub use generate::{
    AdmitError, Answer, Completion, Finish, GenerateError, Generator, Prompt, Request, Sampling,
    generate_all,
};
pub use layout::{Layout, layout};
pub use load::{LoadError, load};
pub use model::{Dtype, Model, ModelError, parse_device};
pub use perplexity::{Document, Perplexity, PerplexityError, chunks, documents, sliding};
pub use scratch::{ScratchError, Shape, write_scratch};
pub use sequence::SequenceError;
pub use tensors::TensorFileError;
pub use tokenizer::{Tokenizer, TokenizerError};
pub use train::{Decay, Example, Method, ResumeError, StepReport, TrainError, TrainSpec, Trainer};

/// What produced a figure or a file, for records: `candle-<version>`.
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
