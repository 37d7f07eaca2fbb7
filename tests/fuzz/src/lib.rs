//! Hostile input for everything that reads what another process wrote: [`TARGETS`] holds one
//! function a parser, none of which may panic or take memory out of proportion, whatever
//! it is given. `tests/corpus.rs` runs them over the corpus and mutations of it; `make fuzz`
//! lets libFuzzer look for more. See `docs/FUZZING.md`.

mod lines;
pub mod memory;
pub mod mutate;
mod targets;

pub use targets::{Run, TARGETS, target};
