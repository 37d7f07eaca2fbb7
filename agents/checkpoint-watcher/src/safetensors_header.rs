//! Parses the header of a safetensors file, which may be incomplete, for the file's length.

use formats::safetensors::{DeclaredTensors, LENGTH_BYTES, parse_header_length};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorFileInfo {
    /// The size of the complete file.
    pub file_bytes: u64,
    pub empty_tensor: Option<String>,
}

/// Returns `None` if the length field or the header is incomplete or invalid.
pub(crate) fn parse_header(start: &[u8]) -> Option<TensorFileInfo> {
    let (length, header) = start.split_first_chunk::<LENGTH_BYTES>()?;
    let bytes = parse_header_length(*length).ok()?;
    let header = header.get(..usize::try_from(bytes).ok()?)?;
    let DeclaredTensors { data_bytes, empty_tensor } = DeclaredTensors::parse(header).ok()?;
    let file_bytes = (LENGTH_BYTES as u64).checked_add(bytes)?.checked_add(data_bytes)?;
    Some(TensorFileInfo { file_bytes, empty_tensor })
}
