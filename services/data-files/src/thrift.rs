//! Reads structures in the compact protocol of Apache Thrift, in which parquet files describe
//! themselves. See <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>.

/// Structures within each other.
const DEPTH_MAX: usize = 8;

/// Types of fields and of the items of lists.
mod thrift_type {
    pub(super) const TRUE: u8 = 1;
    pub(super) const FALSE: u8 = 2;
    pub(super) const BYTE: u8 = 3;
    pub(super) const I16: u8 = 4;
    pub(super) const I32: u8 = 5;
    pub(super) const I64: u8 = 6;
    pub(super) const DOUBLE: u8 = 7;
    pub(super) const BINARY: u8 = 8;
    pub(super) const LIST: u8 = 9;
    pub(super) const SET: u8 = 10;
    pub(super) const STRUCT: u8 = 12;
}

/// The value of a field, as far as it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThriftField {
    /// Of 16, 32 or 64 bits.
    Integer(i64),
    Flag,
    Byte,
    Bytes,
    /// Its fields follow.
    Struct,
    /// A list, a set or a floating-point number.
    Other,
}

/// Reads a structure and passes each field to `see`, with the numbers of the fields that lead to it,
/// which increase within a structure. Returns `None` if the structure is damaged, or if `see` does.
pub(crate) fn read_fields(
    input: &mut &[u8],
    see: &mut dyn FnMut(&[i64], ThriftField) -> Option<()>,
) -> Option<()> {
    let mut path: Vec<i64> = vec![0];
    while let Some(depth) = path.len().checked_sub(1) {
        let head = take_byte(input)?;
        let (kind, step) = (head & 0xf, i64::from(head >> 4));
        if kind == 0 {
            path.pop();
            continue;
        }
        let last = path[depth];
        let number = if step == 0 { take_integer(input)? } else { last.checked_add(step)? };
        if number <= last {
            return None;
        }
        path[depth] = number;
        match kind {
            thrift_type::STRUCT => {
                see(&path, ThriftField::Struct)?;
                if path.len() == DEPTH_MAX {
                    return None;
                }
                path.push(0);
            }
            thrift_type::I16 | thrift_type::I32 | thrift_type::I64 => {
                see(&path, ThriftField::Integer(take_integer(input)?))?;
            }
            // The value of a boolean field is its type.
            thrift_type::TRUE | thrift_type::FALSE => see(&path, ThriftField::Flag)?,
            kind => {
                skip_value(input, kind)?;
                let field = match kind {
                    thrift_type::BYTE => ThriftField::Byte,
                    thrift_type::BINARY => ThriftField::Bytes,
                    _ => ThriftField::Other,
                };
                see(&path, field)?;
            }
        }
    }
    Some(())
}

/// Reads the start of a list of structures, and returns their number.
pub(crate) fn take_struct_list(input: &mut &[u8]) -> Option<u64> {
    let (item, length) = take_list_head(input)?;
    (item == thrift_type::STRUCT).then_some(length)
}

/// Reads the start of a field that follows the field before, a list or an integer of 32 bits.
pub(crate) fn take_next_field(input: &mut &[u8], is_list: bool) -> Option<()> {
    let kind = if is_list { thrift_type::LIST } else { thrift_type::I32 };
    (take_byte(input)? == (1 << 4 | kind)).then_some(())
}

/// Skips a value that is no structure and no integer. Lists are of such values or of integers.
fn skip_value(input: &mut &[u8], kind: u8) -> Option<()> {
    match kind {
        thrift_type::TRUE | thrift_type::FALSE | thrift_type::BYTE => take_byte(input).map(drop),
        thrift_type::I16 | thrift_type::I32 | thrift_type::I64 => take_integer(input).map(drop),
        thrift_type::DOUBLE => skip_bytes(input, 8),
        thrift_type::BINARY => {
            let length = usize::try_from(take_varint(input)?).ok()?;
            skip_bytes(input, length)
        }
        thrift_type::LIST | thrift_type::SET => {
            let (item, length) = take_list_head(input)?;
            let is_flat = ![thrift_type::LIST, thrift_type::SET].contains(&item);
            (0..length).try_for_each(|_| if is_flat { skip_value(input, item) } else { None })
        }
        _ => None,
    }
}

/// Reads the type and the number of the items of a list.
fn take_list_head(input: &mut &[u8]) -> Option<(u8, u64)> {
    let head = take_byte(input)?;
    let length = match head >> 4 {
        0xf => take_varint(input)?,
        short => u64::from(short),
    };
    Some((head & 0xf, length))
}

fn take_byte(input: &mut &[u8]) -> Option<u8> {
    let (first, rest) = input.split_first()?;
    *input = rest;
    Some(*first)
}

fn skip_bytes(input: &mut &[u8], length: usize) -> Option<()> {
    *input = input.get(length..)?;
    Some(())
}

fn take_varint(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take_byte(input)?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads an integer in zigzag notation.
pub(crate) fn take_integer(input: &mut &[u8]) -> Option<i64> {
    let value = take_varint(input)?;
    Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
}
