//! ggml's reference quantisation to 8 bits (`Q8_0`): 32 values share an f16 scale.

use half::f16;

/// The values that share a scale.
pub const BLOCK_VALUES: usize = 32;
/// An f16 scale and one byte for each value.
const BLOCK_BYTES: usize = 34;

/// Appends whole blocks to `bytes`; a rest of `values` is dropped.
pub(crate) fn encode_blocks(values: &[f32], bytes: &mut Vec<u8>) {
    bytes.reserve(values.len() / BLOCK_VALUES * BLOCK_BYTES);
    for block in values.as_chunks::<BLOCK_VALUES>().0 {
        let (scale, quantized) = quantize_block(block);
        bytes.extend(scale.to_le_bytes());
        bytes.extend(quantized.map(i8::cast_unsigned));
    }
}

/// Returns the scale of a block and its values in units of it.
#[inline(always)]
pub fn quantize_block(block: &[f32; BLOCK_VALUES]) -> (f16, [i8; BLOCK_VALUES]) {
    let largest = block.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    // Rounds half away from zero, like C's `roundf`.
    (f16::from_f32(scale), block.map(|value| (value * inverse).round() as i8))
}

/// Decodes whole blocks into `values`, whose old content is dropped.
pub(crate) fn decode_blocks(bytes: &[u8], values: &mut Vec<f32>) {
    values.clear();
    for block in bytes.as_chunks::<BLOCK_BYTES>().0 {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        values.extend(block[2..].iter().map(|value| f32::from(*value as i8) * scale));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_its_scale_and_its_largest_value_127() {
        let mut block = [0_f32; BLOCK_VALUES];
        (block[0], block[1], block[2]) = (-254.0, 3.0, 1.0);
        let mut bytes = Vec::new();
        encode_blocks(&block, &mut bytes);
        assert_eq!(bytes.len(), BLOCK_BYTES);
        assert_eq!(bytes[..2], f16::from_f32(2.0).to_le_bytes());
        // 1.5 and 0.5 are rounded away from zero.
        assert_eq!([bytes[2] as i8, bytes[3] as i8, bytes[4] as i8], [-127, 2, 1]);
        let mut values = Vec::new();
        decode_blocks(&bytes, &mut values);
        assert_eq!(values[..4], [-254.0, 4.0, 2.0, 0.0]);
        bytes.clear();
        encode_blocks(&[0.0; BLOCK_VALUES], &mut bytes);
        assert_eq!(bytes, [0; BLOCK_BYTES]);
    }
}
