//! Reads the header of a GGUF file. The file is not trusted: every count, length and offset is
//! checked against the file's size.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::value::{self, GgufArray, GgufValue};
use super::{ALIGNMENT, ALIGNMENT_FIELD, GgmlType, GgufTensor, MAGIC};

/// This bound and those below are far above any real file, so that a damaged one is refused instead
/// of allocated.
const NAME_BYTES_MAX: u64 = 65_535;
const TEXT_BYTES_MAX: u64 = 16 << 20;
/// Elements of all arrays of a file together.
const ELEMENTS_MAX: u64 = 1 << 24;
/// Bytes before the data: nearly all of them are the vocabulary, of up to 60 MB.
const HEADER_BYTES_MAX: u64 = 256 << 20;
const FIELDS_MAX: u64 = 1 << 16;
const TENSORS_MAX: u64 = 1 << 20;
/// ggml's own limit.
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT_MAX: u64 = 1 << 16;

/// The reason why a GGUF file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("could not read {path}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} is not a GGUF file that can be read: {what} (M103)")]
    Format { path: PathBuf, what: String },
}

/// An open GGUF file whose header is valid.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: fs::File,
    /// 2 or 3.
    pub version: u32,
    pub fields: Vec<(String, GgufValue)>,
    pub tensors: Vec<GgufTensor>,
}

impl GgufFile {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let failed = |source| GgufError::File { path: path.into(), source };
        let file = fs::File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut input = HeaderReader { file: BufReader::new(&file), at: 0, length };
        let header = read_header(&mut input).map_err(|fault| match fault {
            GgufFault::Io(source) => failed(source),
            GgufFault::Format(what) => GgufError::Format { path: path.into(), what },
        })?;
        let (version, fields, tensors) = header;
        Ok(Self { path: path.into(), file, version, fields, tensors })
    }

    /// Returns the path of the file.
    pub fn file_path(&self) -> &Path {
        &self.path
    }

    /// Finds a field by its name.
    pub fn find_field(&self, name: &str) -> Option<&GgufValue> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// Finds a tensor by its name.
    pub fn find_tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    pub fn read(
        &self,
        tensor: &GgufTensor,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), GgufError> {
        let read = self.file.read_exact_at(buffer, tensor.range.start + offset);
        read.map_err(|source| GgufError::File { path: self.path.clone(), source })
    }
}

enum GgufFault {
    Io(io::Error),
    Format(String),
}

impl From<io::Error> for GgufFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn format_error<T>(what: impl Into<String>) -> Result<T, GgufFault> {
    Err(GgufFault::Format(what.into()))
}

struct HeaderReader<R> {
    file: R,
    /// Bytes read so far.
    at: u64,
    length: u64,
}

type GgufHeader = (u32, Vec<(String, GgufValue)>, Vec<GgufTensor>);

fn read_header(input: &mut HeaderReader<impl Read>) -> Result<GgufHeader, GgufFault> {
    let magic = input.read_bytes::<4>("its magic")?;
    if magic != MAGIC {
        return format_error(format!("it begins with {:?}", String::from_utf8_lossy(&magic)));
    }
    let version = input.read_u32("its version")?;
    match version {
        2 | 3 => {}
        1 => return format_error("version 1 is no longer in use; convert the model again"),
        _ if version.swap_bytes() < 16 => {
            return format_error("it is big-endian; convert it again here");
        }
        _ => return format_error(format!("version {version} is not known")),
    }
    let tensors = input.read_u64("its tensor count")?;
    let fields = input.read_u64("its field count")?;
    if tensors > TENSORS_MAX || fields > FIELDS_MAX {
        return format_error(format!("it claims {tensors} tensors and {fields} fields"));
    }
    let fields = read_fields(input, fields)?;
    let alignment = data_alignment(&fields)?;
    let mut tensors = read_tensors(input, tensors)?;
    let data = input.at.next_multiple_of(alignment);
    place_tensors(&mut tensors, data, alignment, input.length)?;
    Ok((version, fields, tensors))
}

/// Refuses a name that occurs twice.
fn read_fields(
    input: &mut HeaderReader<impl Read>,
    count: u64,
) -> Result<Vec<(String, GgufValue)>, GgufFault> {
    let mut fields = Vec::new();
    let mut names = BTreeSet::new();
    let mut budget = ELEMENTS_MAX;
    for _ in 0..count {
        let name = input.read_text(NAME_BYTES_MAX, "a field's name")?;
        let kind = input.read_u32("a field's kind")?;
        let value = if kind == value::ARRAY {
            GgufValue::Array(read_array(input, &name, &mut budget)?)
        } else {
            read_scalar(input, kind, &name)?
        };
        if !names.insert(name.clone()) {
            return format_error(format!("field `{name}` is there twice"));
        }
        fields.push((name, value));
    }
    Ok(fields)
}

