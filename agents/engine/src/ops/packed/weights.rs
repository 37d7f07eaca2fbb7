//! Weights arranged once into the tiles that the kernels read. They lie in huge pages, one after
//! another, and each is read from its start to its end: decoding takes as long as reading them.

use super::factor_tile::{FactorTile, SIDE, STEP};
use super::kernel::MatmulKernel;
use super::{Bf16Rows, tiles};
use crate::huge_pages::map_huge_pages;
use memmap2::Mmap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// A tile of 16 columns, read from mapped memory.
pub(crate) trait WeightTile: pulp::bytemuck::Pod {
    /// The elements of a row that a tile covers.
    const INNER: usize;
}

impl WeightTile for FactorTile {
    const INNER: usize = STEP;
}

/// A matrix `[columns, width]` as right factor of `x wᵀ`: for every 16 columns, one tile for every
/// `T::INNER` elements of a row. A clone shares the tiles.
#[derive(Debug)]
pub(crate) struct TiledMatrix<T> {
    memory: Arc<Mmap>,
    /// In tiles.
    start: usize,
    columns: usize,
    width: usize,
    tile: PhantomData<T>,
}

/// A matrix of bf16 elements.
pub(crate) type PackedMatrix = TiledMatrix<FactorTile>;

impl<T> Clone for TiledMatrix<T> {
    fn clone(&self) -> Self {
        let Self { start, columns, width, tile, .. } = *self;
        Self { memory: self.memory.clone(), start, columns, width, tile }
    }
}

fn count_tiles<T: WeightTile>((columns, width): (usize, usize)) -> usize {
    columns.div_ceil(SIDE) * width.div_ceil(T::INNER)
}

impl<T: WeightTile> TiledMatrix<T> {
    /// Allocates matrices of the shapes (columns, width) in one region of memory. `fill` gets the
    /// index of each and its tiles, which are zero.
    pub(super) fn build_all(
        shapes: &[(usize, usize)],
        mut fill: impl FnMut(usize, &mut [T]),
    ) -> std::io::Result<Vec<Self>> {
        let total: usize = shapes.iter().map(|shape| count_tiles::<T>(*shape)).sum();
        let mut memory = map_huge_pages(total * size_of::<T>())?;
        let mut rest: &mut [T] = pulp::bytemuck::cast_slice_mut(&mut memory);
        for (index, shape) in shapes.iter().enumerate() {
            let (own, others) = rest.split_at_mut(count_tiles::<T>(*shape));
            fill(index, own);
            rest = others;
        }
        let memory = Arc::new(memory.make_read_only()?);
        let mut start = 0;
        let place = |&(columns, width): &(usize, usize)| {
            let own = Self { memory: memory.clone(), start, columns, width, tile: PhantomData };
            start += count_tiles::<T>((columns, width));
            own
        };
        Ok(shapes.iter().map(place).collect())
    }

    /// Returns (columns, width).
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.columns, self.width)
    }

    /// Returns some of the columns, or `None` if they do not begin with a tile.
    pub(crate) fn slice_columns(&self, columns: &Range<usize>) -> Option<Self> {
        let fits = columns.start.is_multiple_of(SIDE) && columns.end <= self.columns;
        let start = self.start + columns.start / SIDE * self.step_count();
        fits.then(|| Self { start, columns: columns.len(), ..self.clone() })
    }

    pub(super) fn group_count(&self) -> usize {
        self.columns.div_ceil(SIDE)
    }

    pub(super) fn step_count(&self) -> usize {
        self.width.div_ceil(T::INNER)
    }

    /// Returns steps of the tiles of 16 columns.
    pub(super) fn group_tiles(&self, group: usize, steps: &Range<usize>) -> &[T] {
        let tiles: &[T] = pulp::bytemuck::cast_slice(&self.memory);
        let start = self.start + group * self.step_count();
        &tiles[start + steps.start..start + steps.end]
    }
}

impl PackedMatrix {
    /// Packs matrices, given as rows of weights, into one region of memory, and calls `done` with
    /// the index of each. Returns an error if the system refuses the memory.
    pub(crate) fn pack_all(
        kernel: MatmulKernel,
        weights: &[Bf16Rows<'_>],
        done: impl Fn(usize),
    ) -> std::io::Result<Vec<Self>> {
        let shapes: Vec<_> =
            weights.iter().map(|weight| (weight.row_count(), weight.width)).collect();
        Self::build_all(&shapes, |index, own| {
            let weight = weights[index];
            tiles::pack_transposed(kernel, weight.values, weight.width, own);
            done(index);
        })
    }
}
