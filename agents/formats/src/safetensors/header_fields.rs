//! The length field and the JSON text of a safetensors header, for readers that check more or less
//! of it. Only the syntax is checked here. A header of 100 MB may have any values, which would take
//! gigabytes, so only those of the format are kept.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
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

#[derive(Default)]
pub(super) struct HeaderFields {
    pub(super) tensors: BTreeMap<String, TensorFields>,
    /// A tensor whose description lacks a field, or has another form.
    pub(super) undescribed: Option<String>,
    /// The entries of `__metadata__` that are texts.
    pub(super) metadata: BTreeMap<String, String>,
}

/// The description of a tensor.
#[derive(serde::Deserialize)]
pub(super) struct TensorFields {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) data_offsets: (u64, u64),
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
        let mut header = HeaderFields::default();
        while let Some(name) = map.next_key::<String>()? {
            let text = map.next_value::<&RawValue>()?.get();
            if name == "__metadata__" {
                let pairs = serde_json::from_str::<TextPairs>(text);
                header.metadata = pairs.map(|pairs| pairs.0).unwrap_or_default();
                continue;
            }
            // Structures are read from lists as well.
            let fields = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten();
            if let Some(fields) = fields {
                header.tensors.insert(name, fields);
            } else {
                header.undescribed.get_or_insert(name);
            }
        }
        Ok(header)
    }
}

/// The members of an object that are texts.
struct TextPairs(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for TextPairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TextPairsVisitor)
    }
}

struct TextPairsVisitor;

impl<'de> Visitor<'de> for TextPairsVisitor {
    type Value = TextPairs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if let Ok(text) = serde_json::from_str(map.next_value::<&RawValue>()?.get()) {
                pairs.insert(name, text);
            }
        }
        Ok(TextPairs(pairs))
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
