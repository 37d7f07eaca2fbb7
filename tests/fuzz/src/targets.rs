//! The fuzz targets, one function per parser.

mod engine;
mod fold;
mod formats;
mod tables;
mod workers;

use std::path::Path;

use bus::fuzzing::follow_claim;
use identity::{BearerInfo, GatewayCaller, JoinToken, UserJwtInfo};
use store::{RelativePath, Store, TreeManifest, TreePlace};
use wire::{AgentId, Digest, Fact, PromptEntry, RunId, Subject, TrainingExample, v1};

use crate::lines;

/// A parser. It must return for every input.
pub type Run = fn(&[u8]);

/// All targets, by the name of their corpus.
pub const TARGETS: &[(&str, Run)] = &[
    ("facts", facts),
    ("names", names),
    ("manifests", manifests),
    ("prompts", prompts),
    ("examples", examples),
    ("tables", tables::tables),
    ("specs", specs),
    ("replies", replies),
    ("bucket", bucket),
    ("stores", stores),
    ("tokens", tokens),
    ("fold", fold::fold),
    ("lines", workers::lines),
    ("verdicts", workers::verdicts),
    ("judges", workers::judges),
    ("requests", workers::requests),
    ("configs", engine::configs),
    ("weights", engine::weights),
    ("shards", engine::shards),
    ("tokenizers", engine::tokenizers),
    ("adapters", engine::adapters),
    ("pairs", engine::pairs),
    ("gguf", formats::gguf),
    ("safetensors", formats::safetensors),
];

/// Returns the target with this name.
pub fn find_target(name: &str) -> Option<Run> {
    TARGETS.iter().find(|(candidate, _)| *candidate == name).map(|(_, run)| *run)
}

/// A subject, and the payload in the next lines. A parsed fact must be written unchanged.
fn facts(input: &[u8]) {
    let (subject, payload) = lines::split_first_line(input);
    let Ok(subject) = std::str::from_utf8(subject) else { return };
    let Ok(fact) = Fact::from_json(subject, payload) else { return };
    assert_roundtrip(&fact);
}

/// Checks that a fact is unchanged after it was written and parsed.
fn assert_roundtrip(fact: &Fact) {
    let json = fact.to_json();
    let parsed = Fact::from_json(&fact.subject.to_string(), &json)
        .unwrap_or_else(|error| panic!("{error:?}: {}", String::from_utf8_lossy(&json)));
    assert_eq!(parsed.to_json(), json, "{}", fact.subject);
}

/// Join tokens, bearers and user JWTs.
fn tokens(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.encode_token().parse::<JoinToken>().ok(), Some(token));
    }
    // No key has signed it, so it must be refused.
    assert!(GatewayCaller::verify_bearer(&text, &["A".repeat(56)], 0).is_err());
    let _ = BearerInfo::read_unverified(&text);
    let _ = UserJwtInfo::read_unverified(&text);
}

/// Subjects, ids, digests and checkpoint references.
fn names(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let text = &*text;
    if let Ok(subject) = text.parse::<Subject>() {
        assert_eq!(subject.to_string(), text);
    }
    if let Ok(digest) = text.parse::<Digest>() {
        assert_eq!(digest.to_string().parse(), Ok(digest));
    }
    if let Ok(run) = RunId::new(text) {
        let _ = TreePlace::for_checkpoint(&run, u32::MAX, u32::MAX);
    }
    let _ = AgentId::new(text);
    let _ = control::parse_checkpoint_ref(text);
}

fn manifests(input: &[u8]) {
    if let Ok(manifest) = TreeManifest::parse(input) {
        let json = manifest.to_json().expect("it was shorter when it was read");
        assert!(TreeManifest::parse(&json).is_ok_and(|parsed| parsed == manifest));
        assert!(manifest.files.iter().all(|file| stays_inside(file.path.as_str())));
        let _ = (manifest.total_bytes(), manifest.content_digest());
    }
    if let Ok(text) = std::str::from_utf8(input) {
        assert!(RelativePath::new(text).map_or(true, |path| stays_inside(path.as_str())));
        let _ = TreePlace::for_model(text);
    }
}

fn stays_inside(path: &str) -> bool {
    Path::new(path).components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

fn prompts(input: &[u8]) {
    if let Ok(prompts) = PromptEntry::parse_all(input) {
        assert!(prompts.iter().all(|prompt| !prompt.id.is_empty() && !prompt.prompt.is_empty()));
    }
}

fn examples(input: &[u8]) {
    if let Ok(examples) = TrainingExample::parse_all(input) {
        assert!(examples.iter().all(|example| !example.completion.is_empty()));
    }
}

fn specs(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let _ = spec::RunSpec::parse(&text);
    let _ = spec::JudgeSpec::parse(&text);
    if let Ok(spec) = spec::GenerationSpec::parse(&text) {
        let total: u32 = spec.category_counts().iter().sum();
        assert_eq!(total, spec.count.unwrap_or(total), "all samples belong to a category");
    }
}

/// The answer of a chat model, as a body and as the text in it, and the reply of a judge.
fn replies(input: &[u8]) {
    data_generation::fuzzing::fuzz_reply(input);
    pair_judge::fuzzing::fuzz_reply(input);
}

/// Values in the fleet's key-value bucket, and messages of agents.
fn bucket(input: &[u8]) {
    follow_claim(input);
    let assert_written = |json: Result<Vec<u8>, serde_json::Error>| {
        json.expect("what was read as a message can be written");
    };
    if let Ok(config) = serde_json::from_slice::<v1::FleetConfig>(input) {
        assert_written(serde_json::to_vec(&config));
    }
    if let Ok(status) = serde_json::from_slice::<v1::AgentStatus>(input) {
        assert_written(serde_json::to_vec(&status));
    }
    if let Ok(command) = serde_json::from_slice::<v1::AgentCommand>(input) {
        assert_written(serde_json::to_vec(&command));
    }
}

/// The URL of a store, and environment variables `NAME=value` in the next lines.
fn stores(input: &[u8]) {
    let (url, variables) = lines::split_first_line(input);
    let (url, variables) = (String::from_utf8_lossy(url), String::from_utf8_lossy(variables));
    if url.starts_with("file:///") {
        // The directory would be created.
        return;
    }
    let pair = |line: &str| {
        let (name, value) = line.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    let variables: Vec<(String, String)> = variables.lines().filter_map(pair).collect();
    let _ = futures::executor::block_on(Store::open_with_env(&url, variables));
}
