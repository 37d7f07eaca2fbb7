//! Profiles: the environment, precision and memory settings of a kind of accelerator. They are
//! files in `profiles/`, and a user may add others.

use formats::FloatDtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::built_in_profiles::{BUILT_IN_PROFILES, has_own_profile};
use crate::host_files::{HostFiles, LiveFiles};
use crate::host_snapshot::{GPU_CHOICE, HostSnapshot};
use crate::known_stack::KnownStack;

/// The settings of one kind of accelerator, with their sources. Unknown keys are errors.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareProfile {
    /// A gfx target, `rocm` for targets without a profile, or `cpu`.
    pub name: String,
    pub summary: String,
    /// Variables that are set for every child and replace the host's own values.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Variables of the host that must not reach a child.
    #[serde(default)]
    pub unset: Vec<String>,
    pub training: TrainingProfile,
    #[serde(default)]
    pub precision: PrecisionSupport,
    /// The support of weights in 4 or 8 bits.
    #[serde(default)]
    pub quantisation: SupportLevel,
    /// The support of evaluations inside a foreign training process; Flotilla's trainer does not
    /// evaluate.
    #[serde(default)]
    pub evals_in_trainer: SupportLevel,
    pub llama: LlamaProfile,
    pub python: PythonRange,
    /// The versions that are known to work together; `None` if none are.
    #[serde(default)]
    pub stack: Option<KnownStack>,
    /// The sources of the values, by key: `training` or `training.dtype`.
    #[serde(default)]
    pub sources: BTreeMap<String, String>,
    /// The GPU's HIP ordinal; detected on the host, not read from the file.
    #[serde(skip)]
    pub ordinal: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKind {
    Sdpa,
    Eager,
}

/// The answer to a job that uses a feature: allow, warn or refuse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SupportLevel {
    #[default]
    Allow,
    Warn,
    Refuse,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionSupport {
    pub f32: SupportLevel,
    pub f16: SupportLevel,
    pub bf16: SupportLevel,
}

impl PrecisionSupport {
    pub fn support_for(&self, dtype: FloatDtype) -> SupportLevel {
        match dtype {
            FloatDtype::F32 => self.f32,
            FloatDtype::F16 => self.f16,
            FloatDtype::Bf16 => self.bf16,
        }
    }

    /// Returns true if weights of two bytes are supported.
    pub fn can_halve(&self) -> bool {
        [self.bf16, self.f16].iter().any(|policy| *policy != SupportLevel::Refuse)
    }
}

/// The settings of the supervised PyTorch trainer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingProfile {
    /// The type of the frozen base; adapters are f32.
    pub dtype: FloatDtype,
    pub attention: AttentionKind,
    pub gradient_checkpointing: bool,
    pub dataloader_workers: u32,
    pub pin_memory: bool,
    /// The tokens of one forward and backward pass, if the order does not set them.
    pub micro_batch_tokens: u32,
    /// The usual batch on this accelerator.
    #[serde(default)]
    pub batch: Option<BatchProfile>,
    /// The fraction of torch's memory that may be used on hosts with unified memory.
    pub memory_fraction: Option<f64>,
}

/// The batch of a first attempt: sequences of a pass and passes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchProfile {
    pub sequences: u32,
    pub accumulate: u32,
}

/// The settings of supervised llama.cpp processes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaProfile {
    pub generate: LlamaTaskProfile,
    pub evaluate: LlamaTaskProfile,
    /// True if weights are memory-mapped, which stalls or causes reclaim storms on some hosts.
    pub mmap: bool,
}

/// The settings of llama.cpp for one kind of work.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaTaskProfile {
    /// Prefixes of device names in order of preference (`Vulkan`, `ROCm`), as `--list-devices`
    /// prints them. Empty for the CPU.
    pub devices: Vec<String>,
    /// The type of the base model's GGUF file.
    pub dtype: FloatDtype,
}

/// The interpreters for which wheels exist, both bounds included.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonRange {
    pub min: String,
    pub max: String,
    /// The package index of torch for this accelerator, used by `uv`; PyPI has none for AMD.
    pub index: Option<String>,
}

/// A profile that is missing or cannot be read.
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
    #[error(
        "FLOTILLA_GPU is {named:?}, and this box has the GPUs {known}; set the number of one of them, or unset it (A101)"
    )]
    NoSuchGpu { named: String, known: String },
}

/// The profile of AMD targets without one of their own.
const GENERIC_AMD_PROFILE: &str = "rocm";

/// The profile of NVIDIA's GPUs, which have no HIP ordinal.
const CUDA_PROFILE: &str = "cuda";

impl ProfileError {
    fn no_such_gpu(named: &str, box_: &HostSnapshot) -> Self {
        let gpus = box_.gpus.iter().map(|gpu| format!("{} ({})", gpu.ordinal, gpu.gfx));
        let known: Vec<String> = gpus.collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Self::NoSuchGpu { named: named.to_owned(), known }
    }
}

