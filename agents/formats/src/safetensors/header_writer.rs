//! Writes the header of a safetensors file. The data follows in the order of the tensors.

use serde_json::{Map, json};
use std::io::{self, Write};

use crate::FloatDtype;

pub(crate) struct PlannedSafetensorsTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) element: FloatDtype,
    pub(crate) shape: &'a [u64],
    pub(crate) bytes: u64,
}

/// Writes the header, padded with spaces to a multiple of 8 bytes like the format's own library.
pub(crate) fn write_header(
    out: &mut impl Write,
    tensors: &[PlannedSafetensorsTensor<'_>],
) -> io::Result<()> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes;
        let dtype = tensor.element.safetensors_name();
        let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]});
        map.insert(tensor.name.into(), entry);
        offset = end;
    }
    let mut text = serde_json::to_string(&map)?;
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())
}
