//! LoRA dropout during training (arXiv:2106.09685, PEFT's `lora_dropout`): in the input of a pair's
//! A, some elements are set to 0 and the others are scaled up, so that the mean is unchanged.

use candle_core::{Result, Tensor};
use formats::LayerModule;
use rayon::prelude::*;

use crate::random::RandomStream;

/// The dropout of one pass. The dropped elements depend only on the seed, the step and each token's
/// position in the step. They are the same in the backward pass, after an interruption, and for any
/// split of the step into micro-batches.
#[derive(Debug, Clone)]
pub(crate) struct LoraDropout {
    rate: f64,
    random: RandomStream,
    /// The position in the step of each row's token.
    token_places: Vec<u64>,
}

impl LoraDropout {
    pub(crate) fn for_step(rate: f64, seed: u64, step: usize, rows: Vec<u64>) -> Option<Self> {
        let random = RandomStream::for_part(seed, &format!("dropout {step}"));
        (rate > 0.0).then_some(Self { rate, random, token_places: rows })
    }

    /// Applies a module's mask to `x`, `[rows, width]`: its input, or the gradient of its input.
    pub(crate) fn apply_mask(
        &self,
        layer: usize,
        module: LayerModule,
        x: &Tensor,
    ) -> Result<Tensor> {
        let width = x.dim(1)?;
        #[expect(clippy::cast_possible_truncation, reason = "a scale of f32 values")]
        let kept = (1.0 / (1.0 - self.rate)) as f32;
        let pair =
            self.random.child_stream((layer * LayerModule::ALL.len() + module as usize) as u64);
        let mut mask = vec![0f32; self.token_places.len() * width];
        mask.par_chunks_mut(width).zip(&self.token_places).for_each(|(mask, row)| {
            let mut random = pair.child_stream(*row);
            for value in mask {
                if random.next_uniform() >= self.rate {
                    *value = kept;
                }
            }
        });
        x * Tensor::from_vec(mask, (self.token_places.len(), width), &candle_core::Device::Cpu)?
            .to_device(x.device())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn mask(rows: &[u64], step: usize, module: LayerModule) -> Vec<Vec<f32>> {
        let ones = Tensor::ones((rows.len(), 500), DType::F32, &Device::Cpu).unwrap();
        let dropout = LoraDropout::for_step(0.2, 7, step, rows.to_vec()).unwrap();
        dropout.apply_mask(3, module, &ones).unwrap().to_vec2().unwrap()
    }

    #[test]
    fn the_share_is_dropped_and_the_mean_stays() {
        let values: Vec<f32> = mask(&(0..40).collect::<Vec<_>>(), 1, LayerModule::Up).concat();
        let dropped = values.iter().filter(|value| **value == 0.0).count();
        assert!((3800..4200).contains(&dropped), "{dropped} of {}", values.len());
        assert!(values.iter().all(|value| *value == 0.0 || *value == 1.25));
        assert!(LoraDropout::for_step(0.0, 7, 1, vec![0]).is_none());
    }

    #[test]
    fn what_is_dropped_follows_from_a_token_s_place_alone() {
        let all = mask(&[5, 6, 7], 1, LayerModule::Up);
        assert_eq!(mask(&[7], 1, LayerModule::Up)[0], all[2], "in whatever company");
        assert_ne!(all[0], all[1]);
        assert_ne!(mask(&[5], 2, LayerModule::Up)[0], all[0]);
        assert_ne!(mask(&[5], 1, LayerModule::Gate)[0], all[0]);
    }
}
