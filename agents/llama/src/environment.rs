//! What a program of llama.cpp gets to know of the box. Its options can all be set by variables
//! (`LLAMA_ARG_…`), so nothing is inherited that is not named here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Inherited where the box has them.
const INHERITED: [&str; 13] = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    // Where the Vulkan loader keeps compiled shaders, and which drivers it finds.
    "XDG_CACHE_HOME",
    "VK_DRIVER_FILES",
    // Which of a box's GPUs is meant.
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
];

/// All variables of a child.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// What is inherited less `unset`, then `variables`: a hardware profile's two lists.
    pub fn new(variables: &BTreeMap<String, String>, unset: &[String]) -> Self {
        let allowed = INHERITED.iter().filter(|name| !unset.iter().any(|other| other == *name));
        let inherited = allowed
            .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))
            .collect::<BTreeMap<_, _>>();
        let mut all = inherited;
        all.extend(variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        Self(all)
    }

    /// In place of what is there under that name.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    pub(crate) fn variables(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_listed_is_inherited_and_the_profile_has_the_last_word() {
        let ours = BTreeMap::from([("HIP_VISIBLE_DEVICES".to_owned(), "1".to_owned())]);
        let environment = Environment::new(&ours, &["HOME".to_owned()]);
        let names: Vec<&str> = environment.variables().keys().map(String::as_str).collect();
        assert!(names.contains(&"PATH") && !names.contains(&"HOME"), "{names:?}");
        // Cargo sets it for every test.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        assert!(!names.contains(&"CARGO_MANIFEST_DIR"));
        assert_eq!(environment.variables()["HIP_VISIBLE_DEVICES"], "1");
    }
}
