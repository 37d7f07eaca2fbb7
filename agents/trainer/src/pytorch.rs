//! The PyTorch trainer: an embedded Python program, run by the user's interpreter or by `uv`, which
//! provides one.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
};

use agent::{ChildCommand, WorkerLauncher};

/// The files of the program, as in `python/`.
const PROGRAM_FILES: [(&str, &str); 16] = [
    ("train.py", include_str!("../python/train.py")),
    ("flotilla_trainer/__init__.py", include_str!("../python/flotilla_trainer/__init__.py")),
    ("flotilla_trainer/canary.py", include_str!("../python/flotilla_trainer/canary.py")),
    ("flotilla_trainer/call.py", include_str!("../python/flotilla_trainer/call.py")),
    ("flotilla_trainer/errors.py", include_str!("../python/flotilla_trainer/errors.py")),
    ("flotilla_trainer/examples.py", include_str!("../python/flotilla_trainer/examples.py")),
    ("flotilla_trainer/main.py", include_str!("../python/flotilla_trainer/main.py")),
    ("flotilla_trainer/models.py", include_str!("../python/flotilla_trainer/models.py")),
    ("flotilla_trainer/objectives.py", include_str!("../python/flotilla_trainer/objectives.py")),
    ("flotilla_trainer/order.py", include_str!("../python/flotilla_trainer/order.py")),
    ("flotilla_trainer/packing.py", include_str!("../python/flotilla_trainer/packing.py")),
    ("flotilla_trainer/probe.py", include_str!("../python/flotilla_trainer/probe.py")),
    ("flotilla_trainer/protocol.py", include_str!("../python/flotilla_trainer/protocol.py")),
    ("flotilla_trainer/saving.py", include_str!("../python/flotilla_trainer/saving.py")),
    ("flotilla_trainer/schedule.py", include_str!("../python/flotilla_trainer/schedule.py")),
    ("flotilla_trainer/training.py", include_str!("../python/flotilla_trainer/training.py")),
];

/// The program that runs the Python code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PythonRunner {
    /// An interpreter that has torch, transformers, peft and accelerate.
    Interpreter(PathBuf),
    /// `uv`, which reads the required packages from the first lines of the program and fetches them
    /// once.
    Uv(PathBuf),
}

/// The Python program, written to the agent's directory.
#[derive(Debug, Clone)]
pub struct PyTorchProgram {
    pub python: PythonRunner,
    /// The path of `train.py`.
    program: PathBuf,
}

impl PyTorchProgram {
    /// Writes the program to the subdirectory `pytorch` of a directory.
    pub fn write_program(python: PythonRunner, directory: &Path) -> std::io::Result<Self> {
        let directory = directory.join("pytorch");
        // Files of an older version could be imported by mistake.
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        for (name, text) in PROGRAM_FILES {
            let path = directory.join(name);
            std::fs::create_dir_all(path.parent().unwrap_or(&directory))?;
            std::fs::write(path, text)?;
        }
        Ok(Self { python, program: directory.join("train.py") })
    }

    /// Returns the name and version of PyTorch, as far as it is known without a start.
    #[must_use]
    pub(crate) fn describe_version(&self) -> String {
        match &self.python {
            PythonRunner::Uv(_) => "pytorch by uv".to_owned(),
            PythonRunner::Interpreter(interpreter) => {
                match hardware::torch_environment::installed_torch_version(interpreter) {
                    Some(version) => format!("pytorch-{version}"),
                    None => "pytorch".to_owned(),
                }
            }
        }
    }

    /// Returns the command of the worker, which trains or probes according to its request. `name`
    /// is the name of its log.
    #[must_use]
    pub fn worker_command(&self, launch: &WorkerLauncher, name: &str) -> ChildCommand {
        let (program, mut arguments): (_, Vec<OsString>) = match &self.python {
            // `-s` keeps packages of the user's own site directory out.
            PythonRunner::Interpreter(path) => (path, vec!["-s".into()]),
            PythonRunner::Uv(path) => (path, build_uv_arguments(launch)),
        };
        arguments.push(self.program.clone().into());
        launch.tool_command(program, name, arguments, build_environment(launch))
    }
}

/// The package that trains on a quantised base.
const QUANTIZER: &str = "bitsandbytes";

/// Adds the package index of the hardware profile, and the quantizer if the profile's stack has it:
/// its wheels then have kernels for the card.
fn build_uv_arguments(launch: &WorkerLauncher) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["run".into(), "--no-project".into()];
    // The CPU profile is also used for a GPU without a profile, which needs other wheels than the
    // CPU's.
    let fits = !launch.profile.is_cpu() || launch.device == "cpu";
    if let Some(index) = launch.profile.python.index.as_deref().filter(|_| fits) {
        arguments.extend(["--index".into(), index.into()]);
    }
    let mut packages = launch.profile.stack.iter().flat_map(|stack| &stack.packages);
    if let Some(quantizer) = packages.find(|package| package.starts_with(QUANTIZER)) {
        arguments.extend(["--with".into(), quantizer.into()]);
    }
    arguments.push("--script".into());
    arguments
}

fn build_environment(launch: &WorkerLauncher) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::from([
        // All files are local; a look-up would only wait for the network.
        ("HF_HUB_OFFLINE".to_owned(), "1".to_owned()),
        ("PYTHONUNBUFFERED".to_owned(), "1".to_owned()),
    ]);
    if !launch.profile.environment.contains_key("OMP_NUM_THREADS") {
        environment.insert("OMP_NUM_THREADS".into(), launch.threads.to_string());
    }
    environment
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    /// Returns the arguments of `uv` on a host with this hardware profile.
    fn uv_arguments(profile: &str) -> String {
        let launch = crate::test_launcher("unused".as_ref(), profile);
        build_uv_arguments(&launch).join(OsStr::new(" ")).into_string().unwrap()
    }

    #[test]
    fn uv_installs_bitsandbytes_where_its_wheels_have_kernels_for_the_card() {
        let pinned = include_str!("../../../deploy/requirements-torch.txt");
        let quantizer = pinned.lines().find(|line| line.starts_with("bitsandbytes")).unwrap();
        let with = format!("--with {quantizer} --script");
        assert_eq!(uv_arguments("cuda"), format!("run --no-project {with}"));
        let index = "--index https://download.pytorch.org/whl/rocm7.2";
        assert_eq!(uv_arguments("gfx1201"), format!("run --no-project {index} {with}"));
        assert!(uv_arguments("gfx1151").ends_with(&with));
        for without in ["cpu", "gfx906", "rocm"] {
            assert!(!uv_arguments(without).contains("bitsandbytes"), "{without}");
        }
    }

    #[test]
    fn every_file_of_the_program_is_written() {
        let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
        let directory = tempfile::tempdir().unwrap();
        let pytorch =
            PyTorchProgram::write_program(PythonRunner::Uv("uv".into()), directory.path()).unwrap();
        let mut there = vec!["train.py".to_owned()];
        for entry in std::fs::read_dir(python.join("flotilla_trainer")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            there.extend(name.ends_with(".py").then(|| format!("flotilla_trainer/{name}")));
        }
        for name in there {
            let written = pytorch.program.with_file_name(&name);
            let written = std::fs::read(&written).unwrap_or_else(|_| panic!("{name} is left out"));
            assert!(written == std::fs::read(python.join(&name)).unwrap(), "{name}");
        }
    }
}
