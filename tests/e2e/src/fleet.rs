//! A fleet that `flotilla up` runs.

use std::{
    ops::Deref,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Client, Process, command::QUICK_RECORDS, program_path, wait_until};

/// The limit for the start of all agents on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// The limit from SIGTERM to the end of the last process.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A fleet in a temporary directory. It is stopped when it is dropped.
pub struct Fleet {
    client: Client,
    agents: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    up: Child,
    /// The last field, because it must be dropped after the processes that use it.
    directory: TempDir,
}

impl Deref for Fleet {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Fleet {
    /// Starts a fleet with these agents (as in `flotilla up --agents`) and waits until they are
    /// ready.
    pub fn start(agents: &str) -> Self {
        Self::start_with(agents, &[], [])
    }

    /// Starts an open fleet, for tests that speak to its servers and for agents that join by
    /// address.
    pub fn start_open(agents: &str) -> Self {
        Self::start_with(agents, &["--open"], [])
    }

    /// Starts a fleet with more arguments and environment for `flotilla up`.
    pub fn start_with(
        agents: &str,
        arguments: &[&str],
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        Self::start_in(directory, agents, arguments, environment)
    }

    /// Starts a fleet in a directory of the test.
    pub fn start_in(
        directory: TempDir,
        agents: &str,
        arguments: &[&str],
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let environment: Vec<(String, String)> = environment.into_iter().collect();
        let at = ("FLOTILLA_DIR".to_owned(), directory.path().display().to_string());
        let client = Client::new(environment.iter().cloned().chain([at]), directory.path());
        let arguments: Vec<String> = arguments.iter().map(|&one| one.to_owned()).collect();
        let up = spawn_up(directory.path(), agents, &arguments, &environment);
        let agents = agents.to_owned();
        let mut fleet = Self { client, agents, arguments, environment, up, directory };
        fleet.await_agents();
        fleet
    }

    /// Runs `flotilla up` again in the same directory and returns without waiting.
    pub fn restart(&mut self) {
        assert!(self.exit_status().is_some(), "one flotilla up at a time");
        self.up = spawn_up(self.path(), &self.agents, &self.arguments, &self.environment);
    }

    /// Restarts the fleet with other arguments, which also apply to later restarts.
    pub fn restart_with(&mut self, arguments: &[&str]) {
        self.arguments = arguments.iter().map(|&one| one.to_owned()).collect();
        self.restart();
    }

    /// Waits until all agents are ready.
    pub fn await_agents(&mut self) {
        let count = |text: &str| text.split_once('=').map_or(1, |(_, n)| n.parse().unwrap_or(1));
        let wanted: usize = self.agents.split(',').map(count).sum();
        wait_until("the fleet is up", READY_LIMIT, || {
            let ended = self.up.try_wait().expect("the process can be asked");
            assert!(ended.is_none(), "flotilla up ended: {}", self.log_tails());
            let listed = self.run_json(&["agents", "list"]).ok()?;
            let ready = |agent: &&Value| agent["state"] == "READY";
            (listed.as_array()?.iter().filter(ready).count() >= wanted).then_some(())
        });
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the content of `fleet.json`.
    pub fn read_fleet_file(&self) -> Value {
        let text = std::fs::read(self.path().join("fleet.json")).expect("fleet.json");
        serde_json::from_slice(&text).expect("fleet.json is JSON")
    }

    /// Returns the URL of its NATS server.
    pub fn nats_url(&self) -> String {
        self.read_fleet_file()["nats"].as_str().expect("a URL").to_owned()
    }

    /// Returns the process id of a member: `up`, `coordinator`, or the name of an agent.
    pub fn pid(&self, member: &str) -> Pid {
        if member == "up" {
            return self.up_pid();
        }
        wait_until(&format!("{member} runs"), Duration::from_secs(10), || {
            Process::all().into_iter().find_map(|process| {
                let is_member = process.member_name().is_some_and(|name| name == member);
                (process.parent == self.up.id() && is_member).then(|| process.pid()).flatten()
            })
        })
    }

    /// Returns `flotilla up` and all of its descendants.
    pub fn processes(&self) -> Vec<Process> {
        Process::tree(self.up.id())
    }

    /// Sends SIGTERM to `flotilla up`.
    pub fn terminate(&self) {
        kill_process(self.up_pid(), Signal::TERM).expect("our own process can be signalled");
    }

    /// Returns the exit status of `flotilla up` if it has ended.
    pub fn exit_status(&mut self) -> Option<std::process::ExitStatus> {
        self.up.try_wait().expect("the process can be asked")
    }

    fn up_pid(&self) -> Pid {
        i32::try_from(self.up.id()).ok().and_then(Pid::from_raw).expect("a process has a number")
    }

    /// Kills `flotilla up` and all of its descendants with SIGKILL, as a power loss does, and waits
    /// for their end.
    pub fn kill_all(&mut self) {
        // Stopped, it restarts none of the others.
        kill_process(self.up_pid(), Signal::STOP).expect("our own process can be signalled");
        let processes = self.processes();
        for pid in processes.iter().filter_map(Process::pid) {
            // Its parent's end may have ended it already.
            let _ = kill_process(pid, Signal::KILL);
        }
        self.up.wait().expect("a killed process ends");
        wait_until("all processes have ended", STOP_LIMIT, || {
            processes.iter().all(|process| !process.is_alive()).then_some(())
        });
    }

    /// Kills a member with SIGKILL.
    pub fn kill(&self, member: &str) {
        self.signal(member, Signal::KILL);
    }

    pub fn signal(&self, member: &str, signal: Signal) {
        kill_process(self.pid(member), signal).expect("our own process can be signalled");
    }
}

fn spawn_up(
    directory: &Path,
    agents: &str,
    arguments: &[String],
    environment: &[(String, String)],
) -> Child {
    let log = directory.join("up.log");
    let log = std::fs::OpenOptions::new().create(true).append(true).open(log).expect("a log");
    // A short lease by default, because most tests wait for one.
    let set = arguments.iter().any(|argument| argument == "--lease");
    let lease: &[&str] = if set { &[] } else { &["--lease", "3"] };
    Command::new(program_path())
        .args(["up", "--die-with-parent", "--agents", agents])
        .args(lease)
        .arg("--dir")
        .arg(directory)
        .args(arguments)
        .envs([QUICK_RECORDS])
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
            eprintln!("{}", self.log_tails());
        }
        if matches!(self.up.try_wait(), Ok(None)) {
            // It may have ended already.
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
