//! `flotilla eval local`: perplexity of a model on this machine, without a fleet.

use std::{path::Path, time::Duration};

use anyhow::Context;
use evaluator::{
    EvaluatorLimits, EvaluatorPaths, LlamaCppEvaluator, MeasureStep, MeasurementInput,
    PerplexityResult, TextFormat,
};
use hardware::HardwareProfile;
use serde_json::json;
use tempfile::NamedTempFile;
use wire::Digest;

use crate::{
    args::{EvalEngine, EvalLocalArgs},
    commands::data::read_named_rows,
    local_models, output,
    this_machine::cpu_cores,
};

/// Time without a finished chunk after which llama.cpp counts as hung.
const SILENCE_LIMIT: Duration = Duration::from_secs(900);

pub(super) async fn run_local_eval(args: EvalLocalArgs, json: bool) -> anyhow::Result<()> {
    let base = local_models::find_local_model(&args.model)?;
    let (text, documents) = prepare_text(&args, &base).await.context("--text")?;
    let path = documents.as_ref().map_or(&*args.text, NamedTempFile::path);
    let source = MeasurementInput {
        base,
        adapter: args.adapter.clone(),
        text: path.to_owned(),
        format: if documents.is_some() { TextFormat::Documents } else { TextFormat::Text },
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
        EvalEngine::Candle => {
            let dtype = local_models::candle_dtype(args.dtype)?;
            evaluator::measure_with_candle(&source, &args.device, dtype, chunks)
        }
        EvalEngine::LlamaCpp => measure_with_llama_cpp(&source, &args, &mut |step| match step {
            MeasureStep::Chunks(done, total) => chunks(done, total),
            MeasureStep::Note(note) => output::set_bar_labels(&bar, "", note),
        }),
    };
    let figures = figures.with_context(|| format!("measure {}", args.text.display()))?;
    bar.finish_and_clear();
    print_result(&source, &figures, text, json)
}

/// Returns the digest of what is scored, as in a fleet. Rows are written to a file as engines read
/// them.
async fn prepare_text(
    args: &EvalLocalArgs,
    base: &Path,
) -> anyhow::Result<(Digest, Option<NamedTempFile>)> {
    if !spec::names_rows(&args.text.to_string_lossy()) {
        return Ok((Digest::hash_bytes(&control::read_named_file(&args.text)?), None));
    }
    let rows = read_named_rows(&args.text, &args.columns).await?;
    let documents = control::prepare_documents(&rows, base).await?;
    let file = NamedTempFile::new()?;
    std::fs::write(file.path(), &documents)?;
    Ok((Digest::hash_bytes(&documents), Some(file)))
}

fn measure_with_llama_cpp(
    source: &MeasurementInput,
    args: &EvalLocalArgs,
    progress: &mut dyn FnMut(MeasureStep<'_>),
) -> anyhow::Result<PerplexityResult> {
    let profile =
        HardwareProfile::choose_profile(args.profile.as_deref()).context("choose the profile")?;
    let device_checks = local_models::cache_directory()?.join("llama.cpp-canaries.json");
    let places =
        EvaluatorPaths { gguf_cache: local_models::gguf_cache_directory()?, device_checks };
    let limits = EvaluatorLimits {
        threads: args.threads.map_or_else(cpu_cores, |threads| threads as usize),
        silence_limit: SILENCE_LIMIT,
        gguf_cache_bytes: local_models::GGUF_CACHE_BYTES,
        repeat_log: false,
    };
    let llama =
        LlamaCppEvaluator::find_installation(args.llama_cpp.as_deref(), &profile, places, limits)?;
    let key = llama::local_model_key(&source.base)?;
    let converters = args.converters.find_converters()?;
    let llama = LlamaCppEvaluator { dtype: args.dtype, converters, ..llama };
    evaluator::measure_with_llama_cpp(source, &key, &llama, progress)
}

fn print_result(
    source: &MeasurementInput,
    figures: &PerplexityResult,
    text: Digest,
    json: bool,
) -> anyhow::Result<()> {
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
    output::print_line(&format!(
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
