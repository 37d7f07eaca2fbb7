//! Products of rows of activations with weights in tiles. Nothing is packed or turned on the way.

use super::super::SharedOutput;
use super::super::factor_tile::{FactorTile, SIDE};
use super::super::kernel::{RightTiles, SumBlock};
use super::super::left_right::LeftFactor;
use super::super::quantized::{self, QuantizedMatrix, QuantizedRows};
use super::super::strip_sums::StripSums;
use super::super::weights::{PackedMatrix, TiledMatrix, WeightTile};
use super::ProjectionJob;
use std::ops::Range;

pub(super) enum PackedTerm<'a> {
    Bf16 { x: &'a LeftFactor, weight: &'a PackedMatrix },
    Quantized { x: &'a QuantizedRows, weight: &'a QuantizedMatrix },
}

/// The rows whose sums stay in a core's second cache.
const SUMMED_ROWS: usize = 512;
/// The bytes of two columns of tiles that stay there while the rows pass.
const DEPTH_BYTES: usize = 32 * 2 * size_of::<FactorTile>();

pub(super) fn project_packed_columns(
    job: &ProjectionJob<'_>,
    terms: &[PackedTerm<'_>],
    panel: &Range<usize>,
    sums: &mut StripSums,
) {
    let out: &SharedOutput<'_> = &job.out;
    let bias = job.bias.map(|bias| &bias[panel.clone()]);
    let groups = panel.start / SIDE..panel.end.div_ceil(SIDE);
    for from in (0..job.rows).step_by(SUMMED_ROWS) {
        sums.reset(from..job.rows.min(from + SUMMED_ROWS), panel.clone(), bias);
        let is_read_once = job.rows <= 2 * SIDE;
        for term in terms {
            match term {
                PackedTerm::Bf16 { x, weight } => {
                    add_columns(sums, weight, &groups, is_read_once, |block, row, step, right| {
                        job.kernel.add_product(block, x.rows_from(row, step), right);
                    });
                }
                PackedTerm::Quantized { x, weight } => {
                    add_columns(sums, weight, &groups, is_read_once, |block, row, step, right| {
                        quantized::add_quantized_product(block, x.rows_from(row, step), right);
                    });
                }
            }
        }
        #[expect(unsafe_code, reason = "a panel's columns are its task's alone")]
        // SAFETY: the columns of a panel are written by its task only.
        unsafe {
            sums.write_to(out);
        }
    }
}

/// Adds a term to sums. `multiply` adds the products of up to 32 rows, from a row and a step on.
fn add_columns<T: WeightTile>(
    sums: &mut StripSums,
    weight: &TiledMatrix<T>,
    groups: &Range<usize>,
    is_read_once: bool,
    multiply: impl Fn(&mut SumBlock, usize, usize, RightTiles<'_, T>),
) {
    let depth = DEPTH_BYTES / (2 * size_of::<T>());
    for first in (0..weight.step_count()).step_by(depth) {
        let steps = first..weight.step_count().min(first + depth);
        let tiles: Vec<&[T]> =
            groups.clone().map(|group| weight.group_tiles(group, &steps)).collect();
        let next = match is_read_once {
            true => next_tiles(weight, groups, &steps, depth),
            false => [[].as_slice(); 2],
        };
        sums.add_product(&tiles, next, |block, row, right| multiply(block, row, first, right));
    }
}

/// Returns the tiles that follow those of two columns: their next steps, or the next two columns.
fn next_tiles<'a, T: WeightTile>(
    weight: &'a TiledMatrix<T>,
    groups: &Range<usize>,
    steps: &Range<usize>,
    depth: usize,
) -> [&'a [T]; 2] {
    let (first, from) = match steps.end < weight.step_count() {
        true => (groups.start, steps.end),
        false => (groups.end, 0),
    };
    let steps = from..weight.step_count().min(from + depth);
    [first, first + 1].map(|group| match group < weight.group_count() {
        true => weight.group_tiles(group, &steps),
        false => &[],
    })
}
