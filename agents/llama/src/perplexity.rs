//! Runs `llama-perplexity` until it reports a result.
//!
//! A thread of the program writes its log, and the program does not wait for it: on a busy machine
//! the last lines are lost although the exit code is 0. Therefore it computes more chunks than
//! needed. The row of the last needed chunk is printed one chunk's time before the end, and that
//! row is used. Every version prints rows on stdout, with two digits more than the final line.

mod output;

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use self::output::PerplexityOutput;
use crate::{LlamaProcess, ProcessEnvironment, ProcessEvent, ProgramOptions, ProgramOutput};

/// Runs that may end with exit code 0 and no result before the measurement fails. Only models whose
/// chunks take milliseconds lose rows, so repeated runs are short.
const RUNS_MAX: u32 = 5;

/// The time that a process may take to exit after it closed its pipes.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The settings with which `llama-perplexity` runs on this host.
///
/// `measure_perplexity` starts the program, reads rows from its output, and returns the row of the
/// last requested chunk:
///
/// * no row for `silence`: the run is ended, and fails;
/// * exit code 0 without a result: the run is repeated, at most `RUNS_MAX` runs in all. The last
///   run accepts the program's final line instead of a row;
/// * another number of chunks than expected: the tokenizers differ, and the run fails at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerplexityRunner {
    pub program: PathBuf,
    pub options: ProgramOptions,
    /// A name of `--list-devices`; the CPU if `None`.
    pub device: Option<String>,
    pub environment: ProcessEnvironment,
    /// True to map weights into memory.
    pub mmap: bool,
    pub threads: usize,
    /// The time without a finished chunk after which the program counts as hung.
    pub silence: Duration,
    /// True to copy its log to our stderr.
    pub repeat: bool,
}

/// A model and a text to measure.
#[derive(Debug, Clone, Copy)]
pub struct PerplexityRequest<'a> {
    pub base: &'a Path,
    pub adapter: Option<&'a Path>,
    pub text: &'a Path,
    /// The size of a chunk in tokens.
    pub n_ctx: usize,
    pub chunks: ChunkSelection,
    /// True to compute attention and its cache in f32, for a base in f32.
    pub exact: bool,
}

/// The chunks of a text that are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkSelection {
    /// The first `n` chunks of a text that has exactly `n + 1`.
    AllButLast(usize),
    /// The first `n` chunks, or fewer if the text is shorter.
    First(usize),
    All,
}

impl ChunkSelection {
    /// Returns how many chunks a run computes; `None` for the whole text. After a run that lost
    /// rows, the next computes more chunks than needed, except for the last run.
    fn chunk_limit(self, run: u32) -> Option<usize> {
        match self {
            Self::First(needed) if run == RUNS_MAX => Some(needed),
            Self::First(needed) => Some(needed + 4_usize.pow(run - 1)),
            Self::AllButLast(_) | Self::All => None,
        }
    }
}

/// A perplexity that `llama-perplexity` measured.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaPerplexity {
    pub perplexity: f64,
    /// The standard error of `perplexity`.
    pub stderr: f64,
    /// The mean negative log-likelihood in nats per token.
    pub mean_nll: f64,
    /// That of each chunk; empty if rows were lost.
    pub chunk_nlls: Vec<f64>,
    pub chunks: usize,
    pub tokens: usize,
}

/// The reason why `llama-perplexity` gave no result.
#[derive(Debug, thiserror::Error)]
pub enum LlamaPerplexityError {
    #[error("start {program}")]
    Start { program: PathBuf, source: io::Error },
    #[error(
        "{program}: {what} {path:?} cannot be passed on; it must be without `:` and `,` (E103)"
    )]
    Name { program: PathBuf, what: &'static str, path: PathBuf },
    #[error("learn how {program} ended")]
    Wait { program: PathBuf, source: io::Error },
    #[error(
        "the text has {tokens} tokens, but llama-perplexity needs at least {needed} for a context \
         of {context}; use a longer text or a smaller context (R114)"
    )]
    TooShort { tokens: u64, context: usize, needed: usize },
    #[error(
        "tokenizer mismatch: llama.cpp cuts the text into {found} chunks where the model's \
         tokenizer.json gives {expected}; the GGUF file's tokenizer is not the model's (E105)"
    )]
    Tokenizers { expected: usize, found: usize },
    #[error(
        "llama-perplexity was silent for {limit:?} and was ended; last output: {last_output} (E104)"
    )]
    Silent { limit: Duration, last_output: String },
    #[error(
        "llama-perplexity computed a perplexity of {printed}: broken weights, or a llama.cpp that \
         computes wrongly on this device (E106)"
    )]
    NotFinite { printed: String },
    #[error("llama-perplexity failed ({status}): {last_output} (E104)")]
    Failed { status: ExitStatus, last_output: String },
    #[error(
        "llama-perplexity ended {tries} times with exit code 0 and no result; last output: {last_output} \
         (E104)"
    )]
    NoResult { tries: u32, last_output: String },
}

