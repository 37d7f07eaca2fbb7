//! The stages. Each returns its figures, or an error that is its result.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use agent::{HostDoctor, WorkerLauncher};
use anyhow::{Context, bail};
use doctor::Severity;
use engine::{MatrixDtype, ScratchShape, write_scratch_model};
use evaluator::{MeasurementInput, TextFormat, measure_in_worker};
use formats::{ConversionDtype, convert};
use generator::{GeneratorBackend, OfflineGenerator, OfflinePolicy, OfflineRequest};
use hardware::{
    host_snapshot::HostSnapshot,
    storm::{StormDetector, StormLevel, StormThresholds},
    telemetry::HostTelemetry,
};
use llama::GgufCache;
use serde_json::json;
use store::{CachedTree, FileCache, Store, TreeMetadata, TreePlace};
use trainer::{OfflineCheckpoint, OfflineTraining, TrainerConfig, TrainingEngine};
use wire::{mean_logprob_distance, v1};

use crate::{
    engines::BoxEngines,
    report::{StageFigures, StageReport},
    settings::BurnInSettings,
    stage_runner::MeasuredFailure,
    task,
};

/// The rate of TLB shootdowns of the idle box is measured for this long.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// Size of the cache into which the published adapter is fetched.
const CACHE_BYTES_MAX: u64 = 10 << 30;

/// The files that stages share.
pub(crate) struct StageInputs<'a> {
    pub(crate) settings: &'a BurnInSettings,
    pub(crate) directory: PathBuf,
    pub(crate) dataset: PathBuf,
    pub(crate) text: PathBuf,
}

/// The model that a burn-in trains, serves and evaluates.
#[derive(Debug, Clone)]
pub(crate) struct ModelUnderTest {
    pub(crate) base: PathBuf,
    /// Identifies the base in the cache of converted models.
    pub(crate) key: String,
    pub(crate) adapter: Option<PathBuf>,
}

/// Checks the host for findings that prevent training or generating, and waits for telemetry of the
/// idle box.
pub(crate) async fn check_host(host: &HostSnapshot) -> anyhow::Result<((), StageFigures)> {
    let findings = ["trainer", "generator"].map(|role| doctor::findings_for_role(host, role));
    let failed = findings.iter().flatten().filter(|it| it.severity == Severity::Fail);
    let mut ids: Vec<&str> = failed.map(|finding| finding.id).collect();
    ids.sort_unstable();
    ids.dedup();
    let gpus: Vec<&str> = host.gpus.iter().map(|gpu| gpu.gfx.as_str()).collect();
    let cards = if gpus.is_empty() { "no AMD GPU".to_owned() } else { gpus.join(", ") };
    let kernel = &host.kernel.release;
    let values = json!({ "gpus": gpus, "kernel": kernel, "failed_checks": ids });
    let figures = StageFigures::new(format!("{cards}, kernel {kernel}"), values);
    tokio::time::sleep(IDLE_TIME).await;
    if ids.is_empty() {
        return Ok(((), figures));
    }
    let reason = format!("{}: see `flotilla doctor` (E115)", ids.join(", "));
    Err(MeasuredFailure { reason, figures }.into())
}

