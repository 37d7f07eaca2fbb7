//! The length field and the JSON text of a safetensors header, for readers that check more or less
//! of it. Only the syntax is checked here.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// The bytes of the length field, with which a file begins.
pub const LENGTH_BYTES: usize = 8;

/// The largest accepted header in bytes, as in the format's own library.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Decodes the length field: the bytes of the header's text. The error is a length above the
/// format's limit of 100 000 000 bytes.
pub fn parse_header_length(field: [u8; LENGTH_BYTES]) -> Result<u64, u64> {
    let bytes = u64::from_le_bytes(field);
    if bytes <= HEADER_BYTES_MAX { Ok(bytes) } else { Err(bytes) }
}

pub(super) struct HeaderFields {
    pub(super) tensors: BTreeMap<String, Value>,
    /// The entries of `__metadata__` that are texts.
    pub(super) metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for HeaderFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = HeaderFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut tensors, mut metadata) = (BTreeMap::new(), BTreeMap::new());
        while let Some(name) = map.next_key::<String>()? {
            if name != "__metadata__" {
                tensors.insert(name, map.next_value()?);
            } else if let Value::Object(pairs) = map.next_value()? {
                metadata = pairs.into_iter().filter_map(to_text_pair).collect();
            }
        }
        Ok(HeaderFields { tensors, metadata })
    }
}

fn to_text_pair((key, value): (String, Value)) -> Option<(String, String)> {
    match value {
        Value::String(text) => Some((key, text)),
        _ => None,
    }
}

/// The data that a header declares. The tensors are not compared with each other or with the file,
/// so an incomplete file has one too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredTensors {
    /// The end of the last tensor in bytes, counted from the end of the header.
    pub data_bytes: u64,
    /// The name of the first tensor without elements, by name.
    pub empty_tensor: Option<String>,
}

/// The part of a description that concerns the size.
#[derive(serde::Deserialize)]
struct DeclaredTensor {
    data_offsets: (u64, u64),
    #[serde(default)]
    shape: Vec<u64>,
}

impl DeclaredTensors {
    /// Parses the text of a header; every tensor must have `data_offsets`. Only one tensor is in
    /// memory at a time.
    pub fn parse(text: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
    }
}

impl<'de> Deserialize<'de> for DeclaredTensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(SizeVisitor)
    }
}

struct SizeVisitor;

impl<'de> Visitor<'de> for SizeVisitor {
    type Value = DeclaredTensors;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut all = DeclaredTensors { data_bytes: 0, empty_tensor: None };
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let DeclaredTensor { data_offsets: (_, end), shape } = map.next_value()?;
            all.data_bytes = all.data_bytes.max(end);
            if shape.contains(&0) && all.empty_tensor.as_ref().is_none_or(|first| name < *first) {
                all.empty_tensor = Some(name);
            }
        }
        Ok(all)
    }
}