/// Expects the format's type number as `kind`.
fn read_scalar(
    input: &mut HeaderReader<impl Read>,
    kind: u32,
    name: &str,
) -> Result<GgufValue, GgufFault> {
    Ok(match kind {
        value::U8 => GgufValue::U8(u8::from_le_bytes(input.read_bytes(name)?)),
        value::I8 => GgufValue::I8(i8::from_le_bytes(input.read_bytes(name)?)),
        value::U16 => GgufValue::U16(u16::from_le_bytes(input.read_bytes(name)?)),
        value::I16 => GgufValue::I16(i16::from_le_bytes(input.read_bytes(name)?)),
        value::U32 => GgufValue::U32(u32::from_le_bytes(input.read_bytes(name)?)),
        value::I32 => GgufValue::I32(i32::from_le_bytes(input.read_bytes(name)?)),
        value::F32 => GgufValue::F32(f32::from_le_bytes(input.read_bytes(name)?)),
        value::BOOL => match input.read_bytes(name)? {
            [0] => GgufValue::Bool(false),
            [1] => GgufValue::Bool(true),
            [other] => {
                return format_error(format!("field `{name}` is neither true nor false: {other}"));
            }
        },
        value::STRING => GgufValue::String(input.read_text(TEXT_BYTES_MAX, name)?),
        value::U64 => GgufValue::U64(u64::from_le_bytes(input.read_bytes(name)?)),
        value::I64 => GgufValue::I64(i64::from_le_bytes(input.read_bytes(name)?)),
        value::F64 => GgufValue::F64(f64::from_le_bytes(input.read_bytes(name)?)),
        value::ARRAY => return format_error(format!("field `{name}` is an array of arrays")),
        _ => return format_error(format!("field `{name}` is of the unknown kind {kind}")),
    })
}

/// Takes the array's elements from `budget`, which all arrays of the file share.
fn read_array(
    input: &mut HeaderReader<impl Read>,
    name: &str,
    budget: &mut u64,
) -> Result<GgufArray, GgufFault> {
    let kind = input.read_u32(name)?;
    let count = input.read_u64(name)?;
    *budget = match budget.checked_sub(count) {
        Some(left) if count <= input.length - input.at => left,
        _ => {
            return format_error(format!(
                "field `{name}` claims {count} elements, more than the file holds; copy it again"
            ));
        }
    };
    match kind {
        value::STRING => {
            let texts = (0..count).map(|_| input.read_text(TEXT_BYTES_MAX, name));
            texts.collect::<Result<_, _>>().map(GgufArray::Strings)
        }
        value::I32 => {
            let numbers = (0..count).map(|_| Ok(i32::from_le_bytes(input.read_bytes(name)?)));
            numbers.collect::<Result<_, GgufFault>>().map(GgufArray::I32)
        }
        value::F32 => {
            let numbers = (0..count).map(|_| Ok(f32::from_le_bytes(input.read_bytes(name)?)));
            numbers.collect::<Result<_, GgufFault>>().map(GgufArray::F32)
        }
        _ => {
            let values = (0..count).map(|_| read_scalar(input, kind, name));
            let values = values.collect::<Result<_, _>>()?;
            Ok(GgufArray::Plain { kind, values })
        }
    }
}

/// Returns the field's value, a power of two from 8 to [`ALIGNMENT_MAX`], or the default.
fn data_alignment(fields: &[(String, GgufValue)]) -> Result<u64, GgufFault> {
    let field = fields.iter().find(|(name, _)| name == ALIGNMENT_FIELD);
    let Some((_, value)) = field else { return Ok(ALIGNMENT) };
    match value.as_u64() {
        Some(size) if size.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&size) => Ok(size),
        _ => format_error(format!("field `{ALIGNMENT_FIELD}` is {value:?}")),
    }
}

