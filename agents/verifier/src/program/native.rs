//! From source to something that runs.

use sandbox::{Broken, How, Limits, Program, Room, WORK};

use super::report::told;
use crate::{language::Language, tools::Tool};

const BINARY: &str = "./main";

/// What became of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Built {
    Runs {
        argv: Vec<String>,
        warnings: bool,
    },
    Fails(String),
    /// The compiler could not be started.
    Trouble(String),
}

/// Compiles the source that lies in the room under its language's name, where that is needed.
pub(super) fn build(
    language: Language,
    tool: &Tool,
    limits: &Limits,
    room: &mut Room<'_>,
) -> Result<Built, Broken> {
    let Some(arguments) = arguments(language) else {
        let argv = [&tool.argv[..], &["-I".into(), "-B".into(), language.file().into()]].concat();
        return Ok(Built::Runs { argv, warnings: false });
    };
    let argv = tool.argv.iter().cloned().chain(arguments.iter().map(|&word| word.to_owned()));
    let program = Program { argv: argv.collect(), env: environment(language), stdin: Vec::new() };
    let ended = room.run(&program, limits)?;
    Ok(match &ended.how {
        How::Exited(0) => Built::Runs {
            argv: vec![BINARY.to_owned()],
            warnings: String::from_utf8_lossy(&ended.stderr).contains("warning"),
        },
        How::NotStarted(why) => Built::Trouble(format!("the compiler: {why}")),
        How::Exited(_) => {
            Built::Fails(format!("it does not compile: {}", complaint(&ended.stderr)))
        }
        _ => Built::Fails(format!("it does not compile: the compiler: {}", told(&ended, limits))),
    })
}

/// `None` for a language that is not compiled.
fn arguments(language: Language) -> Option<&'static [&'static str]> {
    Some(match language {
        Language::Python => return None,
        Language::C => &["-std=gnu17", "-O1", "-Wall", "-Wextra", "-o", "main", "main.c", "-lm"],
        Language::Cpp => {
            &["-std=gnu++20", "-O1", "-Wall", "-Wextra", "-o", "main", "main.cpp", "-pthread"]
        }
        Language::Rust => &["--edition", "2021", "-C", "opt-level=1", "-o", "main", "main.rs"],
        Language::Go => &["build", "-o", "main", "main.go"],
    })
}

fn environment(language: Language) -> Vec<(String, String)> {
    let pairs: &[(&str, &str)] = match language {
        Language::Go => &[
            ("GO111MODULE", "off"),
            ("CGO_ENABLED", "0"),
            ("GOTOOLCHAIN", "local"),
            ("GOTELEMETRY", "off"),
        ],
        _ => &[("LC_ALL", "C.UTF-8")],
    };
    let given = pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
    let cache = (language == Language::Go).then(|| ("GOCACHE".to_owned(), format!("{WORK}/.go")));
    given.chain(cache).collect()
}

/// The first error of a compiler, else the first line.
fn complaint(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let error = lines.clone().find(|line| line.contains("error"));
    error.or_else(|| lines.next()).unwrap_or_default().to_owned()
}
