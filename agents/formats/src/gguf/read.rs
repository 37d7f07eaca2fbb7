//! Reads what stands before the data, believing none of it: every count, length and place is
//! held against what the file has.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::value::{self, Array, Value};
use super::{ALIGNMENT, ALIGNMENT_FIELD, MAGIC, Tensor, TensorKind};

/// Bounds far above any real file, so that a damaged one is refused rather than allocated.
const NAME_BYTES_MAX: u64 = 65_535;
const TEXT_BYTES_MAX: u64 = 16 << 20;
const ELEMENTS_MAX: u64 = 1 << 24;
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT_MAX: u64 = 1 << 16;

#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("could not read {path}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} is not a GGUF file that can be read: {what} (M103)")]
    Format { path: PathBuf, what: String },
}

/// An open file whose header made sense.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    file: fs::File,
    pub version: u32,
    /// In the file's order.
    pub fields: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
}

impl File {
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let failed = |source| GgufError::File { path: path.into(), source };
        let file = fs::File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut input = Input { file: BufReader::new(&file), at: 0, length };
        let header = header(&mut input).map_err(|fault| match fault {
            Fault::Io(source) => failed(source),
            Fault::Format(what) => GgufError::Format { path: path.into(), what },
        })?;
        let (version, fields, tensors) = header;
        Ok(Self { path: path.into(), file, version, fields, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn field(&self, name: &str) -> Option<&Value> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Fills `buffer` with a tensor's bytes from `offset` on.
    pub fn read(&self, tensor: &Tensor, offset: u64, buffer: &mut [u8]) -> Result<(), GgufError> {
        let read = self.file.read_exact_at(buffer, tensor.range.start + offset);
        read.map_err(|source| GgufError::File { path: self.path.clone(), source })
    }
}

enum Fault {
    Io(io::Error),
    Format(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn wrong<T>(what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Format(what.into()))
}

struct Input<R> {
    file: R,
    /// Bytes read so far, of how many.
    at: u64,
    length: u64,
}

type Header = (u32, Vec<(String, Value)>, Vec<Tensor>);

fn header(input: &mut Input<impl Read>) -> Result<Header, Fault> {
    let magic = input.take::<4>("its magic")?;
    if magic != MAGIC {
        return wrong(format!("it begins with {:?}", String::from_utf8_lossy(&magic)));
    }
    let version = input.u32("its version")?;
    match version {
        2 | 3 => {}
        1 => return wrong("version 1 is no longer in use; convert the model again"),
        _ if version.swap_bytes() < 16 => return wrong("it is big-endian; convert it again here"),
        _ => return wrong(format!("version {version} is not known")),
    }
    let tensors = input.u64("its tensor count")?;
    let fields = input.u64("its field count")?;
    let fields = read_fields(input, fields)?;
    let alignment = alignment(&fields)?;
    let mut tensors = read_tensors(input, tensors)?;
    let data = input.at.next_multiple_of(alignment);
    place(&mut tensors, data, alignment, input.length)?;
    Ok((version, fields, tensors))
}

fn read_fields(input: &mut Input<impl Read>, count: u64) -> Result<Vec<(String, Value)>, Fault> {
    let mut fields = Vec::new();
    let mut names = BTreeSet::new();
    let mut budget = ELEMENTS_MAX;
    for _ in 0..count {
        let name = input.text(NAME_BYTES_MAX, "a field's name")?;
        let kind = input.u32("a field's kind")?;
        let value = if kind == value::ARRAY {
            Value::Array(array(input, &name, &mut budget)?)
        } else {
            scalar(input, kind, &name)?
        };
        if !names.insert(name.clone()) {
            return wrong(format!("field `{name}` is there twice"));
        }
        fields.push((name, value));
    }
    Ok(fields)
}

fn scalar(input: &mut Input<impl Read>, kind: u32, name: &str) -> Result<Value, Fault> {
    Ok(match kind {
        value::U8 => Value::U8(u8::from_le_bytes(input.take(name)?)),
        value::I8 => Value::I8(i8::from_le_bytes(input.take(name)?)),
        value::U16 => Value::U16(u16::from_le_bytes(input.take(name)?)),
        value::I16 => Value::I16(i16::from_le_bytes(input.take(name)?)),
        value::U32 => Value::U32(u32::from_le_bytes(input.take(name)?)),
        value::I32 => Value::I32(i32::from_le_bytes(input.take(name)?)),
        value::F32 => Value::F32(f32::from_le_bytes(input.take(name)?)),
        value::BOOL => match input.take(name)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [other] => return wrong(format!("field `{name}` is neither true nor false: {other}")),
        },
        value::STRING => Value::String(input.text(TEXT_BYTES_MAX, name)?),
        value::U64 => Value::U64(u64::from_le_bytes(input.take(name)?)),
        value::I64 => Value::I64(i64::from_le_bytes(input.take(name)?)),
        value::F64 => Value::F64(f64::from_le_bytes(input.take(name)?)),
        value::ARRAY => return wrong(format!("field `{name}` is an array of arrays")),
        _ => return wrong(format!("field `{name}` is of the unknown kind {kind}")),
    })
}

/// `budget` is how many elements all arrays of the file may still have.
fn array(input: &mut Input<impl Read>, name: &str, budget: &mut u64) -> Result<Array, Fault> {
    let kind = input.u32(name)?;
    let count = input.u64(name)?;
    *budget = match budget.checked_sub(count) {
        Some(left) if count <= input.length - input.at => left,
        _ => {
            return wrong(format!(
                "field `{name}` claims {count} elements, more than the file holds; copy it again"
            ));
        }
    };
    match kind {
        value::STRING => {
            let texts = (0..count).map(|_| input.text(TEXT_BYTES_MAX, name));
            texts.collect::<Result<_, _>>().map(Array::Strings)
        }
        value::I32 => {
            let numbers = (0..count).map(|_| Ok(i32::from_le_bytes(input.take(name)?)));
            numbers.collect::<Result<_, Fault>>().map(Array::I32)
        }
        value::F32 => {
            let numbers = (0..count).map(|_| Ok(f32::from_le_bytes(input.take(name)?)));
            numbers.collect::<Result<_, Fault>>().map(Array::F32)
        }
        _ => {
            let values = (0..count).map(|_| scalar(input, kind, name));
            let values = values.collect::<Result<_, _>>()?;
            Ok(Array::Plain { kind, values })
        }
    }
}

fn alignment(fields: &[(String, Value)]) -> Result<u64, Fault> {
    let field = fields.iter().find(|(name, _)| name == ALIGNMENT_FIELD);
    let Some((_, value)) = field else { return Ok(ALIGNMENT) };
    match value.as_u64() {
        Some(size) if size.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&size) => Ok(size),
        _ => wrong(format!("field `{ALIGNMENT_FIELD}` is {value:?}")),
    }
}

/// A tensor's range is its place in the data until [`place`].
fn read_tensors(input: &mut Input<impl Read>, count: u64) -> Result<Vec<Tensor>, Fault> {
    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let name = input.text(NAME_BYTES_MAX, "a tensor's name")?;
        let dimensions = input.u32(&name)?;
        if dimensions > DIMENSIONS_MAX {
            return wrong(format!("tensor `{name}` has {dimensions} dimensions"));
        }
        let sizes = (0..dimensions).map(|_| input.u64(&name));
        let mut shape = sizes.collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let id = input.u32(&name)?;
        let Some(kind) = TensorKind::from_id(id) else {
            return wrong(format!("tensor `{name}` is of the unknown kind {id}"));
        };
        let bytes = kind.bytes_of(&shape).filter(|_| !shape.contains(&0));
        let Some(bytes) = bytes else {
            return wrong(format!("tensor `{name}` has shape {shape:?} in {}", kind.name));
        };
        let start = input.u64(&name)?;
        let Some(end) = start.checked_add(bytes) else {
            return wrong(format!("tensor `{name}` begins at byte {start} of the data"));
        };
        if !names.insert(name.clone()) {
            return wrong(format!("tensor `{name}` is there twice"));
        }
        tensors.push(Tensor { name, shape, kind, range: start..end });
    }
    Ok(tensors)
}

