//! `flotilla doctor speed`: how fast this box draws samples with each of its engines.

use anyhow::Context;
use generator::{
    EngineCandidate, EngineSpeed, GeneratorLimits, GeneratorPaths, OfflinePolicy, choose_fastest,
    measure_engines,
};
use serde_json::json;

use crate::{args::SpeedArgs, local_models, output};

pub(super) async fn measure_speed(args: &SpeedArgs, json: bool) -> anyhow::Result<()> {
    let model = local_models::find_local_model(&args.model)?;
    let base = model.canonicalize().with_context(|| format!("find {}", model.display()))?;
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let launch = local_models::worker_launcher(
        directory.path(),
        args.engines.profile.as_deref(),
        "cpu",
        args.engines.threads,
    )?;
    let places = GeneratorPaths {
        gguf_cache: local_models::gguf_cache_directory()?,
        gguf_cache_bytes: local_models::GGUF_CACHE_BYTES,
        converters: None,
        directory: launch.directory.join("generate"),
    };
    let candidates = EngineCandidate::list_candidates(
        args.engines.llama_cpp.as_deref(),
        &launch.profile,
        GeneratorLimits::from_launcher(&launch),
        &places,
    );
    let policy = OfflinePolicy {
        base_key: llama::local_model_key(&base)?,
        base: &base,
        adapter: None,
        adapter_key: String::new(),
    };
    let count = candidates.len();
    let measured = measure_engines(&launch, &candidates, &policy, |done, engine| {
        output::print_message(&format!("timing {engine} ({} of {count})", done + 1));
    });
    let measured = measured.await;
    let chosen = choose_fastest(&measured, args.tolerance);
    let fastest = chosen.map(|index| &measured[index].engine);
    let document = json!({ "engines": measured, "chosen": fastest });
    output::print_json_or(json, &document, || print_speeds(&measured, chosen, args.tolerance))
}

fn print_speeds(measured: &[EngineSpeed], chosen: Option<usize>, tolerance: f64) {
    let rows = measured.iter().map(|EngineSpeed { engine, rates, .. }| {
        let Some(rates) = rates else {
            return [engine.clone(), "-".into(), "-".into(), "-".into()];
        };
        let apart = rates.distance.map_or("-".into(), |nats| format!("{nats:.4}"));
        let rate = |tokens_per_s: f64| format!("{tokens_per_s:.0}");
        let (prefill, decode) = (rates.prefill_tokens_per_s, rates.decode_tokens_per_s);
        [engine.clone(), rate(prefill), rate(decode), apart]
    });
    let headings = ["engine", ">prefill tokens/s", ">decode tokens/s", ">nats apart"];
    output::print_table(headings, rows);
    for EngineSpeed { engine, problem, .. } in measured {
        if !problem.is_empty() {
            output::print_wrapped(&format!("{engine} failed: {problem}"));
        }
    }
    match chosen {
        Some(index) => output::print_wrapped(&format!(
            "fastest with the same policy (at most {tolerance} nats per token apart): {}; \
             `flotilla agent --calibrate` uses it",
            measured[index].engine
        )),
        None => output::print_line("no engine works on this box"),
    }
}
