//! Finds llama.cpp's programs on a host, and queries their version, options and devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{LlamaProcess, ProcessEnvironment, ProcessEvent, ProgramOutput};

/// For `--help`, `--version` and `--list-devices`: backends search for their GPUs first.
const QUERY_TIMEOUT: Duration = Duration::from_secs(120);

/// More lines than any `--help` has.
const QUERY_LINES_MAX: usize = 20_000;

const PROGRAMS: [&str; 2] = ["llama-perplexity", "llama-server"];

/// A llama.cpp whose programs run on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlamaInstallation {
    directory: PathBuf,
    /// The printed form: `0.7.0 (build 11669, commit …)`.
    pub version: String,
}

/// The reason why a llama.cpp cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InstallationError {
    #[error(
        "llama.cpp not found: neither PATH nor .tools/llama.cpp/bin has {missing}; install it, or \
         set --llama-cpp (FLOTILLA_LLAMA_CPP) to its directory (E101)"
    )]
    Absent { missing: &'static str },
    #[error("{directory} has no {missing}; point --llama-cpp to the directory that has it (E101)")]
    Incomplete { directory: PathBuf, missing: &'static str },
    #[error("{program} does not run")]
    Start { program: PathBuf, source: std::io::Error },
    #[error("{program} {option} did not end within {limit:?} (E102)")]
    Hung { program: PathBuf, option: &'static str, limit: Duration },
    #[error(
        "{program} --list-devices has no {wanted} device (it has: {found}); use a llama.cpp built \
         for it, or --profile cpu (E102)"
    )]
    Device { program: PathBuf, wanted: String, found: String },
    #[error(
        "{program} --version printed {printed:?}, not a version; check that it is llama.cpp's \
             (E102)"
    )]
    Version { program: PathBuf, printed: String },
}

impl LlamaInstallation {
    /// Finds llama.cpp in `directory` if one is given; otherwise on PATH, and then in
    /// `.tools/llama.cpp/bin`, the directory of `deploy/fetch-llama-cpp.sh`.
    pub fn find_installation(directory: Option<&Path>) -> Result<Self, InstallationError> {
        let directory = match directory {
            Some(directory) => directory.to_owned(),
            None => search_path().ok_or(InstallationError::Absent { missing: PROGRAMS[0] })?,
        };
        if let Some(missing) = PROGRAMS.into_iter().find(|name| !directory.join(name).is_file()) {
            return Err(InstallationError::Incomplete { directory, missing });
        }
        let program = directory.join(PROGRAMS[0]);
        let printed =
            query_program(&program, "--version", &ProcessEnvironment::new(&BTreeMap::new(), &[]))?;
        let version = printed.iter().find_map(|line| line.strip_prefix("version: "));
        match version.map(str::trim) {
            Some(version) => Ok(Self { directory, version: version.to_owned() }),
            None => {
                let printed = printed.join("\n").chars().take(200).collect();
                Err(InstallationError::Version { program, printed })
            }
        }
    }

    /// Returns the options that a program supports. They differ between versions, and a program
    /// exits if it gets an unknown one.
    pub fn read_options(
        program: &Path,
        environment: &ProcessEnvironment,
    ) -> Result<ProgramOptions, InstallationError> {
        Ok(ProgramOptions::from_help(&query_program(program, "--help", environment)?))
    }

    /// Returns the names of the devices that a program can compute on, except the CPU.
    pub fn list_devices(
        program: &Path,
        environment: &ProcessEnvironment,
    ) -> Result<Vec<String>, InstallationError> {
        Ok(parse_devices(&query_program(program, "--list-devices", environment)?))
    }

    /// Returns the first device whose name begins with a prefix; earlier prefixes are preferred.
    /// Returns `None` (the CPU) if `prefixes` is empty. No match is an error.
    pub fn select_device(
        program: &Path,
        prefixes: &[String],
        environment: &ProcessEnvironment,
    ) -> Result<Option<String>, InstallationError> {
        if prefixes.is_empty() {
            return Ok(None);
        }
        let devices = Self::list_devices(program, environment)?;
        let of = |prefix: &String| devices.iter().find(|name| name.starts_with(prefix.as_str()));
        match prefixes.iter().find_map(of) {
            Some(device) => Ok(Some(device.clone())),
            None => Err(InstallationError::Device {
                program: program.to_owned(),
                wanted: prefixes.join(" or "),
                found: if devices.is_empty() { "none".into() } else { devices.join(", ") },
            }),
        }
    }

    pub fn perplexity_path(&self) -> PathBuf {
        self.directory.join("llama-perplexity")
    }

    pub fn quantize_path(&self) -> PathBuf {
        self.directory.join("llama-quantize")
    }

    pub fn server_path(&self) -> PathBuf {
        self.directory.join("llama-server")
    }
}

