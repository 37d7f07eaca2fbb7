//! `flotilla topics`: the documentation, in the program.

use std::{fmt::Write, process::ExitCode};

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

/// In the order in which people need them.
const TOPICS: &[Topic] = topics! {
    "tutorial" "TUTORIAL" "From one laptop to a cluster, step by step",
    "strix-halo" "STRIX-HALO" "Fine-tune Qwen2.5 on a Strix Halo",
    "mi50" "MI50" "Mix an MI50 in",
    "halo-forge" "HALO-FORGE" "Come from halo-forge",
    "raft" "RAFT" "Reward-ranked fine-tuning: what a cycle does, and every setting of a run",
    "data" "DATA" "Files of prompts and examples, chats, and what is checked of them",
    "verifiers" "VERIFIERS" "What judges samples: what each reads of a prompt, and what it pays",
    "training" "TRAINING" "What trains, on which boxes, with which settings",
    "watching" "watch" "Checkpoints of a training of your own, published and measured",
    "page" "PAGE" "The web page and the terminal: what they show, and who may do what",
    "trackers" "TRACKERS" "MLflow, TensorBoard, trackio, webhooks and files, fed from the log",
    "metrics" "METRICS" "What /metrics tells Prometheus, with units",
    "api" "API" "gRPC and JSON: calls, streams, errors, limits",
    "scripts" "SCRIPTS" "Python, grpcurl, nats and shells",
    "deploy" "DEPLOY" "Boxes that start by themselves: packages, systemd, containers, NATS clusters",
    "security" "SECURITY" "Closed fleets: keys, kits, scopes, and what a member may do",
    "store" "STORE" "Where files live, what they are called, and members without the store's keys",
    "formats" "FORMATS" "Safetensors, PEFT adapters and GGUF: what is read and written",
    "doctor" "DOCTOR" "What is looked at on a box, and the remedies",
    "care" "CARE" "Quiet hours, heat, power, memory, and TLB-shootdown storms",
    "sandbox" "SANDBOX" "What contains the programs that a model wrote",
    "runbook" "RUNBOOK" "What to do when something is wrong",
    "upgrades" "UPGRADES" "Newer versions, box by box",
    "log" "LOG" "Why there is a log, and what follows from it",
    "storm" "STORM" "Why evals run in processes of their own",
    "reliability" "RELIABILITY" "What may break at any moment, and what was shown of it",
    "bounds" "BOUNDS" "What can grow, and how far",
    "performance" "PERFORMANCE" "What was measured, beside peers and limits",
    "figures" "RAFT-FIGURES" "RAFT measured: what each setting does to what is learned",
    "errors" "ERRORS" "Codes of errors: what each means and what helps; `flotilla topics B102`",
    "fuzzing" "FUZZING" "Hostile input, and how parsers are tried",
};

/// All there are, for the help of the command.
pub(crate) fn list() -> String {
    TOPICS.iter().fold(String::from("Topics:"), |mut list, topic| {
        // Writing to a string does not fail.
        let _ = write!(list, "\n  {:<12} {}", topic.name, topic.about);
        list
    })
}

pub(crate) fn topics(topic: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    match topic {
        None if json => {
            let all = TOPICS.iter().map(|it| json!({ "topic": it.name, "about": it.about }));
            output::print_json(&all.collect::<Vec<_>>())?;
        }
        None => output::print(&list()),
        Some(name) => {
            let Some(text) = text(name) else {
                bail!("there is no topic {name:?} (A114)\n{}", list());
            };
            if json {
                output::print_json(&json!({ "topic": name, "text": text }))?;
            } else {
                output::print(text);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A page, or what the page of errors says of a code.
fn text(name: &str) -> Option<&'static str> {
    let page = |name| TOPICS.iter().find(|topic| topic.name == name).map(|topic| topic.text);
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
        let told = text("b102").unwrap();
        assert!(told.starts_with("B102 The bus cannot be reached\n"), "{told}");
        assert!(!told.contains('#'), "{told}");
        assert!(text("X101").unwrap().contains("report"));
        assert_eq!(text("B999"), None);
    }
}
