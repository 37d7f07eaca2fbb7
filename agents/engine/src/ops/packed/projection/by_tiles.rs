//! Products of rows of weights, as they lie in memory, with activations packed into tiles.

use super::super::Bf16Rows;
use super::super::factor_tile::{FactorTile, SIDE, STEP};
use super::super::kernel::{LeftRows, RightTiles, SumBlock, TileSums};
use super::ProjectionJob;
use half::bf16;
use std::ops::Range;

/// Packed activations, as many as the job has rows, and a weight of the same width.
pub(super) struct TileTerm<'a> {
    pub(super) tiles: &'a [FactorTile],
    pub(super) weight: Bf16Rows<'a>,
}

impl TileTerm<'_> {
    fn step_count(&self) -> usize {
        self.weight.width.div_ceil(STEP)
    }

    /// Returns the tiles of 16 rows.
    fn group_tiles(&self, group: usize, steps: &Range<usize>) -> &[FactorTile] {
        &self.tiles[group * self.step_count()..][steps.clone()]
    }
}

#[derive(Default)]
pub(super) struct TileBuffers {
    blocks: Vec<SumBlock>,
    /// Rows of weights that are not whole tiles.
    padded: Vec<bf16>,
}

const DEPTH_STEPS: usize = 32;

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
                    job.kernel.add_product(
                        block,
                        left,
                        RightTiles { first, second, next: [&[]; 2] },
                    );
                }
            }
        }
        for (block, part) in room.blocks.iter_mut().zip(split_panel(panel)) {
            write_block(job, block, part.start, panel.end, group * SIDE);
        }
    }
}

/// Returns sums that begin with the bias; the job's columns run down, its rows across.
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

/// Writes the transpose.
fn write_block(
    job: &ProjectionJob<'_>,
    block: &mut SumBlock,
    column: usize,
    end: usize,
    row: usize,
) {
    for (tiles, column) in block.iter_mut().zip([column, column + SIDE]) {
        for (sums, row) in tiles.iter_mut().zip([row, row + SIDE]) {
            if column < end && row < job.rows {
                sums.transpose_sums(job.kernel);
                #[expect(unsafe_code, reason = "a panel's columns are its task's alone")]
                // SAFETY: the columns of a panel are written by its task only.
                unsafe {
                    job.out.write_tile(sums, row, column, end);
                }
            }
        }
    }
}

/// Splits into ranges of at most 32 rows.
fn split_panel(panel: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = panel.end;
    panel.clone().step_by(2 * SIDE).map(move |from| from..end.min(from + 2 * SIDE))
}

/// Copies rows that are not whole tiles, with zeros.
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
