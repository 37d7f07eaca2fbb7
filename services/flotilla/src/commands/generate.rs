//! `flotilla generate`: samples of one prompt, without a fleet.

use std::{path::Path, process::ExitCode};

use anyhow::{Context, bail};
use engine::{Dtype, Finish, Prompt, Request};
use generator::{Backend, BaseDtype, Choice, Limits, Made, Once, Places, Wanted};
use runtime::Launch;
use serde_json::json;
use wire::{sample_seed, v1};

use crate::{cli::GenerateArgs, local, output};

/// Sequences run at once.
const SLOTS: u32 = 64;

/// The prompt's, as seeds are derived from it.
const PROMPT_ID: &str = "prompt";

pub(crate) async fn generate(args: &GenerateArgs, json: bool) -> anyhow::Result<ExitCode> {
    check(args)?;
    let made = match &args.engine {
        Choice::Candle => by_candle(args)?,
        _ => by_worker(args).await?,
    };
    if !made.caveat.is_empty() {
        output::say(&format!("caveat: {}", made.caveat));
    }
    if json {
        let samples: Vec<_> = made.samples.iter().map(sample).collect();
        output::print_json(&json!({
            "prompt": args.prompt,
            "samples": samples,
            "engine": made.engine,
            "caveat": made.caveat,
        }))?;
    } else {
        made.samples.iter().for_each(|sample| output::print(&sample.text));
    }
    Ok(ExitCode::SUCCESS)
}

fn by_candle(args: &GenerateArgs) -> anyhow::Result<Made> {
    let dtype = candle_dtype(args.dtype)?;
    let (model, tokenizer) =
        engine::load(&local::model(&args.model)?, args.adapter.as_deref(), &args.device, dtype)?;
    let request = Request {
        tag: (),
        prompt: Prompt::Text(args.prompt.clone()),
        seeds: (0..args.n).map(|index| sample_seed(args.seed, PROMPT_ID, index)).collect(),
        sampling: engine::Sampling {
            temperature: args.temperature,
            top_k: args.top_k as usize,
            top_p: args.top_p,
            max_new_tokens: args.max_new_tokens as usize,
        },
    };
    let slots = SLOTS as usize;
    let mut answers = engine::generate_all(&model, &tokenizer, slots, vec![request], |_, _| {})?;
    let completions = answers.pop().context("the engine gave no answer")??;
    let samples = completions.into_iter().map(|done| v1::samples::Sample {
        prompt_id: PROMPT_ID.into(),
        index: u32::try_from(done.index).unwrap_or(u32::MAX),
        text: done.text,
        tokens: u32::try_from(done.tokens.len()).unwrap_or(u32::MAX),
        finish: match done.finish {
            Finish::Stop => v1::samples::Finish::Stop.into(),
            Finish::Length => v1::samples::Finish::Length.into(),
        },
        logprob: Some(done.logprob),
    });
    let engine = model.engine();
    Ok(Made { samples: samples.collect(), engine, caveat: String::new() })
}

fn candle_dtype(dtype: Option<BaseDtype>) -> anyhow::Result<Dtype> {
    match dtype {
        None | Some(BaseDtype::F32) => Ok(Dtype::F32),
        Some(BaseDtype::Bf16) => Ok(Dtype::Bf16),
        Some(BaseDtype::F16) => bail!("--dtype f16: candle holds weights as f32 or bf16 (A101)"),
    }
}

/// As an agent would: a worker of its own, which ends with this.
async fn by_worker(args: &GenerateArgs) -> anyhow::Result<Made> {
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let profile = args.profile.as_deref();
    let launch = local::launch(directory.path(), profile, &args.device, args.threads)?;
    let backend = backend(args, &launch)?;
    let base = local::model(&args.model)?;
    let base = base.canonicalize().with_context(|| at(&base))?;
    let adapter = match &args.adapter {
        Some(path) => Some(path.canonicalize().with_context(|| at(path))?),
        None => None,
    };
    let request = v1::generate_order::Request {
        prompt_id: PROMPT_ID.into(),
        text: args.prompt.clone(),
        first: 0,
        count: args.n,
    };
    let once = Once {
        base_key: match &backend {
            Backend::LlamaCpp(_) => llama::local_key(&base)?,
            Backend::Candle | Backend::Endpoint(_) => String::new(),
        },
        base: &base,
        // Named after its place: what an endpoint was told to load stays loaded there.
        adapter_key: adapter.as_ref().map_or(String::new(), |path| {
            wire::Digest::of(path.as_os_str().as_encoded_bytes()).to_string()
        }),
        adapter: adapter.as_deref(),
        slots: args.n.min(SLOTS),
        sampling: v1::Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            max_new_tokens: args.max_new_tokens,
        },
        seed: args.seed,
        logprobs: true,
        requests: vec![request],
    };
    generator::generate_once(&launch, &backend, once, |_, _| {}).await
}

fn at(path: &Path) -> String {
    format!("find {}", path.display())
}

fn backend(args: &GenerateArgs, launch: &Launch) -> anyhow::Result<Backend> {
    let places = Places {
        shelf: local::shelf()?,
        shelf_bytes: local::SHELF_BYTES,
        directory: launch.directory.join("generate"),
    };
    let wanted = Wanted {
        choice: &args.engine,
        llama_cpp: args.llama_cpp.as_deref(),
        endpoint_model: args.endpoint_model.as_deref(),
        endpoint_key_file: args.endpoint_key_file.as_deref(),
    };
    let mut backend = Backend::choose(&wanted, &launch.profile, Limits::of(launch), places)?;
    if let (Backend::LlamaCpp(llama), Some(dtype)) = (&mut backend, args.dtype) {
        llama.dtype = dtype;
    }
    Ok(backend)
}

fn check(args: &GenerateArgs) -> anyhow::Result<()> {
    if !(0.0..=10.0).contains(&args.temperature) {
        bail!("--temperature {}: must be from 0 to 10 (A101)", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--top-p {}: must be above 0 and at most 1 (A101)", args.top_p);
    }
    Ok(())
}

fn sample(sample: &v1::samples::Sample) -> serde_json::Value {
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
