//! Reads the header of a safetensors file: names, types, shapes and ranges of the tensors, all
//! checked against the file's size.

use super::header_fields::{HeaderFields, LENGTH_BYTES, TensorFields, parse_header_length};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;

/// The description of a tensor in the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// The format's name of the type: `F32`, `BF16`, `I64` and so on.
    pub dtype: String,
    /// The last dimension is contiguous.
    pub shape: Vec<u64>,
    /// Bytes within the data.
    pub range: Range<u64>,
}

/// Reads the size of the header's text. `length` is the size of the file. The inner error describes
/// invalid content.
pub(super) fn read_header_size(
    file: &mut impl Read,
    length: u64,
) -> io::Result<Result<u64, String>> {
    if length < 8 {
        return Ok(Err("it is shorter than 8 bytes".into()));
    }
    let mut field = [0; LENGTH_BYTES];
    file.read_exact(&mut field)?;
    Ok(match parse_header_length(field) {
        Err(size) => Err(format!("its header claims {size} bytes")),
        Ok(size) if size > length - 8 => {
            Err(format!("its header claims {size} bytes, the file has {length}"))
        }
        Ok(size) => Ok(size),
    })
}

type SafetensorsHeader = (BTreeMap<String, TensorEntry>, BTreeMap<String, String>);

/// Expects `data` bytes after the header, which the tensors must fill exactly.
pub(super) fn parse_header(text: &[u8], data: u64) -> Result<SafetensorsHeader, String> {
    let HeaderFields { tensors, undescribed, metadata } =
        serde_json::from_slice(text).map_err(|error| format!("its header is not JSON: {error}"))?;
    let no_entry = |name: &str| format!("tensor `{name}` is not described");
    if let Some(name) = undescribed {
        return Err(no_entry(&name));
    }
    let mut entries = BTreeMap::new();
    for (name, TensorFields { dtype, shape, data_offsets: (start, end) }) in tensors {
        if start > end {
            return Err(no_entry(&name));
        }
        let entry = TensorEntry { dtype, shape, range: start..end };
        check_size(&name, &entry)?;
        entries.insert(name, entry);
    }
    check_ranges(&entries, data)?;
    Ok((entries, metadata))
}

/// Compares shape and type with the number of bytes.
fn check_size(name: &str, entry: &TensorEntry) -> Result<(), String> {
    let bits = dtype_bits(&entry.dtype)
        .ok_or_else(|| format!("tensor `{name}` is of the unknown kind `{}`", entry.dtype))?;
    let total = entry.shape.iter().try_fold(bits, |total, size| total.checked_mul(*size));
    let held = entry.range.end - entry.range.start;
    match total {
        Some(total) if total % 8 == 0 && total / 8 == held => Ok(()),
        _ => Err(format!(
            "tensor `{name}` of shape {:?} and kind {} cannot have {held} bytes",
            entry.shape, entry.dtype
        )),
    }
}

/// Checks that the tensors fill the data without gaps or overlaps, and that the file is complete.
fn check_ranges(entries: &BTreeMap<String, TensorEntry>, data: u64) -> Result<(), String> {
    let mut places: Vec<(&Range<u64>, &String)> =
        entries.iter().map(|(name, entry)| (&entry.range, name)).collect();
    places.sort_by_key(|(range, _)| (range.start, range.end));
    let mut end = 0;
    for (range, name) in places {
        if range.start != end {
            return Err(format!("tensor `{name}` begins at byte {}, not {end}", range.start));
        }
        end = range.end;
    }
    match end {
        _ if end > data => Err(format!("it is truncated: {} bytes are missing", end - data)),
        _ if end < data => Err(format!("{} bytes follow the last tensor", data - end)),
        _ => Ok(()),
    }
}

/// Returns `None` for an unknown type.
fn dtype_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "F16" | "BF16" | "U16" | "I16" => 16,
        "F32" | "U32" | "I32" => 32,
        "F64" | "U64" | "I64" | "C64" => 64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_does_not_fit_its_file_is_refused_with_the_reason() {
        let good = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "b":{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]},
            "__metadata__":{"format":"pt","made":7}}"#;
        let (entries, metadata) = parse_header(good.as_bytes(), 12).unwrap();
        assert_eq!(entries["b"].range, 8..12);
        assert_eq!(metadata, [("format".to_owned(), "pt".to_owned())].into());
        let (_, none) = parse_header(br#"{"__metadata__":[{"format":"pt"}]}"#, 0).unwrap();
        assert!(none.is_empty());
        for (from, to, data, expected) in [
            ("", "", 11, "truncated: 1 bytes"),
            ("", "", 20, "8 bytes follow"),
            ("[8,12]", "[7,11]", 11, "begins at byte 7"),
            ("[2,1]", "[18446744073709551615,18446744073709551615]", 12, "cannot have 4 bytes"),
            ("[2,1]", "[3,1]", 12, "cannot have 4 bytes"),
            ("[2,1]", "[-2,1]", 12, "`b` is not described"),
            ("[8,12]", "[12,8]", 12, "`b` is not described"),
            (r#"{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]}"#, "[]", 12, "`b` is not"),
            (r#","shape":[2]"#, "", 12, "`a` is not described"),
            ("BF16", "Q9", 12, "unknown kind `Q9`"),
            ("{\"a\"", "[", 12, "not JSON"),
        ] {
            let error = parse_header(good.replacen(from, to, 1).as_bytes(), data).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
