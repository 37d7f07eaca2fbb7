//! The names of GPU targets. The compute driver's `gfx_target_version` is the real silicon:
//! `HSA_OVERRIDE_GFX_VERSION` changes only the output of rocminfo and torch.

/// The targets that are part of a processor. The driver's `local_mem_size` does not show it,
/// because current kernels write 0 for cards with their own memory too.
const INTEGRATED_TARGETS: [&str; 12] = [
    "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150",
    "gfx1151", "gfx1152", "gfx1153",
];

const AMD_VENDOR_ID: u64 = 0x1002;

/// Returns true if a node of the compute driver's topology is a GPU of AMD. `get` returns the value
/// of a property, and 0 for an absent one.
pub(crate) fn is_amd_gpu(get: impl Fn(&str) -> u64) -> bool {
    get("simd_count") != 0 && get("gfx_target_version") != 0 && get("vendor_id") == AMD_VENDOR_ID
}

/// Returns true if the target is part of a processor.
pub fn is_integrated_target(gfx: &str) -> bool {
    INTEGRATED_TARGETS.contains(&gfx)
}

/// Formats a target version: 110501 is gfx1151, 90010 is gfx90a.
pub(crate) fn target_name(version: u64) -> String {
    let (major, minor, step) = (version / 10_000, version / 100 % 100, version % 100);
    format!("gfx{major}{minor:x}{step:x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_named_as_the_compilers_name_them() {
        let names = [110_501, 120_001, 90_006, 90_010, 90_012, 100_300, 110_003].map(target_name);
        let expected = ["gfx1151", "gfx1201", "gfx906", "gfx90a", "gfx90c", "gfx1030", "gfx1103"];
        assert_eq!(names, expected);
    }
}