/// Tensors follow each other, aligned, and the file has them all.
fn place(tensors: &mut [Tensor], data: u64, alignment: u64, length: u64) -> Result<(), Fault> {
    let mut expected = 0_u64;
    for tensor in tensors {
        let name = &tensor.name;
        if tensor.range.start != expected {
            let start = tensor.range.start;
            return wrong(format!("tensor `{name}` begins at byte {start}, not {expected}"));
        }
        let end = tensor.range.end.checked_add(data).filter(|end| *end <= length);
        let Some(end) = end else {
            return wrong(format!("it is truncated: tensor `{name}` is not all there"));
        };
        expected = tensor.range.end.next_multiple_of(alignment);
        tensor.range = tensor.range.start + data..end;
    }
    Ok(())
}

impl<R: Read> Input<R> {
    /// `what` is named when the file ends before.
    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        self.claim(N as u64, what)?;
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.take(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.take(what)?))
    }

    fn text(&mut self, most: u64, what: &str) -> Result<String, Fault> {
        let length = self.u64(what)?;
        if length > most {
            return wrong(format!("{what} claims {length} bytes of text"));
        }
        self.claim(length, what)?;
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        String::from_utf8(bytes).or_else(|_| wrong(format!("{what} is not UTF-8")))
    }

    fn claim(&mut self, bytes: u64, what: &str) -> Result<(), Fault> {
        match self.at.checked_add(bytes) {
            Some(at) if at <= self.length => {
                self.at = at;
                Ok(())
            }
            _ => wrong(format!("it is truncated in {what}")),
        }
    }
}
