//! Chooses the engine of a base by its speed: all engines of the host are timed on it once.

use std::{collections::BTreeMap, fs, path::PathBuf};

use agent::WorkerLauncher;
use anyhow::bail;
use serde::{Deserialize, Serialize};

use crate::{
    EngineCandidate, EngineSpeed, GeneratorBackend, OfflinePolicy, choose_fastest, measure_engines,
};

/// Maximum bases whose speeds are saved; beyond it, the first by digest are dropped.
const BASES_MAX: usize = 64;

/// The engines of a host, and the file of their speeds.
#[derive(Debug, Clone)]
pub struct EngineCalibration {
    candidates: Vec<EngineCandidate>,
    file: PathBuf,
}

/// The content of the file: the speeds by the digest of a base.
#[derive(Debug, Default, Serialize, Deserialize)]
struct CalibrationFile {
    bases: BTreeMap<String, Vec<EngineSpeed>>,
}

/// The engine that draws with a base.
#[derive(Debug, Clone)]
pub(crate) struct ChosenEngine {
    /// The digest of the base.
    pub(crate) base: String,
    /// The largest accepted distance of the engine from the first one, in nats per token.
    pub(crate) tolerance: f64,
    pub(crate) candidate: EngineCandidate,
    /// The engine with its speeds.
    pub(crate) description: String,
}

impl EngineCalibration {
    /// Keeps the measured speeds in `file`. `discard_old` removes those that it has.
    ///
    /// # Errors
    /// When the old speeds cannot be removed.
    pub fn open(
        candidates: Vec<EngineCandidate>,
        file: PathBuf,
        discard_old: bool,
    ) -> std::io::Result<Self> {
        if discard_old && file.exists() {
            fs::remove_file(&file)?;
        }
        Ok(Self { candidates, file })
    }

    pub(crate) fn backends(&self) -> impl Iterator<Item = &GeneratorBackend> {
        self.candidates.iter().map(|candidate| &candidate.backend)
    }

    /// Returns the fastest engine on a base, by the speeds in the file, or else by timing all
    /// engines. Engines whose distance from the first is above `tolerance` are left out.
    /// `progress` receives the number of timed engines and their total.
    ///
    /// # Errors
    /// When no engine works.
    pub(crate) async fn choose_engine(
        &self,
        launch: &WorkerLauncher,
        policy: &OfflinePolicy<'_>,
        tolerance: f64,
        progress: impl Fn(usize, usize),
    ) -> anyhow::Result<ChosenEngine> {
        let mut file = self.read_file();
        let known = file.bases.remove(&policy.base_key).filter(|it| self.has_same_engines(it));
        let is_new = known.is_none();
        let speeds = match known {
            Some(speeds) => speeds,
            None => self.measure_base(launch, policy, progress).await,
        };
        let Some(fastest) = choose_fastest(&speeds, tolerance) else {
            let problems = speeds.iter().map(|it| format!("{}: {}", it.engine, it.problem));
            bail!("no engine works here: {} (E107)", problems.collect::<Vec<_>>().join("; "));
        };
        let chosen = ChosenEngine {
            base: policy.base_key.clone(),
            tolerance,
            candidate: self.candidates[fastest].clone(),
            description: describe_choice(&speeds, fastest),
        };
        if is_new {
            tracing::info!(engine = chosen.description, "chose the fastest engine of this base");
            file.bases.insert(policy.base_key.clone(), speeds);
            self.write_file(file);
        }
        Ok(chosen)
    }

    async fn measure_base(
        &self,
        launch: &WorkerLauncher,
        policy: &OfflinePolicy<'_>,
        progress: impl Fn(usize, usize),
    ) -> Vec<EngineSpeed> {
        let total = self.candidates.len();
        let report = |done, engine: &str| {
            tracing::info!(engine, "timing an engine of this box ({} of {total})", done + 1);
            progress(done, total);
        };
        let speeds = measure_engines(launch, &self.candidates, policy, report).await;
        for EngineSpeed { engine, problem, .. } in speeds.iter().filter(|it| it.rates.is_none()) {
            tracing::warn!(engine, problem, "an engine of this box does not work");
        }
        speeds
    }

