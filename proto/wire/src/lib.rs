//! The contract between all peers: message types, identifiers, digests, subjects, and the facts
//! made of them.
//!
//! Defines formats only; transport is the task of the crate `bus`.

mod authorship;
mod canary;
pub mod clock;
mod digest;
mod episode;
mod error_chain;
mod error_code;
mod example;
mod fact;
mod id;
mod json_count;
mod json_lines;
mod json_schema;
mod message_methods;
mod number;
mod prompt;
mod prompt_set;
mod seed;
mod subject;
mod template;
mod timestamps;
mod token_logprobs;

/// The messages of `proto/flotilla/v1`. Their serde form is canonical proto3 JSON.
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, reason = "generated code")]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/flotilla.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/flotilla.v1.serde.rs"));
}

/// The compiled `.proto` files, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flotilla.bin"));

pub use authorship::{SpecOrigin, check_checkpoint_author, control_user};
pub use canary::{CANARY_TOKENS_MAX, CANARY_TOLERANCE, mean_logprob, mean_logprob_distance};
pub use digest::{Digest, DigestError};
pub use episode::{
    EpisodeTokens, LAST_OBSERVATION_BYTES_MAX, derive_environment_seed, derive_turn_seed,
    shorten_last_observation,
};
pub use error_chain::format_error_chain;
pub use error_code::ErrorCode;
pub use example::{ExamplesError, TrainingExample};
pub use fact::{Fact, FactBody, FactError, Record, RecordLineError};
pub use id::{AgentId, IdError, JobId, NAME_BYTES_MAX, Pool, RunId, SuiteName, make_slug};
pub use json_count::{exceeds_json_count, exceeds_json_values};
pub use json_lines::{
    EncodingError, JsonLine, JsonLineError, JsonMistake, ROW_VALUES_MAX, RowPlace, decode_text,
    parse_json_lines, parse_json_rows,
};
pub use json_schema::{COMPILED_PATTERN_MAX, check_schema_patterns};
pub use message_methods::ANY_MODEL_ABILITY;
pub use pbjson_types::Timestamp;
pub use prompt::{PROMPT_BYTES_MAX, PromptEntry, PromptsError, normalise_question};
pub use prompt_set::PromptSet;
pub use seed::{derive_sample_seed, derive_seed};
pub use subject::{
    FactKey, STREAM_SUBJECTS, Subject, SubjectError, TrainPart, WorkKind, expand_author_filters,
    train_part_name,
};
pub use template::fill_template;
pub use timestamps::to_timestamp;
pub use token_logprobs::{decode_logprobs, encode_logprobs};
