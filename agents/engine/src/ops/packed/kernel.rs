//! The kernels that multiply blocks, with the widest bf16 instructions of the processor.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::factor_tile::{FactorTile, SIDE, STEP};
use super::{Bf16Rows, MatmulPhase};
use half::bf16;
use std::ops::Range;
use std::sync::OnceLock;

/// The sums of 16 rows and 16 columns.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct TileSums(pub(super) [f32; SIDE * SIDE]);

impl TileSums {
    pub(super) const ZERO: Self = Self([0.0; SIDE * SIDE]);

    pub(super) fn transpose_sums(&mut self, kernel: MatmulKernel) {
        kernel.transpose_tile(pulp::bytemuck::cast_slice_mut(&mut self.0));
    }
}

/// The sums of 32 rows and 32 columns.
pub(super) type SumBlock = [[TileSums; 2]; 2];

/// Rows of the left factor as they lie in memory, `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftRows<'a> {
    pub(super) values: &'a [bf16],
    pub(super) stride: usize,
    /// From 1 to 32. Up to the next multiple of 16 there are more values, which some kernels read.
    pub(super) rows: usize,
}

/// One or two columns of tiles of the right factor, with equally many steps.
#[derive(Clone, Copy)]
pub(super) struct RightTiles<'a, T = FactorTile> {
    pub(super) first: &'a [T],
    pub(super) second: Option<&'a [T]>,
    /// The tiles that will be used next, which a kernel may request from memory meanwhile.
    pub(super) next: [&'a [T]; 2],
}

/// Rows of activations and rows of weights, of the same width.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowTerm<'a> {
    pub(super) x: Bf16Rows<'a>,
    pub(super) weight: Bf16Rows<'a>,
}

/// A set of processor instructions for products of bf16 matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatmulKernel {
    /// Intel's tile instructions, AMX.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AVX-512 with bf16 dot products.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Conversion to f32, on any processor.
    Portable,
}

impl MatmulKernel {
    /// Returns the fastest kernel of this processor for a phase.
    pub(crate) fn select_best(phase: MatmulPhase) -> Self {
        static BEST: OnceLock<MatmulKernel> = OnceLock::new();
        let best =
            || Self::available_kernels().find(|kernel| kernel.is_fast()).unwrap_or(Self::Portable);
        match (*BEST.get_or_init(best), phase) {
            // AMX needs packed factors, which does not pay off for few rows.
            #[cfg(target_arch = "x86_64")]
            (Self::Amx, MatmulPhase::Decode) if avx512::is_available() => Self::Avx512,
            (best, _) => best,
        }
    }

    /// Returns the fastest kernel of this processor.
    pub(crate) fn fastest() -> Self {
        Self::select_best(MatmulPhase::Prefill)
    }

    /// Multiplies and adds vectors in registers, and returns the number of multiplications: their
    /// speed is what the kernel could reach if it never waited for memory. AMX is measured by its
    /// AVX-512 instructions.
    pub(crate) fn multiply_registers(self, rounds: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::multiply_registers(rounds),
            Self::Portable => portable::multiply_registers(rounds),
        }
    }

    /// Returns a kernel for which packed weights are faster than rows of them, in each phase.
    pub(crate) fn for_packed_weights() -> Option<Self> {
        match Self::select_best(MatmulPhase::Decode) {
            Self::Portable => None,
            #[cfg(target_arch = "x86_64")]
            kernel => Some(kernel),
        }
    }

    fn is_fast(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::is_fast(),
            _ => true,
        }
    }

    /// Yields the kernels that work here, special instructions first.
    pub(crate) fn available_kernels() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let native = [
            amx::is_available().then_some(Self::Amx),
            avx512::is_available().then_some(Self::Avx512),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let native = [None];
        native.into_iter().flatten().chain([Self::Portable])
    }

    pub(super) fn start_session(self) -> KernelSession {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Amx {
            amx::configure_tiles();
        }
        KernelSession(self)
    }

    /// Returns false if the kernel multiplies this number of rows as they lie.
    pub(super) fn packs_activations(self, phase: MatmulPhase, rows: usize) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => true,
            // The sums are the same either way.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => rows > avx512::FEW_ROWS,
            Self::Portable => phase == MatmulPhase::Prefill,
        }
    }

    /// Returns the largest number of rows that are multiplied at once as they lie.
    pub(super) fn rows_at_once(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::FEW_ROWS,
            Self::Portable => portable::DOT_ROWS,
        }
    }

    /// Adds `Σ x wᵀ` over the terms to `out`, for up to `rows_at_once` rows of `x`. The order of an
    /// element's sum does not depend on the ranges.
    pub(super) fn add_dot_products(
        self,
        terms: &[RowTerm<'_>],
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut [f32],
        room: &mut Vec<f32>,
    ) {
        assert!((1..=self.rows_at_once()).contains(&rows.len()));
        assert!(out.len() == rows.len() * columns.len());
        for RowTerm { x, weight } in terms {
            assert!(x.width == weight.width);
            assert!(rows.end <= x.row_count() && columns.end <= weight.row_count());
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::add_dot_products(terms, rows, columns, out),
            Self::Portable => portable::add_dot_products(terms, rows, columns, out, room),
        }
    }

    /// Adds `left · right` to a block. Must be called within a session.
    pub(super) fn add_product(
        self,
        block: &mut SumBlock,
        left: LeftRows<'_>,
        right: RightTiles<'_>,
    ) {
        let steps = right.first.len();
        assert!((1..=2 * SIDE).contains(&left.rows));
        let read = left.rows.next_multiple_of(SIDE);
        assert!((read - 1) * left.stride + steps * STEP <= left.values.len());
        assert!(right.second.is_none_or(|second| second.len() == steps));
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => amx::add_product(block, left, right),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::add_product(block, left, right),
            Self::Portable => portable::add_product(block, left, right),
        }
    }

    /// Transposes 16 rows in place.
    #[inline(always)]
    pub(super) fn transpose_tile(self, rows: &mut [[u32; SIDE]]) {
        assert!(rows.len() == SIDE);
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::transpose_tile(rows),
            Self::Portable => portable::transpose_tile(rows),
        }
    }
}

/// Returns `N` rows; the last row of the range stands in for rows beyond it.
#[inline(always)]
fn clamped_rows<'a, const N: usize>(
    rows: &Bf16Rows<'a>,
    range: &Range<usize>,
    from: usize,
) -> [&'a [bf16]; N] {
    std::array::from_fn(|index| rows.row_values((from + index).min(range.end - 1)))
}

/// Hints the processor; any address is valid.
#[inline(always)]
fn prefetch_line(place: *const bf16) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "an instruction, which every such processor has")]
    // SAFETY: it reads nothing that the program can observe, and cannot fail.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// A thread's permission to multiply with a kernel. Dropping it releases the processor's tiles.
pub(super) struct KernelSession(MatmulKernel);

impl Drop for KernelSession {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.0 == MatmulKernel::Amx {
            amx::release_tiles();
        }
    }
}
