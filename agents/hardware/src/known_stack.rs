//! Versions that are known to work together on an accelerator, and how those of a host differ.

use serde::Deserialize;

/// The versions that are known to work together on one kind of accelerator.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownStack {
    /// The oldest kernel, such as `6.14.0`; `None` if all do.
    #[serde(default)]
    pub kernel: Option<String>,
    /// The oldest ROCm of the system, such as `7.2`, with which llama.cpp computes; `None` if all
    /// do.
    #[serde(default)]
    pub rocm: Option<String>,
    /// The version of Python for which its wheels were chosen, such as `3.12`.
    pub python: String,
    /// With the version of ROCm that it contains: `2.11.0+rocm7.13.0`. Without a local version, such
    /// as that of CUDA, each one is known to work.
    pub torch: String,
    /// The packages beside torch, as pip reads them: `peft==0.21.2`.
    pub packages: Vec<String>,
    /// The oldest build number of llama.cpp.
    pub llama_cpp: u32,
}

/// The versions of a host. An empty one is unknown, or absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StackVersions {
    /// The kernel's release, such as `6.17.0-19-generic`.
    pub kernel: String,
    /// The version of the system's ROCm, which torch does not use.
    pub rocm: String,
    pub torch: String,
    /// The text that llama.cpp prints: `0.7.0 (build 11669, commit …)`.
    pub llama_cpp: String,
}

impl StackVersions {
    /// Takes the versions of torch and llama.cpp from the descriptions of engines, such as
    /// `trainer: pytorch-2.11.0` and `generator: llama.cpp 0.7.0 (build 11669, …) Vulkan0 f16`.
    #[must_use]
    pub fn with_engines(mut self, engines: &[String]) -> Self {
        for engine in engines {
            let (_, engine) = engine.split_once(": ").unwrap_or(("", engine));
            if let Some(version) = engine.strip_prefix("pytorch-") {
                version.split_whitespace().next().unwrap_or_default().clone_into(&mut self.torch);
            } else if let Some(version) = engine.strip_prefix("llama.cpp ") {
                let end = version.find(')').map_or(version.len(), |at| at + 1);
                version[..end].clone_into(&mut self.llama_cpp);
            }
        }
        self
    }
}

impl KnownStack {
    /// Lists how the versions of a host differ, such as `torch 2.9.1, known to work: 2.11.0`. Unknown
    /// versions do not differ.
    pub fn list_differences(&self, found: &StackVersions) -> Vec<String> {
        let mut differences = Vec::new();
        let oldest = [("kernel", &self.kernel, &found.kernel), ("ROCm", &self.rocm, &found.rocm)];
        for (name, oldest, version) in oldest {
            if let Some(oldest) = oldest
                && parse_numbers(version) < parse_numbers(oldest)
                && !version.is_empty()
            {
                differences.push(format!("{name} {version}, known to work: {oldest} or newer"));
            }
        }
        let public = found.torch.split('+').next().unwrap_or_default();
        if !found.torch.is_empty() && ![public, found.torch.as_str()].contains(&self.torch.as_str())
        {
            differences.push(format!("torch {}, known to work: {}", found.torch, self.torch));
        }
        if let Some(build) = parse_build(&found.llama_cpp).filter(|build| *build < self.llama_cpp) {
            let oldest = self.llama_cpp;
            differences.push(format!("llama.cpp build {build}, known to work: {oldest} or newer"));
        }
        differences
    }
}

/// Parses the first three numbers of a version; missing ones are 0.
fn parse_numbers(version: &str) -> [u32; 3] {
    let mut numbers = version.split(|letter: char| !letter.is_ascii_digit());
    [(); 3].map(|()| numbers.next().and_then(|number| number.parse().ok()).unwrap_or(0))
}

fn parse_build(version: &str) -> Option<u32> {
    let (_, rest) = version.split_once("build ")?;
    rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> KnownStack {
        KnownStack {
            kernel: Some("6.14.0".into()),
            rocm: Some("7.2".into()),
            python: "3.12".into(),
            torch: "2.11.0+rocm7.2".into(),
            packages: Vec::new(),
            llama_cpp: 11_669,
        }
    }

    #[test]
    fn engines_tell_the_versions() {
        let engines = [
            "trainer: pytorch-2.9.1+rocm6.3 (probed)",
            "generator: llama.cpp 0.7.0 (build 11000, commit ab) Vulkan0 f16: prefill 10",
            "evaluator: candle-0.11",
        ];
        let (kernel, rocm) = ("6.11.0-29-generic".into(), "6.4.3-128".into());
        let found = StackVersions { kernel, rocm, ..Default::default() };
        let found = found.with_engines(&engines.map(str::to_owned));
        assert_eq!(found.torch, "2.9.1+rocm6.3");
        assert_eq!(found.llama_cpp, "0.7.0 (build 11000, commit ab)");
        let expected = [
            "kernel 6.11.0-29-generic, known to work: 6.14.0 or newer",
            "ROCm 6.4.3-128, known to work: 7.2 or newer",
            "torch 2.9.1+rocm6.3, known to work: 2.11.0+rocm7.2",
            "llama.cpp build 11000, known to work: 11669 or newer",
        ];
        assert_eq!(known().list_differences(&found), expected);
    }

    #[test]
    fn the_same_newer_and_unknown_versions_do_not_differ() {
        let found = StackVersions {
            kernel: "7.0.0-29-generic".into(),
            rocm: "7.2.0-43".into(),
            torch: "2.11.0+rocm7.2".into(),
            llama_cpp: "0.8.0 (build 12000, commit ab)".into(),
        };
        assert_eq!(known().list_differences(&found), [""; 0]);
        let newer = StackVersions { rocm: "7.13.0".into(), ..found };
        assert_eq!(known().list_differences(&newer), [""; 0]);
        assert_eq!(known().list_differences(&StackVersions::default()), [""; 0]);
        let unnumbered = StackVersions { llama_cpp: "unknown".into(), ..Default::default() };
        assert_eq!(known().list_differences(&unnumbered), [""; 0]);
    }

    #[test]
    fn a_torch_of_any_cuda_is_the_known_one() {
        let known = KnownStack { torch: "2.15.0".into(), ..known() };
        let differences = |torch: &str| {
            known.list_differences(&StackVersions { torch: torch.into(), ..Default::default() })
        };
        assert_eq!(differences("2.15.0"), [""; 0]);
        assert_eq!(differences("2.15.0+cu130"), [""; 0]);
        assert_eq!(differences("2.14.0+cu130"), ["torch 2.14.0+cu130, known to work: 2.15.0"]);
    }
}
