//! AdamW with decoupled weight decay of matrices only, as in Hugging Face's trainer.

use super::backward::ParameterGradients;
use crate::ops::{host_f32, run_vectorised};
use candle_core::{Error, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// AdamW: its settings, the number of steps taken, and the moments of each parameter.
pub(super) struct AdamOptimizer {
    betas: (f64, f64),
    epsilon: f64,
    weight_decay: f64,
    step: i32,
    moments: BTreeMap<String, AdamMoments>,
}

/// The running means of a parameter's gradient and of its square.
#[derive(Clone)]
pub(super) struct AdamMoments {
    mean: Tensor,
    square: Tensor,
}

impl AdamMoments {
    /// Calls `make` with the name of each moment, as PyTorch names them.
    pub(super) fn build<E>(
        parameter: &str,
        mut make: impl FnMut(String) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        let [mean, square] = moment_names(parameter);
        Ok(Self { mean: make(mean)?, square: make(square)? })
    }
}

fn moment_names(parameter: &str) -> [String; 2] {
    [format!("{parameter}.exp_avg"), format!("{parameter}.exp_avg_sq")]
}

#[derive(Clone, Copy)]
struct AdamStep {
    betas: (f64, f64),
    /// Clips the gradient.
    shrink: f64,
    /// The learning rate divided by the mean's bias correction.
    rate: f64,
    /// The square root of the square's bias correction.
    correction: f64,
    epsilon: f64,
    /// Weight decay as a factor of the parameter.
    keep: f64,
}

impl AdamOptimizer {
    pub(super) fn new(betas: (f64, f64), epsilon: f64, weight_decay: f64) -> Self {
        Self { betas, epsilon, weight_decay, step: 0, moments: BTreeMap::new() }
    }

    /// Returns the new values of the parameters, each of which must have a gradient.
    pub(super) fn compute_update(
        &mut self,
        parameters: &[(String, Tensor)],
        gradients: &ParameterGradients,
        shrink: f64,
        learning_rate: f64,
    ) -> candle_core::Result<BTreeMap<String, Tensor>> {
        self.step += 1;
        let step = AdamStep {
            betas: self.betas,
            shrink,
            rate: learning_rate / (1.0 - self.betas.0.powi(self.step)),
            correction: (1.0 - self.betas.1.powi(self.step)).sqrt(),
            epsilon: self.epsilon,
            keep: 1.0,
        };
        let decayed = 1.0 - learning_rate * self.weight_decay;
        let update = |(name, parameter): &(String, Tensor)| {
            let missing = || Error::msg(format!("`{name}` got no gradient"));
            let gradient = gradients.get(name).ok_or_else(missing)?;
            let moments = match self.moments.get(name) {
                Some(moments) => moments.clone(),
                None => {
                    AdamMoments { mean: parameter.zeros_like()?, square: parameter.zeros_like()? }
                }
            };
            let keep = if parameter.rank() == 2 { decayed } else { 1.0 };
            let (value, moments) =
                (AdamStep { keep, ..step }).apply_update(parameter, gradient, &moments)?;
            Ok((name.clone(), value, moments))
        };
        let results = parameters.par_iter().map(update).collect::<candle_core::Result<Vec<_>>>()?;
        let mut updated = BTreeMap::new();
        for (name, value, moments) in results {
            self.moments.insert(name.clone(), moments);
            updated.insert(name, value);
        }
        Ok(updated)
    }

    pub(super) fn named_moments(&self) -> impl Iterator<Item = (String, &Tensor)> {
        self.moments.iter().flat_map(|(parameter, AdamMoments { mean, square })| {
            let [of_mean, of_square] = moment_names(parameter);
            [(of_mean, mean), (of_square, square)]
        })
    }

    /// Returns the number of updates, on which the correction of the moments depends.
    pub(super) fn update_count(&self) -> i32 {
        self.step
    }

    pub(super) fn restore_state(&mut self, step: usize, moments: BTreeMap<String, AdamMoments>) {
        self.step = i32::try_from(step).unwrap_or(i32::MAX);
        self.moments = moments;
    }
}

impl AdamStep {
    fn apply_update(
        &self,
        value: &Tensor,
        grad: &Tensor,
        old: &AdamMoments,
    ) -> candle_core::Result<(Tensor, AdamMoments)> {
        if !value.device().is_cpu() {
            return self.apply_composed(value, grad, old);
        }
        let (values, grads) = (host_f32(value)?, host_f32(grad)?);
        let (means, squares) = (host_f32(&old.mean)?, host_f32(&old.square)?);
        let mut new = [values.to_vec(), means.to_vec(), squares.to_vec()];
        let [value_out, mean_out, square_out] = &mut new;
        let f = |x: f64| x as f32;
        let (beta1, beta2) = (f(self.betas.0), f(self.betas.1));
        let (rest1, rest2) = (f(1.0 - self.betas.0), f(1.0 - self.betas.1));
        let (shrink, keep, rate) = (f(self.shrink), f(self.keep), f(self.rate));
        let (correction, epsilon) = (f(1.0 / self.correction), f(self.epsilon));
        run_vectorised(
            #[inline(always)]
            || {
                let moments = mean_out.iter_mut().zip(square_out.iter_mut());
                let values = value_out.iter_mut().zip(&*grads).zip(moments);
                for ((value, grad), (mean, square)) in values {
                    let grad = grad * shrink;
                    *mean = beta1 * *mean + rest1 * grad;
                    *square = beta2 * *square + rest2 * grad * grad;
                    *value = *value * keep - rate * *mean / (square.sqrt() * correction + epsilon);
                }
            },
        );
        let [value_out, mean, square] =
            new.map(|values| Tensor::from_vec(values, value.shape(), value.device()));
        Ok((value_out?, AdamMoments { mean: mean?, square: square? }))
    }

    fn apply_composed(
        &self,
        value: &Tensor,
        grad: &Tensor,
        old: &AdamMoments,
    ) -> candle_core::Result<(Tensor, AdamMoments)> {
        let grad = (grad * self.shrink)?;
        let mean = ((&old.mean * self.betas.0)? + (&grad * (1.0 - self.betas.0))?)?;
        let square = ((&old.square * self.betas.1)? + (grad.sqr()? * (1.0 - self.betas.1))?)?;
        let divisor = ((square.sqrt()? / self.correction)? + self.epsilon)?;
        let value = ((value * self.keep)? - (&mean / divisor)? * self.rate)?;
        Ok((value, AdamMoments { mean, square }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn the_kernel_agrees_with_the_composed_form() {
        let step = AdamStep {
            betas: (0.9, 0.98),
            shrink: 0.5,
            rate: 0.01,
            correction: 0.3,
            epsilon: 1e-8,
            keep: 0.99,
        };
        let (value, grad) = (random(&[40, 30], 1), random(&[40, 30], 2));
        let old =
            AdamMoments { mean: random(&[40, 30], 3), square: random(&[40, 30], 4).sqr().unwrap() };
        let (fast, moments) = step.apply_update(&value, &grad, &old).unwrap();
        let (naive, naive_moments) = step.apply_composed(&value, &grad, &old).unwrap();
        assert_close(&fast, &naive, 1e-5);
        assert_close(&moments.mean, &naive_moments.mean, 1e-6);
        assert_close(&moments.square, &naive_moments.square, 1e-6);
    }
}
