//! The right factor as tiles: 16 pairs of the inner dimension by 16 columns, the two of a pair in
//! the halves of 32 bits.

use super::super::wide;
use super::kernel::{Kernel, SIDE, STEP};
use half::bf16;
use rayon::prelude::*;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile(pub(super) [u32; SIDE * SIDE]);

impl Tile {
    pub(super) const ZERO: Self = Self([0; SIDE * SIDE]);
}

/// Something to be narrowed to the bits of a bf16.
pub(super) trait Element: Copy + Sync {
    fn bits(self) -> u16;
}

impl Element for f32 {
    /// To the nearest, ties to even; what is not a number stays none.
    #[inline(always)]
    fn bits(self) -> u16 {
        let bits = self.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
        let is_number = bits & 0x7fff_ffff <= 0x7f80_0000;
        (if is_number { rounded } else { (bits >> 16) | 0x40 }) as u16
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

/// The transpose of `x`, `[rows, inner]`: each row is a column of the tiles, of which there are
/// `inner / 32` for every 16 rows.
pub(super) fn of_columns(kernel: Kernel, x: &[f32], inner: usize) -> Vec<Tile> {
    let rows = x.len() / inner;
    let steps = inner.div_ceil(STEP);
    let mut tiles = vec![Tile::ZERO; rows.div_ceil(SIDE) * steps];
    let pack = |(group, tiles): (usize, &mut [Tile])| {
        let x = &x[group * SIDE * inner..rows.min((group + 1) * SIDE) * inner];
        wide(
            #[inline(always)]
            || pack_columns(kernel, x, inner, tiles),
        );
    };
    if rows <= SIDE {
        tiles.chunks_exact_mut(steps).enumerate().for_each(pack);
    } else {
        tiles.par_chunks_exact_mut(steps).enumerate().for_each(pack);
    }
    tiles
}

#[inline(always)]
fn pack_columns(kernel: Kernel, x: &[f32], inner: usize, tiles: &mut [Tile]) {
    let mut pairs = [0u32; SIDE * SIDE];
    for (step, tile) in tiles.iter_mut().enumerate() {
        let columns = step * STEP..inner.min((step + 1) * STEP);
        for (row, pairs) in x.chunks_exact(inner).zip(pairs.chunks_exact_mut(SIDE)) {
            let mut halves = [0u16; STEP];
            for (half, value) in halves.iter_mut().zip(&row[columns.clone()]) {
                *half = value.bits();
            }
            for (pair, halves) in pairs.iter_mut().zip(halves.as_chunks().0) {
                *pair = join(*halves);
            }
        }
        tile.0 = kernel.transpose(&pairs);
    }
}

#[inline(always)]
fn join([even, odd]: [u16; 2]) -> u32 {
    u32::from(even) | u32::from(odd) << 16
}

/// Of `rows`, `[inner, width]`, the columns from `column` on: of every 16 columns one tile for every
/// 32 rows.
pub(super) fn of_rows<T: Element>(rows: &[T], width: usize, column: usize, tiles: &mut [Tile]) {
    let steps = (rows.len() / width).div_ceil(STEP);
    wide(
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

/// There may be no odd row, and fewer columns than a tile has; what is lacking is 0 in `out`.
#[inline(always)]
fn pack_pair<T: Element>(even: &[T], odd: &[T], out: &mut [u32; SIDE]) {
    if let (Some(even), Some(odd)) = (even.first_chunk::<SIDE>(), odd.first_chunk::<SIDE>()) {
        let even = even.map(|value| u32::from(value.bits()));
        let odd = odd.map(|value| u32::from(value.bits()) << 16);
        for (place, out) in out.iter_mut().enumerate() {
            *out = even[place] | odd[place];
        }
        return;
    }
    for (index, out) in out.iter_mut().enumerate() {
        let bits = |row: &[T]| row.get(index).map_or(0, |value| value.bits());
        *out = join([bits(even), bits(odd)]);
    }
}

/// Rows as they lie.
pub(super) fn narrow(x: &[f32], width: usize) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; x.len()];
    narrow_rows(x, width, width, &mut out);
    out
}

/// Bits of rows of f32, each followed by zeros up to `stride`.
pub(super) fn narrow_rows(x: &[f32], width: usize, stride: usize, out: &mut [bf16]) {
    const ROWS: usize = 8;
    let narrow = |(out, x): (&mut [bf16], &[f32])| {
        wide(
            #[inline(always)]
            || {
                for (out, x) in out.chunks_exact_mut(stride).zip(x.chunks_exact(width)) {
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = bf16::from_bits(x.bits());
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
