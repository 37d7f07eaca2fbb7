//! The number formats of weights. Floating-point numbers in files are little-endian.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// A floating-point format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FloatDtype {
    F32,
    F16,
    Bf16,
}

impl FloatDtype {
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Returns the name that users write, such as `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Parses the name that users write.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Parses the name that safetensors uses: `F32`, `F16` or `BF16`. Returns `None` for any other.
    pub(crate) fn from_safetensors(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Returns the name that safetensors uses.
    pub(crate) fn safetensors_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    /// Returns the size of one number in bytes.
    pub fn byte_size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Decodes `bytes` into `values`, whose old content is dropped. An incomplete last number is
    /// ignored.
    pub fn decode_floats(self, bytes: &[u8], values: &mut Vec<f32>) {
        values.clear();
        match self {
            Self::F32 => values.extend(split_words(bytes).map(f32::from_le_bytes)),
            Self::Bf16 => {
                values.extend(split_words(bytes).map(|word| bf16::from_le_bytes(word).to_f32()));
            }
            Self::F16 => {
                let halves: Vec<f16> = split_words(bytes).map(f16::from_le_bytes).collect();
                values.resize(halves.len(), 0.0);
                halves.convert_to_f32_slice(values);
            }
        }
    }

    /// Appends the encoded `values` to `bytes`. Rounds to the nearest number, ties to even.
    pub(crate) fn encode_floats(self, values: &[f32], bytes: &mut Vec<u8>) {
        match self {
            Self::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
            Self::Bf16 => {
                let rounded = |value: &f32| bf16::from_f32(*value).to_le_bytes();
                bytes.extend(values.iter().flat_map(rounded));
            }
            Self::F16 => {
                let mut halves = vec![f16::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
            }
        }
    }
}

/// A number format of converted weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConversionDtype {
    F32,
    F16,
    Bf16,
    /// 8-bit integers for matrices; vectors stay f32.
    Q8_0,
}

impl ConversionDtype {
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0];

    /// Returns the name that users write, such as `q8_0`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Parses the name that users write.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl From<FloatDtype> for ConversionDtype {
    fn from(dtype: FloatDtype) -> Self {
        match dtype {
            FloatDtype::F32 => Self::F32,
            FloatDtype::F16 => Self::F16,
            FloatDtype::Bf16 => Self::Bf16,
        }
    }
}

/// Ignores a shorter rest.
fn split_words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_to_the_nearest_and_ties_to_even() {
        let through = |element: FloatDtype, value: f32| {
            let (mut bytes, mut values) = (Vec::new(), Vec::new());
            element.encode_floats(&[value], &mut bytes);
            assert_eq!(bytes.len(), element.byte_size());
            element.decode_floats(&bytes, &mut values);
            values[0]
        };
        for (element, value, expected) in [
            (FloatDtype::F32, 0.1, 0.1),
            (FloatDtype::Bf16, 1.0 + 1.0 / 256.0, 1.0),
            (FloatDtype::Bf16, 1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
            (FloatDtype::F16, 1.000_488_3, 1.0),
            (FloatDtype::F16, 1.001_464_8, 1.001_953_1),
            (FloatDtype::F16, 6e-8, 5.960_464_5e-8),
            (FloatDtype::F16, 1e6, f32::INFINITY),
            (FloatDtype::Bf16, f32::MAX, f32::INFINITY),
        ] {
            assert_eq!(through(element, value), expected, "{element:?} {value}");
        }
        assert!(through(FloatDtype::Bf16, f32::NAN).is_nan());
        assert!(through(FloatDtype::F16, f32::NAN).is_nan());
    }
}
