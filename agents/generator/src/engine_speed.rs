//! Times the engines of this host on a base, and compares their log-probabilities of a text.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use agent::WorkerLauncher;
use anyhow::{bail, ensure};
use engine::MatrixDtype;
use formats::FloatDtype;
use hardware::{HardwareProfile, SupportLevel};
use llama::LlamaInstallation;
use serde::{Deserialize, Serialize};
use wire::{mean_logprob_distance, v1};

use crate::{
    GeneratorBackend, GeneratorLimits, GeneratorPaths, LlamaCppGenerator, OfflineGenerator,
    OfflinePolicy, OfflineRequest, OfflineSamples,
};

/// The text whose log-probabilities are compared. Most models learnt it, and any can read it.
const TEXT: &str = "The quick brown fox jumps over the lazy dog. ";
/// Repetitions of the text in the prompt whose prefill is timed.
const PREFILL_REPEATS: usize = 24;
/// Sequences that decode together, and the tokens of each.
const DECODED_SEQUENCES: u32 = 16;
const DECODED_TOKENS: u32 = 24;
/// Rounds, of which the fastest counts.
const ROUNDS: u32 = 2;
/// A candidate that takes longer, loading included, is no choice.
const CANDIDATE_LIMIT: Duration = Duration::from_secs(600);

/// The embedded engine is timed if its weights take at most this part of the free memory.
const EMBEDDED_SHARE: u64 = 4;

/// The order by which engines are compared: tokens of a prompt, its samples and their tokens.
const TYPICAL_ORDER: (f64, f64) = (128.0, 8.0 * 256.0);

/// An engine with its device and weight type.
#[derive(Debug, Clone)]
pub struct EngineCandidate {
    pub backend: GeneratorBackend,
    /// The weight type of the embedded engine: `f32` or `bf16`.
    pub dtype: String,
}

/// The speed of an engine on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineSpeed {
    /// Name, version, device and weight type.
    pub engine: String,
    /// `None` if the engine failed, for the reason in `problem`.
    pub rates: Option<EngineRates>,
    pub problem: String,
}

/// Tokens per second, and the distance from the embedded engine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EngineRates {
    pub prefill_tokens_per_s: f64,
    pub decode_tokens_per_s: f64,
    /// Mean absolute difference from the first engine that worked, in nats per token. `None` if
    /// the engine reports no log-probabilities.
    pub distance: Option<f64>,
}

impl EngineCandidate {
    /// Lists the engines of this host, the most exact first: the embedded engine in its weight
    /// types, then llama.cpp on the CPU and on each device, in the weight types that the hardware profile
    /// allows. Without llama.cpp, only the embedded engine.
    pub fn list_candidates(
        llama_cpp: Option<&Path>,
        profile: &HardwareProfile,
        limits: GeneratorLimits,
        places: &GeneratorPaths,
    ) -> Vec<Self> {
        let embedded = MatrixDtype::NAMES
            .map(|dtype| Self { backend: GeneratorBackend::Candle, dtype: dtype.to_owned() });
        let mut candidates = Vec::from(embedded);
        // The host's profile may name a device that is absent now; all that are here are listed.
        let mut on_cpu = profile.clone();
        on_cpu.llama.generate.devices.clear();
        let found =
            LlamaCppGenerator::find_installation(llama_cpp, &on_cpu, limits, places.clone());
        let llama = match found {
            Ok(llama) => llama,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "llama.cpp is not timed");
                return candidates;
            }
        };
        let server = &llama.server;
        let devices = LlamaInstallation::list_devices(&server.program, &server.environment);
        let devices = devices.unwrap_or_default().into_iter().map(Some);
        for device in std::iter::once(None).chain(devices) {
            for dtype in half_types(profile) {
                let mut llama = llama.clone();
                llama.server.device.clone_from(&device);
                llama.dtype = dtype;
                let backend = GeneratorBackend::LlamaCpp(Box::new(llama));
                candidates.push(Self { backend, dtype: "f32".to_owned() });
            }
        }
        candidates
    }

    /// Describes the engine with its device and weight type.
    pub fn describe_engine(&self) -> String {
        match &self.backend {
            GeneratorBackend::Candle => {
                format!("{} {}", self.backend.describe_engine(), self.dtype)
            }
            other => other.describe_engine(),
        }
    }

    /// Returns the settings of this engine's workers.
    pub(crate) fn to_launcher(&self, launch: &WorkerLauncher) -> WorkerLauncher {
        WorkerLauncher { dtype: self.dtype.clone(), ..launch.clone() }
    }
}

