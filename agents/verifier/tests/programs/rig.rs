//! A host's tools and sandbox, and completions to judge.

use std::{path::PathBuf, process::Command};

use requirements::{find_program, find_python_environment, require_namespaces, skip_test};
use serde_json::{Map, Value, json};
use verifier::{OfflineVerifier, OwnerGrants, Toolchain, VerifierTools, VerifyItem};
use wire::v1::{Verifier, verdicts::Verdict, verifier::How};

const JOBS: usize = 2;

/// Returns a tested host. Records this test as skipped and returns `None` if the machine lacks the
/// tool or cannot contain programs; the verifier does not take part in that decision.
pub(crate) fn box_with(tool: &str) -> Option<Toolchain> {
    if !machine_has(tool) {
        let program = if tool == "python" { "python3" } else { tool };
        skip_test(program, &format!("run deploy/fetch-test-tools.sh {program}"));
        return None;
    }
    if !require_namespaces() {
        return None;
    }
    let tools = VerifierTools::detect_tools(chosen_python().as_deref());
    assert!(tools.0.contains_key(tool), "{tool} is on this machine, but not detected: {tools:?}");
    let (toolchain, tested) = find_toolchain(tools, Vec::new(), OwnerGrants::default()).test_host();
    assert!(tested.contained.is_ok(), "there are namespaces, but no sandbox: {tested:?}");
    Some(toolchain)
}

fn machine_has(tool: &str) -> bool {
    let has_one = |programs: &[&str]| programs.iter().any(|name| find_program(name).is_some());
    match tool {
        "c" => has_one(&["gcc", "clang", "cc"]),
        "c++" => has_one(&["g++", "clang++", "c++"]),
        "rust" => has_one(&["rustc"]) && machine_has("c"),
        "go" => has_one(&["go"]),
        "python" => python_succeeds("pass"),
        "pytest" => python_succeeds("import pytest"),
        other => panic!("no way to find {other}"),
    }
}

fn python_succeeds(code: &str) -> bool {
    let python = chosen_python().unwrap_or_else(|| "python3".into());
    let output = Command::new(python).args(["-I", "-c", code]).output();
    output.is_ok_and(|output| output.status.success())
}

/// Returns the Python that is not the one on PATH, if there is any.
fn chosen_python() -> Option<PathBuf> {
    let named = std::env::var_os("FLOTILLA_VERIFIER_PYTHON").map(PathBuf::from);
    named.or_else(|| find_python_environment("pytest", &["requirements-pytest.txt"]))
}

/// Returns a host that is not tested yet.
pub(crate) fn find_toolchain(
    tools: VerifierTools,
    hidden: Vec<PathBuf>,
    grants: OwnerGrants,
) -> Toolchain {
    let test = std::env::current_exe().expect("this test has a path");
    let built = test.ancestors().nth(2).expect("it lies in a build directory");
    let cell = built.join("sandbox-cell");
    assert!(cell.is_file(), "build {} first: cargo build --workspace --bins", cell.display());
    let launch = |arguments| sandbox::CellLaunch { program: cell.clone(), arguments };
    let (cell, masked) = (launch(Vec::new()), launch(vec!["masked".into()]));
    Toolchain { tools, cell_launch: cell, masked_launch: masked, hidden, grants, contains: true }
}

pub(crate) fn item(prompt: &str, completion: &str, fields: Value) -> VerifyItem {
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    VerifyItem {
        prompt_id: "p".into(),
        index: 0,
        prompt: prompt.into(),
        completion: completion.into(),
        answer: None,
        episode: None,
        fields,
    }
}

pub(crate) fn judge_all(toolchain: Toolchain, how: How, items: &[VerifyItem]) -> Vec<Verdict> {
    let once = OfflineVerifier::new(Verifier { how: Some(how) }, toolchain, JOBS)
        .expect("the settings work");
    once.judge_items(items).into_iter().map(|judgement| judgement.verdict).collect()
}

/// Returns `pass`, `fail` or `error`, with the reward and the detail.
pub(crate) fn told(verdict: &Verdict) -> (&'static str, f64, &str) {
    let outcome = match verdict.outcome() {
        wire::v1::verdicts::Outcome::Pass => "pass",
        wire::v1::verdicts::Outcome::Fail => "fail",
        _ => "error",
    };
    (outcome, verdict.reward, &verdict.detail)
}

pub(crate) fn cases<const N: usize>(cases: [(&str, &str); N]) -> Value {
    let case = |(input, output): &(&str, &str)| json!({ "input": input, "output": output });
    json!({ "cases": cases.iter().map(case).collect::<Vec<_>>() })
}

/// Merges the fields.
pub(crate) fn and(one: Value, other: Value) -> Value {
    let fields = |value: Value| match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    Value::Object(fields(one).into_iter().chain(fields(other)).collect())
}