impl StageInputs<'_> {
    fn launcher(&self) -> WorkerLauncher {
        let launch = self.settings.launch.clone();
        match self.settings.model {
            // The embedded engine would need twice the memory for a user's model.
            Some(_) => WorkerLauncher { dtype: MatrixDtype::Bf16.type_name().to_owned(), ..launch },
            None => launch,
        }
    }

    fn trainer_config(&self, engine: TrainingEngine) -> TrainerConfig {
        let launch = self.launcher();
        let doctor = HostDoctor::new(launch.root.clone(), Vec::new(), None);
        let (save_within, grace) = (Duration::MAX, Duration::ZERO);
        TrainerConfig { launch, engine, doctor, save_within, grace }
    }

    /// Returns the user's model, or trains a small one from random weights with the embedded
    /// engine.
    pub(crate) async fn prepare_base(&self) -> anyhow::Result<(ModelUnderTest, StageFigures)> {
        let (base, made) = match &self.settings.model {
            Some(model) if model.is_dir() => (model.clone(), None),
            Some(model) => bail!("--model {}: not a directory (A104)", model.display()),
            None => {
                let made = self.train_small_base().await?;
                (made.directory.clone(), Some(made))
            }
        };
        let bytes = count_bytes(&formats::list_weight_files(&base)?)?;
        let size = format_megabytes(bytes);
        let summary = match &made {
            Some(made) => format!("{size}, {} steps from random weights", made.steps),
            None => size,
        };
        let losses = made.map(|made| [made.losses.0, made.losses.1]);
        let values = json!({ "bytes": bytes, "losses": losses });
        let key = llama::local_model_key(&base)?;
        let model = ModelUnderTest { base, key, adapter: None };
        Ok((model, StageFigures::new(summary, values)))
    }

    async fn train_small_base(&self) -> anyhow::Result<OfflineCheckpoint> {
        let (shape, out) = (self.directory.join("shape"), self.directory.join("base"));
        write_scratch_model(&shape, &ScratchShape::default())?;
        std::fs::create_dir_all(&out)?;
        let training = OfflineTraining {
            base: &shape,
            random_init: true,
            dataset: &self.dataset,
            training: task::base_training(),
            seed: task::SEED,
            out: &out,
        };
        training.train(&self.trainer_config(TrainingEngine::Candle), |_, _| {}).await
    }

    pub(crate) async fn train_adapter(
        &self,
        model: &ModelUnderTest,
        engine: &TrainingEngine,
    ) -> anyhow::Result<(OfflineCheckpoint, StageFigures)> {
        let out = self.directory.join("adapter");
        std::fs::create_dir_all(&out)?;
        let training = OfflineTraining {
            base: &model.base,
            random_init: false,
            dataset: &self.dataset,
            training: task::adapter_training(),
            seed: task::SEED,
            out: &out,
        };
        let config = self.trainer_config(engine.clone());
        let trained = training.train(&config, |_, _| {}).await?;
        let OfflineCheckpoint { engine, steps, losses: (first, last), tokens, wall_s, .. } =
            &trained;
        let (steps_per_s, tokens_per_s) = (f64::from(*steps) / wall_s, to_float(*tokens) / wall_s);
        let summary = format!(
            "{steps} steps, {steps_per_s:.2} steps/s, {tokens_per_s:.0} tokens/s, loss {first:.3} \
             to {last:.3}, {engine}"
        );
        let values = json!({
            "engine": engine, "steps": steps, "steps_per_s": steps_per_s,
            "tokens_per_s": tokens_per_s, "loss_first": first, "loss_last": last,
            "weight_change": trained.weight_change,
        });
        Ok((trained, StageFigures::new(summary, values)))
    }

    /// Publishes the adapter in a store and fetches it again; the fetched files are verified.
    pub(crate) async fn publish_adapter(
        &self,
        adapter: &Path,
    ) -> anyhow::Result<(CachedTree, StageFigures)> {
        let store = self.directory.join("store");
        let store = Store::open(&format!("file://{}", store.display())).await?;
        let cache = FileCache::open(&self.directory.join("cache"), CACHE_BYTES_MAX)?;
        let place = TreePlace::new("burn-in", "adapter")?;
        let began = Instant::now();
        let tree = store.publish_tree(adapter, &place, TreeMetadata::new()).await?;
        let published_s = began.elapsed().as_secs_f64();
        let fetched = cache.fetch_tree(&store, &tree).await?;
        let fetched_s = began.elapsed().as_secs_f64() - published_s;
        let bytes: u64 = fetched.manifest().files.iter().map(|file| file.bytes).sum();
        let rate = |seconds: f64| to_float(bytes) / seconds.max(1e-9) / 1e6;
        let summary = format!(
            "{}, {:.0} MB/s written, {:.0} MB/s fetched and verified",
            format_megabytes(bytes),
            rate(published_s),
            rate(fetched_s)
        );
        let values = json!({
            "bytes": bytes, "published_s": published_s, "fetched_s": fetched_s,
            "manifest": tree.manifest,
        });
        Ok((fetched, StageFigures::new(summary, values)))
    }

    /// Converts base and adapter for llama.cpp, into the cache that serving uses.
    pub(crate) async fn convert_model(
        &self,
        model: &ModelUnderTest,
    ) -> anyhow::Result<((), StageFigures)> {
        let (cache, bytes_max) = self.settings.gguf_cache.clone();
        let dtype = self.settings.launch.profile.llama.generate.dtype;
        let (model, adapter_file) = (model.clone(), self.directory.join("adapter.gguf"));
        let stop = StopOnDrop::default();
        let stopped = stop.0.clone();
        let work = move || -> anyhow::Result<(u64, u64)> {
            let cache = GgufCache::open(&cache, bytes_max)?;
            let mut on_heartbeat = |_: u64, _: u64| unwind_if_stopped(&stopped);
            let base = cache.get_or_convert(
                &model.key,
                &model.base,
                dtype.into(),
                None,
                &mut on_heartbeat,
            )?;
            let base_bytes = count_bytes(&[base.file_path().to_owned()])?;
            let Some(adapter) = &model.adapter else { return Ok((base_bytes, 0)) };
            convert::convert_lora(&model.base, adapter, &adapter_file, ConversionDtype::F32)?;
            Ok((base_bytes, count_bytes(&[adapter_file])?))
        };
        let converted = tokio::task::spawn_blocking(work).await;
        drop(stop);
        let (base_bytes, adapter_bytes) =
            converted.map_err(|_| anyhow::anyhow!("the conversion was ended (A108)"))??;
        let summary = format!(
            "base {} in {}, adapter {}",
            format_megabytes(base_bytes),
            dtype.name(),
            format_megabytes(adapter_bytes)
        );
        let values = json!({
            "dtype": dtype.name(), "base_bytes": base_bytes, "adapter_bytes": adapter_bytes,
        });
        Ok(((), StageFigures::new(summary, values)))
    }

    /// Serves the model with llama.cpp on the box's device, or else with the embedded engine, and
    /// draws samples. Returns the log-probabilities of the canary.
    pub(crate) async fn serve_model(
        &self,
        model: &ModelUnderTest,
        engines: Option<&BoxEngines>,
    ) -> anyhow::Result<(Vec<f32>, StageFigures)> {
        let backend = match engines {
            Some(engines) => GeneratorBackend::LlamaCpp(Box::new(engines.generator.clone())),
            None => GeneratorBackend::Candle,
        };
        let generator = self.start_generator(&backend, model)?;
        let began = Instant::now();
        // Loads the model, too.
        let first =
            generator.generate(build_request(1, 1, &task::canary_text()), |_, _| {}).await?;
        let ready_s = began.elapsed().as_secs_f64();
        if first.canary.is_empty() {
            bail!("{} reports no log-probabilities (E107)", first.engine);
        }
        let began = Instant::now();
        let request = build_request(task::SAMPLES, task::SAMPLE_TOKENS, "");
        let drawn = generator.generate(request, |_, _| {}).await?;
        let tokens: u32 = drawn.samples.iter().map(|sample| sample.tokens).sum();
        let tokens_per_s = f64::from(tokens) / began.elapsed().as_secs_f64();
        if tokens == 0 {
            bail!("{} drew no tokens (E107)", drawn.engine);
        }
        let summary = format!(
            "ready in {ready_s:.1} s, {} samples at {tokens_per_s:.0} tokens/s, {}",
            task::SAMPLES,
            drawn.engine
        );
        let values = json!({
            "engine": drawn.engine, "ready_s": ready_s, "tokens_per_s": tokens_per_s,
            "tokens": tokens,
        });
        Ok((first.canary, StageFigures::new(summary, values)))
    }

    /// Compares the log-probabilities of the served model with those of the CPU; on a box without a
    /// device, with those of the embedded engine.
    pub(crate) async fn compare_devices(
        &self,
        model: &ModelUnderTest,
        engines: &BoxEngines,
        served: &[f32],
    ) -> anyhow::Result<((), StageFigures)> {
        let profile = &self.settings.launch.profile;
        let (names, backend) = match &engines.generator.server.device {
            Some(device) => {
                let on_cpu = engines.generator_on_cpu(self.directory.join("on-cpu"));
                let backend = GeneratorBackend::LlamaCpp(Box::new(on_cpu));
                (format!("{device} and the CPU"), backend)
            }
            None if profile.is_cpu() => (
                "llama.cpp on the CPU and the embedded engine".to_owned(),
                GeneratorBackend::Candle,
            ),
            None => bail!(
                "this llama.cpp has no device for {}; use its Vulkan or ROCm build (E102)",
                profile.name
            ),
        };
        let generator = self.start_generator(&backend, model)?;
        let request = build_request(1, 1, &task::canary_text());
        let reference = generator.generate(request, |_, _| {}).await?.canary;
        let Some(mean) = mean_logprob_distance(served, &reference) else {
            bail!("log-probabilities of {names} cannot be compared (E106)")
        };
        let largest = largest_difference(served, &reference);
        let tolerance = self.settings.tolerance;
        let summary =
            format!("{names}: {mean:.4} nats/token apart, at most {largest:.4} for one token");
        let values = json!({
            "compared": names, "mean_difference_nats": mean, "largest_difference_nats": largest,
            "tolerance_nats": tolerance, "tokens": served.len(),
        });
        let figures = StageFigures::new(summary, values);
        if mean <= tolerance {
            return Ok(((), figures));
        }
        let reason = format!("more than {tolerance} nats per token apart (E106)");
        Err(MeasuredFailure { reason, figures }.into())
    }

    /// Measures the perplexity of a text in a process of its own, which compares GPU and CPU first;
    /// of the small model also with the embedded engine.
    pub(crate) async fn evaluate_model(
        &self,
        model: &ModelUnderTest,
        engines: Option<&BoxEngines>,
    ) -> anyhow::Result<((), StageFigures)> {
        let source = MeasurementInput {
            base: model.base.clone(),
            adapter: model.adapter.clone(),
            text: self.text.clone(),
            format: TextFormat::Text,
            n_ctx: task::CHUNK_TOKENS,
            stride: 0,
            chunks: task::CHUNKS,
        };
        let launch = self.launcher();
        let llama_cpp = engines.map(|engines| &engines.evaluator);
        let measured = measure_in_worker(&launch, &source, &model.key, llama_cpp).await?;
        let embedded = match (llama_cpp, &self.settings.model) {
            (Some(_), None) => {
                Some(measure_in_worker(&launch, &source, &model.key, None).await?.perplexity)
            }
            _ => None,
        };
        let mut summary = format!("perplexity {:.4}", measured.perplexity);
        if let Some(embedded) = embedded {
            summary.push_str(&format!(", {embedded:.4} by the embedded engine"));
        }
        if let Some(ratio) = measured.canary {
            summary.push_str(&format!(", GPU to CPU {ratio:.4}"));
        }
        let process = &measured.process;
        let values = json!({
            "engine": measured.engine, "perplexity": measured.perplexity,
            "perplexity_embedded": embedded, "gpu_to_cpu": measured.canary,
            "tokens": measured.tokens, "wall_s": process.wall_s,
            "peak_rss_bytes": process.peak_rss_bytes, "tlb_shootdowns": process.tlb_shootdowns,
        });
        Ok(((), StageFigures::new(summary, values)))
    }

    fn start_generator(
        &self,
        backend: &GeneratorBackend,
        model: &ModelUnderTest,
    ) -> anyhow::Result<OfflineGenerator> {
        let policy = OfflinePolicy {
            base: &model.base,
            base_key: model.key.clone(),
            adapter: model.adapter.as_deref(),
            adapter_key: if model.adapter.is_some() { "burn-in".into() } else { String::new() },
        };
        OfflineGenerator::start(&self.launcher(), backend, policy, task::SAMPLES)
    }
}

