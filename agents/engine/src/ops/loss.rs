//! Next-token cross entropy: the negative log likelihood of a target for each row of logits.

use super::{for_row_blocks, host, math};
use candle_core::{D, DType, Result, Tensor};
use candle_nn::ops::{log_softmax, softmax};

/// In nats; the sum of exponentials is f64.
pub(crate) fn negative_log_likelihoods(logits: &Tensor, targets: &[u32]) -> Result<Vec<f64>> {
    if !logits.device().is_cpu() {
        let targets = Tensor::new(targets, logits.device())?.unsqueeze(1)?;
        let log_likelihoods = log_softmax(logits, D::Minus1)?.gather(&targets, 1)?.squeeze(1)?;
        return log_likelihoods.neg()?.to_dtype(DType::F64)?.to_vec1();
    }
    let width = logits.dim(1)?;
    let rows = host(logits)?;
    let mut out = vec![0f64; targets.len()];
    for_row_blocks(&mut out, 1, width, |first, out| {
        for (row, out) in (first..).zip(out) {
            *out = row_nll(&rows[row * width..][..width], targets[row] as usize);
        }
    });
    Ok(out)
}

/// In nats, of one row of logits; the sum of exponentials is f64.
#[inline(always)]
pub(crate) fn row_nll(row: &[f32], target: usize) -> f64 {
    let most = math::max(row);
    let mut total = 0f64;
    for part in row.chunks(256) {
        let mut exponentials = [0f32; 256];
        for (out, logit) in exponentials.iter_mut().zip(part) {
            *out = math::exp(logit - most);
        }
        total += exponentials[..part.len()].iter().map(|e| f64::from(*e)).sum::<f64>();
    }
    total.ln() - f64::from(row[target] - most)
}

/// Gradient of `scale` times the summed loss: `scale * (softmax - one hot)`.
pub(crate) fn loss_backward(logits: &Tensor, targets: &[u32], scale: f64) -> Result<Tensor> {
    if !logits.device().is_cpu() {
        return composed_backward(logits, targets, scale);
    }
    let width = logits.dim(1)?;
    let rows = host(logits)?;
    let mut out = vec![0f32; rows.len()];
    for_row_blocks(&mut out, width, 4, |first, out| {
        for (index, out) in out.chunks_exact_mut(width).enumerate() {
            let row = &rows[(first + index) * width..][..width];
            let most = math::max(row);
            for (out, logit) in out.iter_mut().zip(row) {
                *out = math::exp(logit - most);
            }
            let factor = scale as f32 / math::sum(out);
            for out in out.iter_mut() {
                *out *= factor;
            }
            out[targets[first + index] as usize] -= scale as f32;
        }
    });
    Tensor::from_vec(out, logits.shape(), logits.device())
}

fn composed_backward(logits: &Tensor, targets: &[u32], scale: f64) -> Result<Tensor> {
    let targets = Tensor::new(targets, logits.device())?.unsqueeze(1)?;
    let minus_one = targets.to_dtype(DType::F32)?.zeros_like()?.affine(1.0, -1.0)?;
    softmax(logits, D::Minus1)?.scatter_add(&targets, &minus_one, 1)? * scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn loss_and_gradient_agree_with_the_definition() {
        let logits = (random(&[50, 300], 1) * 3.0).unwrap();
        let targets: Vec<u32> = (0..50).map(|row| row * 6).collect();
        let grad = loss_backward(&logits, &targets, 0.25).unwrap();
        assert_close(&grad, &composed_backward(&logits, &targets, 0.25).unwrap(), 1e-6);
        let nll = negative_log_likelihoods(&logits, &targets).unwrap();
        for ((row, target), nll) in logits.to_vec2::<f32>().unwrap().iter().zip(targets).zip(nll) {
            let total: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            let exact = total.ln() - f64::from(row[target as usize]);
            assert!((nll - exact).abs() < 1e-6, "{nll} {exact}");
        }
    }
}
