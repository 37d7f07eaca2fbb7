//! Writes a GGUF file from front to back: first the header, which announces all tensors, then their
//! data in that order, in pieces of any size.

use std::io::{self, Write};

use super::{ALIGNMENT, GgmlType, GgufArray, GgufValue, MAGIC, VERSION};

/// The rows are whole blocks of the type.
#[derive(Debug, Clone)]
pub(crate) struct PlannedGgufTensor {
    pub(crate) name: String,
    /// In torch's order.
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: GgmlType,
}

impl PlannedGgufTensor {
    /// Panics if the rows are not whole blocks.
    pub(crate) fn byte_count(&self) -> u64 {
        self.kind
            .tensor_bytes(&self.shape)
            .expect("planned from a file that has it, in whole blocks")
    }
}

/// Adds the padding between tensors.
pub(crate) struct GgufWriter<W> {
    out: W,
    /// Bytes of the tensors that have not begun, the last tensor first.
    pending_sizes: Vec<u64>,
    /// Bytes missing from the current tensor.
    remaining: u64,
    /// Bytes after the current tensor.
    padding: u64,
}

impl<W: Write> GgufWriter<W> {
    pub(crate) fn start(
        mut out: W,
        fields: &[(String, GgufValue)],
        tensors: &[PlannedGgufTensor],
    ) -> io::Result<Self> {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((fields.len() as u64).to_le_bytes());
        for (name, value) in fields {
            put_text(&mut header, name);
            header.extend(value.type_id().to_le_bytes());
            put_value(&mut header, value);
        }
        let mut offset = 0_u64;
        for tensor in tensors {
            put_text(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            header.extend(tensor.shape.iter().rev().flat_map(|size| size.to_le_bytes()));
            header.extend(tensor.kind.id.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = (offset + tensor.byte_count()).next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        out.write_all(&header)?;
        let to_come = tensors.iter().rev().map(PlannedGgufTensor::byte_count).collect();
        Ok(Self { out, pending_sizes: to_come, remaining: 0, padding: 0 })
    }

    /// Writes a piece of the current tensor. Panics if the piece is longer than its rest, or all
    /// tensors are complete.
    pub(crate) fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.remaining == 0 {
            self.remaining = self.pending_sizes.pop().expect("data belongs to a tensor");
            self.padding = self.remaining.next_multiple_of(ALIGNMENT) - self.remaining;
        }
        self.remaining =
            self.remaining.checked_sub(piece.len() as u64).expect("pieces are of one tensor");
        self.out.write_all(piece)?;
        if self.remaining == 0 {
            self.out.write_all(&[0; ALIGNMENT as usize][..self.padding as usize])?;
        }
        Ok(())
    }

    /// Panics if data of a tensor is missing.
    pub(crate) fn into_output(self) -> W {
        assert!(self.remaining == 0 && self.pending_sizes.is_empty(), "every tensor has its data");
        self.out
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Leaves out the type number.
fn put_value(out: &mut Vec<u8>, value: &GgufValue) {
    match value {
        GgufValue::U8(value) => out.push(*value),
        GgufValue::I8(value) => out.extend(value.to_le_bytes()),
        GgufValue::U16(value) => out.extend(value.to_le_bytes()),
        GgufValue::I16(value) => out.extend(value.to_le_bytes()),
        GgufValue::U32(value) => out.extend(value.to_le_bytes()),
        GgufValue::I32(value) => out.extend(value.to_le_bytes()),
        GgufValue::F32(value) => out.extend(value.to_le_bytes()),
        GgufValue::Bool(value) => out.push((*value).into()),
        GgufValue::String(value) => put_text(out, value),
        GgufValue::U64(value) => out.extend(value.to_le_bytes()),
        GgufValue::I64(value) => out.extend(value.to_le_bytes()),
        GgufValue::F64(value) => out.extend(value.to_le_bytes()),
        GgufValue::Array(array) => {
            out.extend(array.element_type_id().to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            match array {
                GgufArray::Plain { values, .. } => {
                    values.iter().for_each(|value| put_value(out, value));
                }
                GgufArray::Strings(values) => values.iter().for_each(|value| put_text(out, value)),
                GgufArray::I32(values) => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
                GgufArray::F32(values) => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            }
        }
    }
}
