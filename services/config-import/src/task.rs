//! The kind of training that a configuration asks for.

use std::str::FromStr;

use crate::report::ImportError;

/// A kind of training. Supervised training becomes the section `sft` of a spec, the others become
/// the section `raft` with an objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainingTask {
    Sft,
    Dpo,
    Simpo,
    Orpo,
    Kto,
    Grpo,
    /// Reward-ranked fine-tuning, as halo-forge does it.
    Raft,
}

impl TrainingTask {
    pub const ALL: [Self; 7] =
        [Self::Sft, Self::Dpo, Self::Simpo, Self::Orpo, Self::Kto, Self::Grpo, Self::Raft];

    /// Returns the name in arguments, which is that of the objective too.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Dpo => "dpo",
            Self::Simpo => "simpo",
            Self::Orpo => "orpo",
            Self::Kto => "kto",
            Self::Grpo => "grpo",
            Self::Raft => "raft",
        }
    }

    /// Returns the section of the spec.
    pub(crate) fn section_name(self) -> &'static str {
        if self == Self::Sft { "sft" } else { "raft" }
    }

    /// Returns true if it learns from given pairs of better and worse answers.
    pub(crate) fn learns_preferences(self) -> bool {
        matches!(self, Self::Dpo | Self::Simpo | Self::Orpo | Self::Kto)
    }

    /// Finds the kind of training by the word that a program uses for it, such as `kto_pair`.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        match word.to_ascii_lowercase().as_str() {
            "" | "sft" | "pt" | "nll" | "chunked_nll" => Some(Self::Sft),
            "dpo" | "sigmoid" => Some(Self::Dpo),
            "simpo" => Some(Self::Simpo),
            "orpo" => Some(Self::Orpo),
            "kto" | "kto_pair" => Some(Self::Kto),
            "grpo" => Some(Self::Grpo),
            "raft" => Some(Self::Raft),
            _ => None,
        }
    }
}

impl FromStr for TrainingTask {
    type Err = ImportError;

    fn from_str(name: &str) -> Result<Self, ImportError> {
        let found = Self::ALL.into_iter().find(|task| task.as_str() == name);
        found.ok_or_else(|| ImportError::NoTask {
            name: name.to_owned(),
            known: Self::ALL.map(Self::as_str).join(", "),
        })
    }
}
