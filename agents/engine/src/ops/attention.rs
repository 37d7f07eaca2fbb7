//! Causal attention with grouped heads over packed sequences: rows of several sequences one after
//! another, no padding. A row attends to the rows of its own sequence up to itself.

mod composed;

use super::{for_row_blocks, host, math};
use candle_core::{Result, Tensor};
pub(crate) use composed::composed_sequence;
use std::ops::Range;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) count: usize,
    pub(crate) kv_count: usize,
    pub(crate) dim: usize,
}

impl Heads {
    pub(crate) fn width(&self) -> usize {
        self.count * self.dim
    }

    pub(crate) fn kv_width(&self) -> usize {
        self.kv_count * self.dim
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    #[inline(always)]
    fn kv_of(&self, head: usize) -> usize {
        head / self.group()
    }

    fn group(&self) -> usize {
        self.count / self.kv_count
    }
}

/// One row of queries against the `keys` and `values` it may see, `[seen, kv_width]` each. The
/// same code serves packed and cached attention, so both give the same bits.
#[inline(always)]
pub(crate) fn attend_row(
    heads: &Heads,
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    for head in 0..heads.count {
        let offset = heads.kv_of(head) * heads.dim;
        let query = &query[head * heads.dim..][..heads.dim];
        let (_, total) = softmax_row(heads, query, keys, offset, scores);
        let out = &mut out[head * heads.dim..][..heads.dim];
        out.fill(0.0);
        for (score, value) in scores.iter().zip(values.chunks_exact(heads.kv_width())) {
            math::add_scaled(out, *score, &value[offset..][..heads.dim]);
        }
        for out in out {
            *out /= total;
        }
    }
}

/// Leaves the unnormalised probabilities in `scores`; returns the largest logit and their sum.
#[inline(always)]
fn softmax_row(
    heads: &Heads,
    query: &[f32],
    keys: &[f32],
    offset: usize,
    scores: &mut Vec<f32>,
) -> (f32, f32) {
    let scale = heads.scale();
    scores.clear();
    for key in keys.chunks_exact(heads.kv_width()) {
        scores.push(scale * math::dot(query, &key[offset..][..heads.dim]));
    }
    let most = math::max(scores);
    for score in &mut *scores {
        *score = math::exp(*score - most);
    }
    (most, math::sum(scores))
}

/// The sequence each row belongs to.
fn sequence_of_rows(sequences: &[Range<usize>], rows: usize) -> Vec<Range<usize>> {
    let mut of_rows = vec![0..0; rows];
    for sequence in sequences {
        of_rows[sequence.clone()].fill(sequence.clone());
    }
    of_rows
}

/// `sequences` are disjoint ranges of rows.
pub(crate) fn causal_attention(
    heads: &Heads,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &[Range<usize>],
) -> Result<Tensor> {
    if !query.device().is_cpu() {
        return composed::forward(heads, query, key, value, sequences);
    }
    let (width, kv_width) = (heads.width(), heads.kv_width());
    let (queries, keys, values) = (host(query)?, host(key)?, host(value)?);
    let of_rows = sequence_of_rows(sequences, query.dim(0)?);
    let mut out = vec![0f32; queries.len()];
    for_row_blocks(&mut out, width, longest(sequences), |first, out| {
        let mut scores = Vec::new();
        for (index, out) in out.chunks_exact_mut(width).enumerate() {
            let row = first + index;
            let seen = of_rows[row].start * kv_width..(row + 1) * kv_width;
            let query = &queries[row * width..][..width];
            attend_row(heads, query, &keys[seen.clone()], &values[seen], &mut scores, out);
        }
    });
    Tensor::from_vec(out, query.shape(), query.device())
}

fn longest(sequences: &[Range<usize>]) -> usize {
    sequences.iter().map(Range::len).max().unwrap_or(0)
}

pub(crate) struct Gradients {
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
}

/// The inputs and output of [`causal_attention`], and the gradient of the output.
pub(crate) struct Backward<'a> {
    pub(crate) heads: &'a Heads,
    pub(crate) query: &'a Tensor,
    pub(crate) key: &'a Tensor,
    pub(crate) value: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) grad: &'a Tensor,
    pub(crate) sequences: &'a [Range<usize>],
}

