//! Parses the header of a safetensors file for the file's length and its tensors.

use serde_json::{Map, Value};

/// Longest header in bytes, the format's own limit.
pub(crate) const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes of the field with the header's length.
pub(crate) const LENGTH_BYTES: usize = 8;

/// The length of a safetensors file and its first empty tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorFileInfo {
    /// Length of the complete file in bytes.
    pub file_bytes: u64,
    /// Name of the first tensor without elements.
    pub empty_tensor: Option<String>,
}

/// Returns the header's length, if it is from 2 to [`HEADER_BYTES_MAX`].
pub(crate) fn parse_header_length(start: [u8; LENGTH_BYTES]) -> Option<u64> {
    Some(u64::from_le_bytes(start)).filter(|bytes| (2..=HEADER_BYTES_MAX).contains(bytes))
}

/// Parses the length field and the header, or returns `None` if they are incomplete or invalid.
pub(crate) fn parse_header(start: &[u8]) -> Option<TensorFileInfo> {
    let (length, header) = start.split_first_chunk::<LENGTH_BYTES>()?;
    let bytes = parse_header_length(*length)?;
    let header = header.get(..usize::try_from(bytes).ok()?)?;
    let tensors: Map<String, Value> = serde_json::from_slice(header).ok()?;
    let mut end = 0;
    let mut empty = None;
    for (name, tensor) in tensors.iter().filter(|(name, _)| *name != "__metadata__") {
        end = end.max(tensor.get("data_offsets")?.get(1)?.as_u64()?);
        let none = |shape: &Vec<Value>| shape.iter().any(|size| size.as_u64() == Some(0));
        if tensor.get("shape").and_then(Value::as_array).is_some_and(none) {
            empty.get_or_insert_with(|| name.clone());
        }
    }
    let bytes = (LENGTH_BYTES as u64).checked_add(bytes)?.checked_add(end)?;
    Some(TensorFileInfo { file_bytes: bytes, empty_tensor: empty })
}
