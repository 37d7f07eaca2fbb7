//! `x wᵀ`: weights as they lie in memory, rows of activations packed. Each weight is read once,
//! which is what decoding a few sequences takes its time for.

use super::kernel::{Block, Kernel, Left, SIDE, STEP, Sums, Tiles};
use super::tiles::{self, Tile};
use super::{Parts, Rows};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of activations, packed once for all weights that they are multiplied with.
pub(crate) struct Inputs {
    tiles: Vec<Tile>,
    rows: usize,
    width: usize,
    kernel: Kernel,
}

impl Inputs {
    /// `x` is `[rows, width]`.
    pub(crate) fn new(kernel: Kernel, x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let tiles = tiles::of_columns(kernel, x, width);
        Self { tiles, rows: x.len() / width, width, kernel }
    }

    fn steps(&self) -> usize {
        self.width.div_ceil(STEP)
    }

    /// Of the 16 rows of a group.
    fn tiles(&self, group: usize, steps: &Range<usize>) -> &[Tile] {
        &self.tiles[group * self.steps()..][steps.clone()]
    }
}

/// `out = Σ x wᵀ + bias` over the terms: `[rows, columns]`, with a weight `[columns, width]` each.
pub(crate) struct Projection<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) terms: Vec<(&'a Inputs, Rows<'a>)>,
    pub(crate) bias: Option<&'a [f32]>,
}

/// Rows of weights that one task takes at once where activations are many, so that they are in its
/// cache for all of them; of the inner dimension it takes so many steps at a time.
const PANEL: usize = 128;
const DEPTH: usize = 32;

/// Several at once: their weights make one list of work for the threads.
pub(crate) fn project(projections: Vec<Projection<'_>>) {
    let jobs: Vec<Job<'_>> = projections.into_iter().filter_map(Job::new).collect();
    let panels = jobs.iter().enumerate();
    let panels: Vec<_> = panels.flat_map(|(at, job)| job.panels().map(move |p| (at, p))).collect();
    let Some(kernel) = jobs.first().map(Job::kernel) else { return };
    let work = |panels: &[(usize, Range<usize>)]| {
        let _session = kernel.session();
        let mut room = Room::default();
        for (job, panel) in panels {
            jobs[*job].project(panel, &mut room);
        }
    };
    let tasks = 4 * rayon::current_num_threads();
    match panels.len() {
        0 | 1 => work(&panels),
        count => panels.par_chunks(count.div_ceil(tasks)).for_each(work),
    }
}

struct Job<'a> {
    out: Parts<'a>,
    terms: Vec<(&'a Inputs, Rows<'a>)>,
    bias: Option<&'a [f32]>,
    rows: usize,
    columns: usize,
}

/// What a task uses again for each panel.
#[derive(Default)]
struct Room {
    blocks: Vec<Block>,
    padded: Vec<bf16>,
}

impl<'a> Job<'a> {
    /// `None` where there is nothing to compute.
    fn new(Projection { out, terms, bias }: Projection<'a>) -> Option<Self> {
        let (first, weight) = terms.first()?;
        let (rows, columns) = (first.rows, weight.count());
        assert_eq!(out.len(), rows * columns);
        assert!(bias.is_none_or(|bias| bias.len() == columns));
        for (x, weight) in &terms {
            assert!(x.rows == rows && weight.count() == columns && x.width == weight.width);
        }
        let out = (columns > 0).then(|| Parts::new(out, columns))?;
        Some(Self { out, terms, bias, rows, columns })
    }

    fn kernel(&self) -> Kernel {
        self.terms[0].0.kernel
    }

    fn panels(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let columns = self.columns;
        let panel = if self.rows > 2 * SIDE { PANEL } else { 2 * SIDE };
        (0..columns).step_by(panel).map(move |from| from..columns.min(from + panel))
    }

    fn project(&self, panel: &Range<usize>, room: &mut Room) {
        let kernel = self.kernel();
        let groups = self.rows.div_ceil(SIDE);
        for group in (0..groups).step_by(2) {
            room.blocks.clear();
            room.blocks.extend(parts(panel).map(|part| self.biased(part)));
            for (x, weight) in &self.terms {
                for from in (0..x.steps()).step_by(DEPTH) {
                    let steps = from..x.steps().min(from + DEPTH);
                    let first = x.tiles(group, &steps);
                    let second = (group + 1 < groups).then(|| x.tiles(group + 1, &steps));
                    for (block, part) in room.blocks.iter_mut().zip(parts(panel)) {
                        let left = left(*weight, part, &steps, &mut room.padded);
                        kernel.multiply(block, left, Tiles { first, second });
                    }
                }
            }
            for (block, part) in room.blocks.iter().zip(parts(panel)) {
                self.write(block, part.start, panel.end, group * SIDE);
            }
        }
    }

    /// Sums of columns (down) by rows (across) that begin with the bias.
    fn biased(&self, columns: Range<usize>) -> Block {
        let mut block = [[Sums::ZERO; 2]; 2];
        let Some(bias) = self.bias else { return block };
        for (index, bias) in bias[columns].iter().enumerate() {
            for tile in &mut block[index / SIDE] {
                tile.0[index % SIDE * SIDE..][..SIDE].fill(*bias);
            }
        }
        block
    }

    fn write(&self, block: &Block, column: usize, end: usize, row: usize) {
        for (tiles, column) in block.iter().zip([column, column + SIDE]) {
            for (sums, row) in tiles.iter().zip([row, row + SIDE]) {
                if column < end && row < self.rows {
                    let sums = sums.transposed(self.kernel());
                    #[expect(unsafe_code, reason = "a panel's columns are its task's alone")]
                    // SAFETY: see the reason.
                    unsafe {
                        self.out.write(&sums, row, column, end);
                    }
                }
            }
        }
    }
}

/// A panel by what is multiplied at once.
fn parts(panel: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = panel.end;
    panel.clone().step_by(2 * SIDE).map(move |from| from..end.min(from + 2 * SIDE))
}

/// Rows of a weight in whole tiles: where they are not, a copy with zeros.
fn left<'a>(
    weight: Rows<'a>,
    rows: Range<usize>,
    steps: &Range<usize>,
    padded: &'a mut Vec<bf16>,
) -> Left<'a> {
    let count = if rows.len() <= SIDE { SIDE } else { 2 * SIDE };
    let (width, columns) = (weight.width, steps.start * STEP..steps.end * STEP);
    if rows.len() == count && columns.end <= width {
        let values = &weight.values[rows.start * width + columns.start..rows.end * width];
        return Left { values, stride: width, rows: count };
    }
    let stride = columns.len();
    padded.clear();
    padded.resize(count * stride, bf16::ZERO);
    let columns = columns.start..width.min(columns.end);
    for (row, out) in rows.zip(padded.chunks_exact_mut(stride)) {
        out[..columns.len()].copy_from_slice(&weight.values[row * width..][columns.clone()]);
    }
    Left { values: padded, stride, rows: count }
}
