//! The bounds and the enumerations in the schema are those of the checks: for each key, the least
//! and the largest value are accepted by both, and values beyond them are refused by both.

use jsonschema::Validator;
use serde_json::{Value, json};
use spec::RunSpec;

use crate::{schema_errors, schema_validator};

/// Specs in which every number may have any of its values, one after the other.
const SPECS: [&str; 14] = [
    "base: { checkpoint: base-1 }
evals: [{ name: t, text: t.jsonl, n_ctx: 1048576, stride: 0, chunks: 0 }]
queue: { priority: 0 }
promote: { channel: stable, alpha: 0.05 }
raft:
  prompts: p.jsonl
  heldout: h.jsonl
  heldout_samples_per_prompt: 4096
  pass_at: [1]
  verifier: { command: { argv: [a], timeout_s: 1, serve: true, concurrent: 1 } }
  sampling: { max_new_tokens: 1 }
  selection:
    adaptive: { low: -1e9, high: 1e9 }
    replay: { cycles: 1 }
  training:
    max_steps: 1
    max_tokens: 1048576
    across: { merge: nesterov, outer: { rate: 1 }, send_share: 0.1 }
  lora: { r: 1, target_modules: [q_proj] }
  gates:
    perplexity: [{ margin: 1 }]
    pass_rate: { margin: 1 }
    diversity: { least: 0 }
    entropy: { least: 0 }
  proof: { tolerance: 1 }
",
    "base: { model: a/b, upload: auto }
raft:
  prompts: p.jsonl
  heldout: { share: 0.1 }
  prompts_per_cycle: 8
  objective: { grpo: { kl: 0.1 } }
  token_logprobs: true
  verifier: { numeric: { tolerance: 1 } }
  curriculum: { difficulty: { explore: 0.1 }, budget: { min: 8, max: 8 } }
  gates: { pass_rate: [{ margin: 1 }], dropped_tokens: { most: 1 }, divergence: { most: 1 } }
",
    "base: { model: a/b }
raft: { prompts: p.jsonl, heldout: { count: 1 }, verifier: { python: { limits: { timeout_s: 1 } } } }
",
    "base: { model: a/b }
raft: { prompts: p.jsonl, verifier: { environment: { argv: [a], max_turns: 1, role: user } } }
",
    "base: { model: a/b }
raft:
  prompts: p.jsonl
  verifier: { stdio: { language: c, output: { match: words }, limits: { timeout_s: 1 } } }
",
    "base: { model: a/b }
raft:
  prompts: p.jsonl
  verifier: { compile: { language: c, output: { match: words }, limits: { timeout_s: 1 } } }
",
    "base: { model: a/b }
raft: { prompts: p.jsonl, verifier: { tool_call: {} } }
",
    "base: { model: a/b }
raft:
  prompts: p.jsonl
  verifier:
    chain: { stages: [{ verifier: { exact: {} } }, { verifier: { numeric: {} } }] }
",
    "base: { model: a/b }
raft:
  prompts: p.jsonl
  verifier: { llm_judge: { url: 'http://a/v1', model: m } }
",
    "base: { model: a/b }
raft: { prompts: p.jsonl, verifier: { http: { url: 'http://a/v1' } } }
",
    "base: { model: a/b }
evals:
  - { name: a, prompts: a.jsonl, verifier: { exact: {} }, samples_per_prompt: 4096, pass_at: [1] }
raft: { prompts: p.jsonl, verifier: { exact: {} } }
",
    "base: { model: a/b }
evals: [{ name: a, prompts: a.jsonl, verifier: { exact: {} }, sampling: { temperature: 1 } }]
raft: { prompts: p.jsonl, verifier: { exact: {} } }
",
    "base: { init: { config: c.json, tokenizer: t.json } }
sft:
  data: d.jsonl
  training:
    max_steps: 1
    across: { merge: nesterov, outer: { rate: 1 }, send_share: 0.1 }
  lora: { r: 1, target_modules: [q_proj] }
",
    "base: { model: a/b }
raft: { prompts: p.jsonl, verifier: { pytest: { module: a, limits: { timeout_s: 1 } } } }
",
];

/// Values that another key of the section excludes, or that the schema allows because the key has
/// two meanings.
const DEPENDENT: [(&str, &str); 9] = [
    ("raft.curriculum.budget.min", "4096"),
    ("raft.curriculum.budget.max", "1"),
    ("raft.gates.diversity.least", "20"),
    ("raft.gates.dropped_tokens.most", "100"),
    ("raft.gates.diversity.then", "roll_back"),
    ("raft.gates.entropy.then", "roll_back"),
    ("training.across.merge", "average"),
    ("training.across.merge", "stack"),
    ("training.across.merge", "soup"),
];

