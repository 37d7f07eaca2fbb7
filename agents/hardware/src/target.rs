//! What GPU targets are called. The compute driver's `gfx_target_version` is what the silicon
//! is: `HSA_OVERRIDE_GFX_VERSION` changes what rocminfo and torch say, not this.

/// Targets that are part of a processor. The driver's own `local_mem_size` is no help: current
/// kernels write 0 for cards with memory of their own too.
const INTEGRATED: [&str; 12] = [
    "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150",
    "gfx1151", "gfx1152", "gfx1153",
];

pub(crate) fn is_integrated(gfx: &str) -> bool {
    INTEGRATED.contains(&gfx)
}

/// 110501 is gfx1151, 90010 is gfx90a.
pub(crate) fn gfx(version: u64) -> String {
    let (major, minor, step) = (version / 10_000, version / 100 % 100, version % 100);
    format!("gfx{major}{minor:x}{step:x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_named_as_the_compilers_name_them() {
        let names = [110_501, 120_001, 90_006, 90_010, 90_012, 100_300, 110_003].map(gfx);
        let expected = ["gfx1151", "gfx1201", "gfx906", "gfx90a", "gfx90c", "gfx1030", "gfx1103"];
        assert_eq!(names, expected);
    }
}
