//! AMX, the processor's tile instructions: Intel from Sapphire Rapids on. Written in assembly,
//! because Rust has no stable intrinsics for it. Each piece of assembly loads the tiles it uses and
//! stores its sums.

#![expect(unsafe_code, reason = "assembly, on raw pointers")]

use super::{LeftRows, RightTiles, SIDE, SumBlock, TileSums};
use std::arch::asm;

/// Returns true if the processor has AMX and the system lets this process use it.
pub(super) fn is_available() -> bool {
    const FEATURES: u32 = 7;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let has_it = || {
        let features = std::arch::x86_64::__cpuid_count(FEATURES, 0).edx;
        features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
    };
    super::avx512::is_available() && has_it() && is_permitted()
}

/// Requests permission from Linux (5.16), which must save the tiles when it switches threads.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call grants a permission to this process and accesses none of its memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Returns false: the permission is specific to Linux.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The configuration that `ldtilecfg` reads.
#[repr(C, align(64))]
struct TileConfiguration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const TILE_COUNT: usize = 8;
const ROW_BYTES: usize = 4 * SIDE;

static WHOLE_TILES: TileConfiguration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < TILE_COUNT {
        row_bytes[tile] = ROW_BYTES as u16;
        rows[tile] = SIDE as u8;
        tile += 1;
    }
    TileConfiguration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// Requires `is_available`.
pub(super) fn configure_tiles() {
    // SAFETY: the instruction exists; it reads the 64 bytes of the configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, readonly)) }
}

pub(super) fn release_tiles() {
    // SAFETY: the instruction exists.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// Requires that `left` has the rows and the tiles are configured.
pub(super) fn add_product(block: &mut SumBlock, left: LeftRows<'_>, right: RightTiles<'_>) {
    let (steps, stride) = (right.first.len(), 2 * left.stride);
    if steps == 0 {
        return;
    }
    let (upper, first) = (left.values.as_ptr(), right.first.as_ptr());
    // SAFETY: each row of `left` has `steps` times 64 bytes, and each column has `steps` tiles.
    unsafe {
        let lower = (left.rows > SIDE).then(|| upper.add(SIDE * left.stride));
        match (lower, right.second.map(<[_]>::as_ptr)) {
            (Some(lower), Some(second)) => {
                let (left, right) = ([upper.cast(), lower.cast()], [first.cast(), second.cast()]);
                add_four_tiles(block, left, stride, right, steps);
            }
            (Some(lower), None) => {
                add_two_tiles(block, [upper.cast(), lower.cast()], stride, first.cast(), steps);
            }
            (None, second) => {
                let [[sums, other_sums], _] = block;
                add_one_tile(sums, upper.cast(), stride, first.cast(), steps);
                if let Some(second) = second {
                    add_one_tile(other_sums, upper.cast(), stride, second.cast(), steps);
                }
            }
        }
    }
}

unsafe fn add_four_tiles(
    [[c00, c01], [c10, c11]]: &mut SumBlock,
    [upper, lower]: [*const u8; 2],
    stride: usize,
    [first, second]: [*const u8; 2],
    steps: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c00} + {row}]",
            "tileloadd tmm1, [{c01} + {row}]",
            "tileloadd tmm2, [{c10} + {row}]",
            "tileloadd tmm3, [{c11} + {row}]",
            "2:",
            "tileloadd tmm4, [{upper} + {stride}]",
            "tileloadd tmm6, [{first} + {row}]",
            "tileloadd tmm7, [{second} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{lower} + {stride}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {upper}, 64",
            "add {lower}, 64",
            "add {first}, 1024",
            "add {second}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c00} + {row}], tmm0",
            "tilestored [{c01} + {row}], tmm1",
            "tilestored [{c10} + {row}], tmm2",
            "tilestored [{c11} + {row}], tmm3",
            c00 = in(reg) c00,
            c01 = in(reg) c01,
            c10 = in(reg) c10,
            c11 = in(reg) c11,
            upper = inout(reg) upper => _,
            lower = inout(reg) lower => _,
            first = inout(reg) first => _,
            second = inout(reg) second => _,
            stride = in(reg) stride,
            row = in(reg) ROW_BYTES,
            steps = inout(reg) steps => _,
            options(nostack),
        );
    }
}

unsafe fn add_two_tiles(
    [[c00, _], [c10, _]]: &mut SumBlock,
    [upper, lower]: [*const u8; 2],
    stride: usize,
    first: *const u8,
    steps: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c00} + {row}]",
            "tileloadd tmm2, [{c10} + {row}]",
            "2:",
            "tileloadd tmm6, [{first} + {row}]",
            "tileloadd tmm4, [{upper} + {stride}]",
            "tileloadd tmm5, [{lower} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "add {upper}, 64",
            "add {lower}, 64",
            "add {first}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c00} + {row}], tmm0",
            "tilestored [{c10} + {row}], tmm2",
            c00 = in(reg) c00,
            c10 = in(reg) c10,
            upper = inout(reg) upper => _,
            lower = inout(reg) lower => _,
            first = inout(reg) first => _,
            stride = in(reg) stride,
            row = in(reg) ROW_BYTES,
            steps = inout(reg) steps => _,
            options(nostack),
        );
    }
}

unsafe fn add_one_tile(
    sums: &mut TileSums,
    left: *const u8,
    stride: usize,
    right: *const u8,
    steps: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {row}]",
            "2:",
            "tileloadd tmm6, [{right} + {row}]",
            "tileloadd tmm4, [{left} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {left}, 64",
            "add {right}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            sums = in(reg) sums,
            left = inout(reg) left => _,
            right = inout(reg) right => _,
            stride = in(reg) stride,
            row = in(reg) ROW_BYTES,
            steps = inout(reg) steps => _,
            options(nostack),
        );
    }
}
