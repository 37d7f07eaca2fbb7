//! `flotilla topics`: the documentation, embedded in the program.

use std::fmt::Write;

use anyhow::bail;
use serde_json::json;
use wire::ErrorCode;

use crate::output;

struct Topic {
    name: &'static str,
    about: &'static str,
    text: &'static str,
}

macro_rules! topics {
    ($($name:literal $file:literal $about:literal),* $(,)?) => {
        &[$(Topic {
            name: $name,
            about: $about,
            text: include_str!(concat!("../../../../docs/", $file, ".md")),
        }),*]
    };
}

/// All pages, in the order in which users need them.
const TOPICS: &[Topic] = topics! {
    "tutorial" "TUTORIAL" "From one laptop to a cluster, step by step",
    "glossary" "GLOSSARY" "The words of this documentation",
    "strix-halo" "STRIX-HALO" "Fine-tune Qwen2.5 on a Strix Halo",
    "mi50" "MI50" "Add an MI50 to a fleet",
    "migrate" "MIGRATE" "Switch from Axolotl, TRL, LLaMA-Factory, Unsloth or halo-forge",
    "commands" "COMMANDS" "All commands, one line each",
    "runs" "RUNS" "Run specs and base models",
    "spec" "SPEC" "Every key of a run spec: values, defaults, bounds",
    "raft" "RAFT" "Reward-ranked fine-tuning: cycles and every setting of a run",
    "data" "DATA" "Prompt and example files, chats, and their checks",
    "verifiers" "VERIFIERS" "Verifiers: the fields they read and the rewards they give",
    "training" "TRAINING" "Training engines, hosts and settings",
    "objectives" "OBJECTIVES" "Training objectives as weights of tokens",
    "across" "ACROSS" "Train one adapter on several boxes",
    "loop" "LOOP" "Serve models, compare them, promote the better one",
    "watching" "watch" "Publish and evaluate checkpoints of a training of your own",
    "page" "PAGE" "The web page and the terminal view",
    "trackers" "TRACKERS" "Export to MLflow, TensorBoard, trackio, webhooks and files",
    "metrics" "METRICS" "Metrics for Prometheus, with units",
    "api" "API" "gRPC and JSON: calls, streams, errors, limits",
    "scripts" "SCRIPTS" "Python, grpcurl, nats and shells",
    "deploy" "DEPLOY" "Packages, systemd, containers, NATS clusters",
    "security" "SECURITY" "Closed fleets: keys, scopes and roles",
    "store" "STORE" "The object store: locations, keys, uploads and downloads",
    "formats" "FORMATS" "Safetensors, PEFT adapters and GGUF",
    "doctor" "DOCTOR" "Checks of a box, and their remedies",
    "care" "CARE" "Quiet hours, heat, power, memory, and TLB-shootdown storms",
    "sandbox" "SANDBOX" "The sandbox for programs that a model wrote",
    "runbook" "RUNBOOK" "Back up, restore, repair",
    "upgrades" "UPGRADES" "Upgrade a fleet box by box",
    "log" "LOG" "Why state is a log, and the consequences",
    "storm" "STORM" "Why evaluations run in separate processes",
    "reliability" "RELIABILITY" "What may fail at any moment, and the tests of it",
    "bounds" "BOUNDS" "Limits of everything that can grow",
    "performance" "PERFORMANCE" "Measurements beside peers and limits",
    "figures" "RAFT-FIGURES" "RAFT measured: the effect of each setting",
    "errors" "ERRORS" "Error codes: causes and remedies; `flotilla topics B102`",
    "fuzzing" "FUZZING" "Hostile input, and how parsers are tested",
};

pub(crate) fn list_topics() -> String {
    TOPICS.iter().fold(String::from("Topics:"), |mut list, topic| {
        // Writing to a string cannot fail.
        let _ = write!(list, "\n  {:<12} {}", topic.name, topic.about);
        list
    })
}

pub(crate) fn print_topics(topic: Option<&str>, json: bool) -> anyhow::Result<()> {
    match topic {
        None if json => {
            let all = TOPICS.iter().map(|it| json!({ "topic": it.name, "about": it.about }));
            output::print_json(&all.collect::<Vec<_>>())?;
        }
        None => output::print_text(&list_topics()),
        Some(name) => {
            let Some(text) = topic_text(name) else {
                bail!("no topic {name:?} (A114)\n{}", list_topics());
            };
            output::print_json_or(json, &json!({ "topic": name, "text": text }), || {
                output::print_text(text);
            })?;
        }
    }
    Ok(())
}

fn topic_text(name: &str) -> Option<&'static str> {
    let page = |name: &str| {
        TOPICS.iter().find(|topic| topic.name.eq_ignore_ascii_case(name)).map(|topic| topic.text)
    };
    let text = match ErrorCode::parse(&name.to_ascii_uppercase()) {
        None => page(name)?,
        Some(code) => {
            let errors = page("errors")?;
            let start = errors.find(&format!("\n### {code} "))? + "\n### ".len();
            let section = &errors[start..];
            &section[..section.find("\n#").unwrap_or(section.len())]
        }
    };
    Some(text.trim_end())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_page_is_a_topic_and_every_topic_has_a_name_of_its_own() {
        let pages = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs")).unwrap();
        let pages = pages.map(|entry| entry.unwrap().path());
        let pages = pages.filter(|path| path.extension().is_some_and(|it| it == "md"));
        for path in pages {
            let text = std::fs::read_to_string(&path).unwrap();
            let is_a_topic = TOPICS.iter().any(|topic| topic.text == text);
            assert!(is_a_topic || path.ends_with("SUMMARY.md"), "{}", path.display());
        }
        let names: BTreeSet<_> = TOPICS.iter().map(|topic| topic.name).collect();
        assert_eq!(names.len(), TOPICS.len());
    }

    #[test]
    fn a_code_is_a_topic() {
        let told = topic_text("b102").unwrap();
        assert!(told.starts_with("B102 The bus cannot be reached\n"), "{told}");
        assert!(!told.contains('#'), "{told}");
        assert!(topic_text("X101").unwrap().contains("report"));
        assert_eq!(topic_text("B999"), None);
        assert!(topic_text("RUNS").is_some_and(|text| topic_text("runs") == Some(text)));
    }
}
