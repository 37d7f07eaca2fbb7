//! Rows of activations packed into tiles; weights as they lie in memory.

use super::super::Rows;
use super::super::kernel::{Block, Left, SIDE, STEP, Sums, Tiles};
use super::super::tiles::Tile;
use super::Job;
use half::bf16;
use std::ops::Range;

/// Activations are as many as the job's rows, and as wide as the weight.
pub(super) struct Term<'a> {
    pub(super) tiles: &'a [Tile],
    pub(super) weight: Rows<'a>,
}

impl Term<'_> {
    fn steps(&self) -> usize {
        self.weight.width.div_ceil(STEP)
    }

    /// Of the 16 rows of a group.
    fn tiles(&self, group: usize, steps: &Range<usize>) -> &[Tile] {
        &self.tiles[group * self.steps()..][steps.clone()]
    }
}

#[derive(Default)]
pub(super) struct Room {
    blocks: Vec<Block>,
    padded: Vec<bf16>,
}

/// Steps of the inner dimension that are taken at a time.
const DEPTH: usize = 32;

pub(super) fn project(job: &Job<'_>, terms: &[Term<'_>], panel: &Range<usize>, room: &mut Room) {
    let groups = job.rows.div_ceil(SIDE);
    for group in (0..groups).step_by(2) {
        room.blocks.clear();
        room.blocks.extend(parts(panel).map(|part| biased(job, part)));
        for term in terms {
            for from in (0..term.steps()).step_by(DEPTH) {
                let steps = from..term.steps().min(from + DEPTH);
                let first = term.tiles(group, &steps);
                let second = (group + 1 < groups).then(|| term.tiles(group + 1, &steps));
                for (block, part) in room.blocks.iter_mut().zip(parts(panel)) {
                    let left = left(term.weight, part, &steps, &mut room.padded);
                    job.kernel.multiply(block, left, Tiles { first, second });
                }
            }
        }
        for (block, part) in room.blocks.iter().zip(parts(panel)) {
            write(job, block, part.start, panel.end, group * SIDE);
        }
    }
}

/// Sums of columns (down) by rows (across) that begin with the bias.
fn biased(job: &Job<'_>, columns: Range<usize>) -> Block {
    let mut block = [[Sums::ZERO; 2]; 2];
    let Some(bias) = job.bias else { return block };
    for (index, bias) in bias[columns].iter().enumerate() {
        for tile in &mut block[index / SIDE] {
            tile.0[index % SIDE * SIDE..][..SIDE].fill(*bias);
        }
    }
    block
}

fn write(job: &Job<'_>, block: &Block, column: usize, end: usize, row: usize) {
    for (tiles, column) in block.iter().zip([column, column + SIDE]) {
        for (sums, row) in tiles.iter().zip([row, row + SIDE]) {
            if column < end && row < job.rows {
                let sums = sums.transposed(job.kernel);
                #[expect(unsafe_code, reason = "a panel's columns are its task's alone")]
                // SAFETY: see the reason.
                unsafe {
                    job.out.write(&sums, row, column, end);
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
