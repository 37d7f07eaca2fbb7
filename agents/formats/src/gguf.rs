//! GGUF files, versions 2 and 3, little-endian: fields, then a list of tensors, then their data.

mod ggml_type;
pub mod q8_0;
mod reader;
mod value;
mod writer;

pub use ggml_type::GgmlType;
pub use reader::{GgufError, GgufFile};
pub use value::{GgufArray, GgufValue};
pub(crate) use writer::{GgufWriter, PlannedGgufTensor};

use std::ops::Range;

const MAGIC: [u8; 4] = *b"GGUF";
/// The version of written files.
const VERSION: u32 = 3;
/// The default, in bytes.
const ALIGNMENT: u64 = 32;
const ALIGNMENT_FIELD: &str = "general.alignment";

/// A tensor of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    pub name: String,
    /// In torch's order: the last dimension is contiguous. The file has the reverse order.
    pub shape: Vec<u64>,
    pub kind: GgmlType,
    /// Bytes within the file.
    pub range: Range<u64>,
}
