//! `flotilla data generate`: prompts and answers that a model writes.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bounded_http::CompletionClient;
use data_generation::{GenerationPlan, GenerationReport, VerifySample};
use spec::GenerationSpec;
use verifier::{OfflineVerifier, VerifyItem};
use wire::PromptEntry;

use super::verify::find_toolchain;
use crate::{
    args::{GenerateDataArgs, GlobalArgs, VerifierToolArgs},
    fleet::FleetFile,
    output,
    progress_meter::ProgressMeter,
};

/// Also writes `report.txt`, the table that it prints. Fails if samples are missing at the end.
pub(super) async fn generate_data(
    flags: &GlobalArgs,
    args: &GenerateDataArgs,
) -> anyhow::Result<()> {
    let what = || args.spec.display().to_string();
    let bytes = control::read_named_file(&args.spec)?;
    let yaml = wire::decode_text(&bytes).with_context(what)?;
    let plan =
        GenerationPlan::new(GenerationSpec::parse(yaml).with_context(what)?, args.model.clone());
    let client = connect_model(flags, args)?;
    let verify = build_verifiers(&plan, &args.tools)?;
    let meter = ProgressMeter::new();
    let show = |kept, wanted| meter.show_progress("generating", "samples", kept, wanted);
    let generated = data_generation::generate_data(plan, &client, &args.out, &verify, &show).await;
    meter.finish_bar();
    let report = generated?;
    let table = output::fit_table(GenerationReport::HEADINGS, report.table_rows(), None);
    let path = args.out.join("report.txt");
    durable_files::replace_file(&path, format!("{table}\n").as_bytes(), 0o644)
        .with_context(|| format!("write {}", path.display()))?;
    output::print_json_or(flags.json, &report, || {
        output::print_table(GenerationReport::HEADINGS, report.table_rows());
    })?;
    let (kept, wanted) = report.count_samples();
    let reason = report.stopped.as_deref().unwrap_or("samples were dropped");
    ensure!(
        kept == wanted,
        "{kept} of {wanted} samples in {}: {reason}; raise it, or change what is asked for, and \
         run the command again (D121)",
        args.out.display()
    );
    Ok(())
}

fn connect_model(flags: &GlobalArgs, args: &GenerateDataArgs) -> anyhow::Result<CompletionClient> {
    let Some(url) = &args.endpoint else {
        let directory = flags.fleet.dir.as_deref();
        let missing = "pass --endpoint URL, or --dir DIR of the fleet that serves the model (A103)";
        return FleetFile::connect_completions(directory.context(missing)?);
    };
    if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
        bail!(
            "--endpoint must be the URL of an API, such as http://HOST:PORT/v1, not {url} (A101)"
        );
    }
    let read = |path: &std::path::PathBuf| {
        bounded_http::read_key_file(path)
            .with_context(|| format!("read --endpoint-key-file {}", path.display()))
    };
    let key = args.endpoint_key_file.as_ref().map(read).transpose()?;
    Ok(CompletionClient::for_url(url.trim_end_matches('/'), key)?)
}

/// Fails if this box cannot run a verifier of the plan.
fn build_verifiers(
    plan: &GenerationPlan,
    tools: &VerifierToolArgs,
) -> anyhow::Result<VerifySample> {
    let mut verifiers = Vec::new();
    if !plan.verifiers().is_empty() {
        let toolchain = find_toolchain(tools, Vec::new())?;
        for settings in plan.verifiers() {
            let one =
                OfflineVerifier::new(settings.clone(), toolchain.clone(), 1).context("verify")?;
            if let [first, ..] = &*one.missing_needs(&[]) {
                bail!("this box lacks {first} (E117)");
            }
            verifiers.push(one);
        }
    }
    Ok(Arc::new(move |verifier: usize, prompt: &PromptEntry, completion: String| {
        let item = VerifyItem::from_prompt(prompt, 0, completion);
        let judged = verifiers[verifier].judge_items(&[item]);
        judged.into_iter().next().map(|it| it.verdict).unwrap_or_default()
    }))
}
