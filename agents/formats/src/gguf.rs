//! GGUF files, versions 2 and 3, little-endian: fields, then a list of tensors, then their data.

mod kind;
pub(crate) mod q8_0;
mod read;
mod value;
mod write;

pub use kind::TensorKind;
pub use read::{File, GgufError};
pub use value::{Array, Value};
pub(crate) use write::{Planned, Writer};

use std::ops::Range;

const MAGIC: [u8; 4] = *b"GGUF";
/// Of what is written.
const VERSION: u32 = 3;
/// Of the data of each tensor, unless a field says otherwise.
const ALIGNMENT: u64 = 32;
const ALIGNMENT_FIELD: &str = "general.alignment";

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    /// As torch has it: the last dimension is contiguous. The file has it the other way around.
    pub shape: Vec<u64>,
    pub kind: TensorKind,
    /// Of the file.
    pub range: Range<u64>,
}
