//! Reads the schema of a parquet file. The library follows groups within groups without a limit, and
//! reserves memory for as many children as a group declares, so the schema is checked before.

use std::sync::Arc;

use parquet::{file::metadata::ParquetMetaDataReader, schema::types::SchemaDescriptor};

use crate::{
    error::DataFileError,
    thrift::{ThriftField, read_fields, take_integer, take_next_field, take_struct_list},
};

/// Groups within each other. A list takes two.
const DEPTH_MAX: usize = 64;
/// Bytes of the names of all columns, each with the groups around it: the library copies them.
const PATH_BYTES_MAX: usize = 64 << 20;
/// The length of the metadata and the name of the format, at the end of a file.
const TAIL_BYTES: usize = 8;
const FORMAT: &[u8] = b"PAR1";
/// Ends a file whose metadata is encrypted.
const ENCRYPTED_FORMAT: &[u8] = b"PARE";

/// Reads the schema of a file.
///
/// # Errors
/// The file has no metadata, or its schema is damaged or too deep.
pub(crate) fn read_schema(bytes: &[u8]) -> Result<Arc<SchemaDescriptor>, DataFileError> {
    let unreadable = |problem| DataFileError::Unreadable { format: "parquet", problem };
    if bytes.ends_with(ENCRYPTED_FORMAT) {
        return Err(unreadable("it is encrypted; write it without encryption".to_owned()));
    }
    let metadata = find_metadata(bytes).ok_or_else(|| {
        let problem = "its end is missing; it may be incomplete: copy or download it again";
        unreadable(problem.to_owned())
    })?;
    check_schema(metadata).ok_or_else(|| {
        unreadable(format!(
            "its schema is damaged, too large, or nests groups more than {DEPTH_MAX} deep; write it \
             again"
        ))
    })?;
    ParquetMetaDataReader::decode_schema(metadata).map_err(|error| unreadable(error.to_string()))
}

/// Returns the metadata, which stands before its length at the end of the file.
fn find_metadata(bytes: &[u8]) -> Option<&[u8]> {
    let (rest, tail) = bytes.split_at_checked(bytes.len().checked_sub(TAIL_BYTES)?)?;
    let (length, format) = tail.split_at(TAIL_BYTES / 2);
    let length = usize::try_from(u32::from_le_bytes(length.try_into().ok()?)).ok()?;
    (format == FORMAT).then(|| rest.get(rest.len().checked_sub(length)?..))?
}

/// Requires that the metadata begins with the version and the schema, that the schema's fields have
/// the types of the format, and that its groups have all of their children and are not too deep.
fn check_schema(mut metadata: &[u8]) -> Option<()> {
    let input = &mut metadata;
    take_next_field(input, false)?;
    take_integer(input)?;
    take_next_field(input, true)?;
    let elements = take_struct_list(input)?;
    // The children that are missing of each group around the next element, and the bytes of the group
    // and of those around it.
    let mut groups: Vec<(u64, usize)> = vec![(1, 0)];
    let mut path_bytes = 0;
    for number in 0..elements {
        let (mut children, before) = (0, input.len());
        read_fields(input, &mut |path, field| {
            if let ([5], ThriftField::Integer(count)) = (path, field) {
                children = u64::try_from(count).ok()?;
            }
            is_schema_field(path, field).then_some(())
        })?;
        while groups.last().is_some_and(|(missing, _)| *missing == 0) {
            groups.pop();
        }
        let (missing, around) = groups.last_mut()?;
        *missing -= 1;
        // The name is a part of them.
        let bytes = *around + before - input.len();
        path_bytes += if children == 0 { bytes } else { 0 };
        let is_too_large = path_bytes > PATH_BYTES_MAX || groups.len() > DEPTH_MAX;
        if children > elements - number - 1 || is_too_large {
            return None;
        }
        groups.push((children, bytes));
    }
    groups.iter().all(|(missing, _)| *missing == 0).then_some(())
}

