//! Parses and validates the output of `llama-perplexity`. Pure. Lines of both pipes may arrive
//! joined, with prefixes that differ between versions, so marks are searched in the whole line.

use std::{collections::BTreeMap, iter, process::ExitStatus};

use super::{ChunkSelection, LlamaPerplexity, LlamaPerplexityError, PerplexityRequest};

/// A bound on memory.
const ROWS_MAX: usize = 1 << 20;

/// The texts that identify the line with the cause of a failure.
const ERROR_MARKS: [&str; 9] = [
    "GGML_ASSERT",
    "GGML_ABORT",
    "invalid argument",
    "out of memory",
    "failed to",
    "unable to",
    "error",
    "Unexpected negative standard deviation",
    "not found",
];

#[derive(Debug, Default)]
pub(super) struct PerplexityOutput {
    /// The size of a chunk in tokens.
    n_ctx: usize,
    /// By the index of their chunk.
    rows: BTreeMap<usize, OutputRow>,
    final_row: Option<OutputRow>,
    /// The number of chunks that the program announced.
    chunks: Option<usize>,
    /// The number of tokens of a text that is too short.
    too_short: Option<u64>,
    error_line: Option<String>,
}

/// The running values after a chunk, as printed.
#[derive(Debug, Clone, PartialEq)]
struct OutputRow {
    perplexity: f64,
    /// In nats per token; the final line lacks it.
    mean_nll: Option<f64>,
    /// The standard error of `perplexity`.
    stderr: f64,
    /// The text of the row, for error messages.
    printed: String,
}

impl PerplexityOutput {
    pub(super) fn new(n_ctx: usize) -> Self {
        Self { n_ctx, ..Self::default() }
    }

    /// Returns true if the line is a row.
    pub(super) fn record_line(&mut self, line: &str) -> bool {
        if let Some((index, row)) = self.parse_row(line) {
            if self.rows.len() < ROWS_MAX {
                self.rows.insert(index, row);
            }
            return true;
        }
        if let Some(last) = parse_final_line(line) {
            self.final_row = Some(last);
        } else if let Some(chunks) = parse_number_after(line, "calculating perplexity over ") {
            self.chunks = usize::try_from(chunks).ok();
        } else if let Some(tokens) = parse_number_after(line, "tokenizes to only ") {
            self.too_short = Some(tokens);
        } else if self.error_line.is_none() && ERROR_MARKS.iter().any(|mark| line.contains(mark)) {
            self.error_line = Some(line.trim().to_owned());
        }
        false
    }

