//! The contract between all peers: message types, ids, digests, subjects and the
//! facts made of them. Knows how things are written, not how they travel.

mod ask;
mod chain;
mod digest;
mod error_code;
mod example;
mod fact;
mod id;
mod line;
mod number;
mod prompt;
mod prompt_set;
mod seed;
mod subject;
mod time;

/// The messages of `proto/flotilla/v1`, with canonical proto3 JSON as their serde form.
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, reason = "generated code")]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/flotilla.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/flotilla.v1.serde.rs"));
}

/// Tokens of a canary whose log-probabilities are told, at most.
pub const CANARY_TOKENS: usize = 32;

/// The compiled `.proto` files, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flotilla.bin"));

pub use chain::chain;
pub use digest::{Digest, DigestError};
pub use error_code::ErrorCode;
pub use example::{Example, ExamplesError};
pub use fact::{Body, Fact, FactError, LineError, Record};
pub use id::{AgentId, IdError, JobId, NAME_BYTES_MAX, Pool, RunId, SuiteName, slug};
pub use line::{BadLine, Line, lines};
pub use pbjson_types::Timestamp;
pub use prompt::{PROMPT_BYTES_MAX, Prompt, PromptsError};
pub use prompt_set::PromptSet;
pub use seed::{derive, sample_seed};
pub use subject::{Place, STREAM_SUBJECTS, Subject, SubjectError, WorkKind, with_authors};
pub use time::timestamp;
