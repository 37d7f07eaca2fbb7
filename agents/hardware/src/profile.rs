//! How a kind of accelerator is treated: environment, precision, memory. Profiles are files in
//! `profiles/`, and a user may bring another.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::files::Live;
use crate::snapshot::Snapshot;

/// Where a profile comes from and what it says. Unknown keys are errors.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// A gfx target, `rocm` for those without a profile of their own, or `cpu`.
    pub name: String,
    pub summary: String,
    /// Set for every child; the box's own value of the same name does not reach it.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Must not reach a child, whatever the box has set.
    #[serde(default)]
    pub unset: Vec<String>,
    pub training: Training,
    #[serde(default)]
    pub precision: Precision,
    /// Weights in 4 or 8 bits.
    #[serde(default)]
    pub quantisation: Policy,
    /// Evals inside a training process that is not ours; ours has none.
    #[serde(default)]
    pub evals_in_trainer: Policy,
    pub llama: Llama,
    pub python: PythonRange,
    /// Whose experience each value is, by its place: `training`, or `training.dtype`.
    #[serde(default)]
    pub sources: BTreeMap<String, String>,
    /// Which GPU is meant, as HIP counts; found on the box, not in the file.
    #[serde(skip)]
    pub ordinal: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    Sdpa,
    Eager,
}

/// What to say of a job that asks for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    #[default]
    Allow,
    Warn,
    Refuse,
}

/// What the card computes rightly, and fast.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    pub f32: Policy,
    pub f16: Policy,
    pub bf16: Policy,
}

impl Precision {
    pub fn of(&self, dtype: Dtype) -> Policy {
        match dtype {
            Dtype::F32 => self.f32,
            Dtype::F16 => self.f16,
            Dtype::Bf16 => self.bf16,
        }
    }

    /// Whether weights of two bytes can be had.
    pub fn can_halve(&self) -> bool {
        [self.bf16, self.f16].iter().any(|policy| *policy != Policy::Refuse)
    }
}

/// For the supervised PyTorch trainer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Of the frozen base; adapters are f32.
    pub dtype: Dtype,
    pub attention: Attention,
    pub gradient_checkpointing: bool,
    pub dataloader_workers: u32,
    pub pin_memory: bool,
    /// Tokens of one forward and backward pass where the order leaves it open.
    pub micro_batch_tokens: u32,
    /// Sequences of a pass and passes of a step that are usual on it.
    #[serde(default)]
    pub batch: Option<Batch>,
    /// Of the memory torch sees, on boxes whose GPU shares the system's.
    pub memory_fraction: Option<f64>,
}

/// What a first try should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    pub sequences: u32,
    pub accumulate: u32,
}

/// For supervised llama.cpp processes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llama {
    pub generate: LlamaUse,
    pub evaluate: LlamaUse,
    /// Memory-mapped weights stall or feed reclaim storms on some boxes.
    pub mmap: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaUse {
    /// Prefixes of device names in the order of preference (`Vulkan`, `ROCm`), as
    /// `--list-devices` has them. Empty: the CPU.
    pub devices: Vec<String>,
    /// Of the base model's GGUF file.
    pub dtype: Dtype,
}

/// Interpreters for which wheels exist, both ends included.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonRange {
    pub min: String,
    pub max: String,
    /// Where torch for this accelerator comes from when `uv` fetches it; PyPI's is not for AMD.
    pub index: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("could not read the hardware profile {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the hardware profile {name} cannot be used (A101)")]
    Parse { name: String, source: Box<serde_saphyr::Error> },
    #[error(
        "{name:?} is neither a hardware profile ({known}) nor a file; pass one of these or a path (A101)"
    )]
    Unknown { name: String, known: String },
}

/// The profiles that come with the program.
const BUILT_IN: [(&str, &str); 5] = [
    ("cpu", include_str!("../profiles/cpu.yaml")),
    ("gfx906", include_str!("../profiles/gfx906.yaml")),
    ("gfx1151", include_str!("../profiles/gfx1151.yaml")),
    ("gfx1201", include_str!("../profiles/gfx1201.yaml")),
    ("rocm", include_str!("../profiles/rocm.yaml")),
];

/// For AMD targets without a profile of their own.
const OTHER_AMD: &str = "rocm";

impl Profile {
    /// The profile of that name, or in the file of that path.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn named(name: &str) -> Result<Self, ProfileError> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return parse(name, text);
        }
        let path = Path::new(name);
        if !path.exists() {
            let known = BUILT_IN.map(|(name, _)| name).join(", ");
            return Err(ProfileError::Unknown { name: name.into(), known });
        }
        let text = std::fs::read_to_string(path)
            .map_err(|source| ProfileError::Read { path: path.into(), source })?;
        parse(name, &text)
    }

    /// A profile that comes with the program, as its file has it: the start of one's own.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn text(name: &str) -> Result<&'static str, ProfileError> {
        let found = BUILT_IN.iter().find(|(known, _)| *known == name);
        let known = BUILT_IN.map(|(name, _)| name).join(", ");
        found
            .map(|(_, text)| *text)
            .ok_or_else(|| ProfileError::Unknown { name: name.into(), known })
    }

    /// The profile for the GPU of a box that is meant to work; without any, the CPU's.
    ///
    /// # Errors
    /// Never for the profiles that come with the program; a test reads them all.
    pub fn of(box_: &Snapshot) -> Result<Self, ProfileError> {
        let Some(gpu) = box_.main_gpu() else { return Self::named("cpu") };
        let name = if is_known(&gpu.gfx) { &gpu.gfx } else { OTHER_AMD };
        Ok(Self { ordinal: Some(gpu.ordinal), ..Self::named(name)? })
    }

    /// The profile of that name, or the one of this box.
    ///
    /// # Errors
    /// As [`Profile::named`].
    pub fn choose(name: Option<&str>) -> Result<Self, ProfileError> {
        match name {
            Some(name) => Self::named(name),
            None => Self::of(&Snapshot::take(&Live::new("/"))),
        }
    }

    /// Those that come with the program.
    pub fn all() -> impl Iterator<Item = Self> {
        // A test reads them all.
        BUILT_IN.iter().filter_map(|(name, text)| parse(name, text).ok())
    }

    pub fn is_cpu(&self) -> bool {
        self.name == "cpu"
    }

    /// What to set for a child.
    pub fn variables(&self) -> BTreeMap<String, String> {
        let mut variables = self.environment.clone();
        if let Some(ordinal) = self.ordinal {
            variables.insert("HIP_VISIBLE_DEVICES".into(), ordinal.to_string());
        }
        variables
    }
}

