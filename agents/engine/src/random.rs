//! Counter-based random numbers: value `n` of a seed is a pure function of both, so a stream needs
//! no state to be kept, and two streams never disturb each other. SplitMix64 (Steele et al. 2014).

/// One stream; cheap to copy, and a copy repeats what follows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: mix(seed) }
    }

    /// The stream of a named part (a tensor, an epoch) of one seed.
    pub(crate) fn of_part(seed: u64, part: &str) -> Self {
        let hash = blake3::hash(part.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        Self::new(seed ^ u64::from_le_bytes(first))
    }

    /// The stream of a numbered part of this one, of which nothing was taken.
    pub(crate) fn child(self, number: u64) -> Self {
        Self::new(self.state ^ mix(number.wrapping_add(GOLDEN_GAMMA)))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// In [0, 1), 53 bits.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Standard normal (Box and Muller, one of the pair).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Fisher and Yates.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = (u128::from(self.next_u64()) * (last as u128 + 1)) >> 64;
            items.swap(last, other as usize);
        }
    }
}

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_moments_they_should() {
        let mut random = Random::new(7);
        let draws: Vec<f64> = (0..20_000).map(|_| random.normal()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
