//! The command line client of a fleet, with the environment and the host that it runs in.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::{
    Output,
    command::{prefixed_command, run_prefixed},
    wait_until,
};

/// Runs commands of the program with a fixed environment, and collects logs for failing tests.
#[derive(Debug, Clone)]
pub struct Client {
    environment: Vec<(String, String)>,
    /// Words before the program, such as `ip netns exec NAME`.
    pub(crate) prefix: Vec<String>,
    logs: PathBuf,
}

impl Client {
    pub fn new(
        environment: impl IntoIterator<Item = (String, String)>,
        logs: impl Into<PathBuf>,
    ) -> Self {
        Self {
            environment: environment.into_iter().collect(),
            prefix: Vec::new(),
            logs: logs.into(),
        }
    }

    /// Runs a command of the program on this fleet.
    pub fn run(&self, arguments: &[&str]) -> Output {
        run_prefixed(&self.prefix, arguments, self.environment.iter().cloned())
    }

    /// Returns a command of the program on this fleet, for tests that read its output while it runs.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = prefixed_command(&self.prefix);
        command.args(arguments).envs(self.environment.iter().cloned());
        command
    }

    /// Runs a command with `--json` and returns the document that it prints.
    ///
    /// # Errors
    /// If the command fails or prints no JSON.
    pub fn run_json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let output = self.run(&[arguments, &["--json"]].concat());
        if output.code != 0 {
            bail!("{arguments:?} ended with {}: {}{}", output.code, output.stdout, output.stderr);
        }
        serde_json::from_str(&output.stdout).with_context(|| output.stdout)
    }

    /// Submits a spec file and returns the id of its run.
    pub fn submit(&self, spec: &Path) -> String {
        let spec = spec.display().to_string();
        let answer = self.run_json(&["run", "submit", &spec]).expect("the spec is accepted");
        answer["run"].as_str().expect("a run").to_owned()
    }

    /// Waits until a run has succeeded and returns it.
    pub fn await_success(&self, run: &str, limit: Duration) -> Value {
        self.await_state(run, "SUCCEEDED", limit)
    }

    /// Waits until a run has ended and checks that it ended in this state.
    pub fn await_state(&self, run: &str, state: &str, limit: Duration) -> Value {
        let ended = wait_until(&format!("run {run} ends"), limit, || self.ended_run(run));
        assert_eq!(ended["state"], state, "{ended:#}\n{}", self.log_tails());
        ended
    }

    /// Waits for the end of a run in a thread of its own, because requests block while the bus is
    /// down.
    pub fn wait_in_background(&self, run: &str) -> std::thread::JoinHandle<Value> {
        let (client, run) = (self.clone(), run.to_owned());
        std::thread::spawn(move || {
            loop {
                if let Some(ended) = client.ended_run(&run) {
                    return ended;
                }
                std::thread::sleep(Duration::from_millis(500));
            }
        })
    }

    /// Returns the run if it has ended. `None` also if the fleet does not answer.
    pub fn ended_run(&self, run: &str) -> Option<Value> {
        let shown = self.run_json(&["run", "show", run]).ok()?;
        let over = !matches!(shown["state"].as_str()?, "RUNNING" | "PAUSED" | "QUEUED");
        over.then_some(shown)
    }

    /// Audits a run and checks that there are no findings.
    pub fn assert_clean_audit(&self, run: &str) -> Value {
        self.assert_no_findings(&["audit", run])
    }

    /// Audits a run, reads all files that it names, and checks that there are no findings.
    pub fn assert_clean_deep_audit(&self, run: &str) -> Value {
        self.assert_no_findings(&["audit", run, "--deep"])
    }

    fn assert_no_findings(&self, arguments: &[&str]) -> Value {
        let audit = self.run_json(arguments).expect("a clean audit");
        assert_eq!(audit["findings"], serde_json::json!([]));
        assert_eq!(audit["planned_samples"], audit["accepted_samples"]);
        assert_eq!(audit["accepted_samples"], audit["judged_samples"]);
        audit
    }

    /// Returns all facts of an ended run in log order: `subject`, `time_ms`, `fact`.
    pub fn read_facts(&self, run: &str) -> Vec<Value> {
        let output = self.run(&["run", "watch", run, "--json"]);
        assert_ne!(output.code, -1, "{run} does not end: {}", output.stdout);
        let line = |line| serde_json::from_str(line).expect("each line is JSON");
        output.stdout.lines().map(line).collect()
    }

    /// Follows a run until a fact matches, or the run ends.
    pub fn await_fact(&self, run: &str, matches: impl Fn(&Value) -> bool) {
        let mut watch = self.command(&["run", "watch", run, "--json"]);
        let mut watch = watch.stdout(Stdio::piped()).spawn().expect("flotilla starts");
        let lines = BufReader::new(watch.stdout.take().expect("a pipe")).lines();
        let mut facts = lines.map_while(Result::ok);
        let found = facts.any(|line| serde_json::from_str(&line).is_ok_and(|fact| matches(&fact)));
        // It may have ended already.
        let _ = watch.kill();
        watch.wait().expect("a killed process ends");
        assert!(found, "{run} has no such fact\n{}", self.log_tails());
    }

    /// Returns the numbers of accepted and of planned training samples of a run.
    pub fn sample_counts(&self, run: &str) -> Option<(u64, u64)> {
        let audit = self.run_json(&["audit", run]).ok()?;
        Some((audit["accepted_samples"].as_u64()?, audit["planned_samples"].as_u64()?))
    }

    /// Waits until `more` samples are accepted than at the time of the call.
    pub fn await_samples(&self, run: &str, more: u64, limit: Duration) {
        let mut before = None;
        wait_until("samples come in", limit, || {
            let (accepted, _) = self.sample_counts(run)?;
            let enough = accepted >= *before.get_or_insert(accepted) + more;
            if !enough && let Some(outcome) = self.ended_run(run) {
                panic!("the run ended too early: {outcome:#}\n{}", self.log_tails());
            }
            enough.then_some(())
        });
    }

    /// Returns the last lines of every log, for the message of a failing test.
    pub fn log_tails(&self) -> String {
        let mut found = find_logs(&self.logs);
        // That of `flotilla up`, which has the coordinator's lines, comes first.
        found.sort_by_key(|path| path.components().count());
        let tail = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(25)..].join("\n");
            format!("--- {}\n{last}\n", path.display())
        };
        found.iter().map(tail).collect()
    }
}

/// Returns the log files below a directory.
pub fn find_logs(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect_logs(directory, &mut found);
    found
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
