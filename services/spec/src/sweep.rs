//! The `sweep` section: one spec that describes several runs.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::{
    document::set_value,
    error::{FieldError, SpecError},
    field_checks::{FieldResult, ensure_field},
    run_spec::{RunSpec, SweepSpec},
    similar::find_similar,
    yaml::parse_yaml,
};

/// Largest number of runs of a sweep.
const SWEEP_RUNS_MAX: usize = 64;

/// Keys at the top of a spec that all runs of a sweep share.
const SHARED_KEYS: [&str; 3] = ["name", "queue", "sweep"];

/// Keys at the top of a spec that may be swept even if the spec does not write them.
const TOP_KEYS: [&str; 2] = ["pool", "seed"];

/// One run of a sweep.
#[derive(Debug, Clone, PartialEq)]
pub struct SweepRun {
    /// The varied settings by their paths in the spec; empty without a sweep.
    pub settings: BTreeMap<String, String>,
    pub spec: RunSpec,
}

impl RunSpec {
    /// Parses a spec as [`RunSpec::parse`] does and returns its runs: one for each combination of
    /// the values in its `sweep` section, or a single one without it. Each is checked.
    pub fn parse_runs(yaml: &str) -> Result<Vec<SweepRun>, SpecError> {
        let spec = Self::parse(yaml)?;
        let Some(sweep) = spec.sweep.clone() else {
            return Ok(vec![SweepRun { settings: BTreeMap::new(), spec }]);
        };
        let document: Value = parse_yaml(yaml)?;
        let expanded = expand_sweep(&document, &sweep);
        let expanded = expanded.map_err(|error| SpecError::from_field(yaml, &error))?;
        let parse_one = |(settings, document): (BTreeMap<String, String>, Value)| {
            // JSON is YAML.
            let spec = Self::parse(&document.to_string()).map_err(|error| {
                let values = describe_settings(&settings);
                let remedy = format!("with {values}: {}", error.plain_message());
                SpecError::from_field(yaml, &FieldError { field: "sweep".into(), remedy })
            })?;
            Ok(SweepRun { settings, spec })
        };
        expanded.into_iter().map(parse_one).collect()
    }
}

/// Returns settings as words, such as `seed 1, raft.training.learning_rate 0.0001`.
pub fn describe_settings(settings: &BTreeMap<String, String>) -> String {
    let words: Vec<String> = settings.iter().map(|(key, value)| format!("{key} {value}")).collect();
    words.join(", ")
}

/// Checks what can be checked without the rest of the spec.
pub(crate) fn check_sweep(sweep: &SweepSpec) -> FieldResult {
    ensure_field(!sweep.is_empty(), "sweep", "needs a key, such as seed: [1, 2, 3]")?;
    let mut runs = 1_usize;
    for (key, values) in sweep {
        let field = format!("sweep.{key}");
        ensure_field(!values.is_empty(), &field, "must be a list with a value")?;
        let distinct: BTreeSet<String> = values.iter().map(Value::to_string).collect();
        ensure_field(distinct.len() == values.len(), &field, "lists a value twice")?;
        runs = runs.saturating_mul(values.len());
    }
    let remedy = format!("asks for {runs} runs; at most {SWEEP_RUNS_MAX}");
    ensure_field(runs <= SWEEP_RUNS_MAX, "sweep", remedy)
}

/// The settings of a run by their paths, and its document.
type SweepDocument = (BTreeMap<String, String>, Value);

/// Returns each combination; the last key varies fastest.
fn expand_sweep(document: &Value, sweep: &SweepSpec) -> Result<Vec<SweepDocument>, FieldError> {
    let mut base = document.clone();
    if let Value::Object(keys) = &mut base {
        keys.remove("sweep");
        keys.entry("queue").or_insert_with(|| Value::Object(Map::new()));
    }
    let mut written = Vec::new();
    collect_paths("", &base, &mut written);
    let mut runs = vec![(BTreeMap::new(), base)];
    for (key, values) in sweep {
        let path = resolve_key(key, &written)?;
        let mut expanded = Vec::with_capacity(runs.len() * values.len());
        for (settings, document) in &runs {
            for value in values {
                let (mut settings, mut document) = (settings.clone(), document.clone());
                let is_set = set_value(&mut document, &path, value.clone());
                let remedy = "names a key inside of a value that is not a section";
                ensure_field(is_set, &format!("sweep.{key}"), remedy)?;
                let is_new = settings.insert(path.clone(), value_text(value)).is_none();
                ensure_field(is_new, &format!("sweep.{key}"), "is there by another name too")?;
                expanded.push((settings, document));
            }
        }
        runs = expanded;
    }
    Ok(runs)
}

/// Adds the dotted paths of all keys of a document.
fn collect_paths(path: &str, value: &Value, found: &mut Vec<String>) {
    let Value::Object(section) = value else { return };
    for (key, value) in section {
        let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        collect_paths(&inner, value, found);
        found.push(inner);
    }
}