/// Whether a target has a profile of its own.
pub(crate) fn is_known(gfx: &str) -> bool {
    BUILT_IN.iter().any(|(name, _)| *name == gfx)
}

fn parse(name: &str, text: &str) -> Result<Profile, ProfileError> {
    serde_saphyr::from_str(text)
        .map_err(|source| ProfileError::Parse { name: name.into(), source: Box::new(source) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::GpuSeen;

    fn gpu(gfx: &str, ordinal: u32, unified_memory: bool) -> GpuSeen {
        GpuSeen { gfx: gfx.into(), ordinal, unified_memory, ..GpuSeen::default() }
    }

    #[test]
    fn every_built_in_profile_is_read_under_its_name() {
        for (name, _) in BUILT_IN {
            let profile = Profile::named(name).unwrap();
            assert_eq!(profile.name, name);
            let both = profile.unset.iter().find(|name| profile.environment.contains_key(*name));
            assert_eq!(both, None, "{name} sets what it unsets");
        }
    }

    #[test]
    fn the_card_with_its_own_memory_and_profile_is_chosen() {
        let chosen = |gpus: &[GpuSeen]| {
            let box_ = Snapshot { gpus: gpus.to_vec(), ..Snapshot::default() };
            let profile = Profile::of(&box_).unwrap();
            (profile.name.clone(), profile.variables().get("HIP_VISIBLE_DEVICES").cloned())
        };
        assert_eq!(chosen(&[]), ("cpu".into(), None));
        let mixed = [gpu("gfx1036", 0, true), gpu("gfx1201", 1, false)];
        assert_eq!(chosen(&mixed), ("gfx1201".into(), Some("1".into())));
        assert_eq!(chosen(&[gpu("gfx1151", 0, true)]), ("gfx1151".into(), Some("0".into())));
        assert_eq!(chosen(&[gpu("gfx1030", 0, false)]), ("rocm".into(), Some("0".into())));
    }

    #[test]
    fn known_to_corrupt_or_hang_is_in_no_profile() {
        for (name, _) in BUILT_IN {
            let profile = Profile::named(name).unwrap();
            let joined = profile.environment.values().cloned().collect::<Vec<_>>().join(" ");
            assert!(!joined.contains("expandable_segments"), "{name}");
            for never in ["HSA_OVERRIDE_GFX_VERSION", "HSA_DISABLE_CACHE"] {
                assert!(profile.unset.iter().any(|unset| unset == never), "{name} {never}");
            }
            assert!(!profile.environment.contains_key("HSA_OVERRIDE_GFX_VERSION"), "{name}");
        }
        let mi50 = Profile::named("gfx906").unwrap();
        assert_ne!(mi50.training.dtype, Dtype::Bf16, "an MI50 has no bf16");
    }

    #[test]
    fn every_value_of_a_profile_has_a_source() {
        for (name, text) in BUILT_IN {
            let document: serde_json::Value = serde_saphyr::from_str(text).unwrap();
            let sources = Profile::named(name).unwrap().sources;
            let mut places = Vec::new();
            for (key, value) in document.as_object().unwrap() {
                if !["name", "summary", "sources"].contains(&key.as_str()) {
                    leaves(key, value, &mut places);
                }
            }
            let covers = |place: &str, source: &str| {
                place == source
                    || place.strip_prefix(source).is_some_and(|rest| rest.starts_with('.'))
            };
            for place in &places {
                let found = sources.keys().any(|source| covers(place, source));
                assert!(found, "{name}: {place} has no source");
            }
            for source in sources.keys() {
                let found = places.iter().any(|place| covers(place, source));
                assert!(found, "{name}: there is no {source}");
            }
        }
    }

    fn leaves(place: &str, value: &serde_json::Value, places: &mut Vec<String>) {
        match value.as_object() {
            Some(object) => {
                for (key, value) in object {
                    leaves(&format!("{place}.{key}"), value, places);
                }
            }
            None => places.push(place.to_owned()),
        }
    }

    #[test]
    fn a_file_of_the_user_s_own_is_read_and_its_unknown_keys_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        std::fs::write(path, BUILT_IN[0].1.replace("name: cpu", "name: mine")).unwrap();
        assert_eq!(Profile::named(path).unwrap().name, "mine");
        std::fs::write(path, format!("{}\ncolour: red\n", BUILT_IN[0].1)).unwrap();
        let error = Profile::named(path).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("colour"), "{source}");
        assert!(Profile::named("gfx9999").unwrap_err().to_string().contains("gfx1151"));
    }
}
