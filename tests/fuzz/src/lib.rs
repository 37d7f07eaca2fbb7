//! Fuzz targets for all parsers of data from other processes. [`TARGETS`] contains one function per
//! parser. None of them may panic or use excessive memory for any input. `tests/corpus.rs` runs
//! them on the corpus and on mutations of it; `make fuzz` searches further with libFuzzer. See
//! `docs/FUZZING.md`.

mod lines;
pub mod memory;
pub mod mutate;
mod targets;

pub use targets::{Run, TARGETS, find_target};
