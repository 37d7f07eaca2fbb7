//! The shape of the tiles that the kernels multiply.

/// The number of rows and columns of a tile of sums; also the number of rows of a tile of factors,
/// and of bf16 pairs in such a row.
pub(super) const SIDE: usize = 16;
/// The number of elements of the inner dimension that a tile covers.
pub(super) const STEP: usize = 2 * SIDE;

/// A tile of the right factor: 16 rows of 16 pairs.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct FactorTile(pub(super) [u32; SIDE * SIDE]);

#[expect(unsafe_code, reason = "bytes of mapped memory are read as tiles")]
// SAFETY: any bits are elements, and 16 times 16 of 4 bytes leave no room.
unsafe impl pulp::bytemuck::Zeroable for FactorTile {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: as above.
unsafe impl pulp::bytemuck::Pod for FactorTile {}

impl FactorTile {
    pub(super) const ZERO: Self = Self([0; SIDE * SIDE]);
}
