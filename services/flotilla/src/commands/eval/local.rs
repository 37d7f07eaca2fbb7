//! `flotilla eval local`: a model measured here, without a fleet.

use std::time::Duration;

use anyhow::{Context, bail};
use evaluator::{Dtype, Figures, Format, Limits, LlamaCpp, Places, Source, Step};
use hardware::Profile;
use serde_json::json;
use wire::Digest;

use crate::{
    cli::{EvalLocalArgs, LocalDtype, LocalEngine},
    local, output,
};

/// A llama.cpp that finishes no chunk for so long is hung.
const SILENCE: Duration = Duration::from_secs(900);

pub(super) fn local(args: EvalLocalArgs, json: bool) -> anyhow::Result<()> {
    let lines = args.text.extension().is_some_and(|extension| extension == "jsonl");
    let source = Source {
        base: local::model(&args.model)?,
        adapter: args.adapter.clone(),
        text: args.text.clone(),
        format: if lines { Format::Documents } else { Format::Text },
        n_ctx: args.n_ctx as usize,
        stride: args.stride as usize,
        chunks: args.chunks as usize,
    };
    let bar = indicatif::ProgressBar::new(0);
    let chunks = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let figures = match args.engine {
        LocalEngine::Candle => {
            let dtype = candle_dtype(args.dtype)?;
            evaluator::measure_with_candle(&source, &args.device, dtype, chunks)
        }
        LocalEngine::LlamaCpp => with_llama_cpp(&source, &args, &mut |step| match step {
            Step::Chunks(done, total) => chunks(done, total),
            Step::Note(note) => bar.set_message(note.to_owned()),
        }),
    };
    let figures = figures.with_context(|| format!("measure {}", source.text.display()))?;
    bar.finish_and_clear();
    let bytes =
        std::fs::read(&source.text).with_context(|| format!("read {}", source.text.display()))?;
    print(&source, &figures, Digest::of(&bytes), json)
}

fn candle_dtype(dtype: LocalDtype) -> anyhow::Result<engine::Dtype> {
    match dtype {
        LocalDtype::F32 => Ok(engine::Dtype::F32),
        LocalDtype::Bf16 => Ok(engine::Dtype::Bf16),
        LocalDtype::F16 | LocalDtype::Q8_0 => {
            bail!(
                "candle holds weights as f32 or bf16: pass one of these, or --engine llama.cpp (A101)"
            )
        }
    }
}

fn with_llama_cpp(
    source: &Source,
    args: &EvalLocalArgs,
    progress: &mut dyn FnMut(Step<'_>),
) -> anyhow::Result<Figures> {
    let profile = Profile::choose(args.profile.as_deref()).context("choose the profile")?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let canaries = local::cache_directory()?.join("llama.cpp-canaries.json");
    let places = Places { shelf: local::shelf()?, canaries };
    let limits = Limits {
        threads: args.threads.map_or(cores, |threads| threads as usize),
        silence: SILENCE,
        shelf_bytes: local::SHELF_BYTES,
        repeat_log: false,
    };
    let llama = LlamaCpp::find(args.llama_cpp.as_deref(), &profile, places, limits)?;
    let dtype = match args.dtype {
        LocalDtype::F32 => Dtype::F32,
        LocalDtype::F16 => Dtype::F16,
        LocalDtype::Bf16 => Dtype::Bf16,
        LocalDtype::Q8_0 => Dtype::Q8_0,
    };
    let key = llama::local_key(&source.base)?;
    evaluator::measure_with_llama_cpp(source, &key, &LlamaCpp { dtype, ..llama }, progress)
}

fn print(source: &Source, figures: &Figures, text: Digest, json: bool) -> anyhow::Result<()> {
    if json {
        return output::print_json(&json!({
            "perplexity": figures.perplexity,
            "stderr": figures.stderr,
            "mean_nll": figures.mean_nll,
            "bits_per_byte": figures.bits_per_byte,
            "tokens": figures.tokens,
            "chunks": figures.chunks,
            "engine": figures.engine,
            "protocol": figures.protocol,
            "n_ctx": source.n_ctx,
            "stride": source.stride,
            "tokenizer": figures.tokenizer.map(|digest| digest.to_string()),
            "text": text.to_string(),
            "canary": figures.canary,
        }));
    }
    let bits = match figures.bits_per_byte {
        Some(bits) => format!("{bits:.6} bits/byte"),
        None => "bits/byte unknown".to_owned(),
    };
    let protocol = match source.stride {
        _ if figures.protocol == "documents" => "documents".to_owned(),
        0 => format!("{} protocol, context {}", figures.protocol, source.n_ctx),
        stride => format!("{} window of {}, stride {stride}", figures.protocol, source.n_ctx),
    };
    let canary = figures.canary.map_or(String::new(), |ratio| format!(", canary {ratio:.4}"));
    output::print(&format!(
        "perplexity {:.4} ± {:.4}, {bits}, mean NLL {:.6} over {} tokens in {} chunks \
         ({protocol}; {}{canary})",
        figures.perplexity,
        figures.stderr,
        figures.mean_nll,
        figures.tokens,
        figures.chunks,
        figures.engine
    ));
    Ok(())
}
