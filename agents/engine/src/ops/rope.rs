//! Rotary position embedding, in the half-split layout of Hugging Face checkpoints.

use super::{for_row_blocks, host};
use candle_core::{Device, Result, Tensor};
use formats::{Config, RopeScaling};
use std::f32::consts::PI;

/// By how much each pair of elements turns from one position to the next, in f32 throughout, as
/// transformers computes it.
pub(crate) fn frequencies(config: &Config) -> Vec<f32> {
    let Config { head_dim, rope_theta, rope_scaling, .. } = *config;
    let plain = |i: usize| 1.0 / (rope_theta as f32).powf((2 * i) as f32 / head_dim as f32);
    let scaled = |frequency| rope_scaling.map_or(frequency, |by| stretched(frequency, &by));
    (0..head_dim / 2).map(plain).map(scaled).collect()
}

/// Llama 3.1: turns that are slow against the original context become slower by the factor, fast
/// ones stay, and those between are a mixture.
fn stretched(frequency: f32, scaling: &RopeScaling) -> f32 {
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

/// Cosines and sines for the positions of the rows at hand: `[rows, head_dim / 2]` each.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    cosines: Tensor,
    sines: Tensor,
}

impl Rotation {
    /// Of [`frequencies`].
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

    /// Rotates every head of `x` `[rows, heads * head_dim]`.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        self.rotate(x, 1.0)
    }

    /// The gradient of [`Self::apply`]: the rotation back.
    pub(crate) fn backward(&self, grad: &Tensor) -> Result<Tensor> {
        self.rotate(grad, -1.0)
    }

    fn rotate(&self, x: &Tensor, direction: f32) -> Result<Tensor> {
        if !x.device().is_cpu() {
            return self.composed(x, direction);
        }
        let width = x.dim(1)?;
        let half = self.cosines.dim(1)?;
        let (cosines, sines) = (host(&self.cosines)?, host(&self.sines)?);
        let x_rows = host(x)?;
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

    fn composed(&self, x: &Tensor, direction: f32) -> Result<Tensor> {
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
        let rotation = Rotation::new(&positions, &frequencies, &Device::Cpu).unwrap();
        let x = random(&[200, 48], 1);
        let rotated = rotation.apply(&x).unwrap();
        assert_close(&rotated, &rotation.composed(&x, 1.0).unwrap(), 1e-6);
        assert_close(&rotation.backward(&rotated).unwrap(), &x, 1e-5);
    }
}
