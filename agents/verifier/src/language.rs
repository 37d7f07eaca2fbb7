//! Languages programs are written in, and which one a completion is.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    calls::Item,
    fences::{Fence, fences},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Language {
    Python,
    C,
    Cpp,
    Rust,
    Go,
}

/// What of a completion is the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source<'a> {
    pub language: Language,
    pub code: &'a str,
}

impl Language {
    /// By any of the names that fences and data sets use.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name.to_lowercase().as_str() {
            "python" | "python3" | "py" | "py3" => Self::Python,
            "c" | "gcc" | "c99" | "c11" | "c17" => Self::C,
            "c++" | "cpp" | "cc" | "cxx" | "g++" | "c++17" | "c++20" => Self::Cpp,
            "rust" | "rs" => Self::Rust,
            "go" | "golang" => Self::Go,
            _ => return None,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::C => "c",
            Self::Cpp => "c++",
            Self::Rust => "rust",
            Self::Go => "go",
        }
    }

    pub(crate) fn file(self) -> &'static str {
        match self {
            Self::Python => "main.py",
            Self::C => "main.c",
            Self::Cpp => "main.cpp",
            Self::Rust => "main.rs",
            Self::Go => "main.go",
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the settings or the prompt say; the completion has no say in it. The error is a name
/// that is no language known here.
pub(crate) fn asked(setting: &str, item: &Item) -> Result<Option<Language>, String> {
    let name = Some(setting).filter(|name| !name.is_empty()).or_else(|| item.text("language"));
    let known = |name| Language::named(name).ok_or_else(|| name.to_owned());
    name.map(known).transpose()
}

/// The program in a completion: of several blocks the last in its language, else the last without
/// one; without any block all of it. The error says what is missing.
pub(crate) fn source(wanted: Option<Language>, completion: &str) -> Result<Source<'_>, String> {
    let blocks = fences(completion);
    let Some(language) = wanted.or_else(|| blocks.iter().rev().find_map(tagged)) else {
        return Err("no language: neither the prompt nor a fence names one".into());
    };
    let last = |fits: &dyn Fn(&&Fence<'_>) -> bool| {
        let blocks: Vec<_> = blocks.iter().collect();
        blocks.into_iter().rev().find(fits).map(|block| block.body)
    };
    let in_it = last(&|block| tagged(block) == Some(language));
    let code = in_it.or_else(|| last(&|block| block.tag.is_empty()));
    match code {
        Some(code) => Ok(Source { language, code }),
        None if blocks.is_empty() => Ok(Source { language, code: completion }),
        None => Err(format!("no block of {language} in the completion")),
    }
}

fn tagged(block: &Fence<'_>) -> Option<Language> {
    Language::named(&block.tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompts_language_wins_and_otherwise_the_fence_says() {
        let text = "```go\na\n```\n```\nb\n```\n```rust\nc\n```";
        let code = |wanted| source(wanted, text).map(|found| (found.language, found.code));
        assert_eq!(code(None), Ok((Language::Rust, "c\n")));
        assert_eq!(code(Some(Language::Go)), Ok((Language::Go, "a\n")));
        assert_eq!(code(Some(Language::C)), Ok((Language::C, "b\n")));
        assert!(source(Some(Language::C), "```rust\nc\n```").is_err());
        assert_eq!(source(Some(Language::C), "int x;").unwrap().code, "int x;");
        assert!(source(None, "int x;").is_err());
        assert!(source(None, "```brainfuck\n+\n```").is_err());
    }

    #[test]
    fn each_language_knows_its_own_name() {
        for language in [Language::Python, Language::C, Language::Cpp, Language::Rust, Language::Go]
        {
            assert_eq!(Language::named(language.name()), Some(language));
        }
    }
}
