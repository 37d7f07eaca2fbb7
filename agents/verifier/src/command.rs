//! Any executable as a verifier: one JSON request on stdin, one JSON verdict on stdout, or a line of
//! both for each completion (the plug-in protocol of docs/VERIFIERS.md). It runs in the sandbox. If
//! the host's owner has allowed the executable, it runs outside, with the agent's directories hidden
//! from it.

use std::{ffi::OsString, path::Path, time::Duration};

use line_programs::{LineFailure, LineProgramError};
use sandbox::{ProgramEnd, ProgramLimits, ProgramResult, SandboxProgram};
use serde_json::{Map, Value};

use crate::{
    calls::VerifyItem,
    grants::CommandPlacement,
    host_process::{self, OUTPUT_BYTES_MAX},
    judge_result::JudgeResult,
    plugin_answer,
    program::{SandboxSlot, describe_end},
    served_commands::{ServedCommand, ServedPlace},
};

const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// The largest values that the checks of run specs allow; the log may contain others.
const PROCESSES_MAX: u32 = 1024;
const CONCURRENT_MAX: u32 = 256;

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
    /// `None` if a process is started for each completion.
    serving: Option<ServingSettings>,
}

/// The settings of a command that keeps running.
#[derive(Debug, Clone, Copy)]
struct ServingSettings {
    /// `None`: as many as judging threads.
    processes: Option<usize>,
    concurrent: usize,
    start_timeout: Duration,
}

impl From<&wire::v1::verifier::Command> for CommandVerifier {
    fn from(command: &wire::v1::verifier::Command) -> Self {
        let limit = |seconds| {
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO).min(TIMEOUT_MAX)
        };
        let serving = ServingSettings {
            processes: Some(command.processes.min(PROCESSES_MAX) as usize)
                .filter(|count| *count > 0),
            concurrent: command.concurrent.clamp(1, CONCURRENT_MAX) as usize,
            start_timeout: limit(command.start_timeout_s),
        };
        Self {
            argv: command.argv.clone(),
            timeout: limit(command.timeout_s),
            paths: command.paths.clone(),
            serving: command.serve.then_some(serving),
        }
    }
}

impl CommandVerifier {
    /// Runs the executable. Every failure of it is an `error`, never a failed sample.
    pub(crate) fn judge_item(&self, item: &VerifyItem, slot: &mut SandboxSlot<'_>) -> JudgeResult {
        let Some(program) = self.argv.first() else {
            return JudgeResult::input_error("argv is empty");
        };
        let placement = match slot.toolchain().place_command(program, &self.paths) {
            Ok(placement) => placement,
            Err(lacking) => {
                return JudgeResult::unreachable_error(format!("this box lacks {lacking}"));
            }
        };
        if let Some(serving) = self.serving {
            return self.ask_served(serving, placement, item, slot);
        }
        let request = match serde_json::to_vec(item) {
            Ok(request) => request,
            Err(error) => return JudgeResult::input_error(error.to_string()),
        };
        match placement {
            CommandPlacement::Masked { program } => {
                let argv = self.masked_command_line(&program, slot);
                match host_process::run_program(&argv, request, self.timeout) {
                    Ok(output) => parse_answer(&output),
                    Err(problem) => JudgeResult::host_error(problem),
                }
            }
            CommandPlacement::Contained { program, shown } => {
                let program = self.build_program(&program, request);
                let limits = self.program_limits();
                let ran = slot.run_in_room_with::<&str, &[u8], _>(&shown, &[], |room| {
                    room.run(&program, &limits)
                });
                ran.map_or_else(|broken| broken, |ended| read_program_result(&ended, &limits))
            }
        }
    }

    /// Asks a process that keeps running, and starts it if necessary.
    fn ask_served(
        &self,
        serving: ServingSettings,
        placement: CommandPlacement,
        item: &VerifyItem,
        slot: &mut SandboxSlot<'_>,
    ) -> JudgeResult {
        let request: Map<String, Value> = match serde_json::to_value(item) {
            Ok(Value::Object(request)) => request,
            Ok(_) => return JudgeResult::input_error("a completion is no object"),
            Err(error) => return JudgeResult::input_error(error.to_string()),
        };
        match self.send_request(serving, placement, &request, slot) {
            Ok(answer) => plugin_answer::read_verdict(answer).unwrap_or_else(|problem| {
                JudgeResult::host_error(format!("it answered no verdict: {problem}"))
            }),
            Err(error) if error.failure == LineFailure::Request => {
                JudgeResult::input_error(error.to_string())
            }
            Err(error) => JudgeResult::host_error(error.to_string()),
        }
    }

    /// Sends any request to a process that keeps running, and returns its answer.
    pub(crate) fn request_answer(
        &self,
        request: &Map<String, Value>,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<Map<String, Value>, String> {
        let program = self.argv.first().ok_or("argv is empty")?;
        let placement = slot.toolchain().place_command(program, &self.paths);
        let placement = placement.map_err(|lacking| format!("this box lacks {lacking}"))?;
        let serving = self.serving.ok_or("it does not keep running")?;
        self.send_request(serving, placement, request, slot).map_err(|error| error.to_string())
    }

    fn send_request(
        &self,
        serving: ServingSettings,
        placement: CommandPlacement,
        request: &Map<String, Value>,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<Map<String, Value>, LineProgramError> {
        let place = match placement {
            CommandPlacement::Masked { program } => {
                ServedPlace::Masked { argv: self.masked_command_line(&program, slot) }
            }
            CommandPlacement::Contained { program, shown } => ServedPlace::Contained {
                program: self.build_program(&program, Vec::new()),
                limits: self.program_limits(),
                shown,
            },
        };
        let ServingSettings { processes, concurrent, start_timeout } = serving;
        let command = ServedCommand {
            place,
            processes: processes.unwrap_or(slot.threads()),
            concurrent,
            start_timeout,
        };
        slot.ask_served(command, request, self.timeout)
    }

    fn masked_command_line(&self, program: &Path, slot: &SandboxSlot<'_>) -> Vec<OsString> {
        let arguments = self.argv.iter().skip(1).map(OsString::from);
        let argv = [program.as_os_str().to_owned()].into_iter().chain(arguments);
        slot.toolchain().masked_command_line(argv)
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
    plugin_answer::parse_verdict(output).unwrap_or_else(|problem| {
        JudgeResult::host_error(format!("it printed no verdict: {problem}"))
    })
}

#[cfg(test)]
mod tests {
    use wire::v1::verifier::Command;

    use super::*;

    #[test]
    fn settings_from_the_log_cannot_exceed_those_of_specs() {
        let serving = |processes, concurrent| {
            let command = Command { serve: true, processes, concurrent, ..Command::default() };
            let serving = CommandVerifier::from(&command).serving.unwrap();
            (serving.processes, serving.concurrent)
        };
        assert_eq!(serving(u32::MAX, u32::MAX), (Some(1024), 256));
        assert_eq!(serving(0, 0), (None, 1));
        assert_eq!(serving(3, 2), (Some(3), 2));
    }
}
