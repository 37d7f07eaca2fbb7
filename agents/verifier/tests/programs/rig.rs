//! A box's tools and sandbox, and completions to judge.

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use verifier::{Item, Kit, Once, Tools};
use wire::v1::{Verifier, verdicts::Verdict, verifier::How};

const JOBS: usize = 2;

/// `None` with a message when this box lacks something.
pub(crate) fn box_with(tool: &str) -> Option<Kit> {
    let tools =
        Tools::find(std::env::var_os("FLOTILLA_VERIFIER_PYTHON").map(PathBuf::from).as_deref());
    if !tools.0.contains_key(tool) {
        eprintln!("skipped: this box has no {tool}");
        return None;
    }
    let test = std::env::current_exe().expect("this test has a path");
    let built = test.ancestors().nth(2).expect("it lies in a build directory");
    let cell = built.join("sandbox-cell");
    assert!(cell.is_file(), "build {} first: cargo build --workspace --bins", cell.display());
    let cell = sandbox::Launch { program: cell, arguments: Vec::new() };
    match (Kit { tools, cell, hidden: Vec::new() }).tested() {
        (kit, Ok(_)) => Some(kit),
        (_, Err(problem)) => {
            eprintln!("skipped: {problem}");
            None
        }
    }
}

/// A completion with its prompt's fields.
pub(crate) fn item(prompt: &str, completion: &str, fields: Value) -> Item {
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    Item {
        prompt_id: "p".into(),
        index: 0,
        prompt: prompt.into(),
        completion: completion.into(),
        answer: None,
        fields,
    }
}

pub(crate) fn judge_all(kit: Kit, how: How, items: &[Item]) -> Vec<Verdict> {
    let once = Once::new(Verifier { how: Some(how) }, kit, JOBS).expect("the settings work");
    once.judge(items).into_iter().map(|judgement| judgement.verdict).collect()
}

/// `pass`, `fail` or `error`, with the reward and the detail.
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

/// Fields of both.
pub(crate) fn and(one: Value, other: Value) -> Value {
    let fields = |value: Value| match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    Value::Object(fields(one).into_iter().chain(fields(other)).collect())
}
