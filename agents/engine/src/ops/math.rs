//! Scalar functions of the kernels, written so that the compiler can vectorise the loops they are
//! inlined into. The code fixes the order of every sum, independent of the vector width.

const LANES: usize = 16;

/// Sums in sixteen partial sums, then in a fixed tree.
#[inline(always)]
pub(crate) fn dot_product(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (x, y) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * y[lane];
        }
    }
    let mut rest = 0f32;
    for (x, y) in a_rest.iter().zip(b_rest) {
        rest += x * y;
    }
    sum_lanes(lanes) + rest
}

#[inline(always)]
pub(crate) fn sum_values(values: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] += block[lane];
        }
    }
    sum_lanes(lanes) + rest.iter().sum::<f32>()
}

#[inline(always)]
pub(crate) fn add_scaled(acc: &mut [f32], factor: f32, values: &[f32]) {
    for (acc, value) in acc.iter_mut().zip(values) {
        *acc += factor * value;
    }
}

/// Returns the largest value; negative infinity for an empty slice.
#[inline(always)]
pub(crate) fn max_value(values: &[f32]) -> f32 {
    let larger = |most: &mut f32, value: f32| *most = if value > *most { value } else { *most };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        for (most, value) in lanes.iter_mut().zip(block) {
            larger(most, *value);
        }
    }
    let mut most = f32::NEG_INFINITY;
    for value in lanes.iter().chain(rest) {
        larger(&mut most, *value);
    }
    most
}

#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Returns e^x within 2 units in the last place. Arguments are limited to -87 to 88, so small
/// results stay near the smallest normal number.
#[inline(always)]
pub(crate) fn fast_exp(x: f32) -> f32 {
    /// Adding it rounds to an integer that then sits in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = (x - whole * LN2_HIGH) - whole * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let value = p * (r * r) + r + 1.0;
    value * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

#[inline(always)]
pub(crate) fn logistic_sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + fast_exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_library_s() {
        for step in -8700..8800 {
            let x = step as f32 * 0.01;
            let exact = f64::from(x).exp();
            let error = (f64::from(fast_exp(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "exp({x}) is off by {error}");
        }
    }
}
