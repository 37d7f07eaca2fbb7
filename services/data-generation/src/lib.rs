//! Training data that a language model writes: prompts from categories with examples, and answers
//! to them.
//!
//! The core is pure: `plan` builds requests, `prompt_list` reads answers, `duplicates` finds
//! repeated prompts, [`Generation`] decides the next request, `dataset` splits what is kept. The
//! shell, [`generate_data`], asks an endpoint and keeps each event in an append-only log, from which
//! a later command continues. Everything that a model writes is data. Verifiers come from the
//! caller.

mod dataset;
mod duplicates;
mod error;
mod generation;
mod generator;
mod plan;
mod progress_log;
mod prompt_list;
mod report;

pub use error::GenerationError;
pub use generation::{Generation, GenerationCommand, GenerationEvent, SampleOutcome};
pub use generator::{VerifySample, generate_data};
pub use plan::GenerationPlan;
pub use report::{CategoryReport, GenerationReport};

#[doc(hidden)]
pub mod fuzzing {
    use bounded_http::ChatReply;

    use crate::prompt_list::parse_prompt_list;

    /// Parses bytes as the body of an answer, and as a text with a list of prompts.
    pub fn fuzz_reply(input: &[u8]) {
        const PROMPTS_MAX: usize = 100;
        let _ = ChatReply::parse(input);
        let found = parse_prompt_list(&String::from_utf8_lossy(input), PROMPTS_MAX);
        assert!(found.len() <= PROMPTS_MAX && found.iter().all(|it| !it.is_empty()));
    }
}
