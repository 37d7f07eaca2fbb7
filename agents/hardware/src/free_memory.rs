//! The memory that programs may still take, and that this one has taken.

/// Returns the available memory of this machine in bytes, as the kernel estimates it (`MemAvailable`
/// of `/proc/meminfo`); `None` if it does not say.
pub fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Returns the largest resident memory of this process so far, in bytes (`VmHWM` of
/// `/proc/self/status`); 0 if the kernel does not say.
pub fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_left() {
        assert!(available_memory_bytes().is_none_or(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn the_peak_of_this_process_includes_what_it_has_freed() {
        let taken = vec![1_u8; 64 << 20];
        assert_eq!(taken.iter().map(|byte| usize::from(*byte)).sum::<usize>(), 64 << 20);
        drop(taken);
        assert!(peak_memory_bytes() > 64 << 20);
    }
}