/// Returns the profile's weight type, and the other half type if it is allowed.
fn half_types(profile: &HardwareProfile) -> Vec<FloatDtype> {
    let own = profile.llama.generate.dtype;
    let allowed = |dtype: &FloatDtype| {
        *dtype != own && profile.precision.support_for(*dtype) == SupportLevel::Allow
    };
    let others = [FloatDtype::Bf16, FloatDtype::F16].into_iter().filter(allowed);
    std::iter::once(own).chain(others).collect()
}

/// Times engines on a base, one after another. `progress` receives the number of timed engines and
/// the engine that is next. An engine that fails keeps the reason.
pub async fn measure_engines(
    launch: &WorkerLauncher,
    candidates: &[EngineCandidate],
    policy: &OfflinePolicy<'_>,
    mut progress: impl FnMut(usize, &str),
) -> Vec<EngineSpeed> {
    let (mut reference, mut measured) = (None, Vec::new());
    for (index, candidate) in candidates.iter().enumerate() {
        let engine = candidate.describe_engine();
        progress(index, &engine);
        let launch = candidate.to_launcher(launch);
        let timed = measure_engine(&launch, &candidate.backend, policy.clone());
        let timed = match tokio::time::timeout(CANDIDATE_LIMIT, timed).await {
            Ok(timed) => timed,
            Err(_) => Err(anyhow::anyhow!("it took longer than {CANDIDATE_LIMIT:?} (E107)")),
        };
        measured.push(match timed {
            Ok((rates, canary)) => {
                let own = reference.get_or_insert_with(|| canary.clone());
                let rates = EngineRates { distance: mean_logprob_distance(own, &canary), ..rates };
                EngineSpeed { engine, rates: Some(rates), problem: String::new() }
            }
            Err(error) => EngineSpeed { engine, rates: None, problem: format!("{error:#}") },
        });
    }
    measured
}

/// Keeps a large base, which a processor would draw with too slowly, out of the memory that a GPU
/// may share.
fn check_memory(launch: &WorkerLauncher, base: &Path) -> anyhow::Result<()> {
    let Some(available) = hardware::available_memory_bytes() else { return Ok(()) };
    let files = formats::list_weight_files(base)?;
    let stored: u64 = files.iter().filter_map(|file| file.metadata().ok()).map(|it| it.len()).sum();
    let needed = if launch.dtype == "f32" { 2 * stored } else { stored };
    let limit = available / EMBEDDED_SHARE;
    ensure!(
        needed <= limit,
        "its weights would take {} MB, and more than {} MB, a quarter of the free memory, is too \
         much for the embedded engine (E110)",
        needed / 1_000_000,
        limit / 1_000_000
    );
    Ok(())
}

