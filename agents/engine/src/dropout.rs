//! LoRA's dropout (arXiv:2106.09685, PEFT's `lora_dropout`): of what a pair's A reads, some elements
//! are 0 and the others scaled up, so that the mean stays. Only while training.

use candle_core::{Result, Tensor};
use formats::Module;
use rayon::prelude::*;

use crate::random::Random;

/// Of one pass. What is dropped follows from the seed, the step and the place of a token in it:
/// it is the same in the backward pass, after an interruption, and however a step is cut.
#[derive(Debug, Clone)]
pub(crate) struct Dropout {
    rate: f64,
    random: Random,
    /// Of each row, its token's place in the step.
    rows: Vec<u64>,
}

impl Dropout {
    /// `None` at a rate of 0.
    pub(crate) fn of_step(rate: f64, seed: u64, step: usize, rows: Vec<u64>) -> Option<Self> {
        let random = Random::of_part(seed, &format!("dropout {step}"));
        (rate > 0.0).then_some(Self { rate, random, rows })
    }

    /// `x`, `[rows, width]`, without what the pair of a layer's module does not see; or the
    /// gradient of its input, to which the same is done.
    pub(crate) fn apply(&self, layer: usize, module: Module, x: &Tensor) -> Result<Tensor> {
        let width = x.dim(1)?;
        #[expect(clippy::cast_possible_truncation, reason = "a scale of f32 values")]
        let kept = (1.0 / (1.0 - self.rate)) as f32;
        let pair = self.random.child((layer * Module::ALL.len() + module as usize) as u64);
        let mut mask = vec![0f32; self.rows.len() * width];
        mask.par_chunks_mut(width).zip(&self.rows).for_each(|(mask, row)| {
            let mut random = pair.child(*row);
            for value in mask {
                if random.uniform() >= self.rate {
                    *value = kept;
                }
            }
        });
        x * Tensor::from_vec(mask, (self.rows.len(), width), &candle_core::Device::Cpu)?
            .to_device(x.device())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn mask(rows: &[u64], step: usize, module: Module) -> Vec<Vec<f32>> {
        let ones = Tensor::ones((rows.len(), 500), DType::F32, &Device::Cpu).unwrap();
        let dropout = Dropout::of_step(0.2, 7, step, rows.to_vec()).unwrap();
        dropout.apply(3, module, &ones).unwrap().to_vec2().unwrap()
    }

    #[test]
    fn the_share_is_dropped_and_the_mean_stays() {
        let values: Vec<f32> = mask(&(0..40).collect::<Vec<_>>(), 1, Module::Up).concat();
        let dropped = values.iter().filter(|value| **value == 0.0).count();
        assert!((3800..4200).contains(&dropped), "{dropped} of {}", values.len());
        assert!(values.iter().all(|value| *value == 0.0 || *value == 1.25));
        assert!(Dropout::of_step(0.0, 7, 1, vec![0]).is_none());
    }

    #[test]
    fn what_is_dropped_follows_from_a_token_s_place_alone() {
        let all = mask(&[5, 6, 7], 1, Module::Up);
        assert_eq!(mask(&[7], 1, Module::Up)[0], all[2], "in whatever company");
        assert_ne!(all[0], all[1]);
        assert_ne!(mask(&[5], 2, Module::Up)[0], all[0]);
        assert_ne!(mask(&[5], 1, Module::Gate)[0], all[0]);
    }
}