    pub(super) fn row_count(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn chunk_count(&self) -> Option<usize> {
        self.chunks
    }

    /// Returns the line with the cause of a failure, or else the last three lines of `tail`; at
    /// most 400 characters.
    pub(super) fn failure_text(&self, tail: &str) -> String {
        let last = || {
            let lines: Vec<&str> = tail.lines().rev().take(3).collect();
            lines.into_iter().rev().collect::<Vec<_>>().join(" / ")
        };
        let last_output = self.error_line.clone().unwrap_or_else(last);
        if last_output.is_empty() {
            "nothing".to_owned()
        } else {
            last_output.chars().take(400).collect()
        }
    }

    /// The inner error means that the run ended with exit code 0 and no valid result.
    pub(super) fn conclude_run(
        &self,
        request: &PerplexityRequest<'_>,
        status: ExitStatus,
        tail: &str,
    ) -> Result<Result<LlamaPerplexity, String>, LlamaPerplexityError> {
        let last_output = || self.failure_text(tail);
        if let Some(tokens) = self.too_short {
            let context = request.n_ctx;
            return Err(LlamaPerplexityError::TooShort { tokens, context, needed: 2 * context });
        }
        if !status.success() {
            return Err(LlamaPerplexityError::Failed { status, last_output: last_output() });
        }
        // The program ignores this failure and ends with exit code 0.
        if self.error_line.as_ref().is_some_and(|line| line.contains("failed to decode")) {
            return Err(LlamaPerplexityError::Failed { status, last_output: last_output() });
        }
        let Some((row, chunks)) = self.select_row(request.chunks) else {
            return Ok(Err(last_output()));
        };
        let finite = |figure: f64| figure.is_finite() && figure > 0.0;
        if !finite(row.perplexity) || row.mean_nll.is_some_and(|nll| !nll.is_finite()) {
            return Err(LlamaPerplexityError::NotFinite { printed: row.printed.clone() });
        }
        if !row.is_consistent() || !row.stderr.is_finite() {
            return Ok(Err(format!("contradictory results: {}", row.printed)));
        }
        let tokens = chunks * (request.n_ctx - request.n_ctx / 2 - 1);
        let (mean_nll, perplexity) = row.precise_values();
        let (stderr, chunk_nlls) = (row.stderr, self.chunk_nlls(chunks));
        Ok(Ok(LlamaPerplexity { perplexity, stderr, mean_nll, chunk_nlls, chunks, tokens }))
    }

    /// Returns the mean negative log-likelihood of each of the first chunks; none if a row is lost.
    /// A row has the mean over its chunk and all before it, which have as many tokens each.
    fn chunk_nlls(&self, chunks: usize) -> Vec<f64> {
        let sum_until = |index: usize| {
            self.rows.get(&index).map(|row| row.precise_values().0 * (index + 1) as f64)
        };
        let sums: Option<Vec<f64>> = (0..chunks).map(sum_until).collect();
        let sums = sums.unwrap_or_default();
        let before = iter::once(&0.0).chain(&sums);
        sums.iter().zip(before).map(|(sum, before)| sum - before).collect()
    }

    /// Returns the row of the last requested chunk, and the number of chunks it covers.
    fn select_row(&self, chunks: ChunkSelection) -> Option<(&OutputRow, usize)> {
        let row = |count: usize| Some((self.rows.get(&count.checked_sub(1)?)?, count));
        match chunks {
            // Only that line proves that the program splits the text as we do.
            ChunkSelection::AllButLast(count) => self.chunks.and_then(|_| row(count)),
            ChunkSelection::First(needed) => {
                let computed = self.chunks.unwrap_or(needed);
                let last = self.final_row.as_ref().filter(|_| computed <= needed);
                row(computed.min(needed)).or_else(|| Some((last?, computed)))
            }
            ChunkSelection::All => {
                let count = self.chunks?;
                row(count).or_else(|| Some((self.final_row.as_ref()?, count)))
            }
        }
    }

    /// Parses a row: `index * n_ctx`, perplexity, mean loss and its standard error. Returns the
    /// index of the chunk and the row.
    fn parse_row(&self, line: &str) -> Option<(usize, OutputRow)> {
        let mut fields = line.split_whitespace();
        let mut next = || fields.next();
        let (start, perplexity, mean_nll, stderr) = (next()?, next()?, next()?, next()?);
        if next().is_some() {
            return None;
        }
        let start: usize = start.parse().ok()?;
        let [perplexity, mean_nll, mean_stderr]: [f64; 3] =
            [perplexity.parse().ok()?, mean_nll.parse().ok()?, stderr.parse().ok()?];
        let row = OutputRow {
            perplexity,
            mean_nll: Some(mean_nll),
            stderr: mean_stderr * perplexity,
            printed: line.trim().to_owned(),
        };
        let is_row = self.n_ctx > 0 && start.is_multiple_of(self.n_ctx);
        is_row.then(|| (start / self.n_ctx, row))
    }
}

impl OutputRow {
    /// The mean loss and the perplexity must agree within their rounding.
    fn is_consistent(&self) -> bool {
        let digits = 1e-3 + 1e-4 / self.perplexity;
        self.mean_nll.is_none_or(|nll| (nll - self.perplexity.ln()).abs() < digits)
    }

    /// Returns the mean loss and the perplexity. Both are rounded; the more precise one is used for
    /// both.
    fn precise_values(&self) -> (f64, f64) {
        const PERPLEXITY_ROUNDING: f64 = 5e-5;
        const NLL_ROUNDING: f64 = 5e-7;
        match self.mean_nll {
            Some(nll) if PERPLEXITY_ROUNDING / self.perplexity > NLL_ROUNDING => (nll, nll.exp()),
            _ => (self.perplexity.ln(), self.perplexity),
        }
    }
}

/// Parses `… Final estimate: PPL = 268.6434 +/- 5.77250` anywhere in a line.
fn parse_final_line(line: &str) -> Option<OutputRow> {
    let (_, rest) = line.split_once("Final estimate: PPL = ")?;
    let (perplexity, rest) = rest.split_once("+/-")?;
    let stderr = rest.split_whitespace().next()?;
    Some(OutputRow {
        perplexity: perplexity.trim().parse().ok()?,
        mean_nll: None,
        stderr: stderr.parse().ok()?,
        printed: format!("{perplexity}+/- {stderr}"),
    })
}

fn parse_number_after(line: &str, mark: &str) -> Option<u64> {
    let (_, rest) = line.split_once(mark)?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}
