//! `flotilla generate`: samples of one prompt, without a fleet.

use std::path::Path;

use agent::WorkerLauncher;
use anyhow::{Context, bail};
use engine::{FinishReason, PromptInput, PromptRequest};
use formats::{ConversionDtype, FloatDtype};
use generator::{
    GeneratorBackend, GeneratorEngineChoice, GeneratorLimits, GeneratorPaths, OfflineGenerator,
    OfflinePolicy, OfflineRequest, OfflineSamples,
};
use serde_json::json;
use wire::{derive_sample_seed, v1};

use crate::{args::GenerateArgs, local_models, output};

const SLOTS_MAX: u32 = 64;

/// Id of the prompt, from which the seeds of samples are derived.
const PROMPT_ID: &str = "prompt";

pub(crate) async fn generate_samples(args: &GenerateArgs, json: bool) -> anyhow::Result<()> {
    check_sampling(args)?;
    let made = match &args.engine {
        GeneratorEngineChoice::Candle => generate_with_candle(args)?,
        _ => generate_with_worker(args).await?,
    };
    if !made.caveat.is_empty() {
        output::print_message(&format!("caveat: {}", made.caveat));
    }
    if json {
        let samples: Vec<_> = made.samples.iter().map(sample_json).collect();
        output::print_json(&json!({
            "prompt": args.prompt,
            "samples": samples,
            "engine": made.engine,
            "caveat": made.caveat,
        }))?;
    } else {
        made.samples.iter().for_each(|sample| output::print_text(&sample.text));
    }
    Ok(())
}

fn generate_with_candle(args: &GenerateArgs) -> anyhow::Result<OfflineSamples> {
    let dtype = local_models::candle_dtype(args.dtype.unwrap_or(ConversionDtype::F32))?;
    let (model, tokenizer) = engine::load_model(
        &local_models::find_local_model(&args.model)?,
        args.adapter.as_deref(),
        &args.device,
        dtype,
    )?;
    let model = model.into_packed()?;
    let request = PromptRequest {
        tag: (),
        prompt: PromptInput::Text(args.prompt.clone()),
        seeds: (0..args.n).map(|index| derive_sample_seed(args.seed, PROMPT_ID, index)).collect(),
        sampling: engine::SamplingParameters {
            temperature: args.temperature,
            top_k: args.top_k as usize,
            top_p: args.top_p,
            max_new_tokens: args.max_new_tokens as usize,
        },
    };
    let slots = SLOTS_MAX as usize;
    let mut answers = engine::generate_all(&model, &tokenizer, slots, vec![request], |_, _| {})?;
    let completions = answers.pop().context("the engine returned no completion")??;
    let samples = completions.into_iter().map(|done| v1::samples::Sample {
        prompt_id: PROMPT_ID.into(),
        logprob: Some(done.logprob()),
        index: u32::try_from(done.index).unwrap_or(u32::MAX),
        text: done.text,
        tokens: u32::try_from(done.tokens.len()).unwrap_or(u32::MAX),
        finish: match done.finish {
            FinishReason::Stop => v1::samples::Finish::Stop.into(),
            FinishReason::Length => v1::samples::Finish::Length.into(),
        },
        ..Default::default()
    });
    let engine = model.engine_name();
    Ok(OfflineSamples {
        samples: samples.collect(),
        engine,
        caveat: String::new(),
        canary: Vec::new(),
    })
}

/// Generates in a worker process, as an agent does; the worker ends with this process.
async fn generate_with_worker(args: &GenerateArgs) -> anyhow::Result<OfflineSamples> {
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let profile = args.profile.as_deref();
    let launch =
        local_models::worker_launcher(directory.path(), profile, &args.device, args.threads)?;
    let backend = choose_backend(args, &launch)?;
    let find =
        |path: &Path| path.canonicalize().with_context(|| format!("find {}", path.display()));
    let base = find(&local_models::find_local_model(&args.model)?)?;
    let adapter = args.adapter.as_deref().map(find).transpose()?;
    let request = v1::generate_order::Request {
        prompt_id: PROMPT_ID.into(),
        text: args.prompt.clone(),
        first: 0,
        count: args.n,
    };
    let policy = OfflinePolicy {
        base_key: match &backend {
            GeneratorBackend::LlamaCpp(_) => llama::local_model_key(&base)?,
            GeneratorBackend::Candle | GeneratorBackend::Endpoint(_) => String::new(),
        },
        base: &base,
        // The key is derived from the path, because an endpoint keeps an adapter loaded under its
        // key.
        adapter_key: adapter.as_ref().map_or(String::new(), |path| {
            wire::Digest::hash_bytes(path.as_os_str().as_encoded_bytes()).to_string()
        }),
        adapter: adapter.as_deref(),
    };
    let generator = OfflineGenerator::start(&launch, &backend, policy, args.n.min(SLOTS_MAX))?;
    let request = OfflineRequest {
        sampling: v1::Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            max_new_tokens: args.max_new_tokens,
        },
        seed: args.seed,
        logprobs: true,
        requests: vec![request],
        canary: String::new(),
    };
    generator.generate(request, |_, _| {}).await
}

fn choose_backend(
    args: &GenerateArgs,
    launch: &WorkerLauncher,
) -> anyhow::Result<GeneratorBackend> {
    let places = GeneratorPaths {
        gguf_cache: local_models::gguf_cache_directory()?,
        gguf_cache_bytes: local_models::GGUF_CACHE_BYTES,
        converters: args.converters.find_converters()?,
        directory: launch.directory.join("generate"),
    };
    let mut backend = GeneratorBackend::select_backend(
        &args.tools.engine_options(&args.engine),
        &launch.profile,
        GeneratorLimits::from_launcher(launch),
        places,
    )?;
    if let (GeneratorBackend::LlamaCpp(llama), Some(dtype)) = (&mut backend, args.dtype) {
        let known = FloatDtype::from_name(dtype.name());
        llama.dtype = known.context(
            "--dtype q8_0: llama.cpp generates with f32, f16 or bf16 here; --engine candle \
             supports q8_0 (A101)",
        )?;
    }
    Ok(backend)
}

fn check_sampling(args: &GenerateArgs) -> anyhow::Result<()> {
    if !(0.0..=10.0).contains(&args.temperature) {
        bail!("--temperature {}: must be from 0 to 10 (A101)", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--top-p {}: must be above 0 and at most 1 (A101)", args.top_p);
    }
    Ok(())
}

fn sample_json(sample: &v1::samples::Sample) -> serde_json::Value {
    let finish = match sample.finish() {
        v1::samples::Finish::Stop => "stop",
        v1::samples::Finish::Length => "length",
        v1::samples::Finish::Unspecified => "",
    };
    json!({
        "index": sample.index,
        "text": sample.text,
        "tokens": sample.tokens,
        "logprob": sample.logprob,
        "finish": finish,
    })
}
