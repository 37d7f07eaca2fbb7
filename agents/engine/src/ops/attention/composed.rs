//! Attention and its gradients from candle's own operations, one sequence at a time: for devices
//! without kernels here, and for tests of the kernels.

use super::{AttentionBackward, AttentionGradients, HeadShape};
use candle_core::{D, DType, Result, Tensor};
use std::ops::Range;

pub(super) fn forward_composed(
    heads: &HeadShape,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &[Range<usize>],
) -> Result<Tensor> {
    let mut out = query.zeros_like()?;
    for sequence in sequences {
        let (start, rows) = (sequence.start, sequence.len());
        let part = attend_sequence(
            heads,
            &query.narrow(0, start, rows)?,
            &key.narrow(0, start, rows)?,
            &value.narrow(0, start, rows)?,
        )?;
        out = out.slice_assign(&[start..start + rows, 0..heads.query_width()], &part)?;
    }
    Ok(out)
}

/// Attends within one sequence. `query` may have fewer rows than `key`: the last ones.
pub(crate) fn attend_sequence(
    heads: &HeadShape,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
) -> Result<Tensor> {
    let q = split_heads(heads, query, heads.count)?;
    let k = split_heads(heads, key, heads.kv_count)?;
    let v = split_heads(heads, value, heads.kv_count)?;
    join_heads(&attention_probabilities(heads, &q, &k)?.matmul(&v)?)
}

/// Converts `[rows, count * dim]` to `[heads, rows, dim]`; key and value heads are repeated for
/// each query head of their group.
fn split_heads(heads: &HeadShape, x: &Tensor, count: usize) -> Result<Tensor> {
    let rows = x.dim(0)?;
    let x = x.reshape((rows, count, heads.dim))?.transpose(0, 1)?.contiguous()?;
    let group = heads.count / count;
    let x = x.unsqueeze(1)?.expand((count, group, rows, heads.dim))?.contiguous()?;
    x.reshape((heads.count, rows, heads.dim))
}

/// Converts `[heads, rows, dim]` to `[rows, heads * dim]`.
fn join_heads(x: &Tensor) -> Result<Tensor> {
    let (count, rows, dim) = x.dims3()?;
    x.transpose(0, 1)?.contiguous()?.reshape((rows, count * dim))
}

/// Sums the query heads of each key and value head.
fn sum_groups(heads: &HeadShape, x: &Tensor) -> Result<Tensor> {
    let (_, rows, dim) = x.dims3()?;
    x.reshape((heads.kv_count, heads.group_size(), rows, dim))?.sum(1)
}

fn attention_probabilities(heads: &HeadShape, q: &Tensor, k: &Tensor) -> Result<Tensor> {
    let (rows, seen) = (q.dim(1)?, k.dim(1)?);
    let scores = (q.matmul(&k.t()?)? * f64::from(heads.score_scale()))?;
    let column = Tensor::arange(0u32, seen as u32, q.device())?.unsqueeze(0)?;
    let row = Tensor::arange((seen - rows) as u32, seen as u32, q.device())?.unsqueeze(1)?;
    let hidden = column.broadcast_gt(&row)?.to_dtype(DType::F32)?;
    let scores = scores.broadcast_add(&(hidden * -1e30)?)?;
    candle_nn::ops::softmax(&scores, D::Minus1)
}

pub(super) fn backward_composed(pass: &AttentionBackward<'_>) -> Result<AttentionGradients> {
    let heads = pass.heads;
    let (mut query, mut key, mut value) =
        (pass.query.zeros_like()?, pass.key.zeros_like()?, pass.value.zeros_like()?);
    for sequence in pass.sequences {
        let (start, rows) = (sequence.start, sequence.len());
        let part = |x: &Tensor, count| split_heads(heads, &x.narrow(0, start, rows)?, count);
        let (q, k) = (part(pass.query, heads.count)?, part(pass.key, heads.kv_count)?);
        let (v, grad) = (part(pass.value, heads.kv_count)?, part(pass.grad, heads.count)?);
        let probabilities = attention_probabilities(heads, &q, &k)?;
        let value_grad = sum_groups(heads, &probabilities.t()?.matmul(&grad)?)?;
        let inner = grad.matmul(&v.t()?)?;
        let along = (&inner * &probabilities)?.sum_keepdim(D::Minus1)?;
        let scores = (probabilities * inner.broadcast_sub(&along)?)?;
        let scores = (scores * f64::from(heads.score_scale()))?;
        let query_grad = scores.matmul(&k)?;
        let key_grad = sum_groups(heads, &scores.t()?.contiguous()?.matmul(&q)?)?;
        query = query.slice_assign(
            &[start..start + rows, 0..heads.query_width()],
            &join_heads(&query_grad)?,
        )?;
        key =
            key.slice_assign(&[start..start + rows, 0..heads.kv_width()], &join_heads(&key_grad)?)?;
        value = value
            .slice_assign(&[start..start + rows, 0..heads.kv_width()], &join_heads(&value_grad)?)?;
    }
    Ok(AttentionGradients { query, key, value })
}
