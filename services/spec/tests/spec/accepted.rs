//! Every spec of the repository that is accepted matches the schema.

use std::{collections::BTreeMap, fs, path::Path};

use proc_macro2::{TokenStream, TokenTree};
use serde_json::Value;
use spec::{GenerationSpec, RunSpec, WatchSpec};
use walkdir::WalkDir;

use crate::{repository, schema_errors, schema_validator};

/// Returns true for what may be a spec.
fn is_candidate(text: &str) -> bool {
    text.contains("base") && (text.contains("raft") || text.contains("sft"))
}

/// Adds the texts of all string literals, also those in macros, whose braces may be doubled.
fn collect_literals(tokens: TokenStream, found: &mut Vec<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => collect_literals(group.stream(), found),
            TokenTree::Literal(literal) => {
                let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string()) else {
                    continue;
                };
                found.push(text.value().replace("{{", "{").replace("}}", "}"));
                found.push(text.value());
            }
            TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
}

fn collect_texts(path: &Path, found: &mut Vec<String>) {
    let Ok(text) = fs::read_to_string(path) else { return };
    match path.extension().and_then(|it| it.to_str()) {
        Some("rs") => collect_literals(text.parse().unwrap(), found),
        Some("md") => found.extend(
            text.split("```")
                .skip(1)
                .step_by(2)
                .map(|block| block.split_once('\n').unwrap_or_default().1.to_owned()),
        ),
        Some("yaml" | "json") => found.push(text),
        _ => {}
    }
}

/// The specs among the sources, tests, pages and examples, with the files that have them.
fn accepted_specs() -> BTreeMap<String, String> {
    let mut specs = BTreeMap::new();
    for part in ["README.md", "agents", "docs", "examples", "services", "tests"] {
        for entry in WalkDir::new(repository().join(part)) {
            let path = entry.unwrap().into_path();
            let mut texts = Vec::new();
            collect_texts(&path, &mut texts);
            texts.retain(|text| is_candidate(text) && RunSpec::parse(text).is_ok());
            specs.extend(texts.into_iter().map(|text| (text, path.display().to_string())));
        }
    }
    specs
}

#[test]
fn every_accepted_spec_of_the_repository_matches_the_schema() {
    let (specs, validator) = (accepted_specs(), schema_validator());
    for (text, file) in &specs {
        let document: Value = spec::parse_yaml(text).unwrap();
        let errors = schema_errors(&validator, &document);
        assert!(errors.is_empty(), "{file}: {errors:#?}\n{text}");
    }
    println!("{} specs", specs.len());
    assert!(specs.len() >= 25, "these are not all: {}", specs.len());
}

#[test]
fn every_example_names_the_schema_beside_it() {
    let mut examples = 0;
    for entry in fs::read_dir(repository().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|it| it == "yaml") {
            let (file, text) = (path.display(), fs::read_to_string(&path).unwrap());
            let schema = match GenerationSpec::parse(&text) {
                Ok(_) => spec::GENERATION_SCHEMA_FILE,
                Err(_) => spec::SCHEMA_FILE,
            };
            let line = format!("# yaml-language-server: $schema={schema}");
            assert_eq!(text.lines().next(), Some(&*line), "{file}");
            let schema = fs::read_to_string(path.with_file_name(schema)).unwrap();
            let schema: Value = serde_json::from_str(&schema).unwrap();
            let validator = jsonschema::validator_for(&schema).unwrap();
            let errors = schema_errors(&validator, &spec::parse_yaml(&text).unwrap());
            assert_eq!(errors, Vec::<String>::new(), "{file}");
            examples += 1;
        }
    }
    assert!(examples >= 5, "these are not all: {examples}");
}

#[test]
fn the_schema_of_generation_specs_refuses_what_is_not_read() {
    let validator = jsonschema::validator_for(&spec::generation_spec_schema()).unwrap();
    let good = "count: 4\ncategories: [{ name: sums, weight: 2, seeds: [{ prompt: 1+1= }] }]\n";
    for (from, to) in [
        ("", ""),
        ("count: 4", "count: 0"),
        ("count: 4", "cuont: 4"),
        ("sums", "Sums"),
        ("weight: 2", "wieght: 2"),
        ("prompt: 1+1=", "answer: 2"),
        ("count: 4", "limits: { retries: 101 }\ncount: 4"),
        ("count: 4", "verify: {}\ncount: 4"),
    ] {
        let yaml = good.replacen(from, to, 1);
        let errors = schema_errors(&validator, &spec::parse_yaml(&yaml).unwrap());
        assert_eq!(GenerationSpec::parse(&yaml).is_ok(), from.is_empty(), "{yaml}");
        assert_eq!(errors.is_empty(), from.is_empty(), "{yaml}: {errors:?}");
    }
}

#[test]
fn the_schema_of_watch_specs_accepts_what_is_read_and_nothing_else() {
    let validator = jsonschema::validator_for(&spec::watch_spec_schema()).unwrap();
    let errors = |yaml: &str| schema_errors(&validator, &spec::parse_yaml(yaml).unwrap());
    let page = fs::read_to_string(repository().join("docs/watch.md")).unwrap();
    let documented = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next());
    let documented = documented.expect("an example");
    assert!(documented.contains("until: 2000"), "{documented}");
    let line = "# yaml-language-server: $schema=watch-spec.schema.json\n";
    assert!(documented.starts_with(line), "{documented}");
    for yaml in [documented, "name: a", "base: { checkpoint: base-1 }", "evals: []"] {
        WatchSpec::parse(yaml).unwrap();
        assert_eq!(errors(yaml), Vec::<String>::new(), "{yaml}");
    }
    let unknown = "evals: [{ name: a, text: a.txt, window: 4 }]";
    for yaml in ["until: 0", "name: A", "sft: { data: a.jsonl }", "seed: 1", unknown, "until: b"] {
        assert!(WatchSpec::parse(yaml).is_err(), "{yaml}");
        assert!(!errors(yaml).is_empty(), "{yaml}");
    }
}
