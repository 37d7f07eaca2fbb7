//! Reads the rows of a tensor in pieces, reorders them within heads, and converts them to another
//! type.

use super::ConversionDtype;
use crate::FloatDtype;
use crate::gguf::GgmlType;
use crate::safetensors::{LocatedTensor, SafetensorsError};

/// Read at a time, approximately.
const PIECE_BYTES: u64 = 4 << 20;

/// Returns the new index of a row within a head of `rows` rows: the two halves alternate.
fn interleaved_row(row: usize, rows: usize) -> usize {
    let half = rows / 2;
    2 * (row % half) + row / half
}

/// Reorders the rows of each head of `head` rows for llama.cpp.
pub(super) fn interleave_rows<T: Copy>(values: &[T], columns: usize, head: usize) -> Vec<T> {
    let mut reordered = values.to_vec();
    for (row, source) in values.chunks_exact(columns).enumerate() {
        let to = row / head * head + interleaved_row(row % head, head);
        reordered[to * columns..][..columns].copy_from_slice(source);
    }
    reordered
}

/// Reverses [`interleave_rows`].
pub(crate) fn deinterleave_rows<T: Copy>(values: &[T], columns: usize, head: usize) -> Vec<T> {
    let mut reordered = values.to_vec();
    for (row, target) in reordered.chunks_exact_mut(columns).enumerate() {
        let from = row / head * head + interleaved_row(row % head, head);
        target.copy_from_slice(&values[from * columns..][..columns]);
    }
    reordered
}

/// Transposes rows of `columns` values.
pub(super) fn transpose_rows(values: &[f32], columns: usize) -> Vec<f32> {
    let column = |column| values.iter().skip(column).step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RowConversion {
    pub(super) from: FloatDtype,
    pub(super) to: GgmlType,
    /// The rows in a head, if they must be reordered.
    pub(super) head: Option<usize>,
    /// True to add 1 to each value.
    pub(super) shifted: bool,
}

/// Returns the type of a converted tensor. Vectors stay f32. For `Q8_0`, a matrix whose rows are
/// not whole blocks becomes f16, as in llama.cpp.
pub(super) fn target_type(dtype: ConversionDtype, shape: &[u64]) -> GgmlType {
    match dtype {
        _ if shape.len() < 2 => GgmlType::F32,
        ConversionDtype::F32 => GgmlType::F32,
        ConversionDtype::F16 => GgmlType::F16,
        ConversionDtype::Bf16 => GgmlType::BF16,
        ConversionDtype::Q8_0 if GgmlType::Q8_0.tensor_bytes(shape).is_some() => GgmlType::Q8_0,
        ConversionDtype::Q8_0 => GgmlType::F16,
    }
}

/// Passes the converted data to `piece`, in pieces of whole rows.
pub(super) fn convert_rows<E: From<SafetensorsError>>(
    tensor: LocatedTensor<'_>,
    way: RowConversion,
    mut piece: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let row_bytes = column_count(&tensor) * way.from.byte_size();
    let mut scratch = ConversionBuffers::default();
    read_rows(tensor, way.from, way.head.unwrap_or(1), |_, bytes| match way.head {
        Some(head) => {
            let bytes = interleave_rows(bytes, row_bytes, head);
            piece(scratch.convert_piece(&bytes, way))
        }
        None => piece(scratch.convert_piece(bytes, way)),
    })
}

/// Counts the values in a row; each value of a vector is a row.
pub(super) fn column_count(tensor: &LocatedTensor<'_>) -> usize {
    match tensor.entry.shape.as_slice() {
        [_, columns] => *columns as usize,
        _ => 1,
    }
}

/// Passes the bytes to `piece`, in multiples of `group` rows, with the index of the first row.
pub(super) fn read_rows<E: From<SafetensorsError>>(
    tensor: LocatedTensor<'_>,
    element: FloatDtype,
    group: usize,
    mut piece: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let row_bytes = (column_count(&tensor) * element.byte_size()) as u64;
    let unit = (group as u64 * row_bytes).max(1);
    let step = (PIECE_BYTES / unit).max(1) * unit;
    let total = tensor.entry.range.end - tensor.entry.range.start;
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < total {
        let size = step.min(total - at);
        bytes.resize(size as usize, 0);
        tensor.read(at, &mut bytes)?;
        piece((at / row_bytes) as usize, &bytes)?;
        at += size;
    }
    Ok(())
}

/// Returns true if `copy` has the values of `original`, possibly rounded to a smaller format.
pub(super) fn has_equal_values(
    original: LocatedTensor<'_>,
    copy: LocatedTensor<'_>,
) -> Result<bool, SafetensorsError> {
    if original.entry.shape != copy.entry.shape {
        return Ok(false);
    }
    let (from, to) = (original.float_dtype()?, copy.float_dtype()?);
    let mut at = 0;
    let mut bytes = Vec::new();
    let mut same = true;
    let way = RowConversion { from, to: ggml_type_for(to), head: None, shifted: false };
    convert_rows(original, way, |piece| {
        bytes.resize(piece.len(), 0);
        copy.read(at, &mut bytes)?;
        same &= bytes == piece;
        at += piece.len() as u64;
        Ok::<_, SafetensorsError>(())
    })?;
    Ok(same)
}

fn ggml_type_for(element: FloatDtype) -> GgmlType {
    match element {
        FloatDtype::F32 => GgmlType::F32,
        FloatDtype::F16 => GgmlType::F16,
        FloatDtype::Bf16 => GgmlType::BF16,
    }
}

#[derive(Default)]
struct ConversionBuffers {
    values: Vec<f32>,
    encoded: Vec<u8>,
}

impl ConversionBuffers {
    fn convert_piece<'a>(&'a mut self, bytes: &'a [u8], way: RowConversion) -> &'a [u8] {
        if float_dtype_for(way.to) == Some(way.from) && !way.shifted {
            return bytes;
        }
        way.from.decode_floats(bytes, &mut self.values);
        if way.shifted {
            self.values.iter_mut().for_each(|value| *value += 1.0);
        }
        self.encoded.clear();
        encode_rows(&self.values, way.to, &mut self.encoded);
        &self.encoded
    }
}

/// Returns `None` for a quantised type.
fn float_dtype_for(kind: GgmlType) -> Option<FloatDtype> {
    match kind {
        GgmlType::F32 => Some(FloatDtype::F32),
        GgmlType::F16 => Some(FloatDtype::F16),
        GgmlType::BF16 => Some(FloatDtype::Bf16),
        _ => None,
    }
}

/// Appends whole rows in one of the types that the converter writes.
pub(super) fn encode_rows(values: &[f32], to: GgmlType, bytes: &mut Vec<u8>) {
    match float_dtype_for(to) {
        Some(element) => element.encode_floats(values, bytes),
        None => crate::gguf::q8_0::encode_blocks(values, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_taken_from_each_half_by_turns() {
        let rows: Vec<u32> = (0..12).flat_map(|row| [row, 100 + row]).collect();
        let reordered = interleave_rows(&rows, 2, 6);
        let first: Vec<u32> = reordered.iter().copied().step_by(2).collect();
        assert_eq!(first, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        assert_eq!(deinterleave_rows(&reordered, 2, 6), rows);
    }
}