impl PerplexityRunner {
    /// Measures a perplexity. `progress` is called with the number of finished chunks and the
    /// total, at least every few seconds; the total is 0 while unknown.
    pub fn measure_perplexity(
        &self,
        request: &PerplexityRequest<'_>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<LlamaPerplexity, LlamaPerplexityError> {
        for path in request.adapter.iter().copied().chain([request.base]) {
            if path.to_string_lossy().contains([':', ',']) {
                let (program, path) = (self.program.clone(), path.to_owned());
                return Err(LlamaPerplexityError::Name { program, what: "the file", path });
            }
        }
        let mut last_output = String::new();
        for attempt in 1..=RUNS_MAX {
            // If only rows are missing, the final line over the same chunks is accepted.
            let chunks = match request.chunks {
                ChunkSelection::AllButLast(chunks) if attempt == RUNS_MAX => {
                    ChunkSelection::First(chunks)
                }
                chunks => chunks,
            };
            match (
                self.run_once(&PerplexityRequest { chunks, ..*request }, attempt, progress),
                request.chunks,
            ) {
                (Ok(Ok(scored)), _) => return Ok(scored),
                (Ok(Err(tail)), _) => last_output = tail,
                // By our tokenizer's count the text is long enough.
                (
                    Err(LlamaPerplexityError::TooShort { tokens, context, .. }),
                    ChunkSelection::AllButLast(n),
                ) => {
                    let found = usize::try_from(tokens).unwrap_or(0) / context;
                    return Err(LlamaPerplexityError::Tokenizers { expected: n + 1, found });
                }
                (Err(error), _) => return Err(error),
            }
            tracing::warn!(attempt, "llama-perplexity ended with exit code 0 and no result");
        }
        Err(LlamaPerplexityError::NoResult { tries: RUNS_MAX, last_output })
    }

    /// The inner error means that it ended with exit code 0 and no result; it contains the last
    /// output.
    fn run_once(
        &self,
        request: &PerplexityRequest<'_>,
        attempt: u32,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Result<LlamaPerplexity, String>, LlamaPerplexityError> {
        let program = &self.program;
        let mut child = LlamaProcess::spawn_program(
            program,
            self.command_arguments(request, request.chunks.chunk_limit(attempt)),
            &self.environment,
            if self.repeat { ProgramOutput::RepeatedLines } else { ProgramOutput::Lines },
        )
        .map_err(|source| LlamaPerplexityError::Start { program: program.clone(), source })?;
        let wait = |source| LlamaPerplexityError::Wait { program: program.clone(), source };
        let mut output = PerplexityOutput::new(request.n_ctx);
        let mut heard_at = Instant::now();
        let mut reported_at = Instant::now();
        let report_every = PROGRESS_INTERVAL.min(self.silence / 4);
        loop {
            let event = child.wait_event(report_every);
            if let ProcessEvent::Line(line) = &event {
                // After the first row, only rows count as progress.
                if output.record_line(&line.text) || output.row_count() == 0 {
                    heard_at = Instant::now();
                }
                check_chunk_count(request.chunks, &output)?;
            }
            if event == ProcessEvent::Closed
                || (event == ProcessEvent::TimedOut && self.has_exited(&mut child)?)
            {
                break;
            }
            if heard_at.elapsed() >= self.silence {
                let last_output = output.failure_text(&child.output_tail());
                return Err(LlamaPerplexityError::Silent { limit: self.silence, last_output });
            }
            if reported_at.elapsed() >= report_every || matches!(event, ProcessEvent::Line(_)) {
                reported_at = Instant::now();
                progress(output.row_count(), output.chunk_count().unwrap_or(0));
            }
        }
        let status = match child.wait_exit(EXIT_TIMEOUT).map_err(wait)? {
            Some(status) => status,
            None => child.kill_and_wait().map_err(wait)?,
        };
        output.conclude_run(request, status, &child.output_tail())
    }

    /// A process that the program started may keep its pipes open.
    fn has_exited(&self, child: &mut LlamaProcess) -> Result<bool, LlamaPerplexityError> {
        let ended = child.exit_status();
        let program = self.program.clone();
        Ok(ended.map_err(|source| LlamaPerplexityError::Wait { program, source })?.is_some())
    }

    fn command_arguments(
        &self,
        request: &PerplexityRequest<'_>,
        chunk_limit: Option<usize>,
    ) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["-m".into(), request.base.into()];
        if let Some(adapter) = request.adapter {
            arguments.extend(["--lora".into(), adapter.into()]);
        }
        arguments.extend(["-f".into(), request.text.into()]);
        let context = request.n_ctx.to_string();
        let threads = self.threads.to_string();
        // One sequence at a time, so that the first column of a row identifies its chunk.
        let fixed = ["-c", &context, "-b", &context, "--ppl-output-type", "1", "-t", &threads];
        arguments.extend(fixed.map(OsString::from));
        if let Some(chunks) = chunk_limit {
            arguments.extend(["--chunks".into(), chunks.to_string().into()]);
        }
        if request.exact {
            let exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"];
            arguments.extend(exact.map(OsString::from));
        }
        if !self.mmap {
            arguments.extend(self.options.no_mmap_arguments().iter().map(OsString::from));
        }
        let place = self.options.device_arguments(self.device.as_deref());
        arguments.extend(place.into_iter().map(OsString::from));
        arguments
    }
}

/// Ends a run early if the program's number of chunks differs.
fn check_chunk_count(
    wanted: ChunkSelection,
    output: &PerplexityOutput,
) -> Result<(), LlamaPerplexityError> {
    match (wanted, output.chunk_count()) {
        (ChunkSelection::AllButLast(chunks), Some(found)) if found != chunks + 1 => {
            Err(LlamaPerplexityError::Tokenizers { expected: chunks + 1, found })
        }
        _ => Ok(()),
    }
}
