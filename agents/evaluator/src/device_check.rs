//! A check that this build of llama.cpp computes the same on the host's device as on the CPU. Some
//! builds did not for months, at normal speed and with plausible perplexities.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context;
use llama::{LlamaPerplexityError, PerplexityRequest, PerplexityRunner};
use serde::{Deserialize, Serialize};

use crate::llama_cpp::LlamaCppEvaluator;

/// The lower bound of the ratio: what rounding explains, with a margin.
const RATIO_MIN: f64 = 0.98;
const RATIO_MAX: f64 = 1.02;

/// Beyond this number, all results are forgotten and measured again.
const PASSED_CHECKS_MAX: usize = 256;

/// The error that llama.cpp computes wrong logits on this host's device, so that the host must not
/// measure.
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
    /// `on_device / on_cpu`.
    pub ratio: f64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct PassedDeviceCheck {
    ratio: f64,
    on_device: f64,
    on_cpu: f64,
}

/// Returns the ratio of the device's perplexity of a short text to the CPU's. The result is
/// remembered if this build passed with this base before. A failed check is repeated next time,
/// because a driver may have been the cause.
pub(crate) fn check_device(
    llama: &LlamaCppEvaluator,
    base_key: &str,
    request: &PerplexityRequest<'_>,
    alive: &mut dyn FnMut(usize, usize),
) -> anyhow::Result<f64> {
    let device = llama.perplexity.device.clone().unwrap_or_default();
    let key = format!("{} | {base_key}", llama.describe_engine(request.base));
    let mut passed = read_passed(&llama.device_checks);
    if let Some(before) = passed.get(&key) {
        return Ok(before.ratio);
    }
    let cpu = PerplexityRunner { device: None, ..llama.perplexity.clone() };
    let on_cpu = cpu
        .measure_perplexity(request, alive)
        .context("measure a short text on the CPU")?
        .perplexity;
    let on_device = match llama.perplexity.measure_perplexity(request, alive) {
        Ok(scored) => scored.perplexity,
        Err(LlamaPerplexityError::NotFinite { .. }) => f64::NAN,
        Err(error) => {
            return Err(error).with_context(|| format!("measure a short text on {device}"));
        }
    };
    let ratio = on_device / on_cpu;
    if !(RATIO_MIN..=RATIO_MAX).contains(&ratio) {
        let version = llama.version.clone();
        return Err(WrongLogits { version, device, on_device, on_cpu, ratio }.into());
    }
    tracing::info!(
        ratio,
        on_device,
        on_cpu,
        device,
        "llama.cpp computes the same on the device \
                                                      and the CPU"
    );
    if passed.len() >= PASSED_CHECKS_MAX {
        passed.clear();
    }
    passed.insert(key, PassedDeviceCheck { ratio, on_device, on_cpu });
    if let Err(error) = write_passed(&llama.device_checks, &passed) {
        tracing::warn!(%error, "the result of the device check was not saved; it is measured again next time");
    }
    Ok(ratio)
}

/// An unreadable file counts as empty.
fn read_passed(path: &Path) -> BTreeMap<String, PassedDeviceCheck> {
    let bytes = std::fs::read(path).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn write_passed(path: &Path, passed: &BTreeMap<String, PassedDeviceCheck>) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    serde_json::to_writer_pretty(&mut file, passed)?;
    file.persist(path)?;
    Ok(())
}
