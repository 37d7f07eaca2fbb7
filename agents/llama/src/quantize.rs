//! `llama-quantize`: a GGUF file with fewer bits for each weight.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use crate::{LlamaProcess, ProcessEnvironment, ProcessEvent, ProgramOutput};

/// It prints a line for each tensor.
const SILENCE_MAX: Duration = Duration::from_secs(600);
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why a file was not quantized.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    #[error("llama.cpp has no {program}, which quantizes; install all of its programs (E101)")]
    Absent { program: PathBuf },
    #[error("start {program}")]
    Start { program: PathBuf, source: io::Error },
    #[error("learn how {program} ended")]
    Wait { program: PathBuf, source: io::Error },
    #[error("llama-quantize was silent for {SILENCE_MAX:?} and was ended (E104)")]
    Silent,
    #[error("llama-quantize failed ({status}): {last_output} (E104)")]
    Failed { status: ExitStatus, last_output: String },
}

/// Writes the model in `from` to `to` with weights of a type that llama.cpp names, such as
/// `Q4_K_M`. Some weights get another type, as llama.cpp chooses. `on_heartbeat` is called for each
/// line that the program prints.
///
/// # Errors
/// The program is missing, or fails.
pub fn quantize_model(
    program: &Path,
    (from, to): (&Path, &Path),
    weight_type: &str,
    environment: &ProcessEnvironment,
    on_heartbeat: &mut dyn FnMut(),
) -> Result<(), QuantizeError> {
    let named = || program.to_owned();
    if !program.is_file() {
        return Err(QuantizeError::Absent { program: named() });
    }
    let arguments: [OsString; 3] = [from.into(), to.into(), weight_type.into()];
    let started =
        LlamaProcess::spawn_program(program, arguments, environment, ProgramOutput::Lines);
    let mut process =
        started.map_err(|source| QuantizeError::Start { program: named(), source })?;
    loop {
        match process.wait_event(SILENCE_MAX) {
            ProcessEvent::Line(_) => on_heartbeat(),
            ProcessEvent::TimedOut => {
                // It is ended in any case; the silence is the error.
                let _ = process.kill_and_wait();
                return Err(QuantizeError::Silent);
            }
            ProcessEvent::Closed => break,
        }
    }
    let ended = process.wait_exit(EXIT_TIMEOUT).and_then(|_| process.kill_and_wait());
    let status = ended.map_err(|source| QuantizeError::Wait { program: named(), source })?;
    if status.success() {
        return Ok(());
    }
    let tail = process.output_tail();
    let lines: Vec<&str> = tail.lines().map(str::trim).collect();
    Err(QuantizeError::Failed { status, last_output: lines.join(" | ") })
}
