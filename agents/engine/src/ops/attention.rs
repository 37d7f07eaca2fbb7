//! Causal attention with grouped heads over packed sequences: rows of several sequences one after
//! another, no padding. A row attends to the rows of its own sequence up to itself.

mod backward;
mod composed;
mod forward;
mod tile;

use super::{for_blocks_of, host};
pub(crate) use backward::{Backward, Gradients};
use candle_core::{Result, Tensor};
pub(crate) use composed::composed_sequence;
pub(crate) use forward::{Attend, Context};
use std::ops::Range;
pub(crate) use tile::{Blocks, Numbers};

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

/// Rows cut where sequences end: a sequence's number and some of its rows each.
fn runs(
    sequences: &[Range<usize>],
    rows: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let part = move |(number, sequence): (usize, &Range<usize>)| {
        let run = sequence.start.max(rows.start)..sequence.end.min(rows.end);
        (!run.is_empty()).then_some((number, run))
    };
    sequences.iter().enumerate().filter_map(part)
}

/// Rows of a task: enough to fill tiles.
const TASK_ROWS: usize = 16;

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
    let of = |rows: &Range<usize>| &keys[rows.start * kv_width..rows.end * kv_width];
    let blocks = sequences.iter().map(|rows| Blocks::new(of(rows), heads.kv_count, heads.dim));
    let blocks: Vec<Blocks> = blocks.collect();
    let mut out = vec![0f32; queries.len()];
    for_blocks_of(TASK_ROWS, &mut out, width, |first, out| {
        let mut scores = Numbers::default();
        for (sequence, run) in runs(sequences, first..first + out.len() / width) {
            let start = sequences[sequence].start;
            pulp::Arch::new().dispatch(Attend {
                heads,
                context: Context { keys: &blocks[sequence], values: &values[start * kv_width..] },
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
