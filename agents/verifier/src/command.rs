//! Any executable as a verifier: one JSON request on stdin, one JSON verdict on stdout (the plug-in
//! protocol of docs/VERIFIERS.md). It runs in the sandbox. If the host's owner has allowed the
//! executable, it runs outside, with the agent's directories hidden from it.

use std::{ffi::OsString, path::Path, time::Duration};

use sandbox::{ProgramEnd, ProgramLimits, ProgramResult, SandboxProgram};
use serde::Deserialize;
use wire::v1::verdicts::Outcome;

use crate::{
    calls::VerifyItem,
    grants::CommandPlacement,
    host_process::{self, OUTPUT_BYTES_MAX},
    judge_result::JudgeResult,
    program::{SandboxSlot, describe_end},
};

const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// A contained command may be a complete judge with its data.
const MEMORY_BYTES: u64 = 4 << 30;
/// For stdout and stderr together.
const STREAMS_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone)]
pub(crate) struct CommandVerifier {
    argv: Vec<String>,
    timeout: Duration,
    /// In addition to the system and its own directory.
    paths: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct CommandAnswer {
    outcome: CommandOutcome,
    reward: Option<f64>,
    #[serde(default)]
    detail: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CommandOutcome {
    Pass,
    Fail,
    Error,
}

impl From<&wire::v1::verifier::Command> for CommandVerifier {
    fn from(command: &wire::v1::verifier::Command) -> Self {
        let limit = Duration::try_from_secs_f64(command.timeout_s).unwrap_or(Duration::ZERO);
        let limit = limit.min(TIMEOUT_MAX);
        Self { argv: command.argv.clone(), timeout: limit, paths: command.paths.clone() }
    }
}

impl CommandVerifier {
    /// Runs the executable. Every failure of it is an `error`, never a failed sample.
    pub(crate) fn judge_item(&self, item: &VerifyItem, slot: &mut SandboxSlot<'_>) -> JudgeResult {
        let request = match serde_json::to_vec(item) {
            Ok(request) => request,
            Err(error) => return JudgeResult::input_error(error.to_string()),
        };
        let Some((program, arguments)) = self.argv.split_first() else {
            return JudgeResult::input_error("argv is empty");
        };
        match slot.toolchain().place_command(program, &self.paths) {
            Err(lacking) => JudgeResult::host_error(format!("this box lacks {lacking}")),
            Ok(CommandPlacement::Masked { program }) => {
                let argv = [program.into_os_string()].into_iter();
                let argv = slot
                    .toolchain()
                    .masked_command_line(argv.chain(arguments.iter().map(OsString::from)));
                match host_process::run_program(&argv, request, self.timeout) {
                    Ok(output) => parse_answer(&output),
                    Err(problem) => JudgeResult::host_error(problem),
                }
            }
            Ok(CommandPlacement::Contained { program, shown }) => {
                let program = self.build_program(&program, request);
                let limits = self.program_limits();
                let ran = slot.run_in_room_with::<&str, &[u8], _>(&shown, &[], |room| {
                    room.run(&program, &limits)
                });
                ran.map_or_else(|broken| broken, |ended| read_program_result(&ended, &limits))
            }
        }
    }

    fn build_program(&self, program: &Path, stdin: Vec<u8>) -> SandboxProgram {
        let mut argv = self.argv.clone();
        if let Some(first) = argv.first_mut() {
            *first = program.to_string_lossy().into_owned();
        }
        SandboxProgram { argv, env: Vec::new(), stdin }
    }

    fn program_limits(&self) -> ProgramLimits {
        ProgramLimits {
            wall: self.timeout,
            memory_bytes: MEMORY_BYTES,
            output_bytes: STREAMS_BYTES,
            ..ProgramLimits::default()
        }
    }
}

fn read_program_result(ended: &ProgramResult, limits: &ProgramLimits) -> JudgeResult {
    match &ended.how {
        ProgramEnd::Exited(0) if ended.stdout.len() > OUTPUT_BYTES_MAX => {
            JudgeResult::host_error(format!("it printed more than {OUTPUT_BYTES_MAX} bytes"))
        }
        ProgramEnd::Exited(0) => parse_answer(&ended.stdout),
        ProgramEnd::NotStarted(why) => JudgeResult::host_error(format!(
            "it cannot be started in the sandbox: {why}; if the agent runs as root, its file and \
             directory must be readable by all users"
        )),
        _ => JudgeResult::host_error(describe_end(ended, limits)),
    }
}

/// Returns a host error for unreadable output.
pub(crate) fn parse_answer(output: &[u8]) -> JudgeResult {
    let answer: CommandAnswer = match serde_json::from_slice(output) {
        Ok(answer) => answer,
        Err(error) => return JudgeResult::host_error(format!("it printed no verdict: {error}")),
    };
    let (outcome, default) = match answer.outcome {
        CommandOutcome::Pass => (Outcome::Pass, 1.0),
        CommandOutcome::Fail => (Outcome::Fail, 0.0),
        CommandOutcome::Error => (Outcome::Error, 0.0),
    };
    let reward = answer.reward.unwrap_or(default);
    if !reward.is_finite() {
        return JudgeResult::host_error("its reward is not a number");
    }
    let elsewhere = outcome == Outcome::Error;
    JudgeResult { outcome, reward, detail: answer.detail, retry_elsewhere: elsewhere }
}
