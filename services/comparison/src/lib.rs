//! Compares two models by paired scores, with a test that may be looked at after every pair.
//!
//! [`PairedTest`] takes the scores that both models got for the same prompt and seed, in order.
//! It decides as soon as the evidence suffices. Its error rate holds at every moment, so a caller
//! may look after each pair and stop at any time. [`JudgeReport`] counts the preferences of a
//! judge that gives such scores. All functions are pure.

mod bets;
mod describe;
mod figures;
mod import;
mod judging;
mod paired_test;

pub use figures::{DEFAULT_ALPHA, DecisionFigures};
pub use import::{PairLineError, PairsError, compare_pair_lines, read_pair_line};
pub use judging::{JudgeReport, PromptAnswers};
pub use paired_test::{AlphaError, Comparison, Decision, Pair, PairedTest};
