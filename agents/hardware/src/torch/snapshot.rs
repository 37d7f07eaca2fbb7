//! What can be read of a Python environment and of the ROCm around it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::files::{Files, Keep, Live, PYTHON, keep_parts, part, text};

/// Variables by which libraries of one installation reach processes of another.
const LEAKS: [&str; 2] = ["LD_LIBRARY_PATH", "LD_PRELOAD"];

/// Packages whose version matters.
const PACKAGES: [&str; 7] =
    ["torch", "transformers", "peft", "accelerate", "tokenizers", "torchao", "bitsandbytes"];

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub interpreter: PathBuf,
    /// `3.12`; unknown outside of a virtual environment.
    pub python: Option<String>,
    pub torch: Option<Torch>,
    /// Versions by name, torch's included.
    pub packages: BTreeMap<String, String>,
    /// Whether torch brings its own HIP.
    pub bundles_hip: bool,
    /// Targets its rocBLAS has kernels for; none were found where this is empty.
    pub targets: BTreeSet<String>,
    /// Of `/opt/rocm`, if there is one.
    pub system_rocm: Option<String>,
    /// Files by which the loader finds the system's ROCm last.
    pub loader_paths: Vec<PathBuf>,
    /// What a child is given.
    pub environment: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Torch {
    pub version: String,
    pub hip: Option<String>,
    pub cuda: Option<String>,
}

impl Snapshot {
    /// `environment` is what a child is given; `root` is `/` but for tests.
    pub fn read(interpreter: &Path, environment: BTreeMap<String, String>, root: &Path) -> Self {
        let found = Self::look(&Live::new(root).with_python(interpreter)).unwrap_or_default();
        Self { interpreter: interpreter.to_owned(), environment, ..found }
    }

    /// The environment named to these files; `None` where none was, or nothing is there.
    pub(crate) fn look(files: &dyn Files) -> Option<Self> {
        let is_part = |name: &str| name.starts_with("lib") || name == "pyvenv.cfg";
        if files.list_part(PYTHON, is_part).is_empty() {
            return None;
        }
        let site = site_packages(files);
        let torch =
            site.as_deref().and_then(|site| text(files, &format!("{site}/torch/version.py")));
        Some(Self {
            interpreter: format!("{PYTHON}/bin/python").into(),
            python: python_version(files),
            torch: torch.as_deref().and_then(parse_version),
            packages: site.as_deref().map(|site| packages(files, site)).unwrap_or_default(),
            bundles_hip: site.as_deref().is_some_and(|site| bundles_hip(files, site)),
            targets: site.as_deref().map(|site| targets(files, site)).unwrap_or_default(),
            system_rocm: system_rocm(files),
            loader_paths: loader_paths(files),
            environment: BTreeMap::new(),
        })
    }

    /// Variables of a child through which the system's ROCm would be found first.
    pub fn leaks(&self) -> Vec<String> {
        let leak = |name: &str| {
            let value = self.environment.get(name)?;
            value.contains("rocm").then(|| format!("{name}={value}"))
        };
        LEAKS.into_iter().filter_map(leak).collect()
    }
}

/// The version of an interpreter's torch, if it has one.
pub fn installed_version(interpreter: &Path) -> Option<String> {
    Some(Snapshot::look(&Live::new("/").with_python(interpreter))?.torch?.version)
}

/// Where an interpreter's torch says what it is.
pub fn version_file(interpreter: &Path) -> Option<PathBuf> {
    let prefix = interpreter.parent()?.parent()?;
    let site = site_packages(&Live::new("/").with_python(interpreter))?;
    Some(prefix.join(site.strip_prefix(PYTHON)?.trim_start_matches('/')).join("torch/version.py"))
}

/// The directory with torch, or the first there is.
fn site_packages(files: &dyn Files) -> Option<String> {
    let mut sites = Vec::new();
    for lib in ["lib", "lib64"] {
        let pythons = files.list_part(&format!("{PYTHON}/{lib}"), |it| it.starts_with("python3"));
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                sites.push(format!("{PYTHON}/{lib}/{python}/{packages}"));
            }
        }
    }
    sites.retain(|site| !installed(files, site).is_empty());
    let with_torch =
        sites.iter().find(|site| installed(files, site).iter().any(|it| it == "torch"));
    with_torch.or(sites.first()).cloned()
}

