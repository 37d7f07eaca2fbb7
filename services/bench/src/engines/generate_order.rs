//! Measures a generate order as an agent's worker runs it, including the start of the worker.
//!
//! All samples of a prompt share one prefill if the engine supports that.

use std::{path::Path, time::Instant};

use anyhow::{Context, ensure};
use cli::{local_models, output};
use generator::{
    GeneratorBackend, GeneratorEngineChoice, GeneratorEngineOptions, GeneratorLimits,
    GeneratorPaths, OfflineRequest,
};
use wire::v1;

use super::{EngineSpeeds, OrderSpeed};
use crate::flotilla_program::find_flotilla;

/// Prompts of the order.
const PROMPTS: u32 = 16;
/// Samples of each prompt.
const SAMPLES: u32 = 8;
/// Tokens of each sample.
const NEW: u32 = 48;

/// Sequences that run at once.
const SLOTS: u32 = 64;

/// Tokens of a prompt; each byte is one token.
const PROMPT: usize = 96;

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
        gguf_cache: directory.path().join("shelf"),
        gguf_cache_bytes: local_models::GGUF_CACHE_BYTES,
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
    let request = |number: u32| v1::generate_order::Request {
        prompt_id: format!("p{number}"),
        text: prompt_text(number),
        first: 0,
        count: SAMPLES,
    };
    let once = OfflineRequest {
        base,
        base_key,
        adapter: None,
        adapter_key: String::new(),
        slots: SLOTS,
        sampling: v1::Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: NEW },
        seed: 1,
        // llama.cpp would sort its vocabulary for each token.
        logprobs: false,
        requests: (0..PROMPTS).map(request).collect(),
    };
    let began = Instant::now();
    let made = generator::generate_offline(&launch, &backend, once, |_, _| {});
    let made = tokio::runtime::Handle::current().block_on(made)?;
    let wall = began.elapsed().as_secs_f64();
    let tokens: u32 = made.samples.iter().map(|sample| sample.tokens).sum();
    ensure!(tokens == PROMPTS * SAMPLES * NEW, "{} drew {tokens} tokens", engine.name);
    let tokens_per_s = f64::from(tokens) / wall;
    output::print_message(&format!("engines: {tokens_per_s:.1} tokens/s"));
    Ok(OrderSpeed { engine: engine.name.clone(), tokens_per_s })
}

fn prompt_text(number: u32) -> String {
    let letters = ('a'..='z').cycle().skip(number as usize);
    letters.step_by(number as usize % 5 + 1).take(PROMPT).collect()
}