impl HardwareProfile {
    /// Loads the built-in profile of this name, or the file at this path.
    pub fn load_named(name: &str) -> Result<Self, ProfileError> {
        if let Some((name, text)) = BUILT_IN_PROFILES.iter().find(|(known, _)| *known == name) {
            return parse_profile(name, text);
        }
        let path = Path::new(name);
        if !path.exists() {
            let known = BUILT_IN_PROFILES.map(|(name, _)| name).join(", ");
            return Err(ProfileError::Unknown { name: name.into(), known });
        }
        let text = std::fs::read_to_string(path)
            .map_err(|source| ProfileError::Read { path: path.into(), source })?;
        parse_profile(name, &text)
    }

    /// Returns the text of a built-in profile, as a template for a new one.
    pub fn built_in_text(name: &str) -> Result<&'static str, ProfileError> {
        let found = BUILT_IN_PROFILES.iter().find(|(known, _)| *known == name);
        let known = BUILT_IN_PROFILES.map(|(name, _)| name).join(", ");
        found
            .map(|(_, text)| *text)
            .ok_or_else(|| ProfileError::Unknown { name: name.into(), known })
    }

    /// Returns the profile of the host's main GPU, or of the CPU. Fails only if a GPU is named that
    /// the host does not have; a test reads all built-in profiles.
    pub fn for_host(box_: &HostSnapshot) -> Result<Self, ProfileError> {
        let Some(gpu) = box_.main_gpu() else {
            return match box_.environment.get(GPU_CHOICE) {
                Some(named) => Err(ProfileError::no_such_gpu(named, box_)),
                None => Self::load_named("cpu"),
            };
        };
        let name = if has_own_profile(&gpu.gfx) { &gpu.gfx } else { GENERIC_AMD_PROFILE };
        Ok(Self { ordinal: Some(gpu.ordinal), ..Self::load_named(name)? })
    }

    /// Returns the named profile, or the one of this host. Either is for the GPU that
    /// [`GPU_CHOICE`] names, if it is set. Fails if the host does not have that GPU, or if there is
    /// no such profile.
    pub fn choose_profile(name: Option<&str>) -> Result<Self, ProfileError> {
        Self::choose_for_host(name, &LiveFiles::new("/"))
    }

    /// Does the same as [`HardwareProfile::choose_profile`], for the host of these files.
    pub fn choose_for_host(
        name: Option<&str>,
        files: &dyn HostFiles,
    ) -> Result<Self, ProfileError> {
        let Some(name) = name else {
            return Self::for_host(&HostSnapshot::take_snapshot(files));
        };
        let named = Self::load_named(name)?;
        if named.is_cpu() || named.is_cuda() {
            return Ok(named);
        }
        named.with_chosen_gpu(&HostSnapshot::take_snapshot(files))
    }

    /// Sets the ordinal of a profile of AMD's GPUs, if [`GPU_CHOICE`] is set.
    fn with_chosen_gpu(self, box_: &HostSnapshot) -> Result<Self, ProfileError> {
        let Some(named) = box_.environment.get(GPU_CHOICE) else { return Ok(self) };
        let gpu = box_.main_gpu().ok_or_else(|| ProfileError::no_such_gpu(named, box_))?;
        Ok(Self { ordinal: Some(gpu.ordinal), ..self })
    }

    /// Returns the built-in profiles.
    pub fn built_in_profiles() -> impl Iterator<Item = Self> {
        // A test reads all of them.
        BUILT_IN_PROFILES.iter().filter_map(|(name, text)| parse_profile(name, text).ok())
    }

    pub fn is_cpu(&self) -> bool {
        self.name == "cpu"
    }

    /// Returns true for GPUs of NVIDIA.
    pub fn is_cuda(&self) -> bool {
        self.name == CUDA_PROFILE
    }

    /// Returns the variables to set for a child.
    pub fn child_variables(&self) -> BTreeMap<String, String> {
        let mut variables = self.environment.clone();
        if let Some(ordinal) = self.ordinal {
            variables.insert("HIP_VISIBLE_DEVICES".into(), ordinal.to_string());
        }
        variables
    }
}

