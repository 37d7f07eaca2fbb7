//! A host's tools and sandbox, and completions to judge.

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use verifier::{OfflineVerifier, OwnerGrants, Toolchain, VerifierTools, VerifyItem};
use wire::v1::{Verifier, verdicts::Verdict, verifier::How};

const JOBS: usize = 2;

/// Returns `None` with a message if this host lacks something.
pub(crate) fn box_with(tool: &str) -> Option<Toolchain> {
    let tools = VerifierTools::detect_tools(
        std::env::var_os("FLOTILLA_VERIFIER_PYTHON").map(PathBuf::from).as_deref(),
    );
    if !tools.0.contains_key(tool) {
        eprintln!("skipped: this box has no {tool}");
        return None;
    }
    let kit = kit(tools, Vec::new(), OwnerGrants::default());
    match kit.test_host() {
        (kit, tested) if tested.contained.is_ok() => Some(kit),
        (_, tested) => {
            eprintln!("skipped: {:?}", tested.contained);
            None
        }
    }
}

/// Returns a host that is not tested yet.
pub(crate) fn kit(tools: VerifierTools, hidden: Vec<PathBuf>, grants: OwnerGrants) -> Toolchain {
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
        fields,
    }
}

pub(crate) fn judge_all(kit: Toolchain, how: How, items: &[VerifyItem]) -> Vec<Verdict> {
    let once =
        OfflineVerifier::new(Verifier { how: Some(how) }, kit, JOBS).expect("the settings work");
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
