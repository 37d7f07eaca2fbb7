//! Root mean square normalisation.

use super::{for_row_blocks, host_f32, math};
use candle_core::{D, Result, Tensor};

/// Divides each row by its root mean square and multiplies it with `weight`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return rms_norm_composed(x, weight, epsilon);
    }
    let width = x.dim(1)?;
    let (x_rows, scale) = (host_f32(x)?, host_f32(weight)?);
    let mut out = vec![0f32; x_rows.len()];
    for_row_blocks(
        &mut out,
        width,
        2,
        #[inline(always)]
        |first, out| {
            let rows = x_rows[first * width..].chunks_exact(width);
            for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
                let factor = inverse_rms(row, epsilon);
                for ((out, x), weight) in out.iter_mut().zip(row).zip(&*scale) {
                    *out = x * factor * weight;
                }
            }
        },
    );
    Tensor::from_vec(out, x.shape(), x.device())
}

/// Normalises each head of a row. All heads share `weight`, which is as wide as one head.
pub(crate) fn rms_norm_heads(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    rms_norm(&x.reshape(((), weight.dim(0)?))?, weight, epsilon)?.reshape(x.shape())
}

/// Returns 1 / sqrt(mean of the squares + epsilon)
#[inline(always)]
fn inverse_rms(row: &[f32], epsilon: f64) -> f32 {
    let mean = math::dot_product(row, row) / row.len() as f32;
    1.0 / (mean + epsilon as f32).sqrt()
}

fn rms_norm_composed(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    normalise_rows(x, epsilon)?.0.broadcast_mul(weight)
}

fn normalise_rows(x: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)> {
    let factor = (x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?.recip()?;
    Ok((x.broadcast_mul(&factor)?, factor))
}

/// Returns the gradient of the input, and with `with_weight` that of the weight.
pub(crate) fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    epsilon: f64,
    with_weight: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    if !x.device().is_cpu() {
        return rms_norm_backward_composed(x, weight, grad, epsilon, with_weight);
    }
    let width = x.dim(1)?;
    let (x_rows, scale, grads) = (host_f32(x)?, host_f32(weight)?, host_f32(grad)?);
    let mut out = vec![0f32; x_rows.len()];
    for_row_blocks(
        &mut out,
        width,
        3,
        #[inline(always)]
        |first, out| {
            let rows = x_rows[first * width..].chunks_exact(width);
            let grads = grads[first * width..].chunks_exact(width);
            for ((row, grad), out) in rows.zip(grads).zip(out.chunks_exact_mut(width)) {
                let factor = inverse_rms(row, epsilon);
                for ((out, grad), weight) in out.iter_mut().zip(grad).zip(&*scale) {
                    *out = grad * weight;
                }
                let along = math::dot_product(out, row) * factor * factor / width as f32;
                for (out, x) in out.iter_mut().zip(row) {
                    *out = factor * (*out - along * x);
                }
            }
        },
    );
    let weight_grad = if with_weight {
        let mut sums = vec![0f32; width];
        for_row_blocks(
            &mut sums,
            width,
            1,
            #[inline(always)]
            |_, sums| {
                for (row, grad) in x_rows.chunks_exact(width).zip(grads.chunks_exact(width)) {
                    let factor = inverse_rms(row, epsilon);
                    for ((sum, x), grad) in sums.iter_mut().zip(row).zip(grad) {
                        *sum += x * factor * grad;
                    }
                }
            },
        );
        Some(Tensor::from_vec(sums, width, x.device())?)
    } else {
        None
    };
    Ok((Tensor::from_vec(out, x.shape(), x.device())?, weight_grad))
}

pub(crate) fn rms_norm_heads_backward(
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    epsilon: f64,
    with_weight: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let heads = |of: &Tensor| of.reshape(((), weight.dim(0)?));
    let (input, weight_grad) =
        rms_norm_backward(&heads(x)?, weight, &heads(grad)?, epsilon, with_weight)?;
    Ok((input.reshape(x.shape())?, weight_grad))
}

fn rms_norm_backward_composed(
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    epsilon: f64,
    with_weight: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (normal, factor) = normalise_rows(x, epsilon)?;
    let inner = grad.broadcast_mul(weight)?;
    let along = (&inner * &normal)?.mean_keepdim(D::Minus1)?;
    let dx = (inner - normal.broadcast_mul(&along)?)?.broadcast_mul(&factor)?;
    let weight_grad = with_weight.then(|| (normal * grad)?.sum(0)).transpose()?;
    Ok((dx, weight_grad))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn the_kernel_agrees_with_the_composed_form() {
        let (x, weight, grad) = (random(&[300, 72], 1), random(&[72], 2), random(&[300, 72], 3));
        assert_close(
            &rms_norm(&x, &weight, 1e-6).unwrap(),
            &rms_norm_composed(&x, &weight, 1e-6).unwrap(),
            1e-5,
        );
        let (dx, dw) = rms_norm_backward(&x, &weight, &grad, 1e-6, true).unwrap();
        let (dx2, dw2) = rms_norm_backward_composed(&x, &weight, &grad, 1e-6, true).unwrap();
        assert_close(&dx, &dx2, 1e-4);
        assert_close(&dw.unwrap(), &dw2.unwrap(), 1e-3);
    }
}