/// Returns the path of a key: a path is its own, and a bare key is the one of that name that the
/// spec writes.
fn resolve_key(key: &str, written: &[String]) -> Result<String, FieldError> {
    let field = format!("sweep.{key}");
    let top = key.split('.').next().unwrap_or_default();
    ensure_field(!SHARED_KEYS.contains(&top), &field, "is the same for all runs of a sweep")?;
    if key.contains('.') || TOP_KEYS.contains(&key) || written.iter().any(|path| path == key) {
        return Ok(key.to_owned());
    }
    let end = format!(".{key}");
    let matches = written.iter().filter(|path| path.ends_with(&end) && !path.starts_with("queue."));
    let candidates: Vec<&String> = matches.collect();
    match candidates[..] {
        [path] => Ok(path.clone()),
        [] => {
            let names = written.iter().filter_map(|path| path.rsplit('.').next());
            let similar = find_similar(key, names);
            let suggestion = similar.map_or(String::new(), |it| format!("did you mean {it}? Or "));
            let remedy = format!(
                "is not in the spec; {suggestion}write its whole path, such as \
                 raft.training.learning_rate"
            );
            Err(FieldError { field, remedy })
        }
        _ => {
            let names: Vec<&str> = candidates.iter().map(|path| path.as_str()).collect();
            let remedy = format!("may be {}; write the whole path", names.join(" or "));
            Err(FieldError { field, remedy })
        }
    }
}

fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "\
name: sums
base: { checkpoint: base-1 }
raft:
  prompts: p.jsonl
  cycles: 1
  verifier: { exact: { extract: '#(\\d+)$' } }
  training: { learning_rate: 0.0002, epochs: 2 }
  lora: { r: 16, alpha: 32 }
";

    fn parse(sweep: &str) -> Result<Vec<SweepRun>, String> {
        RunSpec::parse_runs(&format!("{SPEC}sweep: {sweep}\n")).map_err(|error| error.to_string())
    }

    fn settings(sweep: &str) -> Vec<String> {
        let runs = parse(sweep).unwrap_or_else(|error| panic!("{error}"));
        runs.iter().map(|run| describe_settings(&run.settings)).collect()
    }

    #[test]
    fn a_sweep_is_the_product_of_its_lists() {
        let runs = parse("{ learning_rate: [1e-4, 2e-4], seed: [1, 2] }").unwrap();
        let rate = |run: &SweepRun| run.spec.raft.as_ref().unwrap().training.learning_rate.clone();
        assert_eq!(runs.len(), 4);
        assert_eq!(runs.iter().map(|run| run.spec.seed).collect::<Vec<_>>(), [1, 2, 1, 2]);
        assert!(rate(&runs[0]) == rate(&runs[1]) && rate(&runs[1]) != rate(&runs[2]));
        assert!(runs.iter().all(|run| run.spec.queue.is_some() && run.spec.sweep.is_none()));
        assert_eq!(
            settings("{ learning_rate: [1e-4], seed: [1, 2] }"),
            [
                "raft.training.learning_rate 0.0001, seed 1",
                "raft.training.learning_rate 0.0001, seed 2"
            ]
        );
        let whole = ["raft.sampling.temperature 0.5", "raft.sampling.temperature 1"];
        assert_eq!(settings("{ raft.sampling.temperature: [0.5, 1] }"), whole);
        let plain = RunSpec::parse_runs(SPEC).unwrap();
        assert!(plain.len() == 1 && plain[0].settings.is_empty() && plain[0].spec.queue.is_none());
    }

    #[test]
    fn texts_of_the_spec_stay_what_they_are() {
        let runs = parse("{ seed: [1, 2] }").unwrap();
        let plain = RunSpec::parse(SPEC).unwrap();
        let queue = Some(crate::QueueSpec::default());
        assert_eq!(runs[0].spec, RunSpec { seed: 1, queue, ..plain });
    }

    #[test]
    fn a_mistake_names_the_key_and_what_may_be_meant() {
        for (sweep, words) in [
            ("{}", "needs a key"),
            ("{ seed: [] }", "must be a list with a value"),
            ("{ seed: [1, 1] }", "lists a value twice"),
            ("{ nonsense: [1] }", "write its whole path"),
            ("{ raft.nonsense: [1] }", "unknown key nonsense in raft"),
            ("{ raft.cycles: [0] }", "with raft.cycles 0: raft.cycles: must be from 1"),
            ("{ raft.cycles.x: [0] }", "not a section"),
            ("{ name: [a] }", "the same for all runs"),
            ("{ epochs: [1, 2], raft.training.epochs: [1] }", "by another name"),
            (
                "{ raft.cycles: [1, 2, 3, 4, 5, 6, 7, 8, 9], seed: [1, 2, 3, 4, 5, 6, 7, 8] }",
                "72 runs",
            ),
        ] {
            let error = parse(sweep).unwrap_err();
            assert!(error.contains(words), "{sweep}: {error}");
        }
        let twice = format!("{SPEC}evals: []\nsweep: {{ r: [1, 2] }}\n");
        let twice = twice.replace("  cycles: 1\n", "  cycles: 1\n  curriculum: { r: 1 }\n");
        assert!(RunSpec::parse_runs(&twice).is_err());
        let candidates = ["raft.a.x".to_owned(), "raft.b.x".to_owned()];
        let error = resolve_key("x", &candidates).unwrap_err();
        assert!(error.remedy.contains("raft.a.x or raft.b.x"), "{error}");
    }
}
