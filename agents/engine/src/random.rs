//! Counter-based random numbers (SplitMix64, Steele et al. 2014). Value `n` of a seed is a pure
//! function of both, so a stream needs no stored state, and streams are independent.

/// A stream of random numbers. A copy repeats the values that follow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomStream {
    state: u64,
}

impl RandomStream {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: mix_bits(seed) }
    }

    /// Creates the stream of a named part of a seed, such as a tensor or an epoch.
    pub(crate) fn for_part(seed: u64, part: &str) -> Self {
        let hash = blake3::hash(part.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        Self::new(seed ^ u64::from_le_bytes(first))
    }

    /// Requires that no value of `self` was taken before.
    pub(crate) fn child_stream(self, number: u64) -> Self {
        Self::new(self.state ^ mix_bits(number.wrapping_add(GOLDEN_GAMMA)))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix_bits(self.state)
    }

    /// Returns a number in [0, 1) with 53 bits.
    pub(crate) fn next_uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a standard normal number (Box and Muller, one of the pair).
    pub(crate) fn next_normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.next_uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.next_uniform()).cos()
    }

    pub(crate) fn shuffle_items<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = (u128::from(self.next_u64()) * (last as u128 + 1)) >> 64;
            items.swap(last, other as usize);
        }
    }
}

/// From the golden ratio.
const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64.
fn mix_bits(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_moments_they_should() {
        let mut random = RandomStream::new(7);
        let draws: Vec<f64> = (0..20_000).map(|_| random.next_normal()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
