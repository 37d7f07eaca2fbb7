//! Writes a file from front to back: what it will hold is said first, then data is handed over
//! in that order, in pieces of any size.

use std::io::{self, Write};

use super::{ALIGNMENT, Array, MAGIC, TensorKind, VERSION, Value};

/// A tensor of a file to be written. Its rows are whole blocks of its kind.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) name: String,
    /// As torch has it.
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: TensorKind,
}

impl Planned {
    pub(crate) fn bytes(&self) -> u64 {
        self.kind.bytes_of(&self.shape).expect("planned from a file that has it, in whole blocks")
    }
}

pub(crate) struct Writer<W> {
    out: W,
    /// Of the data of each tensor that is still to come, the last one first.
    to_come: Vec<u64>,
    /// Of the tensor at hand.
    left: u64,
    /// After it.
    padding: u64,
}

impl<W: Write> Writer<W> {
    pub(crate) fn start(
        mut out: W,
        fields: &[(String, Value)],
        tensors: &[Planned],
    ) -> io::Result<Self> {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((fields.len() as u64).to_le_bytes());
        for (name, value) in fields {
            text(&mut header, name);
            header.extend(value.kind().to_le_bytes());
            encode(&mut header, value);
        }
        let mut offset = 0_u64;
        for tensor in tensors {
            text(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            header.extend(tensor.shape.iter().rev().flat_map(|size| size.to_le_bytes()));
            header.extend(tensor.kind.id.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        out.write_all(&header)?;
        let to_come = tensors.iter().rev().map(Planned::bytes).collect();
        Ok(Self { out, to_come, left: 0, padding: 0 })
    }

    /// A piece of the tensor at hand.
    ///
    /// # Panics
    /// When it is more than what was announced.
    pub(crate) fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.left == 0 {
            self.left = self.to_come.pop().expect("data belongs to a tensor");
            self.padding = self.left.next_multiple_of(ALIGNMENT) - self.left;
        }
        self.left = self.left.checked_sub(piece.len() as u64).expect("pieces are of one tensor");
        self.out.write_all(piece)?;
        if self.left == 0 {
            self.out.write_all(&[0; ALIGNMENT as usize][..self.padding as usize])?;
        }
        Ok(())
    }

    /// # Panics
    /// When a tensor's data never came.
    pub(crate) fn finish(self) -> W {
        assert!(self.left == 0 && self.to_come.is_empty(), "every tensor has its data");
        self.out
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn encode(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(value) => out.push(*value),
        Value::I8(value) => out.extend(value.to_le_bytes()),
        Value::U16(value) => out.extend(value.to_le_bytes()),
        Value::I16(value) => out.extend(value.to_le_bytes()),
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::I32(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push((*value).into()),
        Value::String(value) => text(out, value),
        Value::U64(value) => out.extend(value.to_le_bytes()),
        Value::I64(value) => out.extend(value.to_le_bytes()),
        Value::F64(value) => out.extend(value.to_le_bytes()),
        Value::Array(array) => {
            out.extend(array.kind().to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            match array {
                Array::Plain { values, .. } => values.iter().for_each(|value| encode(out, value)),
                Array::Strings(values) => values.iter().for_each(|value| text(out, value)),
                Array::I32(values) => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
                Array::F32(values) => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            }
        }
    }
}
