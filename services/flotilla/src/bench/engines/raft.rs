//! A generate order as an agent's worker does it, start included: each prompt's samples begin with
//! its one prefill where the engine can do that.

use std::{path::Path, time::Instant};

use anyhow::{Context, ensure};
use generator::{Backend, BaseDtype, Choice, Limits, Once, Places, Wanted};
use wire::v1;

use super::{Engine, Sampled};
use crate::{local, output};

const PROMPTS: u32 = 16;
const SAMPLES: u32 = 8;
const NEW: u32 = 48;

/// As many sequences at once.
const SLOTS: u32 = 64;

/// Of a prompt: one token a byte.
const PROMPT: usize = 96;

/// For the report.
pub(super) fn title() -> String {
    format!("generate order, {PROMPTS} prompts × {SAMPLES} samples of {NEW}")
}

/// `base`: what the engine reads, a directory or a GGUF file.
pub(super) fn measure(
    engine: &Engine,
    choice: &Choice,
    llama_cpp: Option<&Path>,
    base: &Path,
    threads: usize,
) -> anyhow::Result<Sampled> {
    output::say(&format!("engines: {}, {} …", engine.name, title()));
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let threads = u32::try_from(threads).context("count threads")?;
    let mut launch = local::launch(directory.path(), None, "cpu", Some(threads))?;
    "bf16".clone_into(&mut launch.dtype);
    let places = Places {
        shelf: directory.path().join("shelf"),
        shelf_bytes: local::SHELF_BYTES,
        directory: directory.path().join("generate"),
    };
    let wanted = Wanted { choice, llama_cpp, endpoint_model: None, endpoint_key_file: None };
    let mut backend = Backend::choose(&wanted, &launch.profile, Limits::of(&launch), places)?;
    let mut base_key = String::new();
    if let Backend::LlamaCpp(llama) = &mut backend {
        llama.dtype = BaseDtype::Bf16;
        base_key = llama::local_key(base)?;
    }
    let request = |number: u32| v1::generate_order::Request {
        prompt_id: format!("p{number}"),
        text: prompt(number),
        first: 0,
        count: SAMPLES,
    };
    let once = Once {
        base,
        base_key,
        adapter: None,
        adapter_key: String::new(),
        slots: SLOTS,
        sampling: v1::Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: NEW },
        seed: 1,
        // The peer would sort its vocabulary for each token.
        logprobs: false,
        requests: (0..PROMPTS).map(request).collect(),
    };
    let began = Instant::now();
    let made = generator::generate_once(&launch, &backend, once, |_, _| {});
    let made = tokio::runtime::Handle::current().block_on(made)?;
    let wall = began.elapsed().as_secs_f64();
    let tokens: u32 = made.samples.iter().map(|sample| sample.tokens).sum();
    ensure!(tokens == PROMPTS * SAMPLES * NEW, "{} drew {tokens} tokens", engine.name);
    let tokens_per_s = f64::from(tokens) / wall;
    output::say(&format!("engines: {tokens_per_s:.1} tokens/s"));
    Ok(Sampled { engine: engine.name.clone(), tokens_per_s })
}

/// Letters, no two alike.
fn prompt(number: u32) -> String {
    let letters = ('a'..='z').cycle().skip(number as usize);
    letters.step_by(number as usize % 5 + 1).take(PROMPT).collect()
}
