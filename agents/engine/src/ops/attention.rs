//! Causal attention with grouped heads over packed sequences: the rows of several sequences one
//! after another, without padding. A row attends to the rows of its own sequence up to itself.

mod backward;
mod composed;
mod forward;
mod tile;

use super::{for_sized_blocks, host_f32};
pub(crate) use backward::{AttentionBackward, AttentionGradients};
use candle_core::{Result, Tensor};
pub(crate) use composed::attend_sequence;
pub(crate) use forward::{AttentionContext, AttentionTask};
use std::ops::Range;
pub(crate) use tile::{TileBuffer, TransposedBlocks};

/// The number and size of attention heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadShape {
    /// The number of query heads.
    pub(crate) count: usize,
    /// The number of key and value heads, a divisor of `count`.
    pub(crate) kv_count: usize,
    /// The number of elements of a head.
    pub(crate) dim: usize,
}

impl HeadShape {
    /// Returns the width of a row of queries.
    pub(crate) fn query_width(&self) -> usize {
        self.count * self.dim
    }

    /// Returns the width of a row of keys or values.
    pub(crate) fn kv_width(&self) -> usize {
        self.kv_count * self.dim
    }

    /// Returns the factor of the scores, 1 / sqrt(dim).
    fn score_scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// Returns the key and value head of a query head.
    #[inline(always)]
    fn kv_head_of(&self, head: usize) -> usize {
        head / self.group_size()
    }

    /// Returns the number of query heads that share a key and value head.
    fn group_size(&self) -> usize {
        self.count / self.kv_count
    }
}

/// Splits rows at the ends of sequences. Yields the index of each sequence and its part of the
/// rows.
fn split_by_sequence(
    sequences: &[Range<usize>],
    rows: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let part = move |(number, sequence): (usize, &Range<usize>)| {
        let run = sequence.start.max(rows.start)..sequence.end.min(rows.end);
        (!run.is_empty()).then_some((number, run))
    };
    sequences.iter().enumerate().filter_map(part)
}

/// The number of rows of a task, enough to fill tiles.
const TASK_ROWS: usize = 16;

/// Computes the attention of packed rows. `sequences` are disjoint ranges of rows.
pub(crate) fn causal_attention(
    heads: &HeadShape,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &[Range<usize>],
) -> Result<Tensor> {
    if !query.device().is_cpu() {
        return composed::forward_composed(heads, query, key, value, sequences);
    }
    let (width, kv_width) = (heads.query_width(), heads.kv_width());
    let (queries, keys, values) = (host_f32(query)?, host_f32(key)?, host_f32(value)?);
    let of = |rows: &Range<usize>| &keys[rows.start * kv_width..rows.end * kv_width];
    let blocks =
        sequences.iter().map(|rows| TransposedBlocks::new(of(rows), heads.kv_count, heads.dim));
    let blocks: Vec<TransposedBlocks> = blocks.collect();
    let mut out = vec![0f32; queries.len()];
    for_sized_blocks(TASK_ROWS, &mut out, width, |first, out| {
        let mut scores = TileBuffer::default();
        for (sequence, run) in split_by_sequence(sequences, first..first + out.len() / width) {
            let start = sequences[sequence].start;
            pulp::Arch::new().dispatch(AttentionTask {
                heads,
                context: AttentionContext {
                    keys: &blocks[sequence],
                    values: &values[start * kv_width..],
                },
                seen: run.start - start + 1,
                queries: &queries[run.start * width..run.end * width],
                out: &mut out[(run.start - first) * width..(run.end - first) * width],
                scores: &mut scores,
            });
        }
    });
    Tensor::from_vec(out, query.shape(), query.device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    #[test]
    fn the_kernels_agree_with_the_composed_forms() {
        let heads = HeadShape { count: 4, kv_count: 2, dim: 24 };
        let rows = 120;
        let query = random(&[rows, heads.query_width()], 1);
        let key = random(&[rows, heads.kv_width()], 2);
        let value = random(&[rows, heads.kv_width()], 3);
        let grad = random(&[rows, heads.query_width()], 4);
        let sequences = [0..1, 1..70, 70..rows];
        let out = causal_attention(&heads, &query, &key, &value, &sequences).unwrap();
        assert_close(
            &out,
            &composed::forward_composed(&heads, &query, &key, &value, &sequences).unwrap(),
            1e-5,
        );
        let backward = AttentionBackward {
            heads: &heads,
            query: &query,
            key: &key,
            value: &value,
            out: &out,
            grad: &grad,
            sequences: &sequences,
        };
        let (fast, naive) =
            (backward.run().unwrap(), composed::backward_composed(&backward).unwrap());
        assert_close(&fast.query, &naive.query, 1e-4);
        assert_close(&fast.key, &naive.key, 1e-4);
        assert_close(&fast.value, &naive.value, 1e-4);
    }
}
