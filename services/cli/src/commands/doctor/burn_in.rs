//! `flotilla doctor burn-in`: takes this box through all of its work once.

use std::time::Duration;

use anyhow::{Context, bail};
use burn_in::{BurnInSettings, PrivateNames, STAGE_HEADINGS, choose_engine, run_burn_in};
use stacks::StackPrograms;

use crate::{
    args::BurnInArgs, local_models, output, python_runner::find_python, signals, this_machine,
    version::VERSION,
};

/// Takes programs that `args` do not name from `in_use`. Returns true if all stages passed.
pub(crate) async fn burn_in_box(
    args: &BurnInArgs,
    in_use: StackPrograms,
    json: bool,
) -> anyhow::Result<bool> {
    let stop = signals::stop_token()?;
    let scratch = tempfile::tempdir().context("create a scratch directory")?;
    let (at, profile) = (scratch.path(), args.engines.profile.as_deref());
    let launch = local_models::worker_launcher(at, profile, "cpu", args.engines.threads)?;
    let model = args.model.as_deref().map(local_models::find_local_model).transpose()?;
    let gguf_cache = match &model {
        Some(_) => local_models::gguf_cache_directory()?,
        None => at.join("gguf"),
    };
    let (asked, python) = (args.python.as_deref(), in_use.python.as_deref());
    let engine = choose_engine(&launch, asked, python, find_python)?;
    let settings = BurnInSettings {
        version: VERSION.to_owned(),
        launch,
        files: super::live_files(None)?,
        engine,
        model,
        llama_cpp: args.engines.llama_cpp.clone().or(in_use.llama_cpp),
        gguf_cache: (gguf_cache, local_models::GGUF_CACHE_BYTES),
        stage_limit: Duration::from_secs(args.stage_limit),
        limit: Duration::from_secs(args.limit),
        tolerance: args.tolerance,
    };
    let mut announce = |stage: &str| output::print_message(&format!("stage {stage}"));
    let report = tokio::select! {
        report = run_burn_in(&settings, &mut announce) => report?,
        () = stop.cancelled() => bail!("stopped by a signal (A108)"),
    };
    let names = if args.names { PrivateNames::default() } else { private_names() };
    let document = report.to_document(&names)?;
    let written = std::fs::write(&args.out, serde_json::to_vec_pretty(&document)?);
    output::print_json_or(json, &document, || {
        output::print_table(STAGE_HEADINGS, report.stage_rows());
    })?;
    // A box that passed has passed without its report, too.
    output::print_message(&match written {
        Ok(()) => format!("the report is in {}", args.out.display()),
        Err(error) => format!("warning: no report in {}: {error}", args.out.display()),
    });
    Ok(report.passed)
}

fn private_names() -> PrivateNames {
    let variable = |name| std::env::var(name).unwrap_or_default();
    PrivateNames { host: this_machine::host_name(), user: variable("USER"), home: variable("HOME") }
}
