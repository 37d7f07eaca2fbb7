//! The product with AVX-512's dot products of bytes (VNNI): AMD from Zen 4 on, Intel from Cascade
//! Lake on.

#![expect(unsafe_code, reason = "instructions that not every processor has, on raw pointers")]

use super::super::kernel::{RightTiles, SumBlock, TileSums};
use super::super::weights::WeightTile;
use super::rows::RowBlock;
use super::{BLOCK_QUADS, BLOCK_VALUES, BLOCKS, QUAD, QuantizedTile, RowBlocks, SIDE};
use std::arch::x86_64::{
    __m512i, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_cvtepi32_ps, _mm512_cvtph_ps,
    _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps,
};

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
}

/// The rows summed at once: with two columns of tiles, their sums and dot products fit in registers.
const ROWS: usize = 4;

/// Requires the instructions, and that `left` has the rows.
pub(super) fn add_product(
    block: &mut SumBlock,
    left: RowBlocks<'_>,
    right: RightTiles<'_, QuantizedTile>,
) {
    let passes = left.rows.div_ceil(ROWS);
    for (pass, row) in (0..left.rows).step_by(ROWS).enumerate() {
        let count = ROWS.min(left.rows - row);
        let ahead = Prefetch::new(right, pass, passes);
        let [first, second] = &mut block[row / SIDE];
        let start = RowStart {
            values: left.values[row * left.stride..].as_ptr(),
            blocks: left.blocks[row * left.block_stride..].as_ptr(),
            stride: left.stride,
            block_stride: left.block_stride,
            part: row % SIDE,
        };
        // SAFETY: checked by the caller.
        unsafe {
            match right.second {
                None => add_some_rows([first], count, start, [right.first], ahead),
                Some(tiles) => {
                    add_some_rows([first, second], count, start, [right.first, tiles], ahead);
                }
            }
        }
    }
}

/// Rows whose sums begin at row `part` of their tiles.
#[derive(Clone, Copy)]
struct RowStart {
    values: *const i8,
    blocks: *const RowBlock,
    stride: usize,
    block_stride: usize,
    part: usize,
}

const TILE_LINES: usize = size_of::<QuantizedTile>() / 64;

/// Requests the next tiles evenly during the passes over the present ones, as for bf16.
#[derive(Clone, Copy)]
struct Prefetch<'a> {
    next: [&'a [QuantizedTile]; 2],
    first_step: usize,
    all_steps: usize,
}

impl<'a> Prefetch<'a> {
    fn new(right: RightTiles<'a, QuantizedTile>, pass: usize, passes: usize) -> Self {
        let steps = right.first.len();
        Self { next: right.next, first_step: pass * steps, all_steps: (passes * steps).max(1) }
    }

    /// Requests this step's share of the lines.
    #[inline(always)]
    fn request_lines(&self, step: usize) {
        let [first, second] = self.next;
        let first_lines = first.len() * TILE_LINES;
        let all = first_lines + second.len() * TILE_LINES;
        let reached = |step: usize| step * all / self.all_steps;
        let step = self.first_step + step;
        for line in reached(step)..reached(step + 1) {
            let start: *const i8 = match line.checked_sub(first_lines) {
                None => first.as_ptr().cast::<i8>().wrapping_add(64 * line),
                Some(line) => second.as_ptr().cast::<i8>().wrapping_add(64 * line),
            };
            // SAFETY: it reads nothing that the program can observe, and cannot fail.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(start) };
        }
    }
}

#[inline(always)]
unsafe fn add_some_rows<const COLUMNS: usize>(
    sums: [&mut TileSums; COLUMNS],
    rows: usize,
    left: RowStart,
    right: [&[QuantizedTile]; COLUMNS],
    ahead: Prefetch<'_>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match rows {
            1 => add_rows::<1, COLUMNS>(sums, left, right, ahead),
            2 => add_rows::<2, COLUMNS>(sums, left, right, ahead),
            3 => add_rows::<3, COLUMNS>(sums, left, right, ahead),
            _ => add_rows::<ROWS, COLUMNS>(sums, left, right, ahead),
        }
    }
}

/// Adds the products of `COUNT` rows.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_rows<const COUNT: usize, const COLUMNS: usize>(
    sums: [&mut TileSums; COLUMNS],
    left: RowStart,
    right: [&[QuantizedTile]; COLUMNS],
    ahead: Prefetch<'_>,
) {
    // SAFETY: `left` has these rows with as many tiles; a tile of sums has 16 × 16 elements.
    unsafe {
        let mut totals = [[_mm512_setzero_ps(); COLUMNS]; COUNT];
        for (row, totals) in totals.iter_mut().enumerate() {
            for (column, total) in totals.iter_mut().enumerate() {
                *total = _mm512_loadu_ps(sums[column].0.as_ptr().add((left.part + row) * SIDE));
            }
        }
        for step in 0..right[0].len() {
            ahead.request_lines(step);
            let tiles = right.map(|tiles| &tiles[step]);
            for half in 0..BLOCKS {
                let start = left.values.add(step * QuantizedTile::INNER + half * BLOCK_VALUES);
                let blocks: [&RowBlock; COUNT] = std::array::from_fn(|row| {
                    &*left.blocks.add(row * left.block_stride + step * BLOCKS + half)
                });
                let mut dots = [[_mm512_setzero_si512(); COLUMNS]; COUNT];
                for (dots, block) in dots.iter_mut().zip(blocks) {
                    *dots = [_mm512_set1_epi32(block.correction); COLUMNS];
                }
                for quad in 0..BLOCK_QUADS {
                    let weights: [__m512i; COLUMNS] = std::array::from_fn(|column| {
                        let quads = &tiles[column].quads[half][quad];
                        _mm512_loadu_si512(quads.as_ptr().cast())
                    });
                    for (row, dots) in dots.iter_mut().enumerate() {
                        let place = start.add(row * left.stride + quad * QUAD);
                        let x = _mm512_set1_epi32(place.cast::<i32>().read_unaligned());
                        for (dot, weights) in dots.iter_mut().zip(weights) {
                            *dot = _mm512_dpbusd_epi32(*dot, weights, x);
                        }
                    }
                }
                for (column, tile) in tiles.iter().enumerate() {
                    let scales = tile.scales[half].as_ptr();
                    let scales = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
                    for (row, totals) in totals.iter_mut().enumerate() {
                        let scale = _mm512_mul_ps(scales, _mm512_set1_ps(blocks[row].scale));
                        let dot = _mm512_cvtepi32_ps(dots[row][column]);
                        totals[column] = _mm512_fmadd_ps(dot, scale, totals[column]);
                    }
                }
            }
        }
        for (row, totals) in totals.iter().enumerate() {
            for (column, total) in totals.iter().enumerate() {
                let out = sums[column].0.as_mut_ptr().add((left.part + row) * SIDE);
                _mm512_storeu_ps(out, *total);
            }
        }
    }
}
