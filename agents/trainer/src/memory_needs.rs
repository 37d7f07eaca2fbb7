//! Estimates the memory that a training needs on a host, from the base's `config.json` alone.

use std::{collections::BTreeMap, path::Path};

use agent::{JobError, LeasedJob, MemoryFit, MemoryNeeds};
use doctor::{
    TrainingPlan,
    estimate::{ModelShape, PlannedTraining, TrainingMethod},
};
use formats::{FloatDtype, ModelOutline};
use hardware::{AttentionKind, HardwareProfile};
use wire::v1;

use crate::config::{TrainerConfig, TrainingEngine};

const CONFIG_FILE: &str = "config.json";

/// A real configuration has a few hundred bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Returns `None` if the available memory or the base is unknown.
pub(crate) async fn estimate_needs(
    job: &LeasedJob,
    order: &v1::TrainOrder,
    config: &TrainerConfig,
) -> Result<Option<MemoryNeeds>, JobError> {
    let Some(has) = config.doctor.training_budget_bytes(config.uses_gpu()).await else {
        return Ok(None);
    };
    let Some(training) = &order.training else { return Ok(None) };
    let settings = read_base_config(job, order).await?;
    Ok(settings.map(|settings| needs_by_profile(&settings.shape, training, config, has)))
}

/// Reads the configuration of an order's base. Returns `None` if it cannot be read: the worker
/// refuses it, with the reason.
pub(crate) async fn read_base_config(
    job: &LeasedJob,
    order: &v1::TrainOrder,
) -> Result<Option<ModelOutline>, JobError> {
    let tree = order.base.as_ref().and_then(|base| base.tree.as_ref());
    let Some(tree) = tree else { return Ok(None) };
    let read = job.cache.read_tree_file(&job.store, tree, CONFIG_FILE, CONFIG_BYTES_MAX).await?;
    let settings = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    Ok(settings.and_then(|map| ModelOutline::from_json(&map, Path::new(CONFIG_FILE)).ok()))
}

/// Estimates the peak memory in bytes on this host, which has `has` bytes, and on each profile.
fn needs_by_profile(
    shape: &ModelShape,
    training: &v1::Training,
    config: &TrainerConfig,
    has: u64,
) -> MemoryNeeds {
    let bytes = |profile: &HardwareProfile| {
        let on_profile =
            training_on_profile(training, profile, &config.engine, &config.launch.dtype);
        shape.estimate_training(&on_profile).peak_bytes
    };
    let own = MemoryFit { needed_bytes: bytes(&config.launch.profile), available_bytes: Some(has) };
    let by_profile =
        HardwareProfile::built_in_profiles().map(|profile| (profile.name.clone(), bytes(&profile)));
    MemoryNeeds { own, by_profile: BTreeMap::from_iter(by_profile) }
}

fn training_on_profile(
    training: &v1::Training,
    profile: &HardwareProfile,
    engine: &TrainingEngine,
    dtype: &str,
) -> PlannedTraining {
    let policy = &profile.training;
    let tokens = match training.micro_batch_tokens {
        0 => policy.micro_batch_tokens,
        tokens => tokens,
    };
    // Short examples share a pass. Their attention then takes less memory than that of one long
    // sequence.
    let sequence = tokens.min(training.max_tokens.max(1));
    let narrow = match engine {
        TrainingEngine::Candle => dtype != "f32",
        TrainingEngine::PyTorch(_) => policy.dtype != FloatDtype::F32,
    };
    let method = match &training.lora {
        Some(lora) => TrainingMethod::Lora { rank: u64::from(lora.r) },
        None => TrainingMethod::Full,
    };
    PlannedTraining {
        method,
        batch: u64::from((tokens / sequence).max(1)),
        sequence: u64::from(sequence),
        // Trained weights are always f32.
        bytes_per_weight: if narrow && method != TrainingMethod::Full { 2 } else { 4 },
        checkpointing: policy.gradient_checkpointing,
        eager_attention: policy.attention == AttentionKind::Eager,
        dropout: false,
        quantized: training
            .lora
            .as_ref()
            .is_some_and(|lora| lora.quantization() != v1::lora::Quantization::None),
    }
}

/// Returns true if the base is quantised while its adapter is trained.
pub(crate) fn is_quantized(order: &v1::TrainOrder) -> bool {
    let lora = order.training.as_ref().and_then(|training| training.lora.as_ref());
    lora.is_some_and(|lora| lora.quantization() != v1::lora::Quantization::None)
}

/// The memory fit is checked elsewhere.
pub(crate) fn doctor_plan(order: &v1::TrainOrder, profile: &HardwareProfile) -> TrainingPlan {
    let steps = order.training.as_ref().map_or(0, |training| training.max_steps);
    let save_every = order.training.as_ref().map_or(0, |training| training.save_every);
    TrainingPlan {
        steps: (steps > 0).then(|| u64::from(steps)),
        save_every: (save_every > 0).then(|| u64::from(save_every)),
        saves_by_time: true,
        dtype: Some(profile.training.dtype),
        dataloader_workers: Some(profile.training.dataloader_workers),
        pin_memory: Some(profile.training.pin_memory),
        quantised_bits: if is_quantized(order) { 4 } else { 0 },
        ..TrainingPlan::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen2.5 7B.
    const SEVEN_B: ModelShape = ModelShape {
        layers: 28,
        hidden: 3584,
        intermediate: 18_944,
        heads: 28,
        kv_heads: 4,
        head_dim: 128,
        vocab: 152_064,
        tied: false,
        qkv_bias: true,
        qk_norm: false,
        other_parameters: 0,
        expert_parameters: 0,
    };

    fn gigabytes(profile: &str, training: &v1::Training) -> u64 {
        let profile = HardwareProfile::load_named(profile).unwrap();
        let python = crate::PythonRunner::Uv("uv".into());
        let directory = tempfile::tempdir().unwrap();
        let engine = TrainingEngine::PyTorch(
            crate::PyTorchProgram::write_program(python, directory.path()).unwrap(),
        );
        let training = training_on_profile(training, &profile, &engine, "f32");
        (SEVEN_B.estimate_training(&training).peak_bytes + 500_000_000) / 1_000_000_000
    }

    #[test]
    fn an_adapter_of_seven_billion_fits_a_card_in_bf16_and_none_of_32_gb_in_f32() {
        let lora = v1::Lora { r: 32, ..Default::default() };
        let training = v1::Training {
            micro_batch_tokens: 512,
            max_tokens: 256,
            lora: Some(lora),
            ..Default::default()
        };
        assert_eq!(gigabytes("gfx1201", &training), 19);
        assert!(gigabytes("gfx906", &training) > 32);
        let full = v1::Training { lora: None, ..training };
        assert!(gigabytes("gfx1151", &full) > 99);
    }

    #[test]
    fn longer_passes_need_more() {
        let of = |tokens| {
            let lora = Some(v1::Lora { r: 8, ..Default::default() });
            let training = v1::Training {
                micro_batch_tokens: tokens,
                max_tokens: 4096,
                lora,
                ..Default::default()
            };
            gigabytes("gfx1151", &training)
        };
        assert!(of(512) < of(4096) && of(4096) < of(8192));
    }
}
