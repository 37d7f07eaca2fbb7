//! The measuring process: it measures one text and exits.

use std::time::{Duration, Instant};

use agent::{CallInbox, CallResponder};
use engine::MatrixDtype;
use formats::convert::ConvertError;
use llama::LlamaPerplexityError;

use crate::{
    candle,
    device_check::WrongLogits,
    llama_cpp_measurement::{self, MeasureStep},
    measurement::{MeasurementInput, PerplexityResult},
    messages::{MeasureAnswer, MeasureFault, MeasureProgress, MeasureRequest, MeasureResult},
    process_stats::ProcessMeter,
};

/// The interval between two progress messages that do not report a new chunk.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);

/// Answers one measurement request from stdin and returns.
pub fn run_eval_worker(device: &str, dtype: MatrixDtype) {
    let inbox: CallInbox<MeasureRequest> = CallInbox::read_stdin();
    let Some(call) = inbox.next() else { return };
    let meter = ProcessMeter::start();
    let respond = call.responder.clone();
    let answer = match run_measurement(&call.request, device, dtype, &respond) {
        Ok(figures) => MeasureAnswer::Measured(Box::new(build_result(figures, &meter))),
        Err(error) => {
            MeasureAnswer::Failed { blame: classify_fault(&error), message: format!("{error:#}") }
        }
    };
    respond.send_reply(&answer);
}

fn run_measurement(
    call: &MeasureRequest,
    device: &str,
    dtype: MatrixDtype,
    respond: &CallResponder,
) -> anyhow::Result<PerplexityResult> {
    let [n_ctx, stride, chunks] = [call.n_ctx, call.stride, call.chunks].map(|n| n as usize);
    let source = MeasurementInput {
        base: call.base.clone(),
        adapter: call.adapter.clone(),
        text: call.text.clone(),
        format: call.format,
        n_ctx,
        stride,
        chunks,
    };
    let mut throttle = ProgressThrottle::new(respond);
    match &call.llama_cpp {
        Some(llama) if source.protocol_name() == "llama" => {
            llama_cpp_measurement::measure_perplexity(&source, &call.base_key, llama, &mut |step| {
                throttle.report_step(&step);
            })
        }
        other => {
            if other.is_some() {
                candle::check_memory(&source)?;
            }
            candle::measure_perplexity(&source, device, dtype, |done, total| {
                throttle.report_step(&MeasureStep::Chunks(done, total));
            })
        }
    }
}

/// A throttle for progress messages: the agent must receive a message from time to time, and needs
/// the same content only once per interval.
struct ProgressThrottle<'a> {
    responder: &'a CallResponder,
    chunks: (usize, usize),
    sent_at: Option<Instant>,
}

impl<'a> ProgressThrottle<'a> {
    fn new(responder: &'a CallResponder) -> Self {
        Self { responder, chunks: (0, 0), sent_at: None }
    }

    fn report_step(&mut self, step: &MeasureStep<'_>) {
        let is_due = self.sent_at.is_none_or(|at| at.elapsed() >= NOTE_INTERVAL);
        let (is_new, note) = match *step {
            MeasureStep::Chunks(done, total) => {
                let is_new = self.chunks != (done, total);
                self.chunks = (done, total);
                (is_new, "")
            }
            MeasureStep::Note(note) => (false, note),
        };
        if is_due || is_new {
            self.sent_at = Some(Instant::now());
            let (done, total) = self.chunks;
            let (chunks, total) = (saturating_count(done), saturating_count(total));
            self.responder.send_progress(&MeasureProgress { chunks, total, note: note.to_owned() });
        }
    }
}

fn build_result(figures: PerplexityResult, meter: &ProcessMeter) -> MeasureResult {
    MeasureResult {
        mean_nll: figures.mean_nll,
        perplexity: figures.perplexity,
        stderr: figures.stderr,
        // Missing only for a GGUF model, which no order has.
        bits_per_byte: figures.bits_per_byte.unwrap_or(0.0),
        tokens: figures.tokens as u64,
        chunks: saturating_count(figures.chunks),
        engine: figures.engine,
        protocol: figures.protocol.to_owned(),
        tokenizer: figures.tokenizer.map(|digest| digest.to_string()).unwrap_or_default(),
        canary: figures.canary.unwrap_or(0.0),
        process: meter.read(),
    }
}

/// The content is at fault if the error would occur on every host.
fn classify_fault(error: &anyhow::Error) -> MeasureFault {
    if error.chain().any(|cause| cause.is::<WrongLogits>()) {
        return MeasureFault::Box;
    }
    // An I/O error proves nothing about the content of the file.
    if error.chain().any(|cause| cause.is::<std::io::Error>()) {
        return MeasureFault::Work;
    }
    let is_content = error.chain().any(|cause| {
        let of_text = matches!(
            cause.downcast_ref(),
            Some(LlamaPerplexityError::TooShort { .. } | LlamaPerplexityError::Tokenizers { .. })
        );
        of_text || cause.is::<ConvertError>() || cause.is::<engine::PerplexityError>()
    });
    if is_content { MeasureFault::Content } else { MeasureFault::Work }
}

fn saturating_count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn errors_on_every_host_blame_the_content_and_wrong_logits_blame_the_host() {
        let of = |error: anyhow::Error| {
            classify_fault(&Err::<(), _>(error).context("measure").unwrap_err())
        };
        let wrong = WrongLogits {
            version: "1".into(),
            device: "ROCm0".into(),
            on_device: 9.0,
            on_cpu: 3.0,
            ratio: 3.0,
        };
        assert_eq!(of(wrong.into()), MeasureFault::Box);
        let mismatch = LlamaPerplexityError::Tokenizers { expected: 3, found: 4 };
        assert_eq!(of(mismatch.into()), MeasureFault::Content);
        let short = engine::PerplexityError::TooShort { tokens: 1, context: 8, needed: 16 };
        assert_eq!(of(short.into()), MeasureFault::Content);
        let hung =
            LlamaPerplexityError::Silent { limit: NOTE_INTERVAL, last_output: String::new() };
        assert_eq!(of(hung.into()), MeasureFault::Work);
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert_eq!(of(full.into()), MeasureFault::Work);
    }
}
