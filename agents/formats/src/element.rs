//! Numbers as files hold them, little-endian.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Of what the weights that can be converted are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    /// As safetensors calls it.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::Bf16),
            _ => None,
        }
    }

    pub fn safetensors_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// What `bytes` say, in place of what `values` held; bytes short of a number are ignored.
    pub fn decode(self, bytes: &[u8], values: &mut Vec<f32>) {
        values.clear();
        match self {
            Self::F32 => values.extend(words(bytes).map(f32::from_le_bytes)),
            Self::Bf16 => {
                values.extend(words(bytes).map(|word| bf16::from_le_bytes(word).to_f32()));
            }
            Self::F16 => {
                let halves: Vec<f16> = words(bytes).map(f16::from_le_bytes).collect();
                values.resize(halves.len(), 0.0);
                halves.convert_to_f32_slice(values);
            }
        }
    }

    /// Appends, rounding to the nearest, ties to even.
    pub fn encode(self, values: &[f32], bytes: &mut Vec<u8>) {
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

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_to_the_nearest_and_ties_to_even() {
        let through = |element: Element, value: f32| {
            let (mut bytes, mut values) = (Vec::new(), Vec::new());
            element.encode(&[value], &mut bytes);
            assert_eq!(bytes.len(), element.bytes());
            element.decode(&bytes, &mut values);
            values[0]
        };
        for (element, value, expected) in [
            (Element::F32, 0.1, 0.1),
            (Element::Bf16, 1.0 + 1.0 / 256.0, 1.0),
            (Element::Bf16, 1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
            (Element::F16, 1.000_488_3, 1.0),
            (Element::F16, 1.001_464_8, 1.001_953_1),
            (Element::F16, 6e-8, 5.960_464_5e-8),
            (Element::F16, 1e6, f32::INFINITY),
            (Element::Bf16, f32::MAX, f32::INFINITY),
        ] {
            assert_eq!(through(element, value), expected, "{element:?} {value}");
        }
        assert!(through(Element::Bf16, f32::NAN).is_nan());
        assert!(through(Element::F16, f32::NAN).is_nan());
    }
}