/// Reads ranges relative to the start of the data; [`place_tensors`] moves them.
fn read_tensors(
    input: &mut HeaderReader<impl Read>,
    count: u64,
) -> Result<Vec<GgufTensor>, GgufFault> {
    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let name = input.read_text(NAME_BYTES_MAX, "a tensor's name")?;
        let dimensions = input.read_u32(&name)?;
        if dimensions > DIMENSIONS_MAX {
            return format_error(format!("tensor `{name}` has {dimensions} dimensions"));
        }
        let sizes = (0..dimensions).map(|_| input.read_u64(&name));
        let mut shape = sizes.collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let id = input.read_u32(&name)?;
        let Some(kind) = GgmlType::from_id(id) else {
            return format_error(format!("tensor `{name}` is of the unknown kind {id}"));
        };
        let bytes = kind.tensor_bytes(&shape).filter(|_| !shape.contains(&0));
        let Some(bytes) = bytes else {
            return format_error(format!("tensor `{name}` has shape {shape:?} in {}", kind.name));
        };
        let start = input.read_u64(&name)?;
        let Some(end) = start.checked_add(bytes) else {
            return format_error(format!("tensor `{name}` begins at byte {start} of the data"));
        };
        if !names.insert(name.clone()) {
            return format_error(format!("tensor `{name}` is there twice"));
        }
        tensors.push(GgufTensor { name, shape, kind, range: start..end });
    }
    Ok(tensors)
}

/// Moves the ranges into the file. Checks that the tensors follow each other without gaps except
/// alignment, and that the file contains all their data.
fn place_tensors(
    tensors: &mut [GgufTensor],
    data: u64,
    alignment: u64,
    length: u64,
) -> Result<(), GgufFault> {
    let mut expected = 0_u64;
    for tensor in tensors {
        let name = &tensor.name;
        if tensor.range.start != expected {
            let start = tensor.range.start;
            return format_error(format!("tensor `{name}` begins at byte {start}, not {expected}"));
        }
        let end = tensor.range.end.checked_add(data).filter(|end| *end <= length);
        let Some(end) = end else {
            return format_error(format!("it is truncated: tensor `{name}` is incomplete"));
        };
        expected = tensor.range.end.next_multiple_of(alignment);
        tensor.range = tensor.range.start + data..end;
    }
    Ok(())
}

impl<R: Read> HeaderReader<R> {
    /// Names the part as `what` in the error for a truncated file.
    fn read_bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufFault> {
        self.claim_bytes(N as u64, what)?;
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn read_u32(&mut self, what: &str) -> Result<u32, GgufFault> {
        Ok(u32::from_le_bytes(self.read_bytes(what)?))
    }

    fn read_u64(&mut self, what: &str) -> Result<u64, GgufFault> {
        Ok(u64::from_le_bytes(self.read_bytes(what)?))
    }

    fn read_text(&mut self, most: u64, what: &str) -> Result<String, GgufFault> {
        let length = self.read_u64(what)?;
        if length > most {
            return format_error(format!("{what} claims {length} bytes of text"));
        }
        self.claim_bytes(length, what)?;
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        String::from_utf8(bytes).or_else(|_| format_error(format!("{what} is not UTF-8")))
    }

    /// Advances, or fails if the file has fewer bytes left.
    fn claim_bytes(&mut self, bytes: u64, what: &str) -> Result<(), GgufFault> {
        match self.at.checked_add(bytes) {
            Some(at) if at <= self.length.min(HEADER_BYTES_MAX) => {
                self.at = at;
                Ok(())
            }
            Some(at) if at <= self.length => {
                format_error(format!("its header has more than {HEADER_BYTES_MAX} bytes"))
            }
            _ => format_error(format!("it is truncated in {what}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem<T>(read: Result<T, GgufFault>) -> String {
        match read {
            Err(GgufFault::Format(problem)) => problem,
            _ => panic!("it is accepted"),
        }
    }

    #[test]
    fn a_header_as_large_as_its_file_is_not_read() {
        for (tensors, fields) in [(TENSORS_MAX + 1, 0), (0, FIELDS_MAX + 1)] {
            let counts = [tensors.to_le_bytes(), fields.to_le_bytes()].concat();
            let header = [&MAGIC[..], &3_u32.to_le_bytes(), &counts].concat();
            let mut input = HeaderReader { file: &header[..], at: 0, length: 1 << 40 };
            let problem = problem(read_header(&mut input));
            assert_eq!(problem, format!("it claims {tensors} tensors and {fields} fields"));
        }
        let mut input = HeaderReader { file: io::empty(), at: HEADER_BYTES_MAX, length: 1 << 40 };
        let problem = problem(input.read_u32("a field's kind"));
        assert!(problem.contains("more than 268435456 bytes"), "{problem}");
    }
}
