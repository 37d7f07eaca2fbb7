//! The facts of a Python environment and of the ROCm around it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::host_files::{
    ContentFilter, HostFiles, LiveFiles, PYTHON, keep_parts, read_text, read_text_filtered,
};

/// The variables through which libraries of one installation reach processes of another.
const LEAKING_VARIABLES: [&str; 2] = ["LD_LIBRARY_PATH", "LD_PRELOAD"];

const TRACKED_PACKAGES: [&str; 7] =
    ["torch", "transformers", "peft", "accelerate", "tokenizers", "torchao", "bitsandbytes"];

/// A Python environment that trains.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TorchEnvironment {
    pub interpreter: PathBuf,
    /// Such as `3.12`; unknown outside a virtual environment.
    pub python: Option<String>,
    pub torch: Option<TorchBuild>,
    /// By name, including torch.
    pub packages: BTreeMap<String, String>,
    /// True if torch contains its own HIP.
    pub bundles_hip: bool,
    /// The targets for which its rocBLAS has kernels; empty if unknown.
    pub targets: BTreeSet<String>,
    /// The version of `/opt/rocm`, if it exists.
    pub system_rocm: Option<String>,
    /// The files through which the loader finds the system's ROCm last.
    pub loader_paths: Vec<PathBuf>,
    /// The variables that a child receives.
    pub environment: BTreeMap<String, String>,
}

/// The version of torch and of the runtime that it was built for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TorchBuild {
    pub version: String,
    pub hip: Option<String>,
    pub cuda: Option<String>,
}

impl TorchEnvironment {
    /// Reads the environment of an interpreter. `environment` contains a child's variables; `root`
    /// is `/` except in tests.
    pub fn read_environment(
        interpreter: &Path,
        environment: BTreeMap<String, String>,
        root: &Path,
    ) -> Self {
        let found = Self::find_environment(&LiveFiles::new(root).with_python(interpreter))
            .unwrap_or_default();
        Self { interpreter: interpreter.to_owned(), environment, ..found }
    }

    /// Returns `None` if no environment was named or it is missing.
    pub(crate) fn find_environment(files: &dyn HostFiles) -> Option<Self> {
        let is_part = |name: &str| name.starts_with("lib") || name == "pyvenv.cfg";
        if files.list_filtered(PYTHON, is_part).is_empty() {
            return None;
        }
        let site = find_site_packages(files);
        let torch =
            site.as_deref().and_then(|site| read_text(files, &format!("{site}/torch/version.py")));
        Some(Self {
            interpreter: format!("{PYTHON}/bin/python").into(),
            python: read_python_version(files),
            torch: torch.as_deref().and_then(parse_torch_version),
            packages: site.as_deref().map(|site| read_packages(files, site)).unwrap_or_default(),
            bundles_hip: site.as_deref().is_some_and(|site| has_bundled_hip(files, site)),
            targets: site.as_deref().map(|site| read_targets(files, site)).unwrap_or_default(),
            system_rocm: read_system_rocm(files),
            loader_paths: read_loader_paths(files),
            environment: BTreeMap::new(),
        })
    }

    /// Returns a child's variables through which the system's ROCm would be found first.
    pub fn leaking_variables(&self) -> Vec<String> {
        let leak = |name: &str| {
            let value = self.environment.get(name)?;
            value.contains("rocm").then(|| format!("{name}={value}"))
        };
        LEAKING_VARIABLES.into_iter().filter_map(leak).collect()
    }
}

/// Returns the version of an interpreter's torch.
pub fn installed_torch_version(interpreter: &Path) -> Option<String> {
    Some(
        TorchEnvironment::find_environment(&LiveFiles::new("/").with_python(interpreter))?
            .torch?
            .version,
    )
}

/// Returns the path of the file with the version of an interpreter's torch.
pub fn torch_version_file(interpreter: &Path) -> Option<PathBuf> {
    let prefix = interpreter.parent()?.parent()?;
    let site = find_site_packages(&LiveFiles::new("/").with_python(interpreter))?;
    Some(prefix.join(site.strip_prefix(PYTHON)?.trim_start_matches('/')).join("torch/version.py"))
}

/// Returns the package directory that contains torch, or the first one.
fn find_site_packages(files: &dyn HostFiles) -> Option<String> {
    let mut sites = Vec::new();
    for lib in ["lib", "lib64"] {
        let pythons =
            files.list_filtered(&format!("{PYTHON}/{lib}"), |it| it.starts_with("python3"));
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                sites.push(format!("{PYTHON}/{lib}/{python}/{packages}"));
            }
        }
    }
    sites.retain(|site| !list_installed(files, site).is_empty());
    let with_torch =
        sites.iter().find(|site| list_installed(files, site).iter().any(|it| it == "torch"));
    with_torch.or(sites.first()).cloned()
}

/// The untracked packages are private.
fn list_installed(files: &dyn HostFiles, site: &str) -> Vec<String> {
    files.list_filtered(site, |name| {
        name == "torch" || name.starts_with("_rocm_sdk") || parse_package(name).is_some()
    })
}

/// Parses a directory name into `(transformers, 5.23.0)` if the package is tracked.
fn parse_package(name: &str) -> Option<(String, String)> {
    let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
    let package = package.to_lowercase();
    TRACKED_PACKAGES.contains(&package.as_str()).then(|| (package, version.to_owned()))
}

fn read_python_version(files: &dyn HostFiles) -> Option<String> {
    let keep: ContentFilter = |bytes| keep_parts(bytes, b'\n', |line| line.starts_with(b"version"));
    let text = read_text_filtered(files, &format!("{PYTHON}/pyvenv.cfg"), keep);
    let value = text.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        matches!(key.trim(), "version" | "version_info").then(|| value.trim().to_owned())
    })?;
    let parts: Vec<&str> = value.split('.').take(2).collect();
    Some(parts.join("."))
}

