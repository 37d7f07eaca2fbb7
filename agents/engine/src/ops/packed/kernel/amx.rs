//! AMX, tiles of the processor's own: Intel from Sapphire Rapids on. In assembly, as Rust has no
//! stable intrinsics for it. Each piece of assembly loads the tiles it uses and stores its sums.

#![expect(unsafe_code, reason = "assembly, on raw pointers")]

use super::{Block, Left, SIDE, Sums, Tiles};
use std::arch::asm;

/// Whether the processor has it and the system lets this process use it.
pub(super) fn is_there() -> bool {
    const FEATURES: u32 = 7;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let has_it = || {
        let features = std::arch::x86_64::__cpuid_count(FEATURES, 0).edx;
        features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
    };
    super::avx512::is_there() && has_it() && is_permitted()
}

/// Asks the system for room for the tiles when it switches threads (Linux 5.16).
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: gives this process a right and reads or writes no memory of it.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Of the processor's tiles, as `ldtilecfg` reads it.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const TILES: usize = 8;
const ROW_BYTES: usize = 4 * SIDE;

/// All eight of them 16 rows of 64 bytes.
static WHOLE_TILES: Configuration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < TILES {
        row_bytes[tile] = ROW_BYTES as u16;
        rows[tile] = SIDE as u8;
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// The kernel was chosen because [`is_there`].
pub(super) fn begin() {
    // SAFETY: the instruction is there; it reads the 64 bytes of the configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, readonly)) }
}

pub(super) fn end() {
    // SAFETY: the instruction is there.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// The caller has checked that `left` has the rows, and begun.
pub(super) fn multiply(block: &mut Block, left: Left<'_>, right: Tiles<'_>) {
    let (steps, stride) = (right.first.len(), 2 * left.stride);
    if steps == 0 {
        return;
    }
    let (upper, first) = (left.values.as_ptr(), right.first.as_ptr());
    // SAFETY: `left` has so many rows of `steps` times 64 bytes, and the columns so many tiles.
    unsafe {
        let lower = (left.rows > SIDE).then(|| upper.add(SIDE * left.stride));
        match (lower, right.second.map(<[_]>::as_ptr)) {
            (Some(lower), Some(second)) => {
                let (left, right) = ([upper.cast(), lower.cast()], [first.cast(), second.cast()]);
                add_four(block, left, stride, right, steps);
            }
            (Some(lower), None) => {
                add_two(block, [upper.cast(), lower.cast()], stride, first.cast(), steps);
            }
            (None, second) => {
                let [[sums, other_sums], _] = block;
                add(sums, upper.cast(), stride, first.cast(), steps);
                if let Some(second) = second {
                    add(other_sums, upper.cast(), stride, second.cast(), steps);
                }
            }
        }
    }
}

/// A whole block.
unsafe fn add_four(
    [[c00, c01], [c10, c11]]: &mut Block,
    [upper, lower]: [*const u8; 2],
    stride: usize,
    [first, second]: [*const u8; 2],
    steps: usize,
) {
    // SAFETY: the caller's.
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

/// The left column of a block.
unsafe fn add_two(
    [[c00, _], [c10, _]]: &mut Block,
    [upper, lower]: [*const u8; 2],
    stride: usize,
    first: *const u8,
    steps: usize,
) {
    // SAFETY: the caller's.
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

/// One tile of sums.
unsafe fn add(sums: &mut Sums, left: *const u8, stride: usize, right: *const u8, steps: usize) {
    // SAFETY: the caller's.
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
