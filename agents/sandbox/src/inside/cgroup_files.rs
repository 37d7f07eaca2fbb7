//! The control group of the cell (cgroup v2), if one was delegated to the agent.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::Path,
};

use crate::ProgramLimits;

/// The cell's own share, in addition to a program's limit.
const CELL_BYTES: u64 = 64 << 20;
/// Both processes of the cell, and the first process of a program's namespace.
const CELL_PROCESSES: u32 = 3;

/// Opened before the file system was hidden.
#[derive(Debug)]
pub(crate) struct CgroupFiles {
    memory: File,
    processes: File,
    events: File,
}

impl CgroupFiles {
    pub(crate) fn join_group(directory: &Path) -> io::Result<Self> {
        let open = |name| OpenOptions::new().write(true).open(directory.join(name));
        open("cgroup.procs")?.write_all(b"0")?;
        // A host without swap accounting lacks this file; programs may then swap.
        let _ = std::fs::write(directory.join("memory.swap.max"), "0");
        let events = File::open(directory.join("memory.events"))?;
        Ok(Self { memory: open("memory.max")?, processes: open("pids.max")?, events })
    }

    pub(crate) fn set_limits(&self, limits: &ProgramLimits) -> io::Result<()> {
        // Files in the room use memory too.
        let memory = limits.memory_bytes.saturating_add(limits.disk_bytes);
        let memory = memory.saturating_add(CELL_BYTES);
        (&self.memory).write_all(memory.to_string().as_bytes())?;
        let processes = limits.processes.saturating_add(CELL_PROCESSES);
        (&self.processes).write_all(processes.to_string().as_bytes())
    }

    /// Counts the processes killed for lack of memory.
    pub(crate) fn oom_kill_count(&self) -> io::Result<u64> {
        let mut events = &self.events;
        events.rewind()?;
        let mut text = String::new();
        events.read_to_string(&mut text)?;
        Ok(parse_oom_kills(&text))
    }
}

/// Reads `oom_kill` of `memory.events`; 0 if it is missing.
fn parse_oom_kills(events: &str) -> u64 {
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
        let group = CgroupFiles::join_group(directory.path()).unwrap();
        let limits = ProgramLimits {
            memory_bytes: 5,
            disk_bytes: 7,
            processes: 4,
            ..ProgramLimits::default()
        };
        group.set_limits(&limits).unwrap();
        assert_eq!(group.oom_kill_count().unwrap(), 3);
        let read = |file| std::fs::read_to_string(directory.path().join(file)).unwrap();
        assert_eq!(read("cgroup.procs"), "0");
        assert_eq!(read("memory.max"), (12 + CELL_BYTES).to_string());
        assert_eq!(read("pids.max"), "7");
    }
}
