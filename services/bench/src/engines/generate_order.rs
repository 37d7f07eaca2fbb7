//! Measures a generate order as an agent's worker runs it, and the change to another adapter.
//!
//! The worker is warm, as it is for all orders of a phase but the first.

use std::{path::Path, time::Instant};

use anyhow::{Context, ensure};
use cli::{local_models, output};
use generator::{
    GeneratorBackend, GeneratorEngineChoice, GeneratorEngineOptions, GeneratorLimits,
    GeneratorPaths, OfflineGenerator, OfflinePolicy, OfflineRequest,
};
use wire::v1;

use super::{EngineSpeeds, OrderSpeed};
use crate::flotilla_program::find_flotilla;

/// Prompts of the order.
const PROMPTS: u32 = 16;
/// Samples of each prompt.
const SAMPLES: u32 = 8;
/// Tokens of each sample.
pub(super) const NEW: u32 = 48;

/// Sequences that run at once.
pub(super) const SLOTS: u32 = 64;

/// Tokens of a prompt; each byte is one token.
pub(super) const PROMPT: usize = 96;

pub(super) fn order_title() -> String {
    format!("generate order, {PROMPTS} prompts × {SAMPLES} samples of {NEW}")
}

pub(super) fn measure_order(
    engine: &EngineSpeeds,
    choice: &GeneratorEngineChoice,
    llama_cpp: Option<&Path>,
    base: &Path,
    threads: usize,
) -> anyhow::Result<OrderSpeed> {
    output::print_message(&format!("engines: {}, {} …", engine.name, order_title()));
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let threads = u32::try_from(threads).context("count threads")?;
    let mut launch = local_models::worker_launcher(directory.path(), None, "cpu", Some(threads))?;
    launch.program = find_flotilla()?;
    "bf16".clone_into(&mut launch.dtype);
    let places = GeneratorPaths {
        gguf_cache: directory.path().join("gguf-cache"),
        gguf_cache_bytes: local_models::GGUF_CACHE_BYTES,
        converters: None,
        directory: directory.path().join("generate"),
    };
    let wanted =
        GeneratorEngineOptions { choice, llama_cpp, endpoint_model: None, endpoint_key_file: None };
    let mut backend = GeneratorBackend::select_backend(
        &wanted,
        &launch.profile,
        GeneratorLimits::from_launcher(&launch),
        places,
    )?;
    let mut base_key = String::new();
    if let GeneratorBackend::LlamaCpp(llama) = &mut backend {
        llama.dtype = formats::FloatDtype::Bf16;
        base_key = llama::local_model_key(base)?;
    }
    let policy = OfflinePolicy { base, base_key, adapter: None, adapter_key: String::new() };
    let generator = OfflineGenerator::start(&launch, &backend, policy, SLOTS)?;
    let runtime = tokio::runtime::Handle::current();
    let draw = |prompts, samples| {
        runtime.block_on(generator.generate(build_order(prompts, samples), |_, _| {}))
    };
    draw(1, 1)?;
    let began = Instant::now();
    let made = draw(PROMPTS, SAMPLES)?;
    let wall = began.elapsed().as_secs_f64();
    let tokens: u32 = made.samples.iter().map(|sample| sample.tokens).sum();
    ensure!(tokens == ORDER_TOKENS, "{} drew {tokens} tokens", engine.name);
    let tokens_per_s = f64::from(tokens) / wall;
    let began = Instant::now();
    runtime.block_on(generator.swap_adapter(None))?;
    let swap_s = began.elapsed().as_secs_f64();
    output::print_message(&format!(
        "engines: {tokens_per_s:.1} tokens/s, change of the adapter in {swap_s:.2} s"
    ));
    Ok(OrderSpeed { engine: engine.name.clone(), tokens_per_s, swap_s, limit_per_s: None })
}

const ORDER_TOKENS: u32 = PROMPTS * SAMPLES * NEW;

/// Returns the tokens per second of an order at an engine's tokens per second of prefill and of
/// decoding.
pub(super) fn limit_speed(prefill: f64, decode: f64) -> f64 {
    let (prompts, new) = (f64::from(PROMPTS) * PROMPT as f64, f64::from(ORDER_TOKENS));
    new / (prompts / prefill + new / decode)
}

fn build_order(prompts: u32, samples: u32) -> OfflineRequest {
    let request = |number: u32| v1::generate_order::Request {
        prompt_id: format!("p{number}"),
        text: prompt_text(number),
        first: 0,
        count: samples,
    };
    OfflineRequest {
        sampling: v1::Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: NEW },
        seed: 1,
        // llama.cpp would compute its probabilities twice.
        logprobs: false,
        requests: (0..prompts).map(request).collect(),
        canary: String::new(),
    }
}

fn prompt_text(number: u32) -> String {
    let letters = ('a'..='z').cycle().skip(number as usize);
    letters.step_by(number as usize % 5 + 1).take(PROMPT).collect()
}
