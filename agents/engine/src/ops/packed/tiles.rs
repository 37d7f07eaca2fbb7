//! The right factor as tiles: 16 pairs of the inner dimension by 16 columns. The two elements of a
//! pair share 32 bits.

use super::super::run_vectorised;
use super::factor_tile::{FactorTile, SIDE, STEP};
use super::kernel::MatmulKernel;
use half::bf16;
use rayon::prelude::*;

pub(super) trait Bf16Source: Copy + Sync {
    fn bf16_bits(self) -> u16;
}

impl Bf16Source for f32 {
    /// Rounds to nearest, ties to even; NaN stays NaN.
    #[inline(always)]
    fn bf16_bits(self) -> u16 {
        let bits = self.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
        let is_number = bits & 0x7fff_ffff <= 0x7f80_0000;
        (if is_number { rounded } else { (bits >> 16) | 0x40 }) as u16
    }
}

impl Bf16Source for bf16 {
    #[inline(always)]
    fn bf16_bits(self) -> u16 {
        self.to_bits()
    }
}

/// Packs the transpose of `x`, `[rows, inner]`: each row becomes a column of the tiles, with `inner
/// / 32` tiles for every 16 rows.
pub(super) fn pack_transposed<T: Bf16Source>(
    kernel: MatmulKernel,
    x: &[T],
    inner: usize,
    tiles: &mut [FactorTile],
) {
    let (rows, steps) = (x.len() / inner, inner.div_ceil(STEP));
    assert!(tiles.len() == rows.div_ceil(SIDE) * steps);
    let pack = |(group, tiles): (usize, &mut [FactorTile])| {
        let x = &x[group * SIDE * inner..rows.min((group + 1) * SIDE) * inner];
        run_vectorised(
            #[inline(always)]
            || pack_column_group(kernel, x, inner, tiles),
        );
    };
    if rows <= SIDE {
        tiles.chunks_exact_mut(steps).enumerate().for_each(pack);
    } else {
        tiles.par_chunks_exact_mut(steps).enumerate().for_each(pack);
    }
}

/// Packs at most 16 rows into tiles of zeros.
#[inline(always)]
fn pack_column_group<T: Bf16Source>(
    kernel: MatmulKernel,
    x: &[T],
    inner: usize,
    tiles: &mut [FactorTile],
) {
    for (step, tile) in tiles.iter_mut().enumerate() {
        let columns = step * STEP..inner.min((step + 1) * STEP);
        let pairs = tile.0.as_chunks_mut::<SIDE>().0;
        for (row, pairs) in x.chunks_exact(inner).zip(&mut *pairs) {
            let mut halves = [0u16; STEP];
            for (half, value) in halves.iter_mut().zip(&row[columns.clone()]) {
                *half = value.bf16_bits();
            }
            for (pair, halves) in pairs.iter_mut().zip(halves.as_chunks().0) {
                *pair = join_pair(*halves);
            }
        }
        kernel.transpose_tile(pairs);
    }
}

/// Puts the even element into the lower bits.
#[inline(always)]
fn join_pair([even, odd]: [u16; 2]) -> u32 {
    u32::from(even) | u32::from(odd) << 16
}

/// Packs the columns of `rows`, `[inner, width]`, from `column` on: for every 16 columns one tile
/// for every 32 rows.
pub(super) fn pack_rows<T: Bf16Source>(
    rows: &[T],
    width: usize,
    column: usize,
    tiles: &mut [FactorTile],
) {
    let steps = (rows.len() / width).div_ceil(STEP);
    run_vectorised(
        #[inline(always)]
        || {
            for (pair, both) in rows.chunks(2 * width).enumerate() {
                let (even, odd) = both.split_at(width);
                for (group, tiles) in tiles.chunks_exact_mut(steps).enumerate() {
                    let out = &mut tiles[pair / SIDE].0.as_chunks_mut().0[pair % SIDE];
                    let from = column + group * SIDE;
                    let columns = from..width.min(from + SIDE);
                    pack_pair(&even[columns.clone()], odd.get(columns).unwrap_or_default(), out);
                }
            }
        },
    );
}

/// Packs two rows into a row of a tile; a missing odd row and missing columns are 0.
#[inline(always)]
fn pack_pair<T: Bf16Source>(even: &[T], odd: &[T], out: &mut [u32; SIDE]) {
    if let (Some(even), Some(odd)) = (even.first_chunk::<SIDE>(), odd.first_chunk::<SIDE>()) {
        let even = even.map(|value| u32::from(value.bf16_bits()));
        let odd = odd.map(|value| u32::from(value.bf16_bits()) << 16);
        for (place, out) in out.iter_mut().enumerate() {
            *out = even[place] | odd[place];
        }
        return;
    }
    for (index, out) in out.iter_mut().enumerate() {
        let bits = |row: &[T]| row.get(index).map_or(0, |value| value.bf16_bits());
        *out = join_pair([bits(even), bits(odd)]);
    }
}

pub(super) fn narrow_to_bf16(x: &[f32], width: usize) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; x.len()];
    narrow_rows(x, width, width, &mut out);
    out
}

/// Places the rows `stride` elements apart.
pub(super) fn narrow_rows(x: &[f32], width: usize, stride: usize, out: &mut [bf16]) {
    const ROWS: usize = 8;
    let narrow = |(out, x): (&mut [bf16], &[f32])| {
        run_vectorised(
            #[inline(always)]
            || {
                for (out, x) in out.chunks_exact_mut(stride).zip(x.chunks_exact(width)) {
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = bf16::from_bits(x.bf16_bits());
                    }
                }
            },
        );
    };
    if x.len() <= ROWS * width {
        return narrow((out, x));
    }
    let rows = out.par_chunks_mut(ROWS * stride).zip(x.par_chunks(ROWS * width));
    rows.for_each(narrow);
}