/// A key of the schema with allowed values at its bounds, and values beyond them.
struct BoundedKey {
    path: String,
    allowed: Vec<Value>,
    refused: Vec<Value>,
}

/// Finds the keys with bounds or enumerated values.
struct KeyCollector<'a> {
    schema: &'a Value,
    /// The definitions around the present one, which may contain themselves.
    open: Vec<String>,
    found: Vec<BoundedKey>,
}

impl KeyCollector<'_> {
    fn collect(&mut self, node: &Value, path: &str) {
        self.add_numbers(node, path);
        self.add_names(node, path);
        if let Some(name) = node["$ref"].as_str().and_then(|it| it.strip_prefix("#/$defs/"))
            && !self.open.iter().any(|it| it == name)
        {
            self.open.push(name.to_owned());
            let target = &self.schema["$defs"][name];
            self.collect(target, path);
            self.open.pop();
        }
        for (key, value) in node["properties"].as_object().into_iter().flatten() {
            let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            self.collect(value, &inner);
        }
        for form in node["anyOf"].as_array().into_iter().flatten() {
            self.collect(form, path);
        }
        if node["items"].is_object() {
            self.collect(&node["items"], &format!("{path}[0]"));
        }
    }

    fn add_numbers(&mut self, node: &Value, path: &str) {
        let (low, high) = (node["minimum"].as_f64(), node["maximum"].as_f64());
        let is_whole = node["type"] == "integer" || node["type"][0] == "integer";
        let number = |value: f64| if is_whole { json!(value as i64) } else { json!(value) };
        let step = |bound: f64| if is_whole { 1.0 } else { bound.abs() * 1e-3 + 1e-7 };
        let allowed: Vec<Value> = [low, high].into_iter().flatten().map(number).collect();
        let below = low.map(|low| number(low - step(low)));
        let above = high.map(|high| number(high + step(high)));
        if !allowed.is_empty() {
            let refused = [below, above].into_iter().flatten().collect();
            self.found.push(BoundedKey { path: path.to_owned(), allowed, refused });
        }
    }

    fn add_names(&mut self, node: &Value, path: &str) {
        let names = node["enum"].as_array().or_else(|| node["oneOf"].as_array());
        let names = names.into_iter().flatten();
        let names = names.map(|it| if it.is_string() { it.clone() } else { it["const"].clone() });
        let allowed: Vec<Value> = names.filter(Value::is_string).collect();
        if !allowed.is_empty() {
            let refused = vec![json!("nonsense")];
            self.found.push(BoundedKey { path: path.to_owned(), allowed, refused });
        }
    }
}

/// Returns the spec with a value; `None` if it lacks the section of the key.
fn with_value(spec: &Value, path: &str, value: &Value) -> Option<Value> {
    let pointer = format!("/{}", path.replace(['.', '['], "/").replace(']', ""));
    let (section, key) = pointer.rsplit_once('/')?;
    let mut spec = spec.clone();
    match spec.pointer_mut(section)? {
        Value::Object(section) => drop(section.insert(key.to_owned(), value.clone())),
        Value::Array(list) => *list.get_mut(key.parse::<usize>().ok()?)? = value.clone(),
        _ => return None,
    }
    Some(spec)
}

fn check_value(
    validator: &Validator,
    specs: &[Value],
    key: &BoundedKey,
    value: &Value,
    is_allowed: bool,
) {
    let BoundedKey { path, .. } = key;
    // A section whose one key is the verifier has no room for another.
    let changed = specs.iter().filter_map(|spec| with_value(spec, path, value));
    let changed: Vec<Value> = changed.collect();
    assert!(!changed.is_empty(), "no spec has the section of {path}");
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let is_dependent =
        |(key, value): &(&str, &str)| path.ends_with(key) && *value == text.trim_end_matches(".0");
    let is_dependent = DEPENDENT.iter().any(is_dependent);
    let parsed = changed.iter().map(|spec| RunSpec::parse(&spec.to_string()));
    let results: Vec<Result<RunSpec, String>> =
        parsed.map(|it| it.map_err(|error| error.to_string())).collect();
    let accepted = results.iter().position(Result::is_ok);
    match (is_allowed, accepted) {
        (true, None) => assert!(is_dependent, "{path}: {text} is refused: {results:#?}"),
        (false, Some(_)) => panic!("{path}: {text} is accepted"),
        (true, Some(accepted)) => {
            let errors = schema_errors(validator, &changed[accepted]);
            assert!(errors.is_empty(), "{path}: {text}: {errors:#?}");
        }
        (false, None) => {
            let errors = changed.iter().map(|it| schema_errors(validator, it));
            let all: Vec<Vec<String>> = errors.collect();
            assert!(all.iter().all(|it| !it.is_empty()), "{path}: the schema allows {text}");
        }
    }
}

