//! The limits of programs, from the settings.

use std::time::Duration;

use wire::v1::verifier;

const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

const COMPILER_MEMORY_BYTES: u64 = 4 << 30;
const COMPILER_DISK_BYTES: u64 = 512 << 20;

const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;

/// Replaces missing or zero settings by the sandbox's defaults.
pub(super) fn program_limits(limits: Option<&verifier::Limits>) -> sandbox::ProgramLimits {
    let default = sandbox::ProgramLimits::default();
    let Some(limits) = limits else { return default };
    let bytes = |count: u32, unit: u64, default: u64| match u64::from(count) * unit {
        0 => default,
        bytes => bytes,
    };
    sandbox::ProgramLimits {
        wall: parse_timeout(limits.timeout_s).unwrap_or(default.wall),
        memory_bytes: bytes(limits.memory_mib, MIB, default.memory_bytes),
        processes: if limits.processes == 0 { default.processes } else { limits.processes },
        disk_bytes: bytes(limits.disk_mib, MIB, default.disk_bytes),
        output_bytes: bytes(limits.output_kib, KIB, default.output_bytes),
    }
}

/// Defaults to a timeout of 60 s.
pub(super) fn compiler_limits(timeout_s: f64) -> sandbox::ProgramLimits {
    let default = sandbox::ProgramLimits::default();
    sandbox::ProgramLimits {
        wall: parse_timeout(timeout_s).unwrap_or(Duration::from_secs(60)),
        memory_bytes: COMPILER_MEMORY_BYTES,
        disk_bytes: COMPILER_DISK_BYTES,
        ..default
    }
}

/// Accepts a positive timeout up to `TIMEOUT_MAX`.
fn parse_timeout(seconds: f64) -> Option<Duration> {
    let wall = Duration::try_from_secs_f64(seconds).ok().filter(|wall| !wall.is_zero())?;
    Some(wall.min(TIMEOUT_MAX))
}
