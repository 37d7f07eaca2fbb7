//! What the header of a safetensors file says of the file's length and tensors.

use serde_json::{Map, Value};

/// The format's own limit.
pub(crate) const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The field that says how long the header is.
pub(crate) const LENGTH_BYTES: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Of a complete file.
    pub bytes: u64,
    /// The first tensor without any element.
    pub empty: Option<String>,
}

/// The header's length, as far as it makes sense.
pub(crate) fn header_bytes(start: [u8; LENGTH_BYTES]) -> Option<u64> {
    Some(u64::from_le_bytes(start)).filter(|bytes| (2..=HEADER_BYTES_MAX).contains(bytes))
}

/// `None` while the length field and the header are not those of a safetensors file.
pub(crate) fn look(start: &[u8]) -> Option<Seen> {
    let (length, header) = start.split_first_chunk::<LENGTH_BYTES>()?;
    let bytes = header_bytes(*length)?;
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
    Some(Seen { bytes, empty })
}