/// Parses lines such as `name = 'value'`, with or without a type.
fn parse_torch_version(text: &str) -> Option<TorchBuild> {
    let value = |wanted: &str| {
        text.lines().find_map(|line| {
            let (name, value) = line.split_once('=')?;
            let name = name.split(':').next().unwrap_or_default().trim();
            let value = value.trim().trim_matches(['\'', '"']);
            (name == wanted && value != "None").then(|| value.to_owned())
        })
    };
    Some(TorchBuild { version: value("__version__")?, hip: value("hip"), cuda: value("cuda") })
}

fn read_packages(files: &dyn HostFiles, site: &str) -> BTreeMap<String, String> {
    list_installed(files, site).iter().filter_map(|name| parse_package(name)).collect()
}

fn has_bundled_hip(files: &dyn HostFiles, site: &str) -> bool {
    let in_torch = files
        .list_filtered(&format!("{site}/torch/lib"), |name| name.starts_with("libamdhip64.so"));
    !in_torch.is_empty()
        || list_installed(files, site).iter().any(|name| name.starts_with("_rocm_sdk_core"))
}

/// rocBLAS has a file for each target, named after it.
fn read_targets(files: &dyn HostFiles, site: &str) -> BTreeSet<String> {
    let bundled = list_installed(files, site)
        .into_iter()
        .filter(|name| name.starts_with("_rocm_sdk_libraries"))
        .map(|name| format!("{site}/{name}/lib/rocblas/library"));
    let libraries = bundled.chain([format!("{site}/torch/lib/rocblas/library")]);
    let mut targets = BTreeSet::new();
    for name in libraries.flat_map(|library| files.list_filtered(&library, |it| it.contains("gfx")))
    {
        for part in name.split(|c: char| !c.is_ascii_alphanumeric()) {
            let number = part.strip_prefix("gfx").unwrap_or_default();
            if number.len() >= 3 && number.chars().all(|c| c.is_ascii_hexdigit()) {
                targets.insert(part.to_owned());
            }
        }
    }
    targets
}

fn read_system_rocm(files: &dyn HostFiles) -> Option<String> {
    let installed = files.list_filtered("/opt", |name| name.starts_with("rocm"));
    installed.iter().find_map(|name| read_text(files, &format!("/opt/{name}/.info/version")))
}

fn read_loader_paths(files: &dyn HostFiles) -> Vec<PathBuf> {
    let directory = "/etc/ld.so.conf.d";
    let keep: ContentFilter =
        |bytes| keep_parts(bytes, b'\n', |line| String::from_utf8_lossy(line).contains("/rocm"));
    let found = files.read_all_filtered(directory, |name| name.ends_with(".conf"), keep);
    found.into_iter().map(|(name, _)| format!("{directory}/{name}").into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_is_read_from_its_files_alone() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let site = "venv/lib/python3.12/site-packages";
        write("venv/pyvenv.cfg", "home = /usr/bin\nversion = 3.12.4\n");
        write(
            &format!("{site}/torch/version.py"),
            "__version__ = '2.10.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424-4179531dcd'\n",
        );
        write(&format!("{site}/torch/lib/libamdhip64.so"), "");
        write(&format!("{site}/torch/lib/rocblas/library/Kernels.so-000-gfx1151.hsaco"), "");
        write(&format!("{site}/torch/lib/rocblas/library/TensileLibrary_lazy_gfx90a.dat"), "");
        write(&format!("{site}/transformers-5.23.0.dist-info/METADATA"), "");
        write(&format!("{site}/unrelated-1.0.dist-info/METADATA"), "");
        write("opt/rocm-7.2.0/.info/version", "7.2.0-43\n");
        write("etc/ld.so.conf.d/10-rocm.conf", "/opt/rocm/lib\n");
        write("etc/ld.so.conf.d/other.conf", "/usr/local/lib\n");
        let environment =
            BTreeMap::from([("LD_LIBRARY_PATH".to_owned(), "/opt/rocm/lib".to_owned())]);
        let interpreter = root.path().join("venv/bin/python");
        let found = TorchEnvironment::read_environment(&interpreter, environment, root.path());
        assert_eq!(found.python.as_deref(), Some("3.12"));
        let (leaks, torch) = (found.leaking_variables(), found.torch.unwrap());
        assert_eq!(torch.version, "2.10.0+rocm7.1");
        assert_eq!((torch.hip.as_deref(), torch.cuda), (Some("7.1.25424-4179531dcd"), None));
        assert!(found.bundles_hip);
        assert_eq!(found.targets, ["gfx1151", "gfx90a"].map(str::to_owned).into());
        assert_eq!(found.system_rocm.as_deref(), Some("7.2.0-43"));
        assert_eq!(leaks, ["LD_LIBRARY_PATH=/opt/rocm/lib"]);
        assert_eq!(found.loader_paths.len(), 1);
        let packages: Vec<_> = found.packages.into_iter().collect();
        assert_eq!(packages, [("transformers".to_owned(), "5.23.0".to_owned())]);
    }

    #[test]
    fn nothing_is_found_where_nothing_is() {
        let nowhere = Path::new("/nonexistent/bin/python");
        let found =
            TorchEnvironment::read_environment(nowhere, BTreeMap::new(), Path::new("/nonexistent"));
        let nothing =
            TorchEnvironment { interpreter: nowhere.into(), ..TorchEnvironment::default() };
        assert_eq!(found, nothing);
    }
}
