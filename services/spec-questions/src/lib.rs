//! Questions at a terminal whose answers make the spec of a run: `flotilla run new`, and the first
//! run of `flotilla init`. Checks each answer and the files that it names before the next question.
//! Knows no fleet.

mod answers;
mod raft_questions;
mod sft_questions;

use std::path::Path;

use anyhow::bail;
use spec::RunSpec;
use terminal_output::{Question, is_interactive_terminal, print_message, print_status_text};

pub use raft_questions::RaftAnswers;

/// Small, and good enough for a first run.
const DEFAULT_MODEL: &str = "Qwen/Qwen2.5-0.5B-Instruct";

/// The kind of a first run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstRun {
    /// A tiny model on sums, with generated data.
    Demo,
    /// Reward-ranked fine-tuning on prompts.
    Raft,
    /// Supervised fine-tuning on examples.
    Sft,
    /// No run yet.
    None,
}

impl FirstRun {
    const NAMES: [(&'static str, Self); 4] =
        [("demo", Self::Demo), ("raft", Self::Raft), ("sft", Self::Sft), ("none", Self::None)];

    /// Asks what to train first. Without a terminal, it is nothing.
    pub fn ask() -> anyhow::Result<Self> {
        if !is_interactive_terminal() {
            return Ok(Self::None);
        }
        print_status_text(
            "What to train first?\n  \
             demo   a tiny model on sums, with generated data\n  \
             raft   a model on those of its answers to your prompts that a verifier passes\n  \
             sft    a model on your examples\n  \
             none   write no spec",
        );
        let question =
            Question { text: "Train", default: Some("demo"), remedy: "answer with one of these" };
        let answer = question.ask(|answer| Self::parse(answer).map(drop))?;
        Self::parse(&answer)
    }

    fn parse(answer: &str) -> anyhow::Result<Self> {
        let found = Self::NAMES.iter().find(|(name, _)| *name == answer);
        let Some((_, kind)) = found else {
            bail!("{answer:?} is none of {} (A101)", Self::NAMES.map(|(name, _)| name).join(", "));
        };
        Ok(*kind)
    }

    /// Asks for base and data, and returns the spec that will be `file`. `None` if this kind needs
    /// no answers.
    pub fn ask_spec(self, file: &Path) -> anyhow::Result<Option<String>> {
        let shown = file.file_name().unwrap_or_default().to_string_lossy();
        let yaml = match self {
            Self::Demo => return Ok(None),
            Self::None => {
                print_message("no spec written; `flotilla run new` writes one");
                return Ok(None);
            }
            Self::Raft => RaftAnswers::for_first_run()?.ask_draft(file)?.to_yaml(&shown),
            Self::Sft => sft_questions::ask_draft(file)?.to_yaml(&shown),
        };
        RunSpec::parse(&yaml)?;
        Ok(Some(yaml))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_run_is_one_of_four() {
        assert_eq!(FirstRun::parse("sft").unwrap(), FirstRun::Sft);
        let refused = FirstRun::parse("rafft").unwrap_err().to_string();
        assert!(refused.contains("none of demo, raft, sft, none"), "{refused}");
        assert_eq!(FirstRun::Demo.ask_spec(Path::new("run.yaml")).unwrap(), None);
    }
}
