//! A measurement without a fleet, by a worker as an agent runs it.

use agent::WorkerLauncher;
use wire::v1;

use crate::{
    llama_cpp::LlamaCppEvaluator, measurement::MeasurementInput, messages::MeasureRequest,
    worker_call::call_worker,
};

/// A perplexity that a worker measured, and the cost of its process.
#[derive(Debug, Clone)]
pub struct OfflineMeasurement {
    pub perplexity: f64,
    /// The mean negative log-likelihood, in nats per token.
    pub mean_nll: f64,
    pub tokens: u64,
    /// The engine, its version, device and weight type.
    pub engine: String,
    /// The perplexity of a short text on the device, divided by that on the CPU; `None` on the CPU.
    pub canary: Option<f64>,
    pub process: v1::eval::Process,
}

/// Measures in a process of its own, with llama.cpp, or without one with the embedded engine.
/// `base_key` identifies the base in the cache of converted models.
///
/// # Errors
/// When the worker refuses the measurement, hangs or dies (with a known cause, if its log shows
/// one), or llama.cpp computes wrong logits on its device.
pub async fn measure_in_worker(
    launch: &WorkerLauncher,
    source: &MeasurementInput,
    base_key: &str,
    llama_cpp: Option<&LlamaCppEvaluator>,
) -> anyhow::Result<OfflineMeasurement> {
    let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let request = MeasureRequest {
        base: source.base.clone(),
        base_key: base_key.to_owned(),
        adapter: source.adapter.clone(),
        text: source.text.clone(),
        format: source.format,
        n_ctx: to_u32(source.n_ctx),
        stride: to_u32(source.stride),
        chunks: to_u32(source.chunks),
        llama_cpp: llama_cpp.cloned(),
    };
    let measured = call_worker(launch, &request, |_| ()).await?;
    Ok(OfflineMeasurement {
        perplexity: measured.perplexity,
        mean_nll: measured.mean_nll,
        tokens: measured.tokens,
        engine: measured.engine,
        canary: (measured.canary > 0.0).then_some(measured.canary),
        process: measured.process,
    })
}
