//! The llama.cpp of a box, and the device that it computes on.

use std::path::{Path, PathBuf};

use agent::WorkerLauncher;
use evaluator::{EvaluatorLimits, EvaluatorPaths, LlamaCppEvaluator};
use generator::{GeneratorLimits, GeneratorPaths, LlamaCppGenerator};
use hardware::HardwareProfile;
use llama::LlamaInstallation;

/// llama.cpp with the settings of a box, on its device.
#[derive(Debug, Clone)]
pub(crate) struct BoxEngines {
    pub(crate) generator: LlamaCppGenerator,
    pub(crate) evaluator: LlamaCppEvaluator,
}

/// The cache of converted models, and its size in bytes.
#[derive(Debug, Clone)]
pub(crate) struct GgufPlace {
    pub(crate) directory: PathBuf,
    pub(crate) bytes_max: u64,
}

impl BoxEngines {
    /// Finds llama.cpp and its device: one that the profile prefers, or else any that it has, such
    /// as Vulkan on a box without a profile. Blocking.
    ///
    /// # Errors
    /// When no installation runs.
    pub(crate) fn find_engines(
        directory: Option<&Path>,
        launch: &WorkerLauncher,
        gguf: &GgufPlace,
    ) -> anyhow::Result<Self> {
        let on_cpu = without_devices(&launch.profile);
        let limits = GeneratorLimits::from_launcher(launch);
        let places = GeneratorPaths {
            gguf_cache: gguf.directory.clone(),
            gguf_cache_bytes: gguf.bytes_max,
            converters: None,
            directory: launch.directory.join("serve"),
        };
        let mut generator =
            LlamaCppGenerator::find_installation(directory, &on_cpu, limits, places)?;
        let places = EvaluatorPaths {
            gguf_cache: gguf.directory.clone(),
            device_checks: launch.directory.join("canaries.json"),
        };
        let limits = EvaluatorLimits {
            threads: launch.threads,
            silence_limit: limits.ready_limit,
            gguf_cache_bytes: gguf.bytes_max,
            repeat_log: true,
        };
        let mut evaluator =
            LlamaCppEvaluator::find_installation(directory, &on_cpu, places, limits)?;
        let server = &generator.server;
        let devices = LlamaInstallation::list_devices(&server.program, &server.environment)?;
        generator.server.device = choose_device(&devices, &launch.profile.llama.generate.devices);
        evaluator.perplexity.device =
            choose_device(&devices, &launch.profile.llama.evaluate.devices);
        Ok(Self { generator, evaluator })
    }

    /// Returns the generator on the CPU, with a directory of its own.
    pub(crate) fn generator_on_cpu(&self, directory: PathBuf) -> LlamaCppGenerator {
        let mut generator = self.generator.clone();
        generator.server.device = None;
        generator.directory = directory;
        generator
    }
}

/// A device that is absent would be an error, and is a finding here.
fn without_devices(profile: &HardwareProfile) -> HardwareProfile {
    let mut profile = profile.clone();
    profile.llama.generate.devices.clear();
    profile.llama.evaluate.devices.clear();
    profile
}

/// Returns the first device that has one of these prefixes, earlier ones first, or else the first.
fn choose_device(devices: &[String], prefixes: &[String]) -> Option<String> {
    let find = |prefix: &String| devices.iter().find(|name| name.starts_with(prefix.as_str()));
    prefixes.iter().find_map(find).or_else(|| devices.first()).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preferred_device_comes_first_and_any_other_next() {
        let names = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        let devices = names(&["ROCm0", "Vulkan0"]);
        let chosen = |prefixes: &[&str]| choose_device(&devices, &names(prefixes));
        assert_eq!(chosen(&["Vulkan", "ROCm"]).as_deref(), Some("Vulkan0"));
        assert_eq!(chosen(&[]).as_deref(), Some("ROCm0"));
        assert_eq!(chosen(&["CUDA"]).as_deref(), Some("ROCm0"));
        assert_eq!(choose_device(&[], &names(&["Vulkan"])), None);
    }
}
