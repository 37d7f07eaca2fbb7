//! Pythons with packages, made once in `.tools`.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::command::done;

/// What only the tests need, beside the client's own requirements.
const FOR_TESTS: [&str; 3] =
    ["numpy==2.4.6", "openapi-spec-validator==0.9.0", "safetensors==0.8.0"];
/// Trackers of others, which feeds are tested with.
const TRACKERS: [&str; 3] = ["mlflow==3.17.2", "tensorboard==2.21.0", "trackio==0.43.0"];

/// What people copy to and from buckets with.
const AWS: &str = "awscli==1.46.3";

pub struct Python {
    program: PathBuf,
}

impl Python {
    /// `None`, with a word on stdout, where Python or its packages cannot be had.
    ///
    /// # Panics
    /// When the repository cannot be written.
    pub fn find() -> Option<Self> {
        let requirements = scripts().join("requirements.txt");
        let text = std::fs::read_to_string(requirements).expect("the client's requirements");
        Self::with("python", &text.lines().chain(FOR_TESTS).collect::<Vec<_>>())
    }

    /// One with MLflow, TensorBoard and trackio (a gigabyte), as `find`.
    ///
    /// # Panics
    /// When the repository cannot be written.
    pub fn with_trackers() -> Option<Self> {
        Self::with("trackers", &TRACKERS)
    }

    /// One with the AWS command line, as `find`.
    ///
    /// # Panics
    /// When the repository cannot be written.
    pub fn with_aws() -> Option<Self> {
        Self::with("aws", &[AWS])
    }

    fn with(name: &str, packages: &[&str]) -> Option<Self> {
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools");
        std::fs::create_dir_all(&tools).expect("a directory");
        // One makes it, the others wait.
        let lock = File::create(tools.join(format!("{name}.lock"))).expect("a lock");
        lock.lock().expect("a lock can be waited for");
        let directory = tools.join(name);
        match install(&directory, packages) {
            Ok(()) => Some(Self { program: directory.join("bin/python") }),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    /// A program that came with its packages.
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.program.with_file_name(name));
        command.stdin(Stdio::null());
        command
    }

    /// A script of `tests/e2e/python`.
    pub fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(scripts().join(name)).stdin(Stdio::null());
        command
    }

    /// Runs a script and returns what it printed.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self, name: &str, arguments: &[&str]) -> String {
        let output = self.script(name).args(arguments).output().expect("Python starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name} {arguments:?}: {stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

fn install(directory: &Path, packages: &[&str]) -> Result<(), String> {
    let wanted = packages.join("\n");
    let stamp = directory.join("installed.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    done(Command::new("python3").args(["-m", "venv", "--clear"]).arg(directory))?;
    let mut pip = Command::new(directory.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    done(pip.args(packages))?;
    std::fs::write(&stamp, wanted).map_err(|error| error.to_string())
}
