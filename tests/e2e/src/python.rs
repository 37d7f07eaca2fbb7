//! Python environments in `.tools`, which `deploy/fetch-test-tools.sh` creates.

use std::{
    io::{BufRead, BufReader, Lines, Write},
    path::{Path, PathBuf},
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

use requirements::require_python_environment;
use serde_json::Value;

use crate::ChildGuard;

/// What trackers and the clients of models need together: half of their packages are the same.
const SHARED_REQUIREMENTS: [&str; 2] =
    ["requirements-trackers.txt", "requirements-model-clients.txt"];

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
        Self::require("trackers", &SHARED_REQUIREMENTS)
    }

    /// Returns the environment with lm_eval, and with the HTTP client of Open WebUI, or `None`.
    pub fn with_model_clients() -> Option<Self> {
        Self::require("trackers", &SHARED_REQUIREMENTS)
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

/// A running script that answers each line with a line, and imports its packages once.
pub struct ScriptSession {
    _script: ChildGuard,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl ScriptSession {
    /// Starts a script, whose errors appear among those of the test.
    pub fn start(mut command: Command) -> Self {
        let mut script =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("Python");
        let input = script.stdin.take().expect("its input");
        let output = BufReader::new(script.stdout.take().expect("its output")).lines();
        Self { _script: ChildGuard(script), input, output }
    }

    /// Asks for the result of a command with its arguments.
    ///
    /// # Errors
    /// The command failed: the message of the script.
    pub fn ask(&mut self, command: &[&str]) -> Result<Value, String> {
        let line = Value::from(command.to_vec());
        writeln!(self.input, "{line}").expect("the script reads");
        let answer = self.output.next().expect("the script goes on").expect("UTF-8");
        let mut answer: Value = serde_json::from_str(&answer).expect("JSON");
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer["result"].take()),
        }
    }
}

/// Returns the directory with the package of the Python client.
pub fn client_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python").canonicalize().expect("the client")
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}