fn build_request(count: u32, tokens: u32, canary: &str) -> OfflineRequest {
    let (prompt_id, text) = ("burn-in".to_owned(), task::sample_prompt());
    OfflineRequest {
        sampling: v1::Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: tokens },
        seed: task::SEED,
        logprobs: false,
        requests: vec![v1::generate_order::Request { prompt_id, text, first: 0, count }],
        canary: canary.to_owned(),
    }
}

/// Judges the TLB shootdowns of the whole burn-in. Returns `None` if the kernel does not count
/// them.
pub(crate) fn judge_shootdowns(
    samples: &[HostTelemetry],
    stages: &[StageReport],
) -> Option<anyhow::Result<StageFigures>> {
    let rate_of = |stage: &StageReport| {
        let StageReport { name, host, .. } = stage;
        Some((*name, host.shootdowns_max_per_s.or(host.shootdowns_mean_per_s)?))
    };
    let rates = stages.iter().filter_map(rate_of);
    let (busiest, highest) = rates.max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    let idle = stages.iter().find(|stage| stage.name == "host")?.host.shootdowns_mean_per_s;
    let mut detector = StormDetector::new(StormThresholds::default());
    let levels = samples.iter().map(|sample| detector.observe_sample(sample));
    let level = levels.max().unwrap_or_default();
    let idle_text = idle.map_or("unknown".to_owned(), |rate| format!("{rate:.0}/s"));
    let summary = format!("TLB shootdowns: idle {idle_text}, at most {highest:.0}/s ({busiest})");
    let values = json!({
        "idle_per_s": idle, "highest_per_s": highest, "busiest_stage": busiest, "level": level,
    });
    let figures = StageFigures::new(summary, values);
    if level == StormLevel::Storm {
        let reason = "a storm of TLB shootdowns; see `flotilla topics storm` (E115)".to_owned();
        return Some(Err(MeasuredFailure { reason, figures }.into()));
    }
    Some(Ok(figures))
}