/// Returns true if a field of `SchemaElement` has its type in `parquet.thrift` of format 2.12.
fn is_schema_field(path: &[i64], field: ThriftField) -> bool {
    match path {
        // Type, length, repetition, number of children, converted type, scale, precision, id.
        [1..=3 | 5..=9] => {
            matches!(field, ThriftField::Integer(number) if i32::try_from(number).is_ok())
        }
        // The name.
        [4] => field == ThriftField::Bytes,
        // The logical type is one of several structures, and times have one of three units.
        [10] | [10, 1..=8 | 10..=19] | [10, 7 | 8, 2] | [10, 7 | 8, 2, 1..=3] => {
            field == ThriftField::Struct
        }
        // Scale and precision of decimal numbers, and the algorithm of a geography.
        [10, 5, 1 | 2] | [10, 18, 2] => matches!(field, ThriftField::Integer(_)),
        // Whether times are in UTC, and whether an integer has a sign.
        [10, 7 | 8, 1] | [10, 10, 2] => field == ThriftField::Flag,
        // The bits of an integer, and the version of a variant.
        [10, 10 | 16, 1] => field == ThriftField::Byte,
        // Coordinates.
        [10, 17 | 18, 1] => field == ThriftField::Bytes,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(mut number: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while number >= 0x80 {
            bytes.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
            number >>= 7;
        }
        bytes.push(u8::try_from(number).unwrap());
        bytes
    }

    /// A required group with so many children.
    fn group(children: u32) -> Vec<u8> {
        named_group("g", children)
    }

    fn named_group(name: &str, children: u32) -> Vec<u8> {
        // Field 3, REQUIRED; field 4, the name; field 5, the number in zigzag notation.
        let length = varint(name.len() as u64);
        let children = varint(u64::from(children) << 1);
        let start = [0x35, 0, 0x18];
        [&start[..], &length, name.as_bytes(), &[0x15], &children, &[0]].concat()
    }

    /// A required column of 32-bit integers.
    fn column() -> Vec<u8> {
        vec![0x15, 2, 0x25, 0, 0x18, 1, b'c', 0]
    }

    /// A file without rows that has these elements.
    fn file(elements: &[Vec<u8>]) -> Vec<u8> {
        // Version 1; a list of structures.
        let mut metadata = vec![0x15, 2, 0x19, 0xfc];
        metadata.extend(varint(elements.len() as u64));
        metadata.extend(elements.concat());
        // No rows and no row groups.
        metadata.extend([0x16, 0, 0x19, 0x0c, 0]);
        let length = u32::try_from(metadata.len()).unwrap().to_le_bytes();
        [FORMAT, &metadata[..], &length[..], FORMAT].concat()
    }

    #[test]
    fn a_schema_is_read() {
        let schema = read_schema(&file(&[group(2), column(), group(1), column()])).unwrap();
        assert_eq!(schema.num_columns(), 2);
        let deepest: Vec<Vec<u8>> = (1..DEPTH_MAX).map(|_| group(1)).chain([column()]).collect();
        assert_eq!(read_schema(&file(&deepest)).unwrap().num_columns(), 1);
    }

    #[test]
    fn a_schema_that_would_take_all_memory_is_refused() {
        let deep: Vec<Vec<u8>> = (0..10_000).map(|_| group(1)).chain([column()]).collect();
        let with_text = [&column()[..2], &[0x48, 1, b'5', 0]].concat();
        let named = [group(1), named_group(&"g".repeat(1 << 20), 100)].into_iter();
        let named: Vec<Vec<u8>> = named.chain((0..100).map(|_| column())).collect();
        for (elements, what) in [
            (deep, "deep"),
            (named, "a long name around many columns"),
            (vec![group(u32::MAX >> 1), column()], "more children than elements"),
            (vec![group(2), column()], "a missing child"),
            (vec![group(1), column(), column()], "an element that belongs to no group"),
            (vec![group(1), with_text], "a number of children that is a text"),
        ] {
            let error = read_schema(&file(&elements)).unwrap_err().to_string();
            assert!(error.contains("schema is damaged"), "{what}: {error}");
        }
        let mut whole = file(&[group(1), column()]);
        for end in 0..whole.len() {
            assert!(read_schema(&whole[..end]).is_err(), "{end} bytes");
        }
        let last = whole.len() - 1;
        whole[last] = b'E';
        let error = read_schema(&whole).unwrap_err().to_string();
        assert!(error.contains("it is encrypted"), "{error}");
    }
}
