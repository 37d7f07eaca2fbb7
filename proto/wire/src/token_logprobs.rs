//! Log-probabilities of tokens as bytes: IEEE 754 half precision, little-endian. The relative error
//! is at most 2^-11.

use half::f16;

/// Encodes log-probabilities in nats. Rounding errors above 0 become 0.
pub fn encode_logprobs(logprobs: &[f64]) -> Vec<u8> {
    let encode = |logprob: &f64| {
        let bounded = if *logprob > 0.0 { 0.0 } else { *logprob };
        f16::from_f64(bounded).to_le_bytes()
    };
    logprobs.iter().flat_map(encode).collect()
}

/// Decodes log-probabilities. Returns `None` unless there are `tokens` of them, all finite and none
/// above 0.
pub fn decode_logprobs(bytes: &[u8], tokens: usize) -> Option<Vec<f64>> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() || pairs.len() != tokens {
        return None;
    }
    let read = |pair: &[u8; 2]| {
        let logprob = f16::from_le_bytes(*pair).to_f64();
        (logprob.is_finite() && logprob <= 0.0).then_some(logprob)
    };
    pairs.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_survive_in_half_precision() {
        let logprobs = [0.0, -1e-7, -0.125, -2.345_678, -17.3, 1e-9];
        let bytes = encode_logprobs(&logprobs);
        assert_eq!(bytes.len(), 12);
        let read = decode_logprobs(&bytes, 6).unwrap();
        for (before, after) in logprobs.iter().zip(read) {
            assert!((before - after).abs() <= before.abs() / 2048.0 + 1e-7, "{before} {after}");
        }
    }

    #[test]
    fn what_are_no_logprobs_is_refused() {
        let some = encode_logprobs(&[-1.0, -2.0]);
        assert_eq!(decode_logprobs(&some, 3), None);
        assert_eq!(decode_logprobs(&some[..3], 2), None);
        for broken in [f64::NEG_INFINITY, f64::NAN, -1e9] {
            assert_eq!(decode_logprobs(&encode_logprobs(&[broken]), 1), None);
        }
        assert_eq!(decode_logprobs(&f16::ONE.to_le_bytes(), 1), None);
        assert_eq!(decode_logprobs(&[], 0), Some(Vec::new()));
    }
}
