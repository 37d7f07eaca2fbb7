//! The order of the stages, and what each needs of the ones before it.

use std::collections::BTreeMap;

use anyhow::Context;
use hardware::host_snapshot::HostSnapshot;
use llama::{InstallationError, LlamaInstallation};

use crate::{
    engines::{BoxEngines, GgufPlace},
    report::{BurnInReport, StageFigures, StageOutcome},
    settings::BurnInSettings,
    stage_runner::StageRunner,
    stages::{ModelUnderTest, StageInputs, check_host, judge_shootdowns},
    task,
    telemetry_log::TelemetryLog,
    training_engine::{fetch_engine, find_interpreter},
};

/// Runs all stages within the limit. `announce` receives the name of each before it runs. A stage
/// that fails does not stop those that need nothing of it.
///
/// # Errors
/// When the scratch directory cannot be written.
pub async fn run_burn_in(
    settings: &BurnInSettings,
    announce: &mut dyn FnMut(&str),
) -> anyhow::Result<BurnInReport> {
    let inputs = StageInputs::write_files(settings).context("write the files of the burn-in")?;
    let files = settings.files.clone();
    let files = match settings.engine.as_ref().ok().and_then(find_interpreter) {
        Some(interpreter) => files.with_python(interpreter),
        None => files,
    };
    let host = HostSnapshot::take_snapshot(&files);
    let findings = doctor::check_host(&host, &settings.launch.profile);
    // Before the time of the stages begins: the first start may download gigabytes.
    fetch_engine(settings, announce).await;
    let telemetry = TelemetryLog::start(files);
    let limits = (settings.stage_limit, settings.limit);
    let mut runner = StageRunner::new(telemetry, limits, announce);
    runner.run_stage("host", check_host(&host)).await;
    let engines = find_engines(settings, &mut runner).await;
    let trainer = run_model_stages(&inputs, engines.as_ref(), &mut runner).await;
    let samples = runner.telemetry.all_samples();
    match judge_shootdowns(&samples, &runner.stages) {
        Some(judged) => {
            runner.run_stage("storm", async { judged.map(|figures| ((), figures)) }).await;
        }
        None => runner.skip_stage("storm", "this kernel counts no TLB shootdowns"),
    }
    let StageRunner { stages, is_cut_short, .. } = runner;
    let llama = engines.map(|it| ("llama.cpp".to_owned(), it.generator.version));
    let trainer = trainer.map(|engine| ("trainer".to_owned(), engine));
    Ok(BurnInReport {
        flotilla: settings.version.clone(),
        passed: !is_cut_short && stages.iter().all(|it| it.outcome != StageOutcome::Failed),
        seconds: stages.iter().map(|stage| stage.seconds).sum(),
        profile: settings.launch.profile.name.clone(),
        engines: BTreeMap::from_iter(llama.into_iter().chain(trainer)),
        stages,
        findings,
        host,
    })
}

/// Returns `None` if llama.cpp is absent or does not run.
async fn find_engines(
    settings: &BurnInSettings,
    runner: &mut StageRunner<'_>,
) -> Option<BoxEngines> {
    let directory = settings.llama_cpp.clone();
    let find = move || LlamaInstallation::find_installation(directory.as_deref());
    if let Ok(Err(InstallationError::Absent { .. })) = tokio::task::spawn_blocking(find).await {
        runner.skip_stage("llama.cpp", "neither on PATH nor named by --llama-cpp");
        return None;
    }
    let found = async {
        let (directory, launch) = (settings.llama_cpp.clone(), settings.launch.clone());
        let (cache, bytes_max) = settings.gguf_cache.clone();
        let gguf = GgufPlace { directory: cache, bytes_max };
        let find = move || BoxEngines::find_engines(directory.as_deref(), &launch, &gguf);
        let engines = tokio::task::spawn_blocking(find).await??;
        let device = engines.generator.server.device.clone();
        let version = &engines.generator.version;
        let summary = format!("{version} on {}", device.as_deref().unwrap_or("CPU"));
        let values = serde_json::json!({ "version": version, "device": device });
        anyhow::Ok((engines, StageFigures::new(summary, values)))
    };
    runner.run_stage("llama.cpp", found).await
}