    /// Other versions or devices are other engines.
    fn has_same_engines(&self, speeds: &[EngineSpeed]) -> bool {
        let names = self.candidates.iter().map(EngineCandidate::describe_engine);
        names.eq(speeds.iter().map(|it| it.engine.clone()))
    }

    /// An unreadable file has no speeds: they are measured again.
    fn read_file(&self) -> CalibrationFile {
        let text = fs::read(&self.file).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    fn write_file(&self, mut file: CalibrationFile) {
        while file.bases.len() > BASES_MAX {
            file.bases.pop_first();
        }
        let written = serde_json::to_vec_pretty(&file).map_err(std::io::Error::from);
        let written =
            written.and_then(|bytes| durable_files::replace_file(&self.file, &bytes, 0o666));
        if let Err(error) = written {
            tracing::warn!(%error, file = %self.file.display(), "the measured speeds were not saved");
        }
    }
}

/// Returns `llama.cpp 0.7.0 Vulkan0 bf16: prefill 1830, decode 312 tokens/s, the fastest of 5`.
fn describe_choice(speeds: &[EngineSpeed], fastest: usize) -> String {
    let EngineSpeed { engine, rates, .. } = &speeds[fastest];
    let rates_text = rates.map_or(String::new(), |rates| {
        let (prefill, decode) = (rates.prefill_tokens_per_s, rates.decode_tokens_per_s);
        format!(": prefill {prefill:.0}, decode {decode:.0} tokens/s")
    });
    format!("{engine}{rates_text}, the fastest of {}", speeds.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineRates, GeneratorBackend};

    fn calibration(directory: &tempfile::TempDir) -> EngineCalibration {
        let candidates = ["f32", "bf16"].map(|dtype| EngineCandidate {
            backend: GeneratorBackend::Candle,
            dtype: dtype.to_owned(),
        });
        let file = directory.path().join("speeds.json");
        EngineCalibration::open(candidates.into(), file, false).unwrap()
    }

    fn speeds(calibration: &EngineCalibration, decode: [f64; 2]) -> Vec<EngineSpeed> {
        let named = calibration.candidates.iter().zip(decode);
        let speed = |(candidate, decode): (&EngineCandidate, f64)| EngineSpeed {
            engine: candidate.describe_engine(),
            rates: Some(EngineRates {
                prefill_tokens_per_s: 100.0,
                decode_tokens_per_s: decode,
                distance: Some(0.0),
            }),
            problem: String::new(),
        };
        named.map(speed).collect()
    }

    #[test]
    fn speeds_are_kept_until_an_engine_changes_or_calibration_is_requested() {
        let directory = tempfile::tempdir().unwrap();
        let mut own = calibration(&directory);
        let found = |own: &EngineCalibration| {
            let speeds = own.read_file().bases.remove("b3:x")?;
            own.has_same_engines(&speeds).then(|| choose_fastest(&speeds, 0.02))?
        };
        assert_eq!(found(&own), None);
        let mut file = CalibrationFile::default();
        file.bases.insert("b3:x".into(), speeds(&own, [10.0, 30.0]));
        own.write_file(file);
        assert_eq!(found(&own), Some(1));
        own.candidates.pop();
        assert_eq!(found(&own), None, "the engines are others");
        let own = calibration(&directory);
        assert_eq!(found(&own), Some(1));
        EngineCalibration::open(Vec::new(), own.file.clone(), true).unwrap();
        assert_eq!(found(&own), None);
        fs::write(&own.file, "{broken").unwrap();
        assert_eq!(found(&own), None);
    }

    #[test]
    fn a_full_file_stays_small() {
        let directory = tempfile::tempdir().unwrap();
        let own = calibration(&directory);
        let mut file = CalibrationFile::default();
        for number in 0..2 * BASES_MAX {
            file.bases.insert(format!("b3:{number}"), speeds(&own, [1.0, 2.0]));
        }
        own.write_file(file);
        assert_eq!(own.read_file().bases.len(), BASES_MAX);
    }

    #[test]
    fn the_choice_is_described_with_its_speeds() {
        let directory = tempfile::tempdir().unwrap();
        let speeds = speeds(&calibration(&directory), [10.0, 31.7]);
        let said = describe_choice(&speeds, 1);
        assert!(
            said.ends_with(" bf16: prefill 100, decode 32 tokens/s, the fastest of 2"),
            "{said}"
        );
    }
}
