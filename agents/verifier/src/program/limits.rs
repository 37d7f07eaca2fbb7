//! What a program may take, by the settings.

use std::time::Duration;

use wire::v1::verifier;

/// Of a spec that nobody checked.
const LONGEST: Duration = Duration::from_secs(3600);

/// What a compiler may take.
const COMPILER_BYTES: u64 = 4 << 30;
const COMPILER_DISK_BYTES: u64 = 512 << 20;

const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;

/// What is not said, or 0, is as the sandbox has it.
pub(super) fn of(limits: Option<&verifier::Limits>) -> sandbox::Limits {
    let default = sandbox::Limits::default();
    let Some(limits) = limits else { return default };
    let bytes = |count: u32, unit: u64, default: u64| match u64::from(count) * unit {
        0 => default,
        bytes => bytes,
    };
    sandbox::Limits {
        wall: seconds(limits.timeout_s).unwrap_or(default.wall),
        memory_bytes: bytes(limits.memory_mib, MIB, default.memory_bytes),
        processes: if limits.processes == 0 { default.processes } else { limits.processes },
        disk_bytes: bytes(limits.disk_mib, MIB, default.disk_bytes),
        output_bytes: bytes(limits.output_kib, KIB, default.output_bytes),
    }
}

pub(super) fn of_compiler(timeout_s: f64) -> sandbox::Limits {
    let default = sandbox::Limits::default();
    sandbox::Limits {
        wall: seconds(timeout_s).unwrap_or(Duration::from_secs(60)),
        memory_bytes: COMPILER_BYTES,
        disk_bytes: COMPILER_DISK_BYTES,
        ..default
    }
}

fn seconds(seconds: f64) -> Option<Duration> {
    let wall = Duration::try_from_secs_f64(seconds).ok().filter(|wall| !wall.is_zero())?;
    Some(wall.min(LONGEST))
}
