//! The languages that programs are written in, and the detection of a completion's language.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    calls::VerifyItem,
    fences::{FencedBlock, find_blocks},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ProgramLanguage {
    Python,
    C,
    Cpp,
    Rust,
    Go,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProgramSource<'a> {
    pub language: ProgramLanguage,
    pub code: &'a str,
}

impl ProgramLanguage {
    /// Accepts any of the names that fences and data sets use.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Some(match name.to_lowercase().as_str() {
            "python" | "python3" | "py" | "py3" => Self::Python,
            "c" | "gcc" | "c99" | "c11" | "c17" => Self::C,
            "c++" | "cpp" | "cc" | "cxx" | "g++" | "c++17" | "c++20" => Self::Cpp,
            "rust" | "rs" => Self::Rust,
            "go" | "golang" => Self::Go,
            _ => return None,
        })
    }

    pub(crate) fn display_name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::C => "c",
            Self::Cpp => "c++",
            Self::Rust => "rust",
            Self::Go => "go",
        }
    }

    pub(crate) fn file_name(self) -> &'static str {
        match self {
            Self::Python => "main.py",
            Self::C => "main.c",
            Self::Cpp => "main.cpp",
            Self::Rust => "main.rs",
            Self::Go => "main.go",
        }
    }
}

impl fmt::Display for ProgramLanguage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.display_name())
    }
}

/// Returns the language of the settings or of the prompt; the completion cannot choose it. The
/// error is an unknown name.
pub(crate) fn requested_language(
    setting: &str,
    item: &VerifyItem,
) -> Result<Option<ProgramLanguage>, String> {
    let name =
        Some(setting).filter(|name| !name.is_empty()).or_else(|| item.text_field("language"));
    let known = |name| ProgramLanguage::from_name(name).ok_or_else(|| name.to_owned());
    name.map(known).transpose()
}

/// Extracts the last block in the language, else the last untagged block; without any block the
/// whole completion. The error describes what is missing.
pub(crate) fn extract_source(
    wanted: Option<ProgramLanguage>,
    completion: &str,
) -> Result<ProgramSource<'_>, String> {
    let blocks = find_blocks(completion);
    let Some(language) = wanted.or_else(|| blocks.iter().rev().find_map(block_language)) else {
        return Err("no language: neither the prompt nor a fence names one".into());
    };
    let last = |fits: &dyn Fn(&&FencedBlock<'_>) -> bool| {
        let blocks: Vec<_> = blocks.iter().collect();
        blocks.into_iter().rev().find(fits).map(|block| block.body)
    };
    let in_it = last(&|block| block_language(block) == Some(language));
    let code = in_it.or_else(|| last(&|block| block.tag.is_empty()));
    match code {
        Some(code) => Ok(ProgramSource { language, code }),
        None if blocks.is_empty() => Ok(ProgramSource { language, code: completion }),
        None => Err(format!("no block of {language} in the completion")),
    }
}

fn block_language(block: &FencedBlock<'_>) -> Option<ProgramLanguage> {
    ProgramLanguage::from_name(&block.tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompts_language_wins_and_otherwise_the_fence_says() {
        let text = "```go\na\n```\n```\nb\n```\n```rust\nc\n```";
        let code = |wanted| extract_source(wanted, text).map(|found| (found.language, found.code));
        assert_eq!(code(None), Ok((ProgramLanguage::Rust, "c\n")));
        assert_eq!(code(Some(ProgramLanguage::Go)), Ok((ProgramLanguage::Go, "a\n")));
        assert_eq!(code(Some(ProgramLanguage::C)), Ok((ProgramLanguage::C, "b\n")));
        assert!(extract_source(Some(ProgramLanguage::C), "```rust\nc\n```").is_err());
        assert_eq!(extract_source(Some(ProgramLanguage::C), "int x;").unwrap().code, "int x;");
        assert!(extract_source(None, "int x;").is_err());
        assert!(extract_source(None, "```brainfuck\n+\n```").is_err());
    }

    #[test]
    fn each_language_knows_its_own_name() {
        for language in [
            ProgramLanguage::Python,
            ProgramLanguage::C,
            ProgramLanguage::Cpp,
            ProgramLanguage::Rust,
            ProgramLanguage::Go,
        ] {
            assert_eq!(ProgramLanguage::from_name(language.display_name()), Some(language));
        }
    }
}