/// What else somebody has installed is theirs to know.
fn installed(files: &dyn Files, site: &str) -> Vec<String> {
    files.list_part(site, |name| {
        name == "torch" || name.starts_with("_rocm_sdk") || package(name).is_some()
    })
}

/// `(transformers, 5.23.0)` of a directory that tells of one whose version matters.
fn package(name: &str) -> Option<(String, String)> {
    let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
    let package = package.to_lowercase();
    PACKAGES.contains(&package.as_str()).then(|| (package, version.to_owned()))
}

fn python_version(files: &dyn Files) -> Option<String> {
    let keep: Keep = |bytes| keep_parts(bytes, b'\n', |line| line.starts_with(b"version"));
    let text = part(files, &format!("{PYTHON}/pyvenv.cfg"), keep);
    let value = text.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        matches!(key.trim(), "version" | "version_info").then(|| value.trim().to_owned())
    })?;
    let parts: Vec<&str> = value.split('.').take(2).collect();
    Some(parts.join("."))
}

/// `name = 'value'` lines, with or without a type.
fn parse_version(text: &str) -> Option<Torch> {
    let value = |wanted: &str| {
        text.lines().find_map(|line| {
            let (name, value) = line.split_once('=')?;
            let name = name.split(':').next().unwrap_or_default().trim();
            let value = value.trim().trim_matches(['\'', '"']);
            (name == wanted && value != "None").then(|| value.to_owned())
        })
    };
    Some(Torch { version: value("__version__")?, hip: value("hip"), cuda: value("cuda") })
}

fn packages(files: &dyn Files, site: &str) -> BTreeMap<String, String> {
    installed(files, site).iter().filter_map(|name| package(name)).collect()
}

fn bundles_hip(files: &dyn Files, site: &str) -> bool {
    let in_torch =
        files.list_part(&format!("{site}/torch/lib"), |name| name.starts_with("libamdhip64.so"));
    !in_torch.is_empty()
        || installed(files, site).iter().any(|name| name.starts_with("_rocm_sdk_core"))
}

/// rocBLAS has a file for each target, named after it.
fn targets(files: &dyn Files, site: &str) -> BTreeSet<String> {
    let bundled = installed(files, site)
        .into_iter()
        .filter(|name| name.starts_with("_rocm_sdk_libraries"))
        .map(|name| format!("{site}/{name}/lib/rocblas/library"));
    let libraries = bundled.chain([format!("{site}/torch/lib/rocblas/library")]);
    let mut targets = BTreeSet::new();
    for name in libraries.flat_map(|library| files.list_part(&library, |it| it.contains("gfx"))) {
        for part in name.split(|c: char| !c.is_ascii_alphanumeric()) {
            let number = part.strip_prefix("gfx").unwrap_or_default();
            if number.len() >= 3 && number.chars().all(|c| c.is_ascii_hexdigit()) {
                targets.insert(part.to_owned());
            }
        }
    }
    targets
}

fn system_rocm(files: &dyn Files) -> Option<String> {
    let installed = files.list_part("/opt", |name| name.starts_with("rocm"));
    installed.iter().find_map(|name| text(files, &format!("/opt/{name}/.info/version")))
}

fn loader_paths(files: &dyn Files) -> Vec<PathBuf> {
    let directory = "/etc/ld.so.conf.d";
    let keep: Keep =
        |bytes| keep_parts(bytes, b'\n', |line| String::from_utf8_lossy(line).contains("/rocm"));
    let found = files.read_parts(directory, |name| name.ends_with(".conf"), keep);
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
        let found = Snapshot::read(&interpreter, environment, root.path());
        assert_eq!(found.python.as_deref(), Some("3.12"));
        let (leaks, torch) = (found.leaks(), found.torch.unwrap());
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
        let found = Snapshot::read(nowhere, BTreeMap::new(), Path::new("/nonexistent"));
        let nothing = Snapshot { interpreter: nowhere.into(), ..Snapshot::default() };
        assert_eq!(found, nothing);
    }
}