/// Stops a blocking conversion when its stage ends.
#[derive(Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The panic payload that unwinds a conversion, so that its partial output is removed.
struct ConversionEnded;

fn unwind_if_stopped(stopped: &AtomicBool) {
    if stopped.load(Ordering::Relaxed) {
        std::panic::resume_unwind(Box::new(ConversionEnded));
    }
}

fn largest_difference(one: &[f32], other: &[f32]) -> f64 {
    let pairs = one.iter().zip(other);
    pairs.map(|(one, other)| f64::from((one - other).abs())).fold(0.0, f64::max)
}

fn count_bytes(files: &[PathBuf]) -> anyhow::Result<u64> {
    let size = |path: &PathBuf| {
        let data = path.metadata().with_context(|| format!("look at {}", path.display()))?;
        Ok(data.len())
    };
    files.iter().map(size).sum()
}

fn format_megabytes(bytes: u64) -> String {
    format!("{:.1} MB", to_float(bytes) / 1e6)
}

#[expect(clippy::cast_precision_loss, reason = "rates need no sixteen digits")]
fn to_float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::{StageTelemetry, report::StageOutcome};

    fn stage(name: &'static str, mean: Option<f64>, max: Option<f64>) -> StageReport {
        let host = StageTelemetry {
            shootdowns_mean_per_s: mean,
            shootdowns_max_per_s: max,
            ..StageTelemetry::default()
        };
        StageReport {
            name,
            outcome: StageOutcome::Passed,
            reason: String::new(),
            seconds: 1.0,
            summary: String::new(),
            figures: Map::new(),
            host,
            log: String::new(),
        }
    }

    #[test]
    fn the_busiest_stage_is_named_and_a_storm_is_a_failure() {
        let stages = [
            stage("host", Some(90.0), Some(120.0)),
            stage("train", Some(150.0), None),
            stage("evaluate", Some(500.0), Some(700.0)),
        ];
        let calm = judge_shootdowns(&[], &stages).unwrap().unwrap();
        assert_eq!(calm.summary, "TLB shootdowns: idle 90/s, at most 700/s (evaluate)");
        assert_eq!(calm.values["level"], "calm");
        let sample = |second: u64| HostTelemetry {
            at_ms: 1000 * second,
            tlb_per_s: Some(400_000.0),
            cpu: Some(hardware::telemetry::CpuUsage { busy: 0.9, system: 0.8 }),
            ..HostTelemetry::default()
        };
        let samples: Vec<HostTelemetry> = (0..10).map(sample).collect();
        let error = judge_shootdowns(&samples, &stages).unwrap().unwrap_err();
        assert!(error.to_string().contains("storm of TLB shootdowns"), "{error}");
        assert!(judge_shootdowns(&[], &[stage("host", None, None)]).is_none());
    }

    #[test]
    fn the_largest_difference_is_that_of_one_token() {
        let difference = largest_difference(&[-1.0, -2.0, -3.0], &[-1.5, -2.0, -1.0]);
        assert!((difference - 2.0).abs() < 1e-6, "{difference}");
    }

    #[test]
    fn an_ended_stage_stops_its_conversion() {
        let stop = StopOnDrop::default();
        let stopped = stop.0.clone();
        unwind_if_stopped(&stopped);
        drop(stop);
        let unwound = std::panic::catch_unwind(move || unwind_if_stopped(&stopped));
        assert!(unwound.unwrap_err().is::<ConversionEnded>());
    }
}
