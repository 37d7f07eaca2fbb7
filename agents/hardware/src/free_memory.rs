//! The memory that programs may still take.

/// Returns the available memory of this machine in bytes, as the kernel estimates it (`MemAvailable`
/// of `/proc/meminfo`); `None` if it does not say.
pub fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_left() {
        assert!(available_memory_bytes().is_none_or(|bytes| bytes > 1 << 20));
    }
}
