//! The programs whose configurations are imported.

use std::str::FromStr;

use crate::report::ImportError;

/// A program whose configurations are imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceProgram {
    Axolotl,
    Trl,
    LlamaFactory,
    Unsloth,
    HaloForge,
}

impl SourceProgram {
    pub const ALL: [Self; 5] =
        [Self::Axolotl, Self::Trl, Self::LlamaFactory, Self::Unsloth, Self::HaloForge];

    /// Returns the name in arguments and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Axolotl => "axolotl",
            Self::Trl => "trl",
            Self::LlamaFactory => "llama-factory",
            Self::Unsloth => "unsloth",
            Self::HaloForge => "halo-forge",
        }
    }

    /// Returns the name as the program's authors write it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Axolotl => "Axolotl",
            Self::Trl => "TRL",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Unsloth => "Unsloth",
            Self::HaloForge => "halo-forge",
        }
    }
}

impl FromStr for SourceProgram {
    type Err = ImportError;

    fn from_str(name: &str) -> Result<Self, ImportError> {
        let found = Self::ALL.into_iter().find(|program| program.as_str() == name);
        found.ok_or_else(|| ImportError::NoProgram {
            name: name.to_owned(),
            known: Self::ALL.map(Self::as_str).join(", "),
        })
    }
}
