//! Whether a build of llama.cpp computes on this box's device what it computes on the CPU. Builds
//! did not for months and nobody saw it in their speed; a perplexity, however wrong, looks like one.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context;
use llama::{Perplexity, PerplexityError, Request};
use serde::{Deserialize, Serialize};

use crate::llama_cpp::LlamaCpp;

/// What rounding explains, with a margin.
const RATIO_MIN: f64 = 0.98;
const RATIO_MAX: f64 = 1.02;

/// Canaries remembered; beyond, all are forgotten and measured anew.
const PASSED_MAX: usize = 256;

/// This box must not measure.
#[derive(Debug, thiserror::Error)]
#[error(
    "llama.cpp {version} computes wrong logits on {device}: a perplexity of {on_device:.4} where \
     the CPU has {on_cpu:.4} (ratio {ratio:.4}, allowed are 0.98 to 1.02); use its Vulkan build, or \
     one that has commit 865374bb, or --profile cpu (E106)"
)]
pub struct WrongLogits {
    pub version: String,
    pub device: String,
    pub on_device: f64,
    pub on_cpu: f64,
    pub ratio: f64,
}

/// One that passed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Passed {
    ratio: f64,
    on_device: f64,
    on_cpu: f64,
}

/// The device's perplexity of a short text against the CPU's, from memory if this build passed
/// with this base before. What failed is tried again: a driver may have been the cause.
///
/// # Errors
/// When the ratio is out of bounds, or llama.cpp fails.
pub(crate) fn ratio(
    llama: &LlamaCpp,
    base_key: &str,
    request: &Request<'_>,
    alive: &mut dyn FnMut(usize, usize),
) -> anyhow::Result<f64> {
    let device = llama.perplexity.device.clone().unwrap_or_default();
    let key = format!("{} | {base_key}", llama.engine(request.base));
    let mut passed = read(&llama.canaries);
    if let Some(before) = passed.get(&key) {
        return Ok(before.ratio);
    }
    let cpu = Perplexity { device: None, ..llama.perplexity.clone() };
    let on_cpu = cpu.measure(request, alive).context("measure a short text on the CPU")?.perplexity;
    let on_device = match llama.perplexity.measure(request, alive) {
        Ok(scored) => scored.perplexity,
        Err(PerplexityError::NotFinite { .. }) => f64::NAN,
        Err(error) => {
            return Err(error).with_context(|| format!("measure a short text on {device}"));
        }
    };
    let ratio = on_device / on_cpu;
    if !(RATIO_MIN..=RATIO_MAX).contains(&ratio) {
        let version = llama.version.clone();
        return Err(WrongLogits { version, device, on_device, on_cpu, ratio }.into());
    }
    tracing::info!(ratio, on_device, on_cpu, device, "llama.cpp agrees with itself on this box");
    if passed.len() >= PASSED_MAX {
        passed.clear();
    }
    passed.insert(key, Passed { ratio, on_device, on_cpu });
    if let Err(error) = write(&llama.canaries, &passed) {
        tracing::warn!(%error, "remembering a canary; it is measured again next time");
    }
    Ok(ratio)
}

/// A file that cannot be read is as good as none.
fn read(path: &Path) -> BTreeMap<String, Passed> {
    let bytes = std::fs::read(path).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn write(path: &Path, passed: &BTreeMap<String, Passed>) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    serde_json::to_writer_pretty(&mut file, passed)?;
    file.persist(path)?;
    Ok(())
}
