//! The texts of the profiles that are part of the program, by name.

pub(crate) const BUILT_IN_PROFILES: [(&str, &str); 6] = [
    ("cpu", include_str!("../profiles/cpu.yaml")),
    ("cuda", include_str!("../profiles/cuda.yaml")),
    ("gfx906", include_str!("../profiles/gfx906.yaml")),
    ("gfx1151", include_str!("../profiles/gfx1151.yaml")),
    ("gfx1201", include_str!("../profiles/gfx1201.yaml")),
    ("rocm", include_str!("../profiles/rocm.yaml")),
];

pub(crate) fn has_own_profile(gfx: &str) -> bool {
    BUILT_IN_PROFILES.iter().any(|(name, _)| *name == gfx)
}
