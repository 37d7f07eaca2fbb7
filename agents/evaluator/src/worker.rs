//! The measuring process: one text, one set of figures, then it is gone.

use std::time::{Duration, Instant};

use engine::Dtype;
use formats::convert::ConvertError;
use llama::PerplexityError;
use runtime::{Inbox, Responder};

use crate::{
    calls::{Answer, Blame, Done, Measure, Measured},
    canary::WrongLogits,
    candle,
    figures::Meter,
    llama_cpp::{self, Step},
    source::{Figures, Source},
};

/// Between two words to the agent that are not about chunks.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Answers one call and ends.
pub fn work(device: &str, dtype: Dtype) {
    let inbox: Inbox<Measure> = Inbox::open();
    let Some(call) = inbox.next() else { return };
    let meter = Meter::start();
    let respond = call.respond.clone();
    let answer = match measure(&call.request, device, dtype, &respond) {
        Ok(figures) => Answer::Measured(Box::new(measured(figures, &meter))),
        Err(error) => Answer::Failed { blame: blame(&error), message: format!("{error:#}") },
    };
    respond.reply(&answer);
}

fn measure(
    call: &Measure,
    device: &str,
    dtype: Dtype,
    respond: &Responder,
) -> anyhow::Result<Figures> {
    let [n_ctx, stride, chunks] = [call.n_ctx, call.stride, call.chunks].map(|n| n as usize);
    let source = Source {
        base: call.base.clone(),
        adapter: call.adapter.clone(),
        text: call.text.clone(),
        format: call.format,
        n_ctx,
        stride,
        chunks,
    };
    let mut told = Told::new(respond);
    match &call.llama_cpp {
        Some(llama) if source.protocol() == "llama" => {
            llama_cpp::measure(&source, &call.base_key, llama, &mut |step| told.hear(&step))
        }
        other => {
            if other.is_some() {
                candle::check_fits(&source)?;
            }
            candle::measure(&source, device, dtype, |done, total| {
                told.hear(&Step::Chunks(done, total));
            })
        }
    }
}

/// What the agent was last told, and when: it must hear something now and then, and need not
/// hear the same again and again.
struct Told<'a> {
    respond: &'a Responder,
    chunks: (usize, usize),
    at: Option<Instant>,
}

impl<'a> Told<'a> {
    fn new(respond: &'a Responder) -> Self {
        Self { respond, chunks: (0, 0), at: None }
    }

    fn hear(&mut self, step: &Step<'_>) {
        let is_due = self.at.is_none_or(|at| at.elapsed() >= SAY_EVERY);
        let (is_new, note) = match *step {
            Step::Chunks(done, total) => {
                let is_new = self.chunks != (done, total);
                self.chunks = (done, total);
                (is_new, "")
            }
            Step::Note(note) => (false, note),
        };
        if is_due || is_new {
            self.at = Some(Instant::now());
            let (done, total) = self.chunks;
            let (chunks, total) = (count(done), count(total));
            self.respond.progress(&Done { chunks, total, note: note.to_owned() });
        }
    }
}

fn measured(figures: Figures, meter: &Meter) -> Measured {
    Measured {
        mean_nll: figures.mean_nll,
        perplexity: figures.perplexity,
        stderr: figures.stderr,
        // Only for a model that is a file, which no order has.
        bits_per_byte: figures.bits_per_byte.unwrap_or(0.0),
        tokens: figures.tokens as u64,
        chunks: count(figures.chunks),
        engine: figures.engine,
        protocol: figures.protocol.to_owned(),
        tokenizer: figures.tokenizer.map(|digest| digest.to_string()).unwrap_or_default(),
        canary: figures.canary.unwrap_or(0.0),
        process: meter.read(),
    }
}

/// Who is at fault: what would fail wherever it is tried is the content's.
fn blame(error: &anyhow::Error) -> Blame {
    if error.chain().any(|cause| cause.is::<WrongLogits>()) {
        return Blame::Box;
    }
    // A file that cannot be read or written says nothing of what is in it.
    if error.chain().any(|cause| cause.is::<std::io::Error>()) {
        return Blame::Work;
    }
    let is_content = error.chain().any(|cause| {
        let of_text = matches!(
            cause.downcast_ref(),
            Some(PerplexityError::TooShort { .. } | PerplexityError::Tokenizers { .. })
        );
        of_text || cause.is::<ConvertError>() || cause.is::<engine::PerplexityError>()
    });
    if is_content { Blame::Content } else { Blame::Work }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn what_fails_everywhere_is_the_content_s_fault_and_wrong_logits_are_the_box_s() {
        let of = |error: anyhow::Error| blame(&Err::<(), _>(error).context("measure").unwrap_err());
        let wrong = WrongLogits {
            version: "1".into(),
            device: "ROCm0".into(),
            on_device: 9.0,
            on_cpu: 3.0,
            ratio: 3.0,
        };
        assert_eq!(of(wrong.into()), Blame::Box);
        let mismatch = PerplexityError::Tokenizers { expected: 3, found: 4 };
        assert_eq!(of(mismatch.into()), Blame::Content);
        let short = engine::PerplexityError::TooShort { tokens: 1, context: 8, needed: 16 };
        assert_eq!(of(short.into()), Blame::Content);
        let hung = PerplexityError::Silent { limit: SAY_EVERY, said: String::new() };
        assert_eq!(of(hung.into()), Blame::Work);
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert_eq!(of(full.into()), Blame::Work);
    }
}
