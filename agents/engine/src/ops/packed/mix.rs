//! `left · right`: the rows of weights or activations in other proportions, which is what gradients
//! are made of. What is on the right is packed, each strip of its columns by the task that uses it.

use super::kernel::{Block, Kernel, Left, SIDE, STEP, Sums, Tiles};
use super::tiles::{self, Tile};
use super::{Parts, Rows};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of f32 as bf16, with zeros up to whole tiles.
pub(crate) struct Factors {
    values: Vec<bf16>,
    rows: usize,
    width: usize,
    kernel: Kernel,
}

impl Factors {
    /// `x` is `[rows, width]`.
    pub(crate) fn new(kernel: Kernel, x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let mut factors = Self::zeros(kernel, x.len() / width, width);
        tiles::narrow_rows(x, width, factors.stride(), &mut factors.values);
        factors
    }

    /// The transpose of `x`, which is `[width, rows]`.
    pub(crate) fn transposed(kernel: Kernel, x: &[f32], rows: usize) -> Self {
        assert!(rows > 0 && x.len().is_multiple_of(rows));
        let mut factors = Self::zeros(kernel, rows, x.len() / rows);
        let stride = factors.stride();
        for (column, x) in x.chunks_exact(rows).enumerate() {
            for (out, x) in factors.values[column..].iter_mut().step_by(stride).zip(x) {
                *out = bf16::from_f32(*x);
            }
        }
        factors
    }

    fn zeros(kernel: Kernel, rows: usize, width: usize) -> Self {
        let values = rows.next_multiple_of(SIDE) * width.next_multiple_of(STEP);
        Self { values: vec![bf16::ZERO; values], rows, width, kernel }
    }

    fn stride(&self) -> usize {
        self.width.next_multiple_of(STEP)
    }
}

/// `[inner, columns]`, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Right<'a> {
    Bf16(Rows<'a>),
    F32(&'a [f32]),
}

impl Right<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bf16(rows) => rows.values.len(),
            Self::F32(values) => values.len(),
        }
    }

    fn pack(&self, rows: &Range<usize>, width: usize, column: usize, tiles: &mut [Tile]) {
        let values = rows.start * width..rows.end * width;
        match self {
            Self::Bf16(rows) => tiles::of_rows(&rows.values[values], width, column, tiles),
            Self::F32(rows) => tiles::of_rows(&rows[values], width, column, tiles),
        }
    }
}

/// Columns of a task, rows that it packs at once, and rows of the result whose sums it keeps.
const STRIP: usize = 64;
const DEPTH: usize = 32 * STEP;
const HEIGHT: usize = 1024;

/// `out = Σ left · right` over the terms, `[rows, columns]`.
pub(crate) fn mix(out: &mut [f32], columns: usize, terms: &[(&Factors, Right<'_>)]) {
    let Some((first, _)) = terms.first() else { return };
    let (rows, kernel) = (first.rows, first.kernel);
    assert_eq!(out.len(), rows * columns);
    for (left, right) in terms {
        assert!(left.rows == rows && right.len() == left.width * columns);
    }
    if out.is_empty() {
        return;
    }
    let out = Parts::new(out, columns);
    let strips = |from| Range { start: from, end: columns.min(from + STRIP) };
    let strips: Vec<_> = (0..columns).step_by(STRIP).map(strips).collect();
    strips.into_par_iter().with_max_len(1).for_each(|strip| {
        let _session = kernel.session();
        for from in (0..rows).step_by(HEIGHT) {
            mix_strip(&out, terms, &strip, from..rows.min(from + HEIGHT));
        }
    });
}

fn mix_strip(
    out: &Parts<'_>,
    terms: &[(&Factors, Right<'_>)],
    strip: &Range<usize>,
    rows: Range<usize>,
) {
    let groups = strip.len().div_ceil(SIDE);
    let pairs = groups.div_ceil(2);
    let mut blocks: Vec<Block> = vec![[[Sums::ZERO; 2]; 2]; rows.len().div_ceil(2 * SIDE) * pairs];
    let mut tiles = Vec::new();
    for (left, right) in terms {
        for from in (0..left.width).step_by(DEPTH) {
            let inner = from..left.width.min(from + DEPTH);
            let steps = inner.len().div_ceil(STEP);
            tiles.clear();
            tiles.resize(groups * steps, Tile::ZERO);
            right.pack(&inner, out.width, strip.start, &mut tiles);
            let columns: Vec<&[Tile]> = tiles.chunks_exact(steps).collect();
            for (blocks, row) in blocks.chunks_exact_mut(pairs).zip(rows.clone().step_by(2 * SIDE))
            {
                let count = if left.rows - row <= SIDE { SIDE } else { 2 * SIDE };
                let values = &left.values[row * left.stride() + from..];
                let left_rows = Left { values, stride: left.stride(), rows: count };
                for (block, pair) in blocks.iter_mut().zip(columns.chunks(2)) {
                    let tiles = Tiles { first: pair[0], second: pair.get(1).copied() };
                    left.kernel.multiply(block, left_rows, tiles);
                }
            }
        }
    }
    for (blocks, row) in blocks.chunks_exact(pairs).zip(rows.step_by(2 * SIDE)) {
        for (block, column) in blocks.iter().zip(strip.clone().step_by(2 * SIDE)) {
            for (tiles, row) in block.iter().zip([row, row + SIDE]) {
                for (sums, column) in tiles.iter().zip([column, column + SIDE]) {
                    #[expect(unsafe_code, reason = "a strip's columns are its task's alone")]
                    // SAFETY: see the reason.
                    unsafe {
                        out.write(sums, row, column, strip.end);
                    }
                }
            }
        }
    }
}
