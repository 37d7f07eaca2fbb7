//! The gated activation of the feed-forward part.

use super::{for_row_blocks, host_f32, math};
use candle_core::{Result, Tensor};

/// Computes `silu(gate) * up`.
pub(crate) fn swiglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if !gate.device().is_cpu() {
        return gate.silu()? * up;
    }
    let (gates, ups) = (host_f32(gate)?, host_f32(up)?);
    let mut out = vec![0f32; gates.len()];
    for_row_blocks(
        &mut out,
        1,
        4,
        #[inline(always)]
        |first, out| {
            for ((out, gate), up) in out.iter_mut().zip(&gates[first..]).zip(&ups[first..]) {
                *out = gate * math::logistic_sigmoid(*gate) * up;
            }
        },
    );
    Tensor::from_vec(out, gate.shape(), gate.device())
}

pub(crate) fn swiglu_backward(
    gate: &Tensor,
    up: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor)> {
    if !gate.device().is_cpu() {
        let sigmoid = candle_nn::ops::sigmoid(gate)?;
        let silu = (gate * &sigmoid)?;
        let slope = (&sigmoid + (&silu * (1.0 - &sigmoid)?)?)?;
        return Ok((((grad * up)? * slope)?, (grad * silu)?));
    }
    let (gates, ups, grads) = (host_f32(gate)?, host_f32(up)?, host_f32(grad)?);
    let mut gate_grad = vec![0f32; gates.len()];
    for_row_blocks(
        &mut gate_grad,
        1,
        4,
        #[inline(always)]
        |first, out| {
            let inputs = gates[first..].iter().zip(&ups[first..]).zip(&grads[first..]);
            for (out, ((gate, up), grad)) in out.iter_mut().zip(inputs) {
                let sigmoid = math::logistic_sigmoid(*gate);
                *out = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
            }
        },
    );
    let mut up_grad = vec![0f32; gates.len()];
    for_row_blocks(
        &mut up_grad,
        1,
        4,
        #[inline(always)]
        |first, out| {
            for ((out, gate), grad) in out.iter_mut().zip(&gates[first..]).zip(&grads[first..]) {
                *out = grad * gate * math::logistic_sigmoid(*gate);
            }
        },
    );
    let tensor = |values| Tensor::from_vec(values, gate.shape(), gate.device());
    Ok((tensor(gate_grad)?, tensor(up_grad)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};
    use candle_core::Var;

    #[test]
    fn swiglu_and_its_gradient_agree_with_candle_s() {
        let gate = Var::from_tensor(&random(&[90, 200], 1)).unwrap();
        let up = Var::from_tensor(&random(&[90, 200], 2)).unwrap();
        let weights = random(&[90, 200], 3);
        let naive = (gate.silu().unwrap() * up.as_tensor()).unwrap();
        assert_close(&swiglu_forward(&gate, &up).unwrap(), &naive, 1e-5);
        let grads = (naive * &weights).unwrap().sum_all().unwrap().backward().unwrap();
        let (gate_grad, up_grad) = swiglu_backward(&gate, &up, &weights).unwrap();
        assert_close(&gate_grad, grads.get(&gate).unwrap(), 1e-5);
        assert_close(&up_grad, grads.get(&up).unwrap(), 1e-5);
    }
}