async fn measure_engine(
    launch: &WorkerLauncher,
    backend: &GeneratorBackend,
    policy: OfflinePolicy<'_>,
) -> anyhow::Result<(EngineRates, Vec<f32>)> {
    if matches!(backend, GeneratorBackend::Candle) {
        check_memory(launch, policy.base)?;
    }
    let generator = OfflineGenerator::start(launch, backend, policy, DECODED_SEQUENCES)?;
    let draw = async |text: String, count, new, canary: &str| {
        let began = Instant::now();
        let drawn = generator.generate(build_request(text, count, new, canary), |_, _| {}).await?;
        anyhow::Ok((drawn, began.elapsed().as_secs_f64()))
    };
    // Loads the base, too.
    let (OfflineSamples { canary, .. }, _) = draw(TEXT.to_owned(), 1, 1, TEXT).await?;
    ensure!(!canary.is_empty(), "it reports no log-probabilities (E107)");
    let (mut prefill, mut decode): (f64, f64) = (0.0, 0.0);
    for round in 0..ROUNDS {
        // Another begin, so that no state of an earlier prompt fits.
        let text = format!("{round} {}", TEXT.repeat(PREFILL_REPEATS));
        let (_, seconds) = draw(text, 1, 1, "").await?;
        prefill = prefill.max((canary.len() * PREFILL_REPEATS) as f64 / seconds);
        let text = format!("{round} {TEXT}");
        let (drawn, seconds) = draw(text, DECODED_SEQUENCES, DECODED_TOKENS, "").await?;
        let tokens: u32 = drawn.samples.iter().map(|sample| sample.tokens).sum();
        decode = decode.max(f64::from(tokens) / seconds);
    }
    if decode <= 0.0 {
        bail!("it drew no tokens (E107)");
    }
    let rates =
        EngineRates { prefill_tokens_per_s: prefill, decode_tokens_per_s: decode, distance: None };
    Ok((rates, canary))
}

fn build_request(text: String, count: u32, new: u32, canary: &str) -> OfflineRequest {
    let request = v1::generate_order::Request { prompt_id: "speed".into(), text, first: 0, count };
    OfflineRequest {
        sampling: v1::Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: new },
        seed: 1,
        logprobs: false,
        requests: vec![request],
        canary: canary.to_owned(),
    }
}

impl EngineRates {
    /// Returns the seconds of a prompt of 128 tokens with eight samples of 256 tokens.
    fn typical_seconds(&self) -> f64 {
        let (prompt, new) = TYPICAL_ORDER;
        prompt / self.prefill_tokens_per_s + new / self.decode_tokens_per_s
    }

    /// Returns true if the engine draws from the same policy as the first one.
    pub fn draws_same_policy(&self, tolerance: f64) -> bool {
        self.distance.is_some_and(|distance| distance <= tolerance)
    }
}

/// Returns the index of the engine that takes least time for a prompt of 128 tokens with eight
/// samples of 256 tokens, among those that agree with the first one that worked; `None` if none
/// worked.
pub fn choose_fastest(measured: &[EngineSpeed], tolerance: f64) -> Option<usize> {
    let rated = measured.iter().enumerate().filter_map(|(index, it)| Some((index, it.rates?)));
    let agreeing = rated.filter(|(_, rates)| rates.draws_same_policy(tolerance));
    let fastest =
        agreeing.min_by(|(_, a), (_, b)| a.typical_seconds().total_cmp(&b.typical_seconds()));
    fastest.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(prefill: f64, decode: f64, distance: Option<f64>) -> EngineSpeed {
        let rates =
            EngineRates { prefill_tokens_per_s: prefill, decode_tokens_per_s: decode, distance };
        EngineSpeed { engine: String::new(), rates: Some(rates), problem: String::new() }
    }

    #[test]
    fn the_fastest_engine_with_the_same_policy_is_chosen() {
        let broken = EngineSpeed { engine: "x".into(), rates: None, problem: "no driver".into() };
        let all = [
            speed(100.0, 50.0, Some(0.0)),
            speed(900.0, 80.0, Some(0.004)),
            speed(9000.0, 800.0, Some(0.4)),
            speed(9000.0, 800.0, None),
            broken.clone(),
        ];
        assert_eq!(choose_fastest(&all, 0.02), Some(1), "others are another policy, or broken");
        assert_eq!(choose_fastest(&all, 0.5), Some(2));
        assert_eq!(choose_fastest(&[broken], 0.02), None);
    }

    #[test]
    fn decoding_counts_more_than_prefill() {
        let all = [speed(100.0, 400.0, Some(0.0)), speed(10_000.0, 200.0, Some(0.0))];
        assert_eq!(choose_fastest(&all, 0.02), Some(0));
    }
}
