//! Multiplies in registers alone, to measure the speed that a kernel can reach.

use pulp::{Simd, WithSimd};
use std::hint::black_box;

/// Sums that a round adds to, enough to hide the latency of an instruction.
const SUMS: usize = 12;

/// Returns the number of multiplications with additions.
pub(in super::super) fn multiply_registers(rounds: usize) -> usize {
    pulp::Arch::new().dispatch(RegisterTask { rounds })
}

struct RegisterTask {
    rounds: usize,
}

impl WithSimd for RegisterTask {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        let factor = simd.splat_f32s(1.0);
        let mut sums = [simd.splat_f32s(0.0); SUMS];
        for _ in 0..self.rounds {
            let factor = black_box(factor);
            for sum in &mut sums {
                *sum = simd.mul_add_f32s(factor, factor, *sum);
            }
        }
        black_box(sums);
        self.rounds * SUMS * S::F32_LANES
    }
}
