//! The environment variables of llama.cpp's programs. All their options can be set by variables
//! (`LLAMA_ARG_…`), so only the variables listed here are inherited.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

const INHERITED: [&str; 14] = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    // The Vulkan loader's shader cache, and the drivers that it finds.
    "XDG_CACHE_HOME",
    "VK_DRIVER_FILES",
    // The selection of the host's GPUs.
    "CUDA_VISIBLE_DEVICES",
    "GGML_VK_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
];

/// All environment variables of a child process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEnvironment(BTreeMap<String, String>);

impl ProcessEnvironment {
    /// Returns the inherited variables without those in `unset`, overridden by `variables`. Both
    /// lists come from a hardware profile.
    pub fn new(variables: &BTreeMap<String, String>, unset: &[String]) -> Self {
        let allowed = INHERITED.iter().filter(|name| !unset.iter().any(|other| other == *name));
        let inherited = allowed
            .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))
            .collect::<BTreeMap<_, _>>();
        let mut all = inherited;
        all.extend(variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        Self(all)
    }

    /// Returns the environment with a variable set or replaced.
    #[must_use]
    pub(crate) fn with_variable(mut self, name: &str, value: impl Into<String>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    pub(crate) fn all_variables(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_variables_are_inherited_and_the_profile_overrides_them() {
        let ours = BTreeMap::from([("HIP_VISIBLE_DEVICES".to_owned(), "1".to_owned())]);
        let environment = ProcessEnvironment::new(&ours, &["HOME".to_owned()]);
        let names: Vec<&str> = environment.all_variables().keys().map(String::as_str).collect();
        assert!(names.contains(&"PATH") && !names.contains(&"HOME"), "{names:?}");
        // Cargo sets it for every test.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        assert!(!names.contains(&"CARGO_MANIFEST_DIR"));
        assert_eq!(environment.all_variables()["HIP_VISIBLE_DEVICES"], "1");
    }
}
