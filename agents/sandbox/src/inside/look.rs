//! What a program uses, as `/proc` tells: the cell sees its own processes there and no others.

use std::{fs, io, path::PathBuf};

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
    // Pages that several processes share are counted for each; looking closer takes longer.
    if total(&processes, resident) > limit && total(&processes, proportional) > limit {
        return Ok(Some(Excess::Program));
    }
    let box_memory = fs::read_to_string("/proc/meminfo")?;
    Ok(is_short(&box_memory).then_some(Excess::Box))
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
fn total(processes: &[PathBuf], bytes: impl Fn(&PathBuf) -> Option<u64>) -> u64 {
    processes.iter().filter_map(bytes).fold(0, u64::saturating_add)
}

fn resident(process: &PathBuf) -> Option<u64> {
    let text = fs::read_to_string(process.join("statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_size() as u64)
}

fn proportional(process: &PathBuf) -> Option<u64> {
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
    fn this_process_is_seen_with_about_what_it_uses() {
        let this = PathBuf::from("/proc/self");
        let (all, own) = (resident(&this).unwrap(), proportional(&this).unwrap());
        assert!(own <= all && own > 100_000, "{own} of {all}");
    }
}
