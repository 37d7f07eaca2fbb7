//! Python environments in `.tools`, created once for all tests.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::command::run_checked;

/// Packages for the tests only, in addition to the requirements of the client.
const TEST_PACKAGES: [&str; 3] =
    ["numpy==2.4.6", "openapi-spec-validator==0.9.0", "safetensors==0.8.0"];
/// Experiment trackers that the feeds are tested with.
const TRACKERS: [&str; 3] = ["mlflow==3.17.2", "tensorboard==2.21.0", "trackio==0.43.0"];

/// The AWS command line, which the guides use to copy files of buckets.
const AWS: &str = "awscli==1.46.3";

pub struct PythonEnv {
    program: PathBuf,
}

impl PythonEnv {
    /// Returns an environment for the API client. Prints why and returns `None` if Python or its
    /// packages cannot be installed.
    pub fn with_client_packages() -> Option<Self> {
        let requirements = scripts().join("requirements.txt");
        let text = std::fs::read_to_string(requirements).expect("the client's requirements");
        Self::create("python", &text.lines().chain(TEST_PACKAGES).collect::<Vec<_>>())
    }

    /// Returns an environment with MLflow, TensorBoard and trackio (1 GB), or `None`.
    pub fn with_trackers() -> Option<Self> {
        Self::create("trackers", &TRACKERS)
    }

    /// Returns an environment with the AWS command line, or `None`.
    pub fn with_aws() -> Option<Self> {
        Self::create("aws", &[AWS])
    }

    fn create(name: &str, packages: &[&str]) -> Option<Self> {
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools");
        std::fs::create_dir_all(&tools).expect("a directory");
        // The first process creates the environment; the others wait.
        let lock = File::create(tools.join(format!("{name}.lock"))).expect("a lock");
        lock.lock().expect("a lock can be waited for");
        let directory = tools.join(name);
        match create_venv(&directory, packages) {
            Ok(()) => Some(Self { program: directory.join("bin/python") }),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    /// Returns a command for a program that a package installed.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.program.with_file_name(name));
        command.stdin(Stdio::null());
        command
    }

    /// Returns a command for a script in `tests/e2e/python`.
    pub fn script_command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(scripts().join(name)).stdin(Stdio::null());
        command
    }

    /// Runs a script and returns its output.
    pub fn run_script(&self, name: &str, arguments: &[&str]) -> String {
        let output = self.script_command(name).args(arguments).output().expect("Python starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name} {arguments:?}: {stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

fn create_venv(directory: &Path, packages: &[&str]) -> Result<(), String> {
    let wanted = packages.join("\n");
    let stamp = directory.join("installed.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    run_checked(Command::new("python3").args(["-m", "venv", "--clear"]).arg(directory))?;
    let mut pip = Command::new(directory.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    run_checked(pip.args(packages))?;
    std::fs::write(&stamp, wanted).map_err(|error| error.to_string())
}
