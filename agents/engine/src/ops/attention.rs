//! Causal attention with grouped heads over packed sequences: the rows of several sequences one
//! after another, without padding. A row attends to the rows of its own sequence up to itself.

mod backward;
mod composed;
mod forward;
mod tile;

use super::{for_sized_blocks, host_f32};
use candle_core::{Result, Tensor};
pub(crate) use composed::attend_sequence;
pub(crate) use forward::{AttentionContext, AttentionTask};
use std::ops::Range;
pub(crate) use tile::{TileBuffer, TransposedBlocks};

#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadShape {
    pub(crate) count: usize,
    /// A divisor of `count`.
    pub(crate) kv_count: usize,
    pub(crate) dim: usize,
}

impl HeadShape {
    pub(crate) fn query_width(&self) -> usize {
        self.count * self.dim
    }

    pub(crate) fn kv_width(&self) -> usize {
        self.kv_count * self.dim
    }

    /// Returns 1 / sqrt(dim).
    fn score_scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    #[inline(always)]
    fn kv_head_of(&self, head: usize) -> usize {
        head / self.group_size()
    }

    fn group_size(&self) -> usize {
        self.count / self.kv_count
    }
}

/// Yields the index of each sequence with rows in the range, and its part of them.
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

/// Enough rows to fill tiles.
const TASK_ROWS: usize = 16;

/// Attends within `sequences`, disjoint ranges of rows.
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

/// The inputs and output of `causal_attention`, and the gradient of the output.
pub(crate) struct AttentionBackward<'a> {
    pub(crate) heads: &'a HeadShape,
    pub(crate) query: &'a Tensor,
    pub(crate) key: &'a Tensor,
    pub(crate) value: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) grad: &'a Tensor,
    pub(crate) sequences: &'a [Range<usize>],
}

pub(crate) struct AttentionGradients {
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
}

impl AttentionBackward<'_> {
    pub(crate) fn run(&self) -> Result<AttentionGradients> {
        if self.query.device().is_cpu() {
            self.run_kernels()
        } else {
            composed::backward_composed(self)
        }
    }
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