/// Runs the stages of a model, and returns the engine that trained. Without a base there is nothing
/// to do; without an adapter, the base is served and evaluated.
async fn run_model_stages(
    inputs: &StageInputs<'_>,
    engines: Option<&BoxEngines>,
    runner: &mut StageRunner<'_>,
) -> Option<String> {
    let Some(base) = runner.run_stage("base", inputs.prepare_base()).await else {
        for name in ["train", "publish", "convert", "serve", "canary", "evaluate"] {
            runner.skip_stage(name, "there is no base");
        }
        return None;
    };
    let trained = match &inputs.settings.engine {
        Ok(engine) => runner.run_stage("train", inputs.train_adapter(&base, engine)).await,
        Err(reason) => {
            runner.skip_stage("train", reason);
            None
        }
    };
    let published = match &trained {
        Some(trained) => {
            runner.run_stage("publish", inputs.publish_adapter(&trained.directory)).await
        }
        None => {
            runner.skip_stage("publish", "there is no adapter");
            None
        }
    };
    // The fetched adapter is used, as by another box.
    let fetched = published.as_ref().map(|tree| tree.path().to_owned());
    let adapter = fetched.or_else(|| trained.as_ref().map(|it| it.directory.clone()));
    let model = ModelUnderTest { adapter, ..base };
    runner.run_stage("convert", inputs.convert_model(&model)).await;
    let served = runner.run_stage("serve", inputs.serve_model(&model, engines)).await;
    match (engines, served) {
        (Some(engines), Some(logprobs)) => {
            let compared = inputs.compare_devices(&model, engines, &logprobs);
            runner.run_stage("canary", compared).await;
        }
        (None, _) => runner.skip_stage("canary", "there is no llama.cpp to compare"),
        (Some(_), None) => runner.skip_stage("canary", "nothing was served"),
    }
    runner.run_stage("evaluate", inputs.evaluate_model(&model, engines)).await;
    trained.map(|trained| trained.engine)
}

impl<'a> StageInputs<'a> {
    /// Writes the texts of the task into the scratch directory.
    fn write_files(settings: &'a BurnInSettings) -> std::io::Result<Self> {
        let directory = settings.launch.directory.join("burn-in");
        std::fs::create_dir_all(&directory)?;
        let (dataset, text) = (directory.join("train.jsonl"), directory.join("text.txt"));
        std::fs::write(&dataset, task::training_lines())?;
        std::fs::write(&text, task::evaluated_text())?;
        Ok(Self { settings, directory, dataset, text })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hardware::host_files::LiveFiles;

    use super::*;

    #[tokio::test]
    async fn a_box_without_pytorch_skips_the_training_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let model = directory.path().join("model");
        engine::write_scratch_model(&model, &engine::ScratchShape::default()).unwrap();
        std::fs::write(model.join("model.safetensors"), "").unwrap();
        let settings = BurnInSettings {
            version: "0.2.0".into(),
            launch: crate::test_launcher(directory.path(), "rocm"),
            files: LiveFiles::new(directory.path()),
            engine: Err("install uv (E108)".into()),
            model: Some(model),
            llama_cpp: Some(directory.path().join("no-llama-cpp")),
            gguf_cache: (directory.path().join("gguf"), 1 << 20),
            stage_limit: Duration::from_secs(60),
            limit: Duration::from_secs(300),
            tolerance: 0.1,
        };
        let report = run_burn_in(&settings, &mut |_| {}).await.unwrap();
        let stage = |name| report.stages.iter().find(|stage| stage.name == name).unwrap();
        assert_eq!(stage("base").outcome, StageOutcome::Passed, "{:?}", report.stages);
        let train = stage("train");
        assert_eq!(
            (train.outcome, train.reason.as_str()),
            (StageOutcome::Skipped, "install uv (E108)")
        );
        assert_eq!(stage("publish").outcome, StageOutcome::Skipped);
    }
}
