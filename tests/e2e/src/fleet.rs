//! One fleet under test.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Output, Process, binary, flotilla, until};

/// From the first process to the last agent's word, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// From SIGTERM to the last process's end.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A fleet in a temporary directory. Ended, whatever happens, with the test.
pub struct Fleet {
    directory: TempDir,
    environment: Vec<(String, String)>,
    up: Child,
}

impl Fleet {
    /// Starts a fleet with these agents (as in `flotilla up --agents`) and waits for them.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn up(agents: &str) -> Self {
        Self::up_with(agents, &[], [])
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
        let environment: Vec<(String, String)> = environment.into_iter().collect();
        let directory = tempfile::tempdir().expect("a temporary directory");
        let log = std::fs::File::create(directory.path().join("up.log")).expect("a log");
        let up = Command::new(binary())
            .args(["up", "--lease", "3", "--die-with-parent", "--agents", agents])
            .arg("--dir")
            .arg(directory.path())
            .args(arguments)
            .envs(environment.clone())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("flotilla up starts");
        let mut fleet = Self { directory, environment, up };
        fleet.await_agents(agents);
        fleet
    }

    fn await_agents(&mut self, agents: &str) {
        let count = |text: &str| text.split_once('=').map_or(1, |(_, n)| n.parse().unwrap_or(1));
        let wanted: usize = agents.split(',').map(count).sum();
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

    /// Runs a command of the program on this fleet.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn run(&self, arguments: &[&str]) -> Output {
        let directory = ("FLOTILLA_DIR".to_owned(), self.path().display().to_string());
        flotilla(arguments, self.environment.iter().cloned().chain([directory]))
    }

    /// Runs a command with `--json` and reads the document it prints.
    ///
    /// # Errors
    /// When it fails or prints something else.
    pub fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let output = self.run(&[arguments, &["--json"]].concat());
        if output.code != 0 {
            bail!("{arguments:?} ended with {}: {}{}", output.code, output.stdout, output.stderr);
        }
        serde_json::from_str(&output.stdout).with_context(|| output.stdout)
    }

    /// Submits a spec file and returns the run's id.
    ///
    /// # Panics
    /// When it is refused.
    pub fn submit(&self, spec: &Path) -> String {
        let spec = spec.display().to_string();
        let answer = self.json(&["run", "submit", &spec]).expect("the spec is accepted");
        answer["run"].as_str().expect("a run").to_owned()
    }

    /// Waits until a run has ended well and returns it.
    ///
    /// # Panics
    /// When it does not end, or otherwise.
    pub fn finish(&self, run: &str, limit: Duration) -> Value {
        self.end(run, "SUCCEEDED", limit)
    }

    /// Waits until a run has ended in this state and returns it.
    ///
    /// # Panics
    /// When it does not end, or otherwise.
    pub fn end(&self, run: &str, state: &str, limit: Duration) -> Value {
        let ended = until(&format!("run {run} ends"), limit, || {
            let shown = self.json(&["run", "show", run]).ok()?;
            let state = shown["state"].as_str()?.to_owned();
            (!matches!(&*state, "RUNNING" | "PAUSED")).then_some(shown)
        });
        assert_eq!(ended["state"], state, "{ended:#}\n{}", self.logs());
        ended
    }

    /// Audits a run.
    ///
    /// # Panics
    /// When anything is found.
    pub fn audit_clean(&self, run: &str) -> Value {
        let audit = self.json(&["audit", run]).expect("a clean audit");
        assert_eq!(audit["findings"], serde_json::json!([]));
        assert_eq!(audit["planned_samples"], audit["accepted_samples"]);
        assert_eq!(audit["accepted_samples"], audit["judged_samples"]);
        audit
    }

    /// The process of a member (`coordinator`, or an agent by name).
    ///
    /// # Panics
    /// When there is none.
    pub fn pid(&self, member: &str) -> Pid {
        until(&format!("{member} runs"), Duration::from_secs(10), || {
            Process::all().into_iter().find_map(|process| {
                let arguments = &process.arguments;
                let is_member = arguments.get(1).is_some_and(|word| word == member)
                    || arguments.windows(2).any(|pair| pair[0] == "--name" && pair[1] == member);
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
        kill_process(self.up_pid(), Signal::TERM).expect("our own process can be told to end");
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
        kill_process(self.pid(member), Signal::KILL).expect("our own process can be killed");
    }

    /// The last lines of every log, for a failing test.
    pub fn logs(&self) -> String {
        let mut found = vec![self.path().join("up.log")];
        for pattern in ["logs", "agents"] {
            collect_logs(&self.path().join(pattern), &mut found);
        }
        let tail = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(25)..].join("\n");
            format!("--- {}\n{last}\n", path.display())
        };
        found.iter().map(tail).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
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

fn collect_logs(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect_logs(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "log") {
            found.push(path);
        }
    }
}