impl Backward<'_> {
    /// Recomputes the probabilities: once for the queries, row by row, and once for keys and
    /// values, so that both split over rows without sharing a sum.
    pub(crate) fn run(&self) -> Result<Gradients> {
        if !self.query.device().is_cpu() {
            return composed::backward(self);
        }
        let of_rows = sequence_of_rows(self.sequences, self.query.dim(0)?);
        let (query, statistics) = self.query_gradient(&of_rows)?;
        let (key, value) = self.key_value_gradients(&of_rows, &statistics)?;
        Ok(Gradients { query, key, value })
    }

    /// Also returns, for each row and head: log of the softmax's sum, and grad · out.
    fn query_gradient(&self, of_rows: &[Range<usize>]) -> Result<(Tensor, Vec<[f32; 2]>)> {
        let heads = self.heads;
        let (width, kv_width, dim) = (heads.width(), heads.kv_width(), heads.dim);
        let (queries, keys, values) = (host(self.query)?, host(self.key)?, host(self.value)?);
        let (outs, grads) = (host(self.out)?, host(self.grad)?);
        // A row is its gradient followed by its statistics.
        let wide = width + 2 * heads.count;
        let mut both = vec![0f32; of_rows.len() * wide];
        for_row_blocks(&mut both, wide, 2 * longest(self.sequences), |first, rows| {
            let mut scores = Vec::new();
            for (index, both) in rows.chunks_exact_mut(wide).enumerate() {
                let row = first + index;
                let (out, statistics) = both.split_at_mut(width);
                let seen = of_rows[row].start * kv_width..(row + 1) * kv_width;
                let (keys, values) = (&keys[seen.clone()], &values[seen]);
                for head in 0..heads.count {
                    let part = row * width + head * dim..row * width + (head + 1) * dim;
                    let offset = heads.kv_of(head) * dim;
                    let (most, total) =
                        softmax_row(heads, &queries[part.clone()], keys, offset, &mut scores);
                    let along = math::dot(&grads[part.clone()], &outs[part.clone()]);
                    let out = &mut out[head * dim..][..dim];
                    let pairs = keys.chunks_exact(kv_width).zip(values.chunks_exact(kv_width));
                    for (score, (key, value)) in scores.iter().zip(pairs) {
                        let value_grad = math::dot(&grads[part.clone()], &value[offset..][..dim]);
                        let factor = score / total * (value_grad - along) * heads.scale();
                        math::add_scaled(out, factor, &key[offset..][..dim]);
                    }
                    statistics[2 * head] = most + total.ln();
                    statistics[2 * head + 1] = along;
                }
            }
        });
        let mut gradient = Vec::with_capacity(of_rows.len() * width);
        let mut statistics = Vec::with_capacity(of_rows.len() * heads.count);
        for row in both.chunks_exact(wide) {
            gradient.extend_from_slice(&row[..width]);
            statistics.extend(row[width..].chunks_exact(2).map(|pair| [pair[0], pair[1]]));
        }
        Ok((Tensor::from_vec(gradient, self.query.shape(), self.query.device())?, statistics))
    }

    fn key_value_gradients(
        &self,
        of_rows: &[Range<usize>],
        statistics: &[[f32; 2]],
    ) -> Result<(Tensor, Tensor)> {
        let heads = self.heads;
        let (width, kv_width, dim) = (heads.width(), heads.kv_width(), heads.dim);
        let (queries, keys, values) = (host(self.query)?, host(self.key)?, host(self.value)?);
        let grads = host(self.grad)?;
        // A row is the gradient of its key, then of its value.
        let mut both = vec![0f32; of_rows.len() * 2 * kv_width];
        for_row_blocks(&mut both, 2 * kv_width, 2 * longest(self.sequences), |first, rows| {
            for (index, both) in rows.chunks_exact_mut(2 * kv_width).enumerate() {
                let row = first + index;
                let (key_out, value_out) = both.split_at_mut(kv_width);
                for head in 0..heads.count {
                    let offset = heads.kv_of(head) * dim;
                    let key = &keys[row * kv_width + offset..][..dim];
                    let value = &values[row * kv_width + offset..][..dim];
                    let key_out = &mut key_out[offset..][..dim];
                    let value_out = &mut value_out[offset..][..dim];
                    for later in row..of_rows[row].end {
                        let query = &queries[later * width + head * dim..][..dim];
                        let grad = &grads[later * width + head * dim..][..dim];
                        let [log_sum, along] = statistics[later * heads.count + head];
                        let score = heads.scale() * math::dot(query, key);
                        let probability = math::exp(score - log_sum);
                        math::add_scaled(value_out, probability, grad);
                        let factor = probability * (math::dot(grad, value) - along) * heads.scale();
                        math::add_scaled(key_out, factor, query);
                    }
                }
            }
        });
        let both = Tensor::from_vec(both, (of_rows.len(), 2 * kv_width), self.key.device())?;
        let part = |at| both.narrow(1, at, kv_width)?.contiguous();
        Ok((part(0)?, part(kv_width)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn the_kernels_agree_with_the_composed_forms() {
        let heads = Heads { count: 4, kv_count: 2, dim: 24 };
        let rows = 120;
        let query = random(&[rows, heads.width()], 1);
        let key = random(&[rows, heads.kv_width()], 2);
        let value = random(&[rows, heads.kv_width()], 3);
        let grad = random(&[rows, heads.width()], 4);
        let sequences = [0..1, 1..70, 70..rows];
        let out = causal_attention(&heads, &query, &key, &value, &sequences).unwrap();
        assert_close(
            &out,
            &composed::forward(&heads, &query, &key, &value, &sequences).unwrap(),
            1e-5,
        );
        let backward = Backward {
            heads: &heads,
            query: &query,
            key: &key,
            value: &value,
            out: &out,
            grad: &grad,
            sequences: &sequences,
        };
        let (fast, naive) = (backward.run().unwrap(), composed::backward(&backward).unwrap());
        assert_close(&fast.query, &naive.query, 1e-4);
        assert_close(&fast.key, &naive.key, 1e-4);
        assert_close(&fast.value, &naive.value, 1e-4);
    }
}