fn search_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let fetched = PathBuf::from(".tools/llama.cpp/bin");
    let mut places = std::env::split_paths(&path).chain([fetched]);
    places.find(|place| place.join(PROGRAMS[0]).is_file())
}

fn query_program(
    program: &Path,
    option: &'static str,
    environment: &ProcessEnvironment,
) -> Result<Vec<String>, InstallationError> {
    let start = |source| InstallationError::Start { program: program.to_owned(), source };
    let mut child = LlamaProcess::spawn_program(
        program,
        [OsString::from(option)],
        environment,
        ProgramOutput::Lines,
    )
    .map_err(start)?;
    let until = Instant::now() + QUERY_TIMEOUT;
    let mut lines = Vec::new();
    while lines.len() < QUERY_LINES_MAX {
        match child.wait_event(until.saturating_duration_since(Instant::now())) {
            ProcessEvent::Line(line) => lines.push(line.text),
            ProcessEvent::Closed => break,
            ProcessEvent::TimedOut => {
                let program = program.to_owned();
                return Err(InstallationError::Hung { program, option, limit: QUERY_TIMEOUT });
            }
        }
    }
    Ok(lines)
}

/// The options that a program supports, read from its `--help`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramOptions(BTreeSet<String>);

impl ProgramOptions {
    fn from_help(help: &[String]) -> Self {
        let heads = help.iter().filter(|line| line.starts_with('-'));
        // The names, separated by commas and spaces, come first on the line.
        let names = heads.flat_map(|line| {
            let words = line.split([',', ' ']).filter(|word| !word.is_empty());
            words.filter(|word| word.starts_with('-')).map(str::to_owned)
        });
        Self(names.collect())
    }

    pub(crate) fn has_option(&self, option: &str) -> bool {
        self.0.contains(option)
    }

    /// Returns the arguments that switch off the mapping of weights into memory; empty if this
    /// build has no such option.
    pub(crate) fn no_mmap_arguments(&self) -> &'static [&'static str] {
        if self.has_option("--no-mmap") {
            &["--no-mmap"]
        } else if self.has_option("--load-mode") {
            &["--load-mode", "none"]
        } else {
            &[]
        }
    }

    /// Returns the arguments that select a device of `--list-devices`, or the CPU alone for `None`.
    /// Without layers on a GPU, a build may still send large products to it, so the GPU is hidden
    /// from it.
    pub(crate) fn device_arguments(&self, device: Option<&str>) -> Vec<String> {
        let layers = if device.is_some() { "99" } else { "0" };
        let mut arguments = vec!["-ngl".to_owned(), layers.to_owned()];
        if self.has_option("--device") {
            arguments.extend(["--device".to_owned(), device.unwrap_or("none").to_owned()]);
        }
        arguments
    }
}

fn parse_devices(printed: &[String]) -> Vec<String> {
    let listed = printed.iter().skip_while(|line| !line.contains("Available devices"));
    let name = |line: &String| Some(line.strip_prefix("  ")?.split_once(':')?.0.to_owned());
    listed.skip(1).filter_map(name).filter(|name| !name.contains(' ')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn options_are_read_from_any_version_s_help() {
        let help = "----- common params -----\n\n-h,    --help, --usage      print usage\n\
            --perf, --no-perf                       whether to -enable\n\
            -dev,  --device <dev1,dev2,..>          comma-separated\n      --no-mmap is gone\n\
            -lm,   --load-mode MODE                 model loading mode\n";
        let options = ProgramOptions::from_help(&lines(help));
        assert!(
            ["-h", "--usage", "--no-perf", "--device"].iter().all(|one| options.has_option(one))
        );
        assert!(!options.has_option("--no-mmap"));
        assert_eq!(options.no_mmap_arguments(), ["--load-mode", "none"]);
        assert_eq!(
            options.device_arguments(Some("Vulkan0")),
            ["-ngl", "99", "--device", "Vulkan0"]
        );
        assert_eq!(options.device_arguments(None), ["-ngl", "0", "--device", "none"]);
        let old = ProgramOptions::from_help(&lines(
            "--no-mmap      do not memory-map model\n-ngl, --gpu-layers N",
        ));
        assert_eq!(old.no_mmap_arguments(), ["--no-mmap"]);
        assert_eq!(old.device_arguments(None), ["-ngl", "0"]);
    }

    #[test]
    fn devices_are_the_names_before_the_colon() {
        let printed = "load_backend: loaded Vulkan backend\nAvailable devices:\n\
            \x20 Vulkan0: AMD Radeon 8060S (RADV GFX1151) (98304 MiB, 97000 MiB free)\n\
            \x20 ROCm0: AMD Radeon Graphics (98304 MiB, 97000 MiB free)\n";
        assert_eq!(parse_devices(&lines(printed)), ["Vulkan0", "ROCm0"]);
        assert_eq!(parse_devices(&lines("Available devices:\n  (none)\n")), [""; 0]);
    }
}
