//! Finding llama.cpp's programs on a box.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{Child, Environment, Heard};

/// What `--help` and the like may take: backends look for their GPUs first.
const BRIEF_LIMIT: Duration = Duration::from_secs(120);

/// More than any `--help` has.
const BRIEF_LINES_MAX: usize = 20_000;

/// What is run of it.
const PROGRAMS: [&str; 2] = ["llama-perplexity", "llama-server"];

/// A llama.cpp whose programs run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    directory: PathBuf,
    /// As it calls itself: `0.7.0 (build 11669, commit …)`.
    pub version: String,
}

#[derive(Debug, thiserror::Error)]
pub enum InstallationError {
    #[error(
        "no llama.cpp: neither PATH nor .tools/llama.cpp/bin has {missing}; install it, or point \
         --llama-cpp (FLOTILLA_LLAMA_CPP) to the directory that has it (E101)"
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
    #[error("{program} --version prints no version but {printed:?}; is it llama.cpp's? (E102)")]
    Version { program: PathBuf, printed: String },
}

impl Installation {
    /// In the directory given, or else on PATH, or else where `deploy/fetch-llama-cpp.sh` puts it.
    ///
    /// # Errors
    /// When there is none, or it does not run.
    pub fn find(directory: Option<&Path>) -> Result<Self, InstallationError> {
        let directory = match directory {
            Some(directory) => directory.to_owned(),
            None => on_path().ok_or(InstallationError::Absent { missing: PROGRAMS[0] })?,
        };
        if let Some(missing) = PROGRAMS.into_iter().find(|name| !directory.join(name).is_file()) {
            return Err(InstallationError::Incomplete { directory, missing });
        }
        let program = directory.join(PROGRAMS[0]);
        let printed = brief(&program, "--version", &Environment::new(&BTreeMap::new(), &[]))?;
        let version = printed.iter().find_map(|line| line.strip_prefix("version: "));
        match version.map(str::trim) {
            Some(version) => Ok(Self { directory, version: version.to_owned() }),
            None => {
                let printed = printed.join("\n").chars().take(200).collect();
                Err(InstallationError::Version { program, printed })
            }
        }
    }

    /// The options a program of it knows. They come and go between versions, and an unknown one
    /// is the end of a program.
    ///
    /// # Errors
    /// When the program does not run.
    pub fn options(
        program: &Path,
        environment: &Environment,
    ) -> Result<Options, InstallationError> {
        Ok(Options::of(&brief(program, "--help", environment)?))
    }

    /// The names of the devices a program of it can compute on, beside the CPU.
    ///
    /// # Errors
    /// When the program does not run.
    pub fn devices(
        program: &Path,
        environment: &Environment,
    ) -> Result<Vec<String>, InstallationError> {
        Ok(devices_of(&brief(program, "--list-devices", environment)?))
    }

    /// The first of the devices that begins with the first of these prefixes that any begins
    /// with. `None`, the CPU, when there is no prefix.
    ///
    /// # Errors
    /// When there are prefixes and no such device, or the program does not run.
    pub fn device(
        program: &Path,
        prefixes: &[String],
        environment: &Environment,
    ) -> Result<Option<String>, InstallationError> {
        if prefixes.is_empty() {
            return Ok(None);
        }
        let devices = Self::devices(program, environment)?;
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

    pub fn perplexity(&self) -> PathBuf {
        self.directory.join("llama-perplexity")
    }

    pub fn server(&self) -> PathBuf {
        self.directory.join("llama-server")
    }
}

fn on_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let fetched = PathBuf::from(".tools/llama.cpp/bin");
    let mut places = std::env::split_paths(&path).chain([fetched]);
    places.find(|place| place.join(PROGRAMS[0]).is_file())
}

/// What a program prints for an option that makes it print something and end.
fn brief(
    program: &Path,
    option: &'static str,
    environment: &Environment,
) -> Result<Vec<String>, InstallationError> {
    let start = |source| InstallationError::Start { program: program.to_owned(), source };
    let mut child =
        Child::spawn(program, [OsString::from(option)], environment, false).map_err(start)?;
    let until = Instant::now() + BRIEF_LIMIT;
    let mut lines = Vec::new();
    while lines.len() < BRIEF_LINES_MAX {
        match child.hear(until.saturating_duration_since(Instant::now())) {
            Heard::Line(line) => lines.push(line.text),
            Heard::Ended => break,
            Heard::Nothing => {
                let program = program.to_owned();
                return Err(InstallationError::Hung { program, option, limit: BRIEF_LIMIT });
            }
        }
    }
    Ok(lines)
}

/// The options of a program, as its `--help` has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options(BTreeSet<String>);

impl Options {
    fn of(help: &[String]) -> Self {
        let heads = help.iter().filter(|line| line.starts_with('-'));
        // Names, separated by commas and blanks, come before anything else on the line.
        let names = heads.flat_map(|line| {
            let words = line.split([',', ' ']).filter(|word| !word.is_empty());
            words.filter(|word| word.starts_with('-')).map(str::to_owned)
        });
        Self(names.collect())
    }

    pub fn knows(&self, option: &str) -> bool {
        self.0.contains(option)
    }

    /// How this build is told not to map weights into memory, if it can be.
    pub fn without_mmap(&self) -> &'static [&'static str] {
        if self.knows("--no-mmap") {
            &["--no-mmap"]
        } else if self.knows("--load-mode") {
            &["--load-mode", "none"]
        } else {
            &[]
        }
    }

    /// How this build is told where to compute: on a device of `--list-devices`, or on the CPU
    /// alone. Without layers on a GPU it may still send it large products: it must not see one.
    pub fn compute_on(&self, device: Option<&str>) -> Vec<String> {
        let layers = if device.is_some() { "99" } else { "0" };
        let mut arguments = vec!["-ngl".to_owned(), layers.to_owned()];
        if self.knows("--device") {
            arguments.extend(["--device".to_owned(), device.unwrap_or("none").to_owned()]);
        }
        arguments
    }
}

fn devices_of(printed: &[String]) -> Vec<String> {
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
        let options = Options::of(&lines(help));
        assert!(["-h", "--usage", "--no-perf", "--device"].iter().all(|one| options.knows(one)));
        assert!(!options.knows("--no-mmap"));
        assert_eq!(options.without_mmap(), ["--load-mode", "none"]);
        assert_eq!(options.compute_on(Some("Vulkan0")), ["-ngl", "99", "--device", "Vulkan0"]);
        assert_eq!(options.compute_on(None), ["-ngl", "0", "--device", "none"]);
        let old =
            Options::of(&lines("--no-mmap      do not memory-map model\n-ngl, --gpu-layers N"));
        assert_eq!(old.without_mmap(), ["--no-mmap"]);
        assert_eq!(old.compute_on(None), ["-ngl", "0"]);
    }

    #[test]
    fn devices_are_the_names_before_the_colon() {
        let printed = "load_backend: loaded Vulkan backend\nAvailable devices:\n\
            \x20 Vulkan0: AMD Radeon 8060S (RADV GFX1151) (98304 MiB, 97000 MiB free)\n\
            \x20 ROCm0: AMD Radeon Graphics (98304 MiB, 97000 MiB free)\n";
        assert_eq!(devices_of(&lines(printed)), ["Vulkan0", "ROCm0"]);
        assert_eq!(devices_of(&lines("Available devices:\n  (none)\n")), [""; 0]);
    }
}
