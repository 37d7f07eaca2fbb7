//! What can be believed of what `llama-perplexity` prints: pure. Lines of both streams come
//! glued together and with prefixes that differ between versions, so nothing is looked for at a
//! line's start.

use std::{collections::BTreeMap, process::ExitStatus};

use super::{Chunks, PerplexityError, Request, Scored};

/// Rows are kept up to here; a text of more chunks is of no use to anybody.
const ROWS_MAX: usize = 1 << 20;

/// What marks the line that says what went wrong.
const TELLING: [&str; 9] = [
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
pub(super) struct Output {
    n_ctx: usize,
    /// By the chunk's index.
    rows: BTreeMap<usize, Row>,
    last: Option<Row>,
    chunks: Option<usize>,
    too_short: Option<u64>,
    telling: Option<String>,
}

/// Running figures, as printed.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    perplexity: f64,
    mean_nll: Option<f64>,
    stderr: f64,
    printed: String,
}

impl Output {
    pub(super) fn new(n_ctx: usize) -> Self {
        Self { n_ctx, ..Self::default() }
    }

    /// Whether the line is a row.
    pub(super) fn hear(&mut self, line: &str) -> bool {
        if let Some((index, row)) = self.row(line) {
            if self.rows.len() < ROWS_MAX {
                self.rows.insert(index, row);
            }
            return true;
        }
        if let Some(last) = final_line(line) {
            self.last = Some(last);
        } else if let Some(chunks) = number_after(line, "calculating perplexity over ") {
            self.chunks = usize::try_from(chunks).ok();
        } else if let Some(tokens) = number_after(line, "tokenizes to only ") {
            self.too_short = Some(tokens);
        } else if self.telling.is_none() && TELLING.iter().any(|mark| line.contains(mark)) {
            self.telling = Some(line.trim().to_owned());
        }
        false
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn chunks(&self) -> Option<usize> {
        self.chunks
    }

    /// The line that says what went wrong, or the last ones.
    pub(super) fn telling(&self, tail: &str) -> String {
        let last = || {
            let lines: Vec<&str> = tail.lines().rev().take(3).collect();
            lines.into_iter().rev().collect::<Vec<_>>().join(" / ")
        };
        let said = self.telling.clone().unwrap_or_else(last);
        if said.is_empty() { "nothing".to_owned() } else { said.chars().take(400).collect() }
    }

    pub(super) fn conclude(
        &self,
        request: &Request<'_>,
        status: ExitStatus,
        tail: &str,
    ) -> Result<Result<Scored, String>, PerplexityError> {
        let said = || self.telling(tail);
        if let Some(tokens) = self.too_short {
            let context = request.n_ctx;
            return Err(PerplexityError::TooShort { tokens, context, needed: 2 * context });
        }
        if !status.success() {
            return Err(PerplexityError::Failed { status, said: said() });
        }
        // It goes on as if nothing had happened, and ends with code 0.
        if self.telling.as_ref().is_some_and(|line| line.contains("failed to decode")) {
            return Err(PerplexityError::Failed { status, said: said() });
        }
        let Some((row, chunks)) = self.wanted(request.chunks) else { return Ok(Err(said())) };
        let finite = |figure: f64| figure.is_finite() && figure > 0.0;
        if !finite(row.perplexity) || row.mean_nll.is_some_and(|nll| !nll.is_finite()) {
            return Err(PerplexityError::NotFinite { printed: row.printed.clone() });
        }
        if !row.agrees_with_itself() || !row.stderr.is_finite() {
            return Ok(Err(format!("figures that contradict each other: {}", row.printed)));
        }
        let tokens = chunks * (request.n_ctx - request.n_ctx / 2 - 1);
        Ok(Ok(row.scored(chunks, tokens)))
    }

    /// The figures over the chunks that count, and how many these are.
    fn wanted(&self, chunks: Chunks) -> Option<(&Row, usize)> {
        let row = |count: usize| Some((self.rows.get(&count.checked_sub(1)?)?, count));
        match chunks {
            // Without that line nobody knows that it cut the text as we did.
            Chunks::AllButOne(count) => self.chunks.and_then(|_| row(count)),
            Chunks::First(_) | Chunks::All => {
                let ((Some(count), _) | (None, Chunks::First(count))) = (self.chunks, chunks)
                else {
                    return None;
                };
                row(count).or_else(|| Some((self.last.as_ref()?, count)))
            }
        }
    }

    /// `index * n_ctx`, perplexity, mean loss and its standard error.
    fn row(&self, line: &str) -> Option<(usize, Row)> {
        let mut fields = line.split_whitespace();
        let mut next = || fields.next();
        let (start, perplexity, mean_nll, stderr) = (next()?, next()?, next()?, next()?);
        if next().is_some() {
            return None;
        }
        let start: usize = start.parse().ok()?;
        let [perplexity, mean_nll, mean_stderr]: [f64; 3] =
            [perplexity.parse().ok()?, mean_nll.parse().ok()?, stderr.parse().ok()?];
        let row = Row {
            perplexity,
            mean_nll: Some(mean_nll),
            stderr: mean_stderr * perplexity,
            printed: line.trim().to_owned(),
        };
        let is_row = self.n_ctx > 0 && start.is_multiple_of(self.n_ctx);
        is_row.then(|| (start / self.n_ctx, row))
    }
}

impl Row {
    fn agrees_with_itself(&self) -> bool {
        let digits = 1e-3 + 1e-4 / self.perplexity;
        self.mean_nll.is_none_or(|nll| (nll - self.perplexity.ln()).abs() < digits)
    }

    /// Of the two figures, each rounded, the one that says more.
    fn scored(&self, chunks: usize, tokens: usize) -> Scored {
        const PERPLEXITY_ROUNDING: f64 = 5e-5;
        const NLL_ROUNDING: f64 = 5e-7;
        let (mean_nll, perplexity) = match self.mean_nll {
            Some(nll) if PERPLEXITY_ROUNDING / self.perplexity > NLL_ROUNDING => (nll, nll.exp()),
            _ => (self.perplexity.ln(), self.perplexity),
        };
        Scored { perplexity, stderr: self.stderr, mean_nll, chunks, tokens }
    }
}

/// `… Final estimate: PPL = 268.6434 +/- 5.77250`, wherever in the line.
fn final_line(line: &str) -> Option<Row> {
    let (_, rest) = line.split_once("Final estimate: PPL = ")?;
    let (perplexity, rest) = rest.split_once("+/-")?;
    let stderr = rest.split_whitespace().next()?;
    Some(Row {
        perplexity: perplexity.trim().parse().ok()?,
        mean_nll: None,
        stderr: stderr.parse().ok()?,
        printed: format!("{perplexity}+/- {stderr}"),
    })
}

fn number_after(line: &str, mark: &str) -> Option<u64> {
    let (_, rest) = line.split_once(mark)?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}
