//! Llama 3.1's stretching of slow rotations, which llama.cpp takes as a tensor: by how much each
//! frequency is divided.

use std::f32::consts::TAU;

use crate::{Config, RopeScaling};

/// None of a model that rotates plainly. Rounded where llama.cpp's converter rounds, so that the
/// same numbers come out.
pub(crate) fn factors(config: &Config) -> Option<Vec<f32>> {
    let scaling = config.rope_scaling?;
    let wavelength = |index: usize| {
        let part = (2 * index) as f32 / config.head_dim as f32;
        let frequency = 1.0 / config.rope_theta.powf(f64::from(part)) as f32;
        1.0 / frequency * TAU
    };
    Some((0..config.head_dim / 2).map(|index| factor(wavelength(index), &scaling)).collect())
}

fn factor(wavelength: f32, scaling: &RopeScaling) -> f32 {
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
