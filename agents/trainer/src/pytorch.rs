//! The PyTorch trainer: a Python program that comes with this one, run by an interpreter the
//! user has or by `uv`, which brings one.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
};

use runtime::{Command, Launch};

/// The program, as it lies in `python/`.
const FILES: [(&str, &str); 15] = [
    ("train.py", include_str!("../python/train.py")),
    ("flotilla_trainer/__init__.py", include_str!("../python/flotilla_trainer/__init__.py")),
    ("flotilla_trainer/canary.py", include_str!("../python/flotilla_trainer/canary.py")),
    ("flotilla_trainer/call.py", include_str!("../python/flotilla_trainer/call.py")),
    ("flotilla_trainer/errors.py", include_str!("../python/flotilla_trainer/errors.py")),
    ("flotilla_trainer/examples.py", include_str!("../python/flotilla_trainer/examples.py")),
    ("flotilla_trainer/main.py", include_str!("../python/flotilla_trainer/main.py")),
    ("flotilla_trainer/models.py", include_str!("../python/flotilla_trainer/models.py")),
    ("flotilla_trainer/order.py", include_str!("../python/flotilla_trainer/order.py")),
    ("flotilla_trainer/packing.py", include_str!("../python/flotilla_trainer/packing.py")),
    ("flotilla_trainer/probe.py", include_str!("../python/flotilla_trainer/probe.py")),
    ("flotilla_trainer/protocol.py", include_str!("../python/flotilla_trainer/protocol.py")),
    ("flotilla_trainer/saving.py", include_str!("../python/flotilla_trainer/saving.py")),
    ("flotilla_trainer/schedule.py", include_str!("../python/flotilla_trainer/schedule.py")),
    ("flotilla_trainer/training.py", include_str!("../python/flotilla_trainer/training.py")),
];

/// What runs the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Python {
    /// With torch, transformers, peft and accelerate beside it.
    Interpreter(PathBuf),
    /// Reads what the program needs from its first lines, and fetches it once.
    Uv(PathBuf),
}

/// The program, written out for this agent.
#[derive(Debug, Clone)]
pub struct PyTorch {
    pub python: Python,
    program: PathBuf,
}

impl PyTorch {
    /// Writes the program below a directory.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn prepare(python: Python, directory: &Path) -> std::io::Result<Self> {
        let directory = directory.join("pytorch");
        // What an older version left there could be imported.
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        for (name, text) in FILES {
            let path = directory.join(name);
            std::fs::create_dir_all(path.parent().unwrap_or(&directory))?;
            std::fs::write(path, text)?;
        }
        Ok(Self { python, program: directory.join("train.py") })
    }

    /// What it is, as far as that can be known without starting it.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.python {
            Python::Uv(_) => "pytorch by uv".to_owned(),
            Python::Interpreter(interpreter) => {
                match hardware::torch::installed_version(interpreter) {
                    Some(version) => format!("pytorch-{version}"),
                    None => "pytorch".to_owned(),
                }
            }
        }
    }

    /// The worker that trains, or probes, as its call says.
    #[must_use]
    pub fn command(&self, launch: &Launch, name: &str) -> Command {
        let (program, mut arguments): (_, Vec<OsString>) = match &self.python {
            // -s: nothing from the user's own site-packages gets among the interpreter's.
            Python::Interpreter(path) => (path, vec!["-s".into()]),
            Python::Uv(path) => (path, uv_arguments(launch)),
        };
        arguments.push(self.program.clone().into());
        launch.tool(program, name, arguments, environment(launch))
    }
}

fn uv_arguments(launch: &Launch) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["run".into(), "--no-project".into()];
    // The CPU's wheels are of no use to a GPU that no profile speaks of.
    let fits = !launch.profile.is_cpu() || launch.device == "cpu";
    if let Some(index) = launch.profile.python.index.as_deref().filter(|_| fits) {
        arguments.extend(["--index".into(), index.into()]);
    }
    arguments.push("--script".into());
    arguments
}

fn environment(launch: &Launch) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::from([
        // Everything is local; a look-up would only wait for a network.
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
    use super::*;

    #[test]
    fn every_file_of_the_program_is_written() {
        let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
        let directory = tempfile::tempdir().unwrap();
        let pytorch = PyTorch::prepare(Python::Uv("uv".into()), directory.path()).unwrap();
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
