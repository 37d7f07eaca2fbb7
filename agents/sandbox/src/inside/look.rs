//! What a program uses, as `/proc` tells: the cell sees its own processes there and no others.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rustix::param::page_size;

/// A box with less of its memory left than this part is about to end processes of its own choice.
const SPARE_PART: u64 = 64;

/// What is wrong with the memory, if anything.
pub(crate) enum Excess {
    /// The program uses more than it may.
    Program,
    /// The box has hardly any left, whoever uses it.
    Box,
}

/// Looks at the program's processes, and at the box.
pub(crate) fn memory(limit: u64) -> io::Result<Option<Excess>> {
    let processes = processes()?;
    // Both count too much, and looking closer takes longer.
    let much = total(&processes, resident) > limit || total(&processes, mapped) > limit;
    if much && closer(&processes) > limit {
        return Ok(Some(Excess::Program));
    }
    let box_memory = fs::read_to_string("/proc/meminfo")?;
    Ok(is_short(&box_memory).then_some(Excess::Box))
}

/// Pages that several processes share are counted once. So is shared memory without a file,
/// whole: it stays in memory when no process has its pages any more.
fn closer(processes: &[PathBuf]) -> u64 {
    let mut shared = BTreeMap::new();
    for process in processes {
        let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
        shared.extend(maps.lines().filter_map(shared_memory));
    }
    shared.into_values().fold(total(processes, proportional), u64::saturating_add)
}

/// The inode and length of a mapping of shared memory without a file, from a line of `maps`.
fn shared_memory(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.strip_suffix(" (deleted)")?.split_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let inode = fields.nth(3)?.parse().ok()?;
    let length = u64::from_str_radix(to, 16).ok()?.checked_sub(u64::from_str_radix(from, 16).ok()?);
    (fields.next()? == "/dev/zero").then_some((inode, length?))
}

/// Directories of all processes but this one.
fn processes() -> io::Result<Vec<PathBuf>> {
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

/// One that has just ended uses nothing.
fn total(processes: &[PathBuf], bytes: impl Fn(&Path) -> Option<u64>) -> u64 {
    processes.iter().filter_map(|process| bytes(process)).fold(0, u64::saturating_add)
}

fn mapped(process: &Path) -> Option<u64> {
    pages(process, 0)
}

fn resident(process: &Path) -> Option<u64> {
    pages(process, 1)
}

/// Bytes, from a field of `statm`.
fn pages(process: &Path, field: usize) -> Option<u64> {
    let text = fs::read_to_string(process.join("statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(field)?.parse().ok()?;
    pages.checked_mul(page_size() as u64)
}

fn proportional(process: &Path) -> Option<u64> {
    match fs::read_to_string(process.join("smaps_rollup")) {
        Ok(text) => kib(&text, "Pss:"),
        Err(_) => resident(process),
    }
}

fn is_short(meminfo: &str) -> bool {
    let (available, total) = (kib(meminfo, "MemAvailable:"), kib(meminfo, "MemTotal:"));
    matches!((available, total), (Some(left), Some(all)) if left < all / SPARE_PART)
}

/// Bytes, from a line of KiB.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_short_of_memory_with_less_than_a_64th_of_it() {
        assert!(is_short("MemTotal:  6400 kB\nMemFree: 1 kB\nMemAvailable:   99 kB\n"));
        assert!(!is_short("MemTotal:  6400 kB\nMemFree: 1 kB\nMemAvailable:  101 kB\n"));
        assert!(!is_short("nothing known"));
    }

    #[test]
    fn shared_memory_without_a_file_is_found_in_maps() {
        let line = "7f0000000000-7f0000400000 rw-s 00000000 00:01 4711    /dev/zero (deleted)";
        assert_eq!(shared_memory(line), Some((4711, 4 << 20)));
        for other in [
            "7f0000000000-7f0000400000 rw-s 00000000 00:29 7    /room/tmp/x (deleted)",
            "7f0000000000-7f0000400000 r--p 00000000 fe:00 9    /usr/lib/libc.so.6",
            "7f0000000000-7f0000400000 rw-p 00000000 00:00 0",
        ] {
            assert_eq!(shared_memory(other), None, "{other}");
        }
    }

    #[test]
    fn this_process_is_seen_with_about_what_it_uses() {
        let this = Path::new("/proc/self");
        let (all, own) = (resident(this).unwrap(), proportional(this).unwrap());
        assert!(own <= all && own > 100_000, "{own} of {all}");
    }
}
