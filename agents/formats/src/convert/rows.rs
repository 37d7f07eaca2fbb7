//! A tensor's rows: read in pieces, reordered within heads, and turned into another kind.

use super::Dtype;
use crate::Element;
use crate::gguf::TensorKind;
use crate::safetensors::{Located, TensorError};

/// Of a tensor, read at once.
const PIECE_BYTES: u64 = 4 << 20;

/// Where a row goes that is `row` of its head's `rows`: one of each half, by turns.
fn interleaved(row: usize, rows: usize) -> usize {
    let half = rows / 2;
    2 * (row % half) + row / half
}

/// Reorders the rows of each head as llama.cpp wants them.
pub(super) fn interleave<T: Copy>(values: &[T], columns: usize, head: usize) -> Vec<T> {
    let mut reordered = values.to_vec();
    for (row, source) in values.chunks_exact(columns).enumerate() {
        let to = row / head * head + interleaved(row % head, head);
        reordered[to * columns..][..columns].copy_from_slice(source);
    }
    reordered
}

/// Back again.
pub(crate) fn deinterleave<T: Copy>(values: &[T], columns: usize, head: usize) -> Vec<T> {
    let mut reordered = values.to_vec();
    for (row, target) in reordered.chunks_exact_mut(columns).enumerate() {
        let from = row / head * head + interleaved(row % head, head);
        target.copy_from_slice(&values[from * columns..][..columns]);
    }
    reordered
}

/// Of rows of `columns`.
pub(super) fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let column = |column| values.iter().skip(column).step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}

/// How a tensor is changed on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    pub(super) from: Element,
    pub(super) to: TensorKind,
    /// Rows of a head, when they are to be reordered.
    pub(super) head: Option<usize>,
}

/// What `dtype` means for a tensor of this shape: vectors stay f32, as norms and biases are. Rows that
/// are no whole blocks become f16, as llama.cpp has it.
pub(super) fn kind(dtype: Dtype, shape: &[u64]) -> TensorKind {
    match dtype {
        _ if shape.len() < 2 => TensorKind::F32,
        Dtype::F32 => TensorKind::F32,
        Dtype::F16 => TensorKind::F16,
        Dtype::Bf16 => TensorKind::BF16,
        Dtype::Q8_0 if TensorKind::Q8_0.bytes_of(shape).is_some() => TensorKind::Q8_0,
        Dtype::Q8_0 => TensorKind::F16,
    }
}

/// Hands over a tensor's data as the other kind, in pieces.
pub(super) fn convert<E: From<TensorError>>(
    tensor: Located<'_>,
    way: Way,
    mut piece: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let row_bytes = columns(&tensor) * way.from.bytes();
    let mut scratch = Scratch::default();
    read(tensor, way.from, way.head.unwrap_or(1), |_, bytes| match way.head {
        Some(head) => {
            let bytes = interleave(bytes, row_bytes, head);
            piece(scratch.turn(&bytes, way.from, way.to))
        }
        None => piece(scratch.turn(bytes, way.from, way.to)),
    })
}

/// Numbers of a row; those of a vector are rows of their own.
pub(super) fn columns(tensor: &Located<'_>) -> usize {
    match tensor.entry.shape.as_slice() {
        [_, columns] => *columns as usize,
        _ => 1,
    }
}

/// Hands over a tensor's bytes, whole groups of rows at a time, with the first row's number.
pub(super) fn read<E: From<TensorError>>(
    tensor: Located<'_>,
    element: Element,
    group: usize,
    mut piece: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let row_bytes = (columns(&tensor) * element.bytes()) as u64;
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

/// Whether `copy` is `original`, perhaps rounded to a smaller element.
pub(super) fn equal(original: Located<'_>, copy: Located<'_>) -> Result<bool, TensorError> {
    if original.entry.shape != copy.entry.shape {
        return Ok(false);
    }
    let (from, to) = (original.element()?, copy.element()?);
    let mut at = 0;
    let mut bytes = Vec::new();
    let mut same = true;
    let way = Way { from, to: kind_of(to), head: None };
    convert(original, way, |piece| {
        bytes.resize(piece.len(), 0);
        copy.read(at, &mut bytes)?;
        same &= bytes == piece;
        at += piece.len() as u64;
        Ok::<_, TensorError>(())
    })?;
    Ok(same)
}

fn kind_of(element: Element) -> TensorKind {
    match element {
        Element::F32 => TensorKind::F32,
        Element::F16 => TensorKind::F16,
        Element::Bf16 => TensorKind::BF16,
    }
}

#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    encoded: Vec<u8>,
}

impl Scratch {
    fn turn<'a>(&'a mut self, bytes: &'a [u8], from: Element, to: TensorKind) -> &'a [u8] {
        if element(to) == Some(from) {
            return bytes;
        }
        from.decode(bytes, &mut self.values);
        self.encoded.clear();
        encode(&self.values, to, &mut self.encoded);
        &self.encoded
    }
}

fn element(kind: TensorKind) -> Option<Element> {
    match kind {
        TensorKind::F32 => Some(Element::F32),
        TensorKind::F16 => Some(Element::F16),
        TensorKind::BF16 => Some(Element::Bf16),
        _ => None,
    }
}

/// Appends whole rows in one of the kinds we write.
pub(super) fn encode(values: &[f32], to: TensorKind, bytes: &mut Vec<u8>) {
    match element(to) {
        Some(element) => element.encode(values, bytes),
        None => crate::gguf::q8_0::encode(values, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_taken_from_each_half_by_turns() {
        let rows: Vec<u32> = (0..12).flat_map(|row| [row, 100 + row]).collect();
        let reordered = interleave(&rows, 2, 6);
        let first: Vec<u32> = reordered.iter().copied().step_by(2).collect();
        assert_eq!(first, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        assert_eq!(deinterleave(&reordered, 2, 6), rows);
    }
}
