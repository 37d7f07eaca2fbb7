//! The cell's control group, where the box has delegated one to the agent: kernel version 2.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::Path,
};

use crate::Limits;

/// What the cell itself may use on top of a program's limits.
const CELL_BYTES: u64 = 64 << 20;
/// Both processes of the cell, and the first of a program's.
const CELL_PROCESSES: u32 = 3;

/// Files of a group this process is in, opened before they were out of sight.
#[derive(Debug)]
pub(crate) struct Group {
    memory: File,
    processes: File,
    events: File,
}

impl Group {
    /// Enters the group, with all that is started later.
    pub(crate) fn join(directory: &Path) -> io::Result<Self> {
        let open = |name| OpenOptions::new().write(true).open(directory.join(name));
        open("cgroup.procs")?.write_all(b"0")?;
        // A box without swap accounting has no such file, and then programs may swap.
        let _ = std::fs::write(directory.join("memory.swap.max"), "0");
        let events = File::open(directory.join("memory.events"))?;
        Ok(Self { memory: open("memory.max")?, processes: open("pids.max")?, events })
    }

    /// For the program that comes next.
    pub(crate) fn limit(&self, limits: &Limits) -> io::Result<()> {
        // The room is memory too.
        let memory = limits.memory_bytes.saturating_add(limits.disk_bytes);
        let memory = memory.saturating_add(CELL_BYTES);
        (&self.memory).write_all(memory.to_string().as_bytes())?;
        let processes = limits.processes.saturating_add(CELL_PROCESSES);
        (&self.processes).write_all(processes.to_string().as_bytes())
    }

    /// How many processes the kernel has ended for want of memory so far.
    pub(crate) fn killed(&self) -> io::Result<u64> {
        let mut events = &self.events;
        events.rewind()?;
        let mut text = String::new();
        events.read_to_string(&mut text)?;
        Ok(killed(&text))
    }
}

fn killed(events: &str) -> u64 {
    let count = |line: &str| line.strip_prefix("oom_kill ")?.parse().ok();
    events.lines().find_map(count).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_joined_limited_and_asked_by_its_files() {
        let directory = tempfile::tempdir().unwrap();
        for file in ["cgroup.procs", "memory.max", "pids.max"] {
            std::fs::write(directory.path().join(file), "").unwrap();
        }
        let events = "low 0\nhigh 0\nmax 7\noom 1\noom_kill 3\noom_group_kill 0\n";
        std::fs::write(directory.path().join("memory.events"), events).unwrap();
        let group = Group::join(directory.path()).unwrap();
        let limits = Limits { memory_bytes: 5, disk_bytes: 7, processes: 4, ..Limits::default() };
        group.limit(&limits).unwrap();
        assert_eq!(group.killed().unwrap(), 3);
        let read = |file| std::fs::read_to_string(directory.path().join(file)).unwrap();
        assert_eq!(read("cgroup.procs"), "0");
        assert_eq!(read("memory.max"), (12 + CELL_BYTES).to_string());
        assert_eq!(read("pids.max"), "7");
    }
}
