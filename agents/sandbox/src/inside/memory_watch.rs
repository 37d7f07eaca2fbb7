//! The memory use of a program, from `/proc`, in which the cell sees only its own processes.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rustix::param::page_size;

/// Below this fraction of free memory the kernel is about to kill processes of its own choice.
const FREE_MEMORY_DIVISOR: u64 = 64;

pub(crate) enum MemoryExcess {
    Program,
    /// The host has almost no free memory, whichever process uses it.
    Host,
}

/// Checks the program's processes and the host. `limit` is in bytes.
pub(crate) fn check_memory(limit: u64) -> io::Result<Option<MemoryExcess>> {
    let processes = other_processes()?;
    // Both sums overestimate; the exact measurement is slower.
    let much = sum_memory(&processes, resident_bytes) > limit
        || sum_memory(&processes, mapped_bytes) > limit;
    if much && exact_memory(&processes) > limit {
        return Ok(Some(MemoryExcess::Program));
    }
    let box_memory = fs::read_to_string("/proc/meminfo")?;
    Ok(is_host_short(&box_memory).then_some(MemoryExcess::Host))
}

/// Counts shared pages once, and anonymous shared memory in full, because it stays in memory after
/// its processes have unmapped it.
fn exact_memory(processes: &[PathBuf]) -> u64 {
    let mut shared = BTreeMap::new();
    for process in processes {
        let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
        shared.extend(maps.lines().filter_map(parse_shared_mapping));
    }
    shared.into_values().fold(sum_memory(processes, proportional_bytes), u64::saturating_add)
}

/// Returns inode and length of an anonymous shared mapping, from a line of `maps`.
fn parse_shared_mapping(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.strip_suffix(" (deleted)")?.split_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let inode = fields.nth(3)?.parse().ok()?;
    let length = u64::from_str_radix(to, 16).ok()?.checked_sub(u64::from_str_radix(from, 16).ok()?);
    (fields.next()? == "/dev/zero").then_some((inode, length?))
}

/// Returns their `/proc` directories.
fn other_processes() -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        if pid.is_some_and(|pid| pid != std::process::id()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Counts a process that has just ended as 0.
fn sum_memory(processes: &[PathBuf], bytes: impl Fn(&Path) -> Option<u64>) -> u64 {
    processes.iter().filter_map(|process| bytes(process)).fold(0, u64::saturating_add)
}

fn mapped_bytes(process: &Path) -> Option<u64> {
    statm_bytes(process, 0)
}

fn resident_bytes(process: &Path) -> Option<u64> {
    statm_bytes(process, 1)
}

fn statm_bytes(process: &Path, field: usize) -> Option<u64> {
    let text = fs::read_to_string(process.join("statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(field)?.parse().ok()?;
    pages.checked_mul(page_size() as u64)
}

/// Returns the proportional set size, or the resident memory if that is unavailable.
fn proportional_bytes(process: &Path) -> Option<u64> {
    match fs::read_to_string(process.join("smaps_rollup")) {
        Ok(text) => field_bytes(&text, "Pss:"),
        Err(_) => resident_bytes(process),
    }
}

fn is_host_short(meminfo: &str) -> bool {
    let (available, total) =
        (field_bytes(meminfo, "MemAvailable:"), field_bytes(meminfo, "MemTotal:"));
    matches!((available, total), (Some(left), Some(all)) if left < all / FREE_MEMORY_DIVISOR)
}

/// Converts a KiB field of a `/proc` file.
fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_short_of_memory_with_less_than_a_64th_of_it() {
        assert!(is_host_short("MemTotal:  6400 kB\nMemFree: 1 kB\nMemAvailable:   99 kB\n"));
        assert!(!is_host_short("MemTotal:  6400 kB\nMemFree: 1 kB\nMemAvailable:  101 kB\n"));
        assert!(!is_host_short("nothing known"));
    }

    #[test]
    fn shared_memory_without_a_file_is_found_in_maps() {
        let line = "7f0000000000-7f0000400000 rw-s 00000000 00:01 4711    /dev/zero (deleted)";
        assert_eq!(parse_shared_mapping(line), Some((4711, 4 << 20)));
        for other in [
            "7f0000000000-7f0000400000 rw-s 00000000 00:29 7    /room/tmp/x (deleted)",
            "7f0000000000-7f0000400000 r--p 00000000 fe:00 9    /usr/lib/libc.so.6",
            "7f0000000000-7f0000400000 rw-p 00000000 00:00 0",
        ] {
            assert_eq!(parse_shared_mapping(other), None, "{other}");
        }
    }

    #[test]
    fn this_process_is_seen_with_about_what_it_uses() {
        let this = Path::new("/proc/self");
        let (all, own) = (resident_bytes(this).unwrap(), proportional_bytes(this).unwrap());
        assert!(own <= all && own > 100_000, "{own} of {all}");
    }
}
