//! A fleet as its users have it: by the command line, from some directory or host.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::{Output, command::run_on, until};

/// Who asks, and what for: environment for every command, logs for a failing test.
#[derive(Debug, Clone)]
pub struct Client {
    environment: Vec<(String, String)>,
    /// What goes before the program, such as `ip netns exec NAME`.
    pub(crate) on: Vec<String>,
    logs: PathBuf,
}

impl Client {
    pub fn new(
        environment: impl IntoIterator<Item = (String, String)>,
        logs: impl Into<PathBuf>,
    ) -> Self {
        Self { environment: environment.into_iter().collect(), on: Vec::new(), logs: logs.into() }
    }

    /// Runs a command of the program on this fleet.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn run(&self, arguments: &[&str]) -> Output {
        run_on(&self.on, arguments, self.environment.iter().cloned())
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
        let ended = until(&format!("run {run} ends"), limit, || self.outcome(run));
        assert_eq!(ended["state"], state, "{ended:#}\n{}", self.logs());
        ended
    }

    /// Looks from a thread of its own, for a fleet without bus keeps whoever asks waiting. The
    /// thread ends when the run has ended.
    pub fn watch(&self, run: &str) -> std::thread::JoinHandle<Value> {
        let (client, run) = (self.clone(), run.to_owned());
        std::thread::spawn(move || {
            loop {
                if let Some(ended) = client.outcome(&run) {
                    return ended;
                }
                std::thread::sleep(Duration::from_millis(500));
            }
        })
    }

    /// The run, if it has ended and the fleet can say so.
    pub fn outcome(&self, run: &str) -> Option<Value> {
        let shown = self.json(&["run", "show", run]).ok()?;
        let over = !matches!(shown["state"].as_str()?, "RUNNING" | "PAUSED");
        over.then_some(shown)
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

    /// Every fact of a run that has ended, in log order: `subject`, `time_ms`, `fact`.
    ///
    /// # Panics
    /// When they cannot be read.
    pub fn facts(&self, run: &str) -> Vec<Value> {
        let output = self.run(&["run", "watch", run, "--json"]);
        let line = |line| serde_json::from_str(line).expect("each line is JSON");
        output.stdout.lines().map(line).collect()
    }

    /// How many of a run's training samples are in, and how many are planned.
    pub fn samples(&self, run: &str) -> Option<(u64, u64)> {
        let audit = self.json(&["audit", run]).ok()?;
        Some((audit["accepted_samples"].as_u64()?, audit["planned_samples"].as_u64()?))
    }

    /// Waits until `more` samples have come in since this was called.
    ///
    /// # Panics
    /// When they do not come, or the run ends before.
    pub fn await_samples(&self, run: &str, more: u64, limit: Duration) {
        let mut before = None;
        until("samples come in", limit, || {
            let (accepted, _) = self.samples(run)?;
            let come = accepted >= *before.get_or_insert(accepted) + more;
            if !come && let Some(outcome) = self.outcome(run) {
                panic!("too fast to be disturbed, or ended: {outcome:#}\n{}", self.logs());
            }
            come.then_some(())
        });
    }

    /// The last lines of every log, for a failing test.
    pub fn logs(&self) -> String {
        let mut found = Vec::new();
        collect_logs(&self.logs, &mut found);
        let tail = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(25)..].join("\n");
            format!("--- {}\n{last}\n", path.display())
        };
        found.iter().map(tail).collect()
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
