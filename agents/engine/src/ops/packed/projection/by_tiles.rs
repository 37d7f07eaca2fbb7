//! Products of rows of weights, as they lie in memory, with activations packed into tiles.

use super::super::Bf16Rows;
use super::super::kernel::{LeftRows, RightTiles, SIDE, STEP, SumBlock, TileSums};
use super::super::tiles::FactorTile;
use super::ProjectionJob;
use half::bf16;
use std::ops::Range;

/// Packed activations and a weight of the same width. There are as many activations as the job has
/// rows.
pub(super) struct TileTerm<'a> {
    pub(super) tiles: &'a [FactorTile],
    pub(super) weight: Bf16Rows<'a>,
}

impl TileTerm<'_> {
    /// Returns the number of steps of the inner dimension.
    fn step_count(&self) -> usize {
        self.weight.width.div_ceil(STEP)
    }

    /// Returns the tiles of a group of 16 rows.
    fn group_tiles(&self, group: usize, steps: &Range<usize>) -> &[FactorTile] {
        &self.tiles[group * self.step_count()..][steps.clone()]
    }
}

/// The buffers of a task.
#[derive(Default)]
pub(super) struct TileBuffers {
    blocks: Vec<SumBlock>,
    /// The copy of rows of weights that are not whole tiles.
    padded: Vec<bf16>,
}

/// The number of steps of the inner dimension that are taken at a time.
const DEPTH_STEPS: usize = 32;

/// Computes a panel of a job.
pub(super) fn project_tiles(
    job: &ProjectionJob<'_>,
    terms: &[TileTerm<'_>],
    panel: &Range<usize>,
    room: &mut TileBuffers,
) {
    let groups = job.rows.div_ceil(SIDE);
    for group in (0..groups).step_by(2) {
        room.blocks.clear();
        room.blocks.extend(split_panel(panel).map(|part| bias_block(job, part)));
        for term in terms {
            for from in (0..term.step_count()).step_by(DEPTH_STEPS) {
                let steps = from..term.step_count().min(from + DEPTH_STEPS);
                let first = term.group_tiles(group, &steps);
                let second = (group + 1 < groups).then(|| term.group_tiles(group + 1, &steps));
                for (block, part) in room.blocks.iter_mut().zip(split_panel(panel)) {
                    let left = left_rows(term.weight, part, &steps, &mut room.padded);
                    job.kernel.add_product(block, left, RightTiles { first, second });
                }
            }
        }
        for (block, part) in room.blocks.iter().zip(split_panel(panel)) {
            write_block(job, block, part.start, panel.end, group * SIDE);
        }
    }
}

/// Returns a block whose sums begin with the bias; the job's columns run down, its rows across.
fn bias_block(job: &ProjectionJob<'_>, columns: Range<usize>) -> SumBlock {
    let mut block = [[TileSums::ZERO; 2]; 2];
    let Some(bias) = job.bias else { return block };
    for (index, bias) in bias[columns].iter().enumerate() {
        for tile in &mut block[index / SIDE] {
            tile.0[index % SIDE * SIDE..][..SIDE].fill(*bias);
        }
    }
    block
}

/// Writes a block to the result, transposed.
fn write_block(job: &ProjectionJob<'_>, block: &SumBlock, column: usize, end: usize, row: usize) {
    for (tiles, column) in block.iter().zip([column, column + SIDE]) {
        for (sums, row) in tiles.iter().zip([row, row + SIDE]) {
            if column < end && row < job.rows {
                let sums = sums.transpose_sums(job.kernel);
                #[expect(unsafe_code, reason = "a panel's columns are its task's alone")]
                // SAFETY: the columns of a panel are written by its task only.
                unsafe {
                    job.out.write_tile(&sums, row, column, end);
                }
            }
        }
    }
}

/// Splits a panel into ranges of at most 32 rows.
fn split_panel(panel: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = panel.end;
    panel.clone().step_by(2 * SIDE).map(move |from| from..end.min(from + 2 * SIDE))
}

/// Returns rows of a weight as whole tiles; copies them with zeros if they are not.
fn left_rows<'a>(
    weight: Bf16Rows<'a>,
    rows: Range<usize>,
    steps: &Range<usize>,
    padded: &'a mut Vec<bf16>,
) -> LeftRows<'a> {
    let count = if rows.len() <= SIDE { SIDE } else { 2 * SIDE };
    let (width, columns) = (weight.width, steps.start * STEP..steps.end * STEP);
    if rows.len() == count && columns.end <= width {
        let values = &weight.values[rows.start * width + columns.start..rows.end * width];
        return LeftRows { values, stride: width, rows: count };
    }
    let stride = columns.len();
    padded.clear();
    padded.resize(count * stride, bf16::ZERO);
    let columns = columns.start..width.min(columns.end);
    for (row, out) in rows.zip(padded.chunks_exact_mut(stride)) {
        out[..columns.len()].copy_from_slice(&weight.values[row * width..][columns.clone()]);
    }
    LeftRows { values: padded, stride, rows: count }
}
