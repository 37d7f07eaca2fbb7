//! The divisors of the rope frequencies, which llama.cpp reads as tensors.

use std::f32::consts::TAU;

use super::tensor_names;
use crate::{ModelConfig, RopeScaling};

/// Lists the tensors of divisors by name: those of Llama 3.1's scaling or of Phi's; none without
/// rope scaling.
pub(super) fn list_factors(config: &ModelConfig) -> Vec<(&'static str, Vec<f32>)> {
    let computed = compute_divisors(config).map(|factors| (tensor_names::ROPE_FACTORS, factors));
    let mut lists: Vec<_> = computed.into_iter().collect();
    if let Some(rope) = &config.details.long_rope {
        lists.push((tensor_names::ROPE_LONG_FACTORS, rope.long_factors.clone()));
        lists.push((tensor_names::ROPE_SHORT_FACTORS, rope.short_factors.clone()));
    }
    lists.retain(|(_, factors)| !factors.is_empty());
    lists
}

/// Computes a divisor for each frequency; `None` without Llama 3.1's scaling. Rounds at the same
/// points as llama.cpp's converter, so that the numbers are equal.
pub(crate) fn compute_divisors(config: &ModelConfig) -> Option<Vec<f32>> {
    let scaling = config.rope_scaling?;
    let wavelength = |index: usize| {
        let part = (2 * index) as f32 / config.head_dim as f32;
        let frequency = 1.0 / config.rope_theta.powf(f64::from(part)) as f32;
        1.0 / frequency * TAU
    };
    Some(
        (0..config.head_dim / 2)
            .map(|index| compute_divisor(wavelength(index), &scaling))
            .collect(),
    )
}

fn compute_divisor(wavelength: f32, scaling: &RopeScaling) -> f32 {
    let (low, high) = (scaling.low_freq_factor as f32, scaling.high_freq_factor as f32);
    let (factor, original) = (scaling.factor as f32, scaling.original_max_positions as f32);
    if wavelength < original / high {
        1.0
    } else if wavelength > original / low {
        factor
    } else {
        let smooth = (1.0 / wavelength * original - low) / (high - low);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}
