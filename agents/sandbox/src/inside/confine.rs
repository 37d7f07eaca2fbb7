//! What a process gives up of itself: capabilities, and what it may use.

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

use crate::Limits;

/// Processes of the cell's user that are not the program's: the cell, and the first of the
/// program's namespace.
const CELL_PROCESSES: u64 = 2;

const OPEN_FILES_MAX: u64 = 512;
const STACK_BYTES: u64 = 8 << 20;

/// One process may reserve so many times what all may use: between two looks, and so that
/// allocations fail rather than programs.
const RESERVED: u64 = 2;

/// Nothing that is executed later can have capabilities, whatever its file says.
pub(crate) fn cell() -> io::Result<()> {
    sethostname(b"sandbox")?;
    set_no_new_privs(true)?;
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // Of a newer kernel than this one.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Makes this process and all it starts the kernel's first choice when the box runs out of memory.
pub(crate) fn first_to_go() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000")
}

/// Gives up what is left within the namespaces.
pub(crate) fn capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(set_capabilities(None, sets)?)
}

/// For a program, in its process. All cores of the box may work for it until its time is up.
pub(crate) fn limits(limits: &Limits, cores: u64) -> io::Result<()> {
    let seconds = limits.wall.as_secs().saturating_add(1).saturating_mul(cores);
    let processes = u64::from(limits.processes).saturating_add(CELL_PROCESSES);
    let reserved = limits.memory_bytes.saturating_mul(RESERVED);
    for (resource, current, maximum) in [
        (Resource::Core, 0, 0),
        // A second line behind the wall clock.
        (Resource::Cpu, seconds, seconds),
        (Resource::Data, reserved, reserved),
        (Resource::Fsize, limits.disk_bytes, limits.disk_bytes),
        (Resource::Nofile, OPEN_FILES_MAX, OPEN_FILES_MAX),
        (Resource::Nproc, processes, processes),
        (Resource::Stack, STACK_BYTES.min(reserved), reserved),
        (Resource::Memlock, 0, 0),
        (Resource::Msgqueue, 0, 0),
    ] {
        set(resource, current, maximum)?;
    }
    Ok(())
}

/// Only ever lowers: who is limited already stays so.
fn set(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let maximum =
        rustix::process::getrlimit(resource).maximum.map_or(maximum, |now| now.min(maximum));
    let current = current.min(maximum);
    Ok(setrlimit(resource, Rlimit { current: Some(current), maximum: Some(maximum) })?)
}
