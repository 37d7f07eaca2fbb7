//! `flotilla stack`: stacks are tried on a box before its agents start with them.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::time::Duration;

use e2e::{Fleet, Output, find_llama_cpp, run_flotilla, wait_until, write_llama_cpp};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const BURN_IN: [&str; 6] = ["--profile", "cpu", "--stage-limit", "600", "--limit", "3600"];

struct Stacks {
    directory: tempfile::TempDir,
}

impl Stacks {
    fn path(&self) -> String {
        self.directory.path().join("stacks").display().to_string()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let at = [("FLOTILLA_STACKS".to_owned(), self.path())];
        run_flotilla(&[&["stack"], arguments].concat(), at)
    }

    /// Installs a stack that starts this llama.cpp. If it breaks, its server dies as soon as it has
    /// a model.
    fn install(&self, name: &str, breaks: bool, programs: &str) {
        let source = self.directory.path().join(format!("source-{name}"));
        let dies = if breaks { "case \"$*\" in *--model*) exit 1;; esac" } else { "" };
        let source = write_llama_cpp(&source, programs, dies);
        self.run(&["install", name, "--llama-cpp", &source, "--profile", "cpu"]).assert_success();
    }

    /// Burns this machine in with a stack, and uses it if that passes.
    fn use_stack(&self, name: &str, out: &str) -> Output {
        self.run(&[&["use", name, "--out", out][..], &BURN_IN].concat())
    }

    /// Returns the name of the stack in use.
    fn current(&self) -> String {
        let listed = self.run(&["list", "--json"]);
        let listed: Vec<Value> = serde_json::from_str(&listed.stdout).unwrap();
        let current = listed.iter().find(|stack| stack["is_current"] == true);
        current.map_or(String::new(), |stack| stack["name"].as_str().unwrap().to_owned())
    }
}

#[test]
fn a_stack_that_fails_its_burn_in_is_not_used_and_a_used_one_is_rolled_back() {
    let Some(programs) = find_llama_cpp() else { return };
    let stacks = Stacks { directory: tempfile::tempdir().unwrap() };
    stacks.install("good", false, &programs);
    stacks.install("broken", true, &programs);
    let nowhere = stacks.directory.path().join("none/report.json").display().to_string();
    let only_test = ["use", "good", "--only-test", "--out", &nowhere];
    let tried = stacks.run(&[&only_test[..], &BURN_IN].concat());
    assert_eq!((tried.code, stacks.current().as_str()), (0, ""), "{tried:?}");
    // One that passes needs no report.
    let tried = stacks.use_stack("good", &nowhere);
    assert_eq!(tried.code, 0, "{tried:?}");
    assert!(tried.stderr.contains("warning: no report in"), "{tried:?}");
    assert_eq!(stacks.current(), "good");
    let out = stacks.directory.path().join("report.json").display().to_string();
    let refused = stacks.use_stack("broken", &out);
    assert_eq!(refused.code, 3, "{refused:?}");
    assert!(refused.stderr.contains("stack broken failed here"), "{refused:?}");
    assert_eq!(stacks.current(), "good");
    stacks.run(&["use", "broken", "--untested"]).assert_success();
    assert_eq!(stacks.current(), "broken");
    stacks.run(&["roll-back", "--from", "good"]).assert_success();
    assert_eq!(stacks.current(), "broken", "it is not that one that is in use");
    stacks.run(&["roll-back", "--from", "broken"]).assert_success();
    assert_eq!(stacks.current(), "good");
    stacks.run(&["use", "unknown"]).assert_refused(&["there is no stack unknown", "(A119)"]);
}

#[test]
fn an_agent_reports_the_stack_that_it_started_with() {
    let Some(programs) = find_llama_cpp() else { return };
    let stacks = Stacks { directory: tempfile::tempdir().unwrap() };
    stacks.install("new", false, &programs);
    stacks.run(&["use", "new", "--untested"]).assert_success();
    let environment = [
        ("FLOTILLA_STACKS".to_owned(), stacks.path()),
        ("FLOTILLA_GENERATOR_ENGINE".to_owned(), "llama.cpp".to_owned()),
        ("FLOTILLA_PROFILE".to_owned(), "cpu".to_owned()),
    ];
    let fleet = Fleet::start_with("generator", &[], environment);
    let stack = wait_until("the agent's stack", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let stack = agents.as_array()?.first()?["stack"].clone();
        stack["name"].is_string().then_some(stack)
    });
    assert_eq!(stack["name"], "new", "{stack:#}");
    assert!(stack["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()), "{stack:#}");
    assert!(stack["llamaCpp"].as_str().unwrap().contains("build"), "{stack:#}");
}
