//! Rotary position embedding, in the half-split layout of Hugging Face checkpoints.

use super::{for_row_blocks, host_f32};
use candle_core::{Device, Result, Tensor};
use formats::{ModelConfig, RopeScaling};
use std::f32::consts::PI;

/// Returns the rotation of each pair of elements from one position to the next, in radians.
/// Computed in f32 as in transformers.
pub(crate) fn rotary_frequencies(config: &ModelConfig) -> Vec<f32> {
    let ModelConfig { head_dim, rope_theta, rope_scaling, .. } = *config;
    let plain = |i: usize| 1.0 / (rope_theta as f32).powf((2 * i) as f32 / head_dim as f32);
    let scaled = |frequency| rope_scaling.map_or(frequency, |by| stretch_frequency(frequency, &by));
    (0..head_dim / 2).map(plain).map(scaled).collect()
}

/// Scales a frequency as Llama 3.1 does: low frequencies (relative to the original context) are
/// divided by the factor, high ones are unchanged, and those between are interpolated.
fn stretch_frequency(frequency: f32, scaling: &RopeScaling) -> f32 {
    let (low, high) = (scaling.low_freq_factor as f32, scaling.high_freq_factor as f32);
    let (factor, original) = (scaling.factor as f32, scaling.original_max_positions as f32);
    let wavelength = 2.0 * PI / frequency;
    if wavelength < original / high {
        frequency
    } else if wavelength > original / low {
        frequency / factor
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// The cosines and sines of the rows' positions, `[rows, head_dim / 2]` each.
#[derive(Debug, Clone)]
pub(crate) struct RotaryEmbedding {
    cosines: Tensor,
    sines: Tensor,
}

impl RotaryEmbedding {
    /// Computes the tables from `rotary_frequencies`.
    pub(crate) fn new(positions: &[u32], frequencies: &[f32], device: &Device) -> Result<Self> {
        let half = frequencies.len();
        let angles: Vec<f32> = positions
            .iter()
            .flat_map(|position| frequencies.iter().map(move |f| *position as f32 * f))
            .collect();
        let table = |of: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|angle| of(*angle)).collect();
            Tensor::from_vec(values, (positions.len(), half), device)
        };
        Ok(Self { cosines: table(f32::cos)?, sines: table(f32::sin)? })
    }

    /// Rotates every head of `x`, `[rows, heads * head_dim]`.
    pub(crate) fn rotate_forward(&self, x: &Tensor) -> Result<Tensor> {
        self.rotate_rows(x, 1.0)
    }

    /// Computes the gradient, which is the inverse rotation.
    pub(crate) fn rotate_backward(&self, grad: &Tensor) -> Result<Tensor> {
        self.rotate_rows(grad, -1.0)
    }

    /// Rotates forward (`direction` 1) or backward (-1).
    fn rotate_rows(&self, x: &Tensor, direction: f32) -> Result<Tensor> {
        if !x.device().is_cpu() {
            return self.rotate_composed(x, direction);
        }
        let width = x.dim(1)?;
        let half = self.cosines.dim(1)?;
        let (cosines, sines) = (host_f32(&self.cosines)?, host_f32(&self.sines)?);
        let x_rows = host_f32(x)?;
        let mut out = vec![0f32; x_rows.len()];
        for_row_blocks(
            &mut out,
            width,
            2,
            #[inline(always)]
            |first, out| {
                for (index, out) in out.chunks_exact_mut(width).enumerate() {
                    let row = first + index;
                    let cosines = &cosines[row * half..][..half];
                    let sines = &sines[row * half..][..half];
                    let heads = x_rows[row * width..][..width].chunks_exact(2 * half);
                    for (head, out) in heads.zip(out.chunks_exact_mut(2 * half)) {
                        let (low, high) = head.split_at(half);
                        let (out_low, out_high) = out.split_at_mut(half);
                        for i in 0..half {
                            let sine = direction * sines[i];
                            out_low[i] = low[i] * cosines[i] - high[i] * sine;
                            out_high[i] = high[i] * cosines[i] + low[i] * sine;
                        }
                    }
                }
            },
        );
        Tensor::from_vec(out, x.shape(), x.device())
    }

    fn rotate_composed(&self, x: &Tensor, direction: f32) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let half = self.cosines.dim(1)?;
        let heads = x.reshape((rows, width / (2 * half), 2, half))?;
        let (low, high) = (heads.narrow(2, 0, 1)?, heads.narrow(2, 1, 1)?);
        let cosines = self.cosines.reshape((rows, 1, 1, half))?;
        let sines = (self.sines.reshape((rows, 1, 1, half))? * f64::from(direction))?;
        let out_low = (low.broadcast_mul(&cosines)? - high.broadcast_mul(&sines)?)?;
        let out_high = (high.broadcast_mul(&cosines)? + low.broadcast_mul(&sines)?)?;
        Tensor::cat(&[out_low, out_high], 2)?.reshape((rows, width))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn the_kernel_agrees_with_the_composed_form_and_backward_undoes_it() {
        let positions: Vec<u32> = (0..200).collect();
        let frequencies: Vec<f32> = (0..8).map(|i| 1e4f32.powf(-0.125 * i as f32)).collect();
        let rotation = RotaryEmbedding::new(&positions, &frequencies, &Device::Cpu).unwrap();
        let x = random(&[200, 48], 1);
        let rotated = rotation.rotate_forward(&x).unwrap();
        assert_close(&rotated, &rotation.rotate_composed(&x, 1.0).unwrap(), 1e-6);
        assert_close(&rotation.rotate_backward(&rotated).unwrap(), &x, 1e-5);
    }
}
