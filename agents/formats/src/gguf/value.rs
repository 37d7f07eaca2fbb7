//! The values of GGUF fields.

/// A value of a GGUF field.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(GgufArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of a GGUF field, whose values have one type.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufArray {
    /// Numbers and booleans of any other type.
    Plain {
        kind: u32,
        values: Vec<GgufValue>,
    },
    Strings(Vec<String>),
    I32(Vec<i32>),
    F32(Vec<f32>),
}

/// The format's type numbers.
pub(super) const U8: u32 = 0;
pub(super) const I8: u32 = 1;
pub(super) const U16: u32 = 2;
pub(super) const I16: u32 = 3;
pub(super) const U32: u32 = 4;
pub(super) const I32: u32 = 5;
pub(super) const F32: u32 = 6;
pub(super) const BOOL: u32 = 7;
pub(super) const STRING: u32 = 8;
pub(super) const ARRAY: u32 = 9;
pub(super) const U64: u32 = 10;
pub(super) const I64: u32 = 11;
pub(super) const F64: u32 = 12;

impl GgufValue {
    pub(super) fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => U8,
            Self::I8(_) => I8,
            Self::U16(_) => U16,
            Self::I16(_) => I16,
            Self::U32(_) => U32,
            Self::I32(_) => I32,
            Self::F32(_) => F32,
            Self::Bool(_) => BOOL,
            Self::String(_) => STRING,
            Self::Array(_) => ARRAY,
            Self::U64(_) => U64,
            Self::I64(_) => I64,
            Self::F64(_) => F64,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns an integer of any type that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::U8(value) => Some((*value).into()),
            Self::U16(value) => Some((*value).into()),
            Self::U32(value) => Some((*value).into()),
            Self::U64(value) => Some(*value),
            Self::I8(value) => u64::try_from(*value).ok(),
            Self::I16(value) => u64::try_from(*value).ok(),
            Self::I32(value) => u64::try_from(*value).ok(),
            Self::I64(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::F32(value) => Some((*value).into()),
            Self::F64(value) => Some(*value),
            _ => None,
        }
    }

    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(GgufArray::Strings(texts)) => Some(texts),
            _ => None,
        }
    }

    pub fn as_i32s(&self) -> Option<&[i32]> {
        match self {
            Self::Array(GgufArray::I32(values)) => Some(values),
            _ => None,
        }
    }
}

impl GgufArray {
    /// Returns the format's type number of the elements.
    pub(super) fn element_type_id(&self) -> u32 {
        match self {
            Self::Plain { kind, .. } => *kind,
            Self::Strings(_) => STRING,
            Self::I32(_) => I32,
            Self::F32(_) => F32,
        }
    }

    #[expect(clippy::len_without_is_empty, reason = "nobody asks whether a field is empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::Plain { values, .. } => values.len(),
            Self::Strings(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }
}

impl From<&str> for GgufValue {
    fn from(text: &str) -> Self {
        Self::String(text.into())
    }
}
