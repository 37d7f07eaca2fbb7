//! Builds an executable from a source file.

use sandbox::{ProgramEnd, ProgramLimits, SandboxError, SandboxProgram, SandboxRoom, WORK};

use super::{SandboxSlot, harness_report::describe_end};
use crate::{
    judge_result::JudgeResult,
    language::{ProgramLanguage, ProgramSource},
    tools::{ToolNeed, VerifierTool},
};

const BINARY_PATH: &str = "./main";

/// The command line of a built program, and true if the compiler printed warnings.
pub(super) struct BuiltProgram {
    pub argv: Vec<String>,
    pub warnings: bool,
}

enum BuildOutcome {
    Ready(BuiltProgram),
    CompileError(String),
    CompilerUnavailable(String),
}

/// Builds the source in a new room and judges it there. A source that does not compile fails; a
/// compiler that cannot be started is a host error.
pub(super) fn judge_built_program(
    source: &ProgramSource<'_>,
    compiler_limits: &ProgramLimits,
    slot: &mut SandboxSlot<'_>,
    judge: impl FnOnce(BuiltProgram, &mut SandboxRoom<'_>) -> Result<JudgeResult, SandboxError>,
) -> Result<JudgeResult, JudgeResult> {
    let tool = slot.find_tool(&ToolNeed::Language(source.language))?;
    let files = [(source.language.file_name(), source.code)];
    slot.run_in_room(&files, |room| {
        match build_program(source.language, tool, compiler_limits, room)? {
            BuildOutcome::Ready(program) => judge(program, room),
            BuildOutcome::CompileError(why) => Ok(JudgeResult::failed_because(why)),
            BuildOutcome::CompilerUnavailable(why) => Ok(JudgeResult::host_error(why)),
        }
    })
}

/// Compiles the source file if its language needs it.
fn build_program(
    language: ProgramLanguage,
    tool: &VerifierTool,
    limits: &ProgramLimits,
    room: &mut SandboxRoom<'_>,
) -> Result<BuildOutcome, SandboxError> {
    let Some(arguments) = compiler_arguments(language) else {
        let argv =
            [&tool.argv[..], &["-I".into(), "-B".into(), language.file_name().into()]].concat();
        return Ok(BuildOutcome::Ready(BuiltProgram { argv, warnings: false }));
    };
    let argv = tool.argv.iter().cloned().chain(arguments.iter().map(|&word| word.to_owned()));
    let program = SandboxProgram {
        argv: argv.collect(),
        env: compiler_environment(language),
        stdin: Vec::new(),
    };
    let ended = room.run(&program, limits)?;
    Ok(match &ended.how {
        ProgramEnd::Exited(0) => BuildOutcome::Ready(BuiltProgram {
            argv: vec![BINARY_PATH.to_owned()],
            warnings: String::from_utf8_lossy(&ended.stderr).contains("warning"),
        }),
        ProgramEnd::NotStarted(why) => {
            BuildOutcome::CompilerUnavailable(format!("the compiler: {why}"))
        }
        ProgramEnd::Exited(_) => BuildOutcome::CompileError(format!(
            "it does not compile: {}",
            first_error(&ended.stderr)
        )),
        _ => BuildOutcome::CompileError(format!(
            "it does not compile: the compiler: {}",
            describe_end(&ended, limits)
        )),
    })
}

/// Returns `None` for an interpreted language.
fn compiler_arguments(language: ProgramLanguage) -> Option<&'static [&'static str]> {
    Some(match language {
        ProgramLanguage::Python => return None,
        ProgramLanguage::C => {
            &["-std=gnu17", "-O1", "-Wall", "-Wextra", "-o", "main", "main.c", "-lm"]
        }
        ProgramLanguage::Cpp => {
            &["-std=gnu++20", "-O1", "-Wall", "-Wextra", "-o", "main", "main.cpp", "-pthread"]
        }
        ProgramLanguage::Rust => {
            &["--edition", "2021", "-C", "opt-level=1", "-o", "main", "main.rs"]
        }
        ProgramLanguage::Go => &["build", "-o", "main", "main.go"],
    })
}

fn compiler_environment(language: ProgramLanguage) -> Vec<(String, String)> {
    let pairs: &[(&str, &str)] = match language {
        ProgramLanguage::Go => &[
            ("GO111MODULE", "off"),
            ("CGO_ENABLED", "0"),
            ("GOTOOLCHAIN", "local"),
            ("GOTELEMETRY", "off"),
        ],
        _ => &[("LC_ALL", "C.UTF-8")],
    };
    let given = pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
    let cache =
        (language == ProgramLanguage::Go).then(|| ("GOCACHE".to_owned(), format!("{WORK}/.go")));
    given.chain(cache).collect()
}

/// Returns the first line with an error, else the first line.
fn first_error(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let error = lines.clone().find(|line| line.contains("error"));
    error.or_else(|| lines.next()).unwrap_or_default().to_owned()
}
