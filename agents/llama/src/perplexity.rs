//! `llama-perplexity`, run until it has said what it measured.
//!
//! Its log is written by a thread that nobody waits for: on a busy machine the last lines are
//! lost and the exit code is 0 all the same. So it is given a chunk more than is wanted, and the
//! row of the last wanted one counts, which is printed a chunk's time before the end. Rows are on
//! stdout of every version, and have two digits more than the final line.

mod output;

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use self::output::Output;
use crate::{Child, Environment, Heard, Options};

/// Runs that end well and say nothing, before that is a failure.
const TRIES: u32 = 3;

/// What a process may take to be gone once it has closed its pipes.
const ENDING_LIMIT: Duration = Duration::from_secs(10);

/// Between two words to whoever waits for us.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// How `llama-perplexity` is run on this box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Perplexity {
    pub program: PathBuf,
    pub options: Options,
    /// Of `--list-devices`; the CPU without one.
    pub device: Option<String>,
    pub environment: Environment,
    pub mmap: bool,
    pub threads: usize,
    /// One that finishes no chunk for so long is hung.
    pub silence: Duration,
    /// Repeat its log on our stderr.
    pub repeat: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// GGUF files.
    pub base: &'a Path,
    pub adapter: Option<&'a Path>,
    pub text: &'a Path,
    pub n_ctx: usize,
    pub chunks: Chunks,
    /// Attention and its cache in f32, for a base in f32.
    pub exact: bool,
}

/// Which chunks of the text count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunks {
    /// So many, and the text has exactly one more.
    AllButOne(usize),
    /// So many, or as many as the text has.
    First(usize),
    All,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored {
    pub perplexity: f64,
    /// Standard error of `perplexity`.
    pub stderr: f64,
    /// Nats a token.
    pub mean_nll: f64,
    pub chunks: usize,
    /// Scored ones.
    pub tokens: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum PerplexityError {
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
    #[error("llama-perplexity was silent for {limit:?} and was ended; it said last: {said} (E104)")]
    Silent { limit: Duration, said: String },
    #[error(
        "llama-perplexity computed a perplexity of {printed}: broken weights, or a llama.cpp that \
         computes wrongly on this device (E106)"
    )]
    NotFinite { printed: String },
    #[error("llama-perplexity failed ({status}): {said} (E104)")]
    Failed { status: ExitStatus, said: String },
    #[error(
        "llama-perplexity ended {tries} times with exit code 0 and no result; it said last: {said} (E104)"
    )]
    NoResult { tries: u32, said: String },
}

impl Perplexity {
    /// Measures. `progress` hears chunks done, and of how many, and at least every few seconds.
    ///
    /// # Errors
    /// When the program cannot be run, fails, hangs, or says nothing that can be believed.
    pub fn measure(
        &self,
        request: &Request<'_>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Scored, PerplexityError> {
        for path in request.adapter.iter().copied().chain([request.base]) {
            if path.to_string_lossy().contains([':', ',']) {
                let (program, path) = (self.program.clone(), path.to_owned());
                return Err(PerplexityError::Name { program, what: "the file", path });
            }
        }
        let mut said = String::new();
        for attempt in 1..=TRIES {
            // Should rows be what is missing, the final line over the same chunks will do.
            let chunks = match request.chunks {
                Chunks::AllButOne(chunks) if attempt == TRIES => Chunks::First(chunks),
                chunks => chunks,
            };
            match (self.attempt(&Request { chunks, ..*request }, progress), request.chunks) {
                (Ok(Ok(scored)), _) => return Ok(scored),
                (Ok(Err(tail)), _) => said = tail,
                // By our count it was long enough.
                (Err(PerplexityError::TooShort { tokens, context, .. }), Chunks::AllButOne(n)) => {
                    let found = usize::try_from(tokens).unwrap_or(0) / context;
                    return Err(PerplexityError::Tokenizers { expected: n + 1, found });
                }
                (Err(error), _) => return Err(error),
            }
            tracing::warn!(attempt, "llama-perplexity ended with exit code 0 and no result");
        }
        Err(PerplexityError::NoResult { tries: TRIES, said })
    }

    /// One run. The inner error, the last it said, is that it ended well without a result.
    fn attempt(
        &self,
        request: &Request<'_>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Result<Scored, String>, PerplexityError> {
        let program = &self.program;
        let mut child =
            Child::spawn(program, self.arguments(request), &self.environment, self.repeat)
                .map_err(|source| PerplexityError::Start { program: program.clone(), source })?;
        let wait = |source| PerplexityError::Wait { program: program.clone(), source };
        let mut output = Output::new(request.n_ctx);
        let mut heard_at = Instant::now();
        let mut said_at = Instant::now();
        let say_every = SAY_EVERY.min(self.silence / 4);
        loop {
            let heard = child.hear(say_every);
            if let Heard::Line(line) = &heard {
                // Once there are rows, only rows are a sign of life.
                if output.hear(&line.text) || output.rows() == 0 {
                    heard_at = Instant::now();
                }
                check_chunks(request.chunks, &output)?;
            }
            if heard == Heard::Ended || (heard == Heard::Nothing && self.is_over(&mut child)?) {
                break;
            }
            if heard_at.elapsed() >= self.silence {
                let said = output.telling(child.tail());
                return Err(PerplexityError::Silent { limit: self.silence, said });
            }
            if said_at.elapsed() >= say_every || matches!(heard, Heard::Line(_)) {
                said_at = Instant::now();
                progress(output.rows(), output.chunks().unwrap_or(0));
            }
        }
        let status = match child.wait(ENDING_LIMIT).map_err(wait)? {
            Some(status) => status,
            None => child.end().map_err(wait)?,
        };
        output.conclude(request, status, child.tail())
    }

    /// Something it started may hold its pipes open after it is gone.
    fn is_over(&self, child: &mut Child) -> Result<bool, PerplexityError> {
        let ended = child.ended();
        let program = self.program.clone();
        Ok(ended.map_err(|source| PerplexityError::Wait { program, source })?.is_some())
    }

    fn arguments(&self, request: &Request<'_>) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["-m".into(), request.base.into()];
        if let Some(adapter) = request.adapter {
            arguments.extend(["--lora".into(), adapter.into()]);
        }
        arguments.extend(["-f".into(), request.text.into()]);
        let context = request.n_ctx.to_string();
        let threads = self.threads.to_string();
        // One sequence at a time: rows are then told apart by their first column.
        let fixed = ["-c", &context, "-b", &context, "--ppl-output-type", "1", "-t", &threads];
        arguments.extend(fixed.map(OsString::from));
        if let Chunks::First(chunks) = request.chunks {
            arguments.extend(["--chunks".into(), chunks.to_string().into()]);
        }
        if request.exact {
            let exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"];
            arguments.extend(exact.map(OsString::from));
        }
        if !self.mmap {
            arguments.extend(self.options.without_mmap().iter().map(OsString::from));
        }
        let place = self.options.compute_on(self.device.as_deref());
        arguments.extend(place.into_iter().map(OsString::from));
        arguments
    }
}

/// As soon as it says how it cuts the text, there is no need to wait for the rest.
fn check_chunks(wanted: Chunks, output: &Output) -> Result<(), PerplexityError> {
    match (wanted, output.chunks()) {
        (Chunks::AllButOne(chunks), Some(found)) if found != chunks + 1 => {
            Err(PerplexityError::Tokenizers { expected: chunks + 1, found })
        }
        _ => Ok(()),
    }
}
