//! Restrictions of a process on itself: capabilities and resource limits.

use std::io;

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, setrlimit},
    system::sethostname,
    thread::{
        CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities,
        set_no_new_privs,
    },
};

use crate::ProgramLimits;

/// The cell, and the first process of the program's namespace, which have the program's user.
const CELL_PROCESSES: u64 = 2;

const OPEN_FILES_MAX: u64 = 512;
const STACK_BYTES: u64 = 8 << 20;

/// The factor of the memory limit that one process may reserve: an allocation between two
/// measurements then fails instead of the host running out of memory.
const RESERVED_MEMORY_FACTOR: u64 = 2;

pub(crate) fn confine_cell() -> io::Result<()> {
    sethostname(b"sandbox")?;
    forbid_privileges()
}

/// Ensures that no executable gains capabilities from its file's attributes.
pub(crate) fn forbid_privileges() -> io::Result<()> {
    set_no_new_privs(true)?;
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // Capabilities of newer kernels only.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Makes this process and its children the kernel's first choice when memory runs out.
pub(crate) fn prefer_oom_kill() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000")
}

pub(crate) fn drop_capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(set_capabilities(None, sets)?)
}

/// Sets the limits of this process. The CPU limit allows all cores for the whole wall time.
pub(crate) fn apply_limits(limits: &ProgramLimits, cores: u64) -> io::Result<()> {
    let seconds = limits.wall.as_secs().saturating_add(1).saturating_mul(cores);
    let processes = u64::from(limits.processes).saturating_add(CELL_PROCESSES);
    let reserved = limits.memory_bytes.saturating_mul(RESERVED_MEMORY_FACTOR);
    for (resource, current, maximum) in [
        (Resource::Core, 0, 0),
        // A second defence behind the wall clock.
        (Resource::Cpu, seconds, seconds),
        (Resource::Data, reserved, reserved),
        (Resource::Fsize, limits.disk_bytes, limits.disk_bytes),
        (Resource::Nofile, OPEN_FILES_MAX, OPEN_FILES_MAX),
        (Resource::Nproc, processes, processes),
        (Resource::Stack, STACK_BYTES.min(reserved), reserved),
        (Resource::Memlock, 0, 0),
        (Resource::Msgqueue, 0, 0),
    ] {
        lower_limit(resource, current, maximum)?;
    }
    Ok(())
}

/// Never raises an existing limit.
fn lower_limit(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let maximum =
        rustix::process::getrlimit(resource).maximum.map_or(maximum, |now| now.min(maximum));
    let current = current.min(maximum);
    Ok(setrlimit(resource, Rlimit { current: Some(current), maximum: Some(maximum) })?)
}
