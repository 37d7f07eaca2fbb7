//! Converts models and adapters between formats, in pieces. The memory used is bounded by the
//! largest head of an attention projection and a few MiB, for a model of any size.

mod atomic_file;
mod error;
mod listing;
mod lora;
mod merge;
mod metadata;
mod model;
mod pairs;
mod rope;
mod rows;
mod tensor_mapping;
mod tensor_names;
mod tokenizer;

pub use crate::dtype::ConversionDtype;
pub use error::ConvertError;
pub use listing::{FileListing, ListedTensor, list_contents};
pub use lora::convert_lora;
pub use merge::merge_adapter;
pub use model::convert_model;
pub(crate) use rope::compute_divisors as rope_factors;
pub(crate) use rows::deinterleave_rows;
pub(crate) use tensor_mapping::{TensorMapping, map_tensors};
pub(crate) use tensor_names::ROPE_FACTORS;
pub use tokenizer::has_byte_level_tokenizer;
pub(crate) use tokenizer::{SPECIAL_TOKENS, kind as token_kind, pre_tokenizer_json};

/// A callback that receives the bytes written and the total.
pub type ConvertProgress<'a> = dyn FnMut(u64, u64) + 'a;