#[test]
fn the_schema_has_the_bounds_and_the_names_of_the_checks() {
    let (schema, validator) = (spec::run_spec_schema(), schema_validator());
    let mut keys = KeyCollector { schema: &schema, open: Vec::new(), found: Vec::new() };
    keys.collect(&schema, "");
    let specs: Vec<Value> = SPECS.iter().map(|text| spec::parse_yaml(text).unwrap()).collect();
    for (spec, text) in specs.iter().zip(SPECS) {
        RunSpec::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(schema_errors(&validator, spec), Vec::<String>::new(), "{text}");
    }
    let mut checked = 0;
    // The same definitions as elsewhere.
    let repeated = ["stages[0].verifier.", "evals[0].verifier.", "raft.teacher."];
    let is_repeated = |path: &str| repeated.iter().any(|it| path.contains(it));
    for key in keys.found.iter().filter(|key| !is_repeated(&key.path)) {
        let is_objective = key.path.starts_with("raft.objective");
        let specs = if is_objective { objective_specs(&key.path) } else { specs.clone() };
        for value in &key.allowed {
            check_value(&validator, &specs, key, value, true);
        }
        for value in &key.refused {
            check_value(&validator, &specs, key, value, false);
        }
        checked += 1;
    }
    println!("{checked} keys");
    assert!(checked > 250, "these are not all: {checked}");
}

/// Returns specs with the objective that a path names, or with any.
fn objective_specs(path: &str) -> Vec<Value> {
    let name = path.split('.').nth(2);
    let spec = |has_teacher: bool| {
        let mut spec = json!({
            "base": { "model": "a/b" },
            "raft": {
                "prompts": "p.jsonl",
                "verifier": { "exact": {} },
                "token_logprobs": true,
                "objective": "raft",
            },
        });
        if let Some(name) = name {
            spec["raft"]["objective"] = json!({ name: {} });
        }
        if has_teacher {
            spec["raft"]["teacher"] = json!({ "model": "c/d" });
        }
        spec
    };
    vec![spec(false), spec(true)]
}

#[test]
fn texts_of_a_form_are_accepted_by_both_or_refused_by_both() {
    let validator = schema_validator();
    let specs: Vec<Value> = SPECS.iter().map(|text| spec::parse_yaml(text).unwrap()).collect();
    for (path, allowed, refused) in [
        ("name", &["a", "raft-1_b"][..], &["", "A", "-a", "a b", "é"][..]),
        ("pool", &["a", "0"], &["", "A.b"]),
        ("evals[0].name", &["a", "b-1"], &["", "Held out"]),
        ("promote.channel", &["stable"], &["", "A"]),
        ("raft.verifier.pytest.module", &["solution", "_a1"], &["", "a.b", "1a"]),
        ("raft.verifier.llm_judge.url", &["http://a/v1", "https://a"], &["a:80", "ftp://a"]),
        (
            "raft.verifier.http.url",
            &["http://a", "https://a:8080/v?x=@"],
            &[
                "a:80",
                "ftp://a",
                "http://",
                "http:///v",
                "http://u:p@a/v",
                "http://a/#v",
                "http://a b",
            ],
        ),
        ("raft.verifier.http.key_env", &["", "FLOTILLA_JUDGE_KEY_2"], &["HOME", "sk-1234"]),
        ("raft.verifier.llm_judge.model", &["m"], &[""]),
        ("raft.verifier.llm_judge.prompt", &["{completion}"], &["", "{answer}"]),
        (
            "raft.verifier.llm_judge.key_env",
            &["", "FLOTILLA_JUDGE_KEY", "FLOTILLA_JUDGE_KEY_2"],
            &["HOME", "FLOTILLA_JUDGE_KEY-x", "sk-1234"],
        ),
    ] {
        let key = BoundedKey { path: path.to_owned(), allowed: Vec::new(), refused: Vec::new() };
        for text in allowed {
            check_value(&validator, &specs, &key, &json!(text), true);
        }
        for text in refused {
            check_value(&validator, &specs, &key, &json!(text), false);
        }
    }
}

#[test]
fn windows_of_a_queue_are_accepted_by_both_or_refused_by_both() {
    let validator = schema_validator();
    for (window, is_allowed) in [
        (json!({}), true),
        (json!({ "from": "22:00", "until": "7:30" }), true),
        (json!({ "from": "22:00" }), false),
        (json!({ "from": "22", "until": "7:30" }), false),
        (json!({ "from": "22:00", "until": "24:00" }), false),
        (json!({ "from": "22:00", "until": "7:3" }), false),
    ] {
        let spec = json!({
            "base": { "model": "a/b" },
            "queue": window,
            "sft": { "data": "d.jsonl" },
        });
        assert_eq!(RunSpec::parse(&spec.to_string()).is_ok(), is_allowed, "{window}");
        assert_eq!(validator.is_valid(&spec), is_allowed, "{window}");
    }
}
