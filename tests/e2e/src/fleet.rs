//! One fleet under test.

use std::{
    ops::Deref,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Client, Process, binary, until};

/// From the first process to the last agent's word, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// From SIGTERM to the last process's end.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A fleet in a temporary directory. Ended, whatever happens, with the test.
pub struct Fleet {
    client: Client,
    agents: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    up: Child,
    /// Last, for what works in it ends first.
    directory: TempDir,
}

impl Deref for Fleet {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Fleet {
    /// Starts a fleet with these agents (as in `flotilla up --agents`) and waits for them.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn up(agents: &str) -> Self {
        Self::up_with(agents, &[], [])
    }

    /// As `up`, open to whoever can reach it: for tests that speak to its servers themselves, and
    /// for boxes that join by address alone.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn open(agents: &str) -> Self {
        Self::up_with(agents, &["--open"], [])
    }

    /// As `up`, with more arguments and environment for `flotilla up`.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn up_with(
        agents: &str,
        arguments: &[&str],
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        Self::up_in(directory, agents, arguments, environment)
    }

    /// As `up_with`, in a directory made by the test.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn up_in(
        directory: TempDir,
        agents: &str,
        arguments: &[&str],
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let environment: Vec<(String, String)> = environment.into_iter().collect();
        let at = ("FLOTILLA_DIR".to_owned(), directory.path().display().to_string());
        let client = Client::new(environment.iter().cloned().chain([at]), directory.path());
        let arguments: Vec<String> = arguments.iter().map(|&one| one.to_owned()).collect();
        let up = start(directory.path(), agents, &arguments, &environment);
        let agents = agents.to_owned();
        let mut fleet = Self { client, agents, arguments, environment, up, directory };
        fleet.await_agents();
        fleet
    }

    /// `flotilla up` once more, in the same directory. Waits for nothing.
    ///
    /// # Panics
    /// When it cannot be started, or the one before still runs.
    pub fn up_again(&mut self) {
        assert!(self.ended().is_some(), "one flotilla up at a time");
        self.up = start(self.path(), &self.agents, &self.arguments, &self.environment);
    }

    /// As `up_again`, with other arguments from now on.
    ///
    /// # Panics
    /// As `up_again`.
    pub fn up_again_with(&mut self, arguments: &[&str]) {
        self.arguments = arguments.iter().map(|&one| one.to_owned()).collect();
        self.up_again();
    }

    /// Waits until all agents are ready.
    ///
    /// # Panics
    /// When they are not, or `flotilla up` ended.
    pub fn await_agents(&mut self) {
        let count = |text: &str| text.split_once('=').map_or(1, |(_, n)| n.parse().unwrap_or(1));
        let wanted: usize = self.agents.split(',').map(count).sum();
        until("the fleet is up", READY_LIMIT, || {
            let ended = self.up.try_wait().expect("the process can be asked");
            assert!(ended.is_none(), "flotilla up ended: {}", self.logs());
            let listed = self.json(&["agents", "list"]).ok()?;
            let ready = |agent: &&Value| agent["state"] == "READY";
            (listed.as_array()?.iter().filter(ready).count() >= wanted).then_some(())
        });
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// `fleet.json`, once it is there.
    ///
    /// # Panics
    /// When it is not.
    pub fn file(&self) -> Value {
        let text = std::fs::read(self.path().join("fleet.json")).expect("fleet.json");
        serde_json::from_slice(&text).expect("fleet.json is JSON")
    }

    /// Where its bus listens.
    ///
    /// # Panics
    /// When it was never up.
    pub fn nats(&self) -> String {
        self.file()["nats"].as_str().expect("a URL").to_owned()
    }

    /// The process of a member: `up` itself, `coordinator`, or an agent by name.
    ///
    /// # Panics
    /// When there is none.
    pub fn pid(&self, member: &str) -> Pid {
        if member == "up" {
            return self.up_pid();
        }
        until(&format!("{member} runs"), Duration::from_secs(10), || {
            Process::all().into_iter().find_map(|process| {
                let is_member = process.member().is_some_and(|name| name == member);
                (process.parent == self.up.id() && is_member).then(|| process.pid()).flatten()
            })
        })
    }

    /// `flotilla up` and all that it started.
    pub fn processes(&self) -> Vec<Process> {
        Process::family(self.up.id())
    }

    /// Asks `flotilla up` to end.
    ///
    /// # Panics
    /// When it has ended already.
    pub fn terminate(&self) {
        kill_process(self.up_pid(), Signal::TERM).expect("our own process can be told");
    }

    /// How `flotilla up` ended, if it did.
    ///
    /// # Panics
    /// When it cannot be asked.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.up.try_wait().expect("the process can be asked")
    }

    fn up_pid(&self) -> Pid {
        i32::try_from(self.up.id()).ok().and_then(Pid::from_raw).expect("a process has a number")
    }

    /// `kill -9` of a member.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&self, member: &str) {
        self.signal(member, Signal::KILL);
    }

    /// # Panics
    /// When it cannot be told.
    pub fn signal(&self, member: &str, signal: Signal) {
        kill_process(self.pid(member), signal).expect("our own process can be told");
    }
}

fn start(
    directory: &Path,
    agents: &str,
    arguments: &[String],
    environment: &[(String, String)],
) -> Child {
    let log = directory.join("up.log");
    let log = std::fs::OpenOptions::new().create(true).append(true).open(log).expect("a log");
    // Short, unless the test says otherwise: most wait for one.
    let set = arguments.iter().any(|argument| argument == "--lease");
    let lease: &[&str] = if set { &[] } else { &["--lease", "3"] };
    Command::new(binary())
        .args(["up", "--die-with-parent", "--agents", agents])
        .args(lease)
        .arg("--dir")
        .arg(directory)
        .args(arguments)
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("flotilla up starts")
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        if matches!(self.up.try_wait(), Ok(None)) {
            // It may have ended by itself.
            let _ = kill_process(self.up_pid(), Signal::TERM);
        }
        let began = std::time::Instant::now();
        while matches!(self.up.try_wait(), Ok(None)) {
            if began.elapsed() > STOP_LIMIT {
                let _ = self.up.kill();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
