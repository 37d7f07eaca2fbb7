//! A process of the program that the test starts itself, with or without `flotilla up`.

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    Process,
    command::{QUICK_RECORDS, prefixed_command},
};

/// A process of the program that ends when it is dropped.
pub struct Member {
    pub name: String,
    prefix: Vec<String>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    log: PathBuf,
    child: Child,
}

impl Member {
    /// Starts `flotilla ARGUMENTS`. The log is `NAME.log` in `logs`.
    pub fn start(
        name: &str,
        prefix: &[String],
        arguments: &[&str],
        environment: impl IntoIterator<Item = (String, String)>,
        logs: &Path,
    ) -> Self {
        std::fs::create_dir_all(logs).expect("a directory");
        let arguments: Vec<String> = arguments.iter().map(|&one| one.to_owned()).collect();
        let environment: Vec<(String, String)> = environment.into_iter().collect();
        let log = logs.join(format!("{name}.log"));
        let child = spawn(prefix, &arguments, &environment, &log);
        Self { name: name.to_owned(), prefix: prefix.to_vec(), arguments, environment, log, child }
    }

    /// Starts the process again if it has exited.
    pub fn restart_exited(&mut self) {
        if self.child.try_wait().expect("the process can be asked").is_some() {
            self.child = spawn(&self.prefix, &self.arguments, &self.environment, &self.log);
        }
    }

    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns the process and all of its descendants.
    pub fn processes(&self) -> Vec<Process> {
        Process::tree(self.child.id())
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let sent = kill_process(pid.expect("a process has a number"), signal);
        sent.expect("our own process can be signalled");
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        self.child.kill().expect("our own process can be killed");
        self.child.wait().expect("a killed process ends");
    }
}

fn spawn(
    prefix: &[String],
    arguments: &[String],
    environment: &[(String, String)],
    log: &Path,
) -> Child {
    let log = OpenOptions::new().create(true).append(true).open(log).expect("a log");
    prefixed_command(prefix)
        .args(arguments)
        .arg("--die-with-parent")
        .env_remove("FLOTILLA_DIR")
        .env_remove("FLOTILLA_NATS")
        .envs([QUICK_RECORDS])
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("flotilla starts")
}

impl Drop for Member {
    fn drop(&mut self) {
        // Its child processes end with it (`--die-with-parent`).
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
