//! What multiplies blocks: the widest bf16 instructions that the processor has.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::tiles::Tile;
use super::{Phase, Rows};
use half::bf16;
use std::ops::Range;
use std::sync::OnceLock;

/// Rows and columns of a tile of sums; rows of a tile of factors, and pairs of bf16 in one.
pub(super) const SIDE: usize = 16;
/// What a tile covers of the inner dimension.
pub(super) const STEP: usize = 2 * SIDE;

/// Sums of 16 rows and 16 columns.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Sums(pub(super) [f32; SIDE * SIDE]);

impl Sums {
    pub(super) const ZERO: Self = Self([0.0; SIDE * SIDE]);

    pub(super) fn transposed(&self, kernel: Kernel) -> Self {
        let bits = self.0.map(f32::to_bits);
        Self(kernel.transpose(&bits).map(f32::from_bits))
    }
}

/// 32 rows by 32 columns of sums.
pub(super) type Block = [[Sums; 2]; 2];

/// Rows of factors as they lie in memory, the starts of two `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) values: &'a [bf16],
    pub(super) stride: usize,
    /// 16 or 32.
    pub(super) rows: usize,
}

/// One or two columns of tiles, of as many steps each.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub(super) first: &'a [Tile],
    pub(super) second: Option<&'a [Tile]>,
}

/// Rows of activations and of weights, as wide as each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Term<'a> {
    pub(super) x: Rows<'a>,
    pub(super) weight: Rows<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    Portable,
}

impl Kernel {
    /// Of this processor and system.
    pub(crate) fn best(phase: Phase) -> Self {
        static BEST: OnceLock<Kernel> = OnceLock::new();
        let best = || Self::all().find(|kernel| kernel.is_fast()).unwrap_or(Self::Portable);
        match (*BEST.get_or_init(best), phase) {
            // What AMX takes has to be packed, which few rows do not pay for.
            #[cfg(target_arch = "x86_64")]
            (Self::Amx, Phase::Decode) if avx512::is_there() => Self::Avx512,
            (best, _) => best,
        }
    }

    /// Against those that come after it.
    fn is_fast(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::is_fast(),
            _ => true,
        }
    }

    /// Those that work here, what has instructions of its own first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let native =
            [amx::is_there().then_some(Self::Amx), avx512::is_there().then_some(Self::Avx512)];
        #[cfg(not(target_arch = "x86_64"))]
        let native = [None];
        native.into_iter().flatten().chain([Self::Portable])
    }

    /// Makes the thread ready to multiply, until what is returned is dropped.
    pub(super) fn session(self) -> Session {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Amx {
            amx::begin();
        }
        Session(self)
    }

    /// Whether so many rows of activations are packed for it, and not multiplied as they lie.
    pub(super) fn takes_tiles(self, phase: Phase, rows: usize) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => true,
            // Its sums are the same in both ways.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => rows > avx512::FEW,
            Self::Portable => phase == Phase::Prefill,
        }
    }

    /// Of activations, that are multiplied at once as they lie.
    pub(super) fn rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::FEW,
            Self::Portable => portable::ROWS,
        }
    }

    /// Adds `Σ x wᵀ` over the terms to `out`, of up to [`Self::rows`] rows of `x` by so many rows of
    /// weights. Each element is summed alike, whatever rows and columns are asked for.
    pub(super) fn dots(
        self,
        terms: &[Term<'_>],
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut [f32],
        room: &mut Vec<f32>,
    ) {
        assert!((1..=self.rows()).contains(&rows.len()));
        assert!(out.len() == rows.len() * columns.len());
        for Term { x, weight } in terms {
            assert!(x.width == weight.width);
            assert!(rows.end <= x.count() && columns.end <= weight.count());
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::dots(terms, rows, columns, out),
            Self::Portable => portable::dots(terms, rows, columns, out, room),
        }
    }

    /// Adds `left · right`, in a session.
    pub(super) fn multiply(self, block: &mut Block, left: Left<'_>, right: Tiles<'_>) {
        let steps = right.first.len();
        assert!(left.rows == SIDE || left.rows == 2 * SIDE);
        assert!((left.rows - 1) * left.stride + steps * STEP <= left.values.len());
        assert!(right.second.is_none_or(|second| second.len() == steps));
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => amx::multiply(block, left, right),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::multiply(block, left, right),
            Self::Portable => portable::multiply(block, left, right),
        }
    }

    /// Of 16 rows of 16.
    pub(super) fn transpose(self, rows: &[u32; SIDE * SIDE]) -> [u32; SIDE * SIDE] {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::transpose(rows),
            Self::Portable => portable::transpose(rows),
        }
    }
}

/// Rows from `from` on; beyond the range's end its last row stands in.
#[inline(always)]
fn clamped<'a, const N: usize>(
    rows: &Rows<'a>,
    range: &Range<usize>,
    from: usize,
) -> [&'a [bf16]; N] {
    std::array::from_fn(|index| rows.row((from + index).min(range.end - 1)))
}

/// Asks for what will be read soon. A hint, which may name any place.
#[inline(always)]
fn prefetch(place: *const bf16) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "an instruction, which every such processor has")]
    // SAFETY: it reads nothing that the program would see, and cannot fail.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

pub(super) struct Session(Kernel);

impl Drop for Session {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.0 == Kernel::Amx {
            amx::end();
        }
    }
}
