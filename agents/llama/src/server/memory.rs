//! The memory that a server has for itself, which does not include weights that it maps.

/// Returns true if this machine has memory for a second process like `process`. `None` if the
/// kernel does not say.
pub(super) fn has_room_for_second(process: u32) -> Option<bool> {
    let own = read_bytes(&format!("/proc/{process}/status"), "RssAnon:")?;
    let available = read_bytes("/proc/meminfo", "MemAvailable:")?;
    // A tenth more, because a server grows while it draws.
    Some(own + own / 10 <= available)
}

fn read_bytes(path: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_process_fits_twice_and_one_that_is_gone_is_unknown() {
        assert_eq!(has_room_for_second(std::process::id()), Some(true));
        assert_eq!(has_room_for_second(u32::MAX), None);
    }
}