fn parse_profile(name: &str, text: &str) -> Result<HardwareProfile, ProfileError> {
    serde_saphyr::from_str(text)
        .map_err(|source| ProfileError::Parse { name: name.into(), source: Box::new(source) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_snapshot::GpuInfo;

    fn gpu(gfx: &str, ordinal: u32, unified_memory: bool) -> GpuInfo {
        GpuInfo { gfx: gfx.into(), ordinal, unified_memory, ..GpuInfo::default() }
    }

    #[test]
    fn every_built_in_profile_is_read_under_its_name() {
        for (name, _) in BUILT_IN_PROFILES {
            let profile = HardwareProfile::load_named(name).unwrap();
            assert_eq!(profile.name, name);
            let both = profile.unset.iter().find(|name| profile.environment.contains_key(*name));
            assert_eq!(both, None, "{name} sets what it unsets");
        }
    }

    #[test]
    fn the_card_with_its_own_memory_and_profile_is_chosen() {
        let chosen = |gpus: &[GpuInfo]| {
            let box_ = HostSnapshot { gpus: gpus.to_vec(), ..HostSnapshot::default() };
            let profile = HardwareProfile::for_host(&box_).unwrap();
            (profile.name.clone(), profile.child_variables().get("HIP_VISIBLE_DEVICES").cloned())
        };
        assert_eq!(chosen(&[]), ("cpu".into(), None));
        let mixed = [gpu("gfx1036", 0, true), gpu("gfx1201", 1, false)];
        assert_eq!(chosen(&mixed), ("gfx1201".into(), Some("1".into())));
        assert_eq!(chosen(&[gpu("gfx1151", 0, true)]), ("gfx1151".into(), Some("0".into())));
        assert_eq!(chosen(&[gpu("gfx1030", 0, false)]), ("rocm".into(), Some("0".into())));
    }

    #[test]
    fn an_agent_takes_the_gpu_that_is_named() {
        let chosen = |named: &str| {
            let gpus = vec![gpu("gfx1201", 0, false), gpu("gfx1201", 1, false)];
            let environment = [(GPU_CHOICE.to_owned(), named.to_owned())].into();
            let box_ = HostSnapshot { gpus, environment, ..HostSnapshot::default() };
            HardwareProfile::for_host(&box_)
        };
        let second = chosen("1").unwrap();
        assert_eq!(second.child_variables()["HIP_VISIBLE_DEVICES"], "1");
        for wrong in ["2", "", "gfx1201"] {
            let error = chosen(wrong).unwrap_err().to_string();
            assert!(error.contains("0 (gfx1201), 1 (gfx1201)"), "{error}");
        }
    }

    #[test]
    fn a_named_profile_is_for_the_gpu_that_is_named() {
        let chosen = |named: Option<&str>| {
            let gpus = vec![gpu("gfx1201", 0, false), gpu("gfx1030", 1, false)];
            let environment = named.map(|named| (GPU_CHOICE.to_owned(), named.to_owned()));
            let environment = environment.into_iter().collect();
            let box_ = HostSnapshot { gpus, environment, ..HostSnapshot::default() };
            let profile = HardwareProfile::load_named("rocm")?.with_chosen_gpu(&box_)?;
            Ok::<_, ProfileError>(profile.child_variables().get("HIP_VISIBLE_DEVICES").cloned())
        };
        assert_eq!(chosen(Some("1")).unwrap(), Some("1".to_owned()));
        assert_eq!(chosen(None).unwrap(), None, "the first one that HIP lists");
        let error = chosen(Some("2")).unwrap_err().to_string();
        assert!(error.contains("0 (gfx1201), 1 (gfx1030)"), "{error}");
    }

    #[test]
    fn known_to_corrupt_or_hang_is_in_no_profile() {
        for (name, _) in BUILT_IN_PROFILES {
            let profile = HardwareProfile::load_named(name).unwrap();
            let joined = profile.environment.values().cloned().collect::<Vec<_>>().join(" ");
            assert!(!joined.contains("expandable_segments"), "{name}");
            for never in ["HSA_OVERRIDE_GFX_VERSION", "HSA_DISABLE_CACHE"] {
                assert!(profile.unset.iter().any(|unset| unset == never), "{name} {never}");
            }
            assert!(!profile.environment.contains_key("HSA_OVERRIDE_GFX_VERSION"), "{name}");
        }
        let mi50 = HardwareProfile::load_named("gfx906").unwrap();
        assert_ne!(mi50.training.dtype, FloatDtype::Bf16, "an MI50 has no bf16");
    }

    #[test]
    fn a_stack_names_the_rocm_of_its_torch() {
        for (name, _) in BUILT_IN_PROFILES {
            let Some(stack) = HardwareProfile::load_named(name).unwrap().stack else { continue };
            let of_torch = stack.torch.split_once("+rocm").map(|(_, rocm)| rocm);
            assert_eq!(stack.rocm.as_deref(), of_torch, "{name}");
        }
    }

    #[test]
    fn every_value_of_a_profile_has_a_source() {
        for (name, text) in BUILT_IN_PROFILES {
            let document: serde_json::Value = serde_saphyr::from_str(text).unwrap();
            let sources = HardwareProfile::load_named(name).unwrap().sources;
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
        std::fs::write(path, BUILT_IN_PROFILES[0].1.replace("name: cpu", "name: mine")).unwrap();
        assert_eq!(HardwareProfile::load_named(path).unwrap().name, "mine");
        std::fs::write(path, format!("{}\ncolour: red\n", BUILT_IN_PROFILES[0].1)).unwrap();
        let error = HardwareProfile::load_named(path).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("colour"), "{source}");
        assert!(
            HardwareProfile::load_named("gfx9999").unwrap_err().to_string().contains("gfx1151")
        );
    }
}
