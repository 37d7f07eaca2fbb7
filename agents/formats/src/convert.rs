//! From one format to another, a piece at a time: memory is bounded by the largest head of an
//! attention projection and a few MiB, whatever the model's size.

mod error;
mod lora;
mod merge;
mod model;
mod names;
mod output;
mod pairs;
mod plan;
mod rope;
mod rows;
mod show;
mod tokenizer;

pub use error::ConvertError;
pub use lora::lora;
pub use merge::merge;
pub use model::model;
pub(crate) use names::ROPE_FACTORS;
pub(crate) use plan::{Step, steps};
pub(crate) use rope::factors as rope_factors;
pub(crate) use rows::deinterleave;
pub use show::{Listed, Listing, show};
pub(crate) use tokenizer::{kind as token_kind, pre_tokenizer};

/// Of what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    /// Matrices only; vectors stay f32.
    Q8_0,
}

/// Hears bytes written, and of how many.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;
