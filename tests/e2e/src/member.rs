//! A process of the program that a test starts itself, beside or without `flotilla up`.

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Process, command::program_on};

/// Started again when it ends, as `revive` is called; ended with the test.
pub struct Member {
    pub name: String,
    on: Vec<String>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    log: PathBuf,
    child: Child,
}

impl Member {
    /// Starts `flotilla ARGUMENTS`; its log is `NAME.log` in `logs`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(
        name: &str,
        on: &[String],
        arguments: &[&str],
        environment: impl IntoIterator<Item = (String, String)>,
        logs: &Path,
    ) -> Self {
        std::fs::create_dir_all(logs).expect("a directory");
        let arguments: Vec<String> = arguments.iter().map(|&one| one.to_owned()).collect();
        let environment: Vec<(String, String)> = environment.into_iter().collect();
        let log = logs.join(format!("{name}.log"));
        let child = spawn(on, &arguments, &environment, &log);
        Self { name: name.to_owned(), on: on.to_vec(), arguments, environment, log, child }
    }

    /// Starts it again if it ended.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn revive(&mut self) {
        if self.child.try_wait().expect("the process can be asked").is_some() {
            self.child = spawn(&self.on, &self.arguments, &self.environment, &self.log);
        }
    }

    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// It and all that it started.
    pub fn processes(&self) -> Vec<Process> {
        Process::family(self.child.id())
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// # Panics
    /// When it cannot be told.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let told = kill_process(pid.expect("a process has a number"), signal);
        told.expect("our own process can be told");
    }

    /// `kill -9`, and waits for its end.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self) {
        self.child.kill().expect("our own process can be killed");
        self.child.wait().expect("a killed process ends");
    }
}

fn spawn(
    on: &[String],
    arguments: &[String],
    environment: &[(String, String)],
    log: &Path,
) -> Child {
    let log = OpenOptions::new().create(true).append(true).open(log).expect("a log");
    program_on(on)
        .args(arguments)
        .arg("--die-with-parent")
        .env_remove("FLOTILLA_DIR")
        .env_remove("FLOTILLA_NATS")
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("flotilla starts")
}

impl Drop for Member {
    fn drop(&mut self) {
        // What it started ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
