//! Python environments in `.tools`, which `deploy/fetch-test-tools.sh` creates.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use requirements::require_python_environment;

/// An environment in `.tools`. Tests that need an absent one are recorded as skipped.
pub struct PythonEnv {
    program: PathBuf,
}

impl PythonEnv {
    /// Returns the environment for the Python client and the tests of the API, or `None`.
    pub fn with_client_packages() -> Option<Self> {
        Self::require("python", &["requirements.txt", "requirements-tests.txt"])
    }

    /// Returns the environment with the compiler of the Python client's messages and the oldest
    /// packages that the client supports, or `None`.
    pub fn with_stub_compiler() -> Option<Self> {
        Self::require("stubs", &["requirements-stubs.txt"])
    }

    /// Returns the environment with MLflow, TensorBoard and trackio, or `None`.
    pub fn with_trackers() -> Option<Self> {
        Self::require("trackers", &["requirements-trackers.txt"])
    }

    /// Returns the environment with the AWS command line, which the guides use, or `None`.
    pub fn with_aws() -> Option<Self> {
        Self::require("aws", &["requirements-aws.txt"])
    }

    fn require(name: &str, requirements: &[&str]) -> Option<Self> {
        Some(Self { program: require_python_environment(name, requirements)? })
    }

    /// Returns a command for a program that a package installed. Python finds the client there.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.program.with_file_name(name));
        command.env("PYTHONPATH", client_directory()).stdin(Stdio::null());
        command
    }

    /// Returns a command for a script in `tests/e2e/python`.
    pub fn script_command(&self, name: &str) -> Command {
        let mut command = self.command("python");
        command.arg(scripts().join(name));
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

/// Returns the directory with the package of the Python client.
pub fn client_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python").canonicalize().expect("the client")
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}
