//! The shape of the tiles that the kernels multiply.

/// The number of rows and columns of a tile of sums; also the number of rows of a tile of factors,
/// and of bf16 pairs in such a row.
pub(super) const SIDE: usize = 16;
/// The number of elements of the inner dimension that a tile covers.
pub(super) const STEP: usize = 2 * SIDE;

/// A tile of the right factor: 16 rows of 16 pairs.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct FactorTile(pub(super) [u32; SIDE * SIDE]);

impl FactorTile {
    pub(super) const ZERO: Self = Self([0; SIDE * SIDE]);
}
