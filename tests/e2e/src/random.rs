//! A random number generator (`SplitMix64`) with a seed.

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in `0.0..1.0`.
    pub fn next_f64(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits are kept")]
        let share = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        share
    }

    pub fn next_in_range(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.next_f64()
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        let count = u64::try_from(from.len()).expect("few enough to count");
        &from[usize::try_from(self.next_u64() % count).expect("below the count")]
    }
}
