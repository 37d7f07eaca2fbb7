//! What a training needs of a box's memory, known before anything of it is fetched but the base's
//! `config.json`.

use std::{collections::BTreeMap, path::Path};

use formats::Architecture;
use hardware::{
    Attention, Dtype, Profile,
    doctor::Plan,
    estimate::{Method, Shape, Training},
};
use runtime::{Job, JobError, Needs, Room};
use wire::v1;

use crate::config::{Config, Engine};

const SETTINGS: &str = "config.json";

/// It is a few hundred bytes.
const SETTINGS_BYTES_MAX: u64 = 1 << 20;

/// What decides how much memory a model takes.
pub fn shape(config: &formats::Config) -> Shape {
    let wide = |size: usize| size as u64;
    Shape {
        layers: wide(config.layers),
        hidden: wide(config.hidden_size),
        intermediate: wide(config.intermediate_size),
        heads: wide(config.heads),
        kv_heads: wide(config.kv_heads),
        head_dim: wide(config.head_dim),
        vocab: wide(config.vocab_size),
        tied: config.tied_embeddings,
        qkv_bias: config.attention_bias,
        qk_norm: config.architecture == Architecture::Qwen3,
    }
}

/// What an order needs here and elsewhere; `None` where nobody knows what there is, or what the
/// base is.
pub(crate) async fn needs(
    job: &Job,
    order: &v1::TrainOrder,
    config: &Config,
) -> Result<Option<Needs>, JobError> {
    let Some(has) = config.doctor.training_bytes(config.uses_gpu()).await else { return Ok(None) };
    let tree = order.base.as_ref().and_then(|base| base.tree.as_ref());
    let (Some(tree), Some(training)) = (tree, &order.training) else { return Ok(None) };
    let read = job.cache.file_of(&job.store, tree, SETTINGS, SETTINGS_BYTES_MAX).await?;
    // What cannot be read is refused, with its reason, by what trains.
    let settings = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let settings =
        settings.and_then(|map| formats::Config::from_json(&map, Path::new(SETTINGS)).ok());
    Ok(settings.map(|settings| estimate(&shape(&settings), training, config, has)))
}

fn estimate(shape: &Shape, training: &v1::Training, config: &Config, has: u64) -> Needs {
    let bytes = |profile: &Profile| {
        let on_profile = memory(training, profile, &config.engine, &config.launch.dtype);
        shape.training(&on_profile).peak_bytes
    };
    let own = Room { needs: bytes(&config.launch.profile), has: Some(has) };
    let by_profile = Profile::all().map(|profile| (profile.name.clone(), bytes(&profile)));
    Needs { own, by_profile: BTreeMap::from_iter(by_profile) }
}

/// A training as a box of some profile does it.
fn memory(training: &v1::Training, profile: &Profile, engine: &Engine, dtype: &str) -> Training {
    let policy = &profile.training;
    let tokens = match training.micro_batch_tokens {
        0 => policy.micro_batch_tokens,
        tokens => tokens,
    };
    // Short examples share a pass, whose attention then takes less.
    let sequence = tokens.min(training.max_tokens.max(1));
    let narrow = match engine {
        Engine::Candle => dtype == "bf16",
        Engine::PyTorch(_) => policy.dtype != Dtype::F32,
    };
    let method = match &training.lora {
        Some(lora) => Method::Lora { rank: u64::from(lora.r) },
        None => Method::Full,
    };
    Training {
        method,
        batch: u64::from((tokens / sequence).max(1)),
        sequence: u64::from(sequence),
        // Weights that are trained are f32.
        bytes_per_weight: if narrow && method != Method::Full { 2 } else { 4 },
        checkpointing: policy.gradient_checkpointing,
        eager_attention: policy.attention == Attention::Eager,
        dropout: false,
    }
}

/// What the doctor is asked about an order. Whether it fits was seen before.
pub(crate) fn plan(order: &v1::TrainOrder, profile: &Profile) -> Plan {
    let steps = order.training.as_ref().map_or(0, |training| training.max_steps);
    let save_every = order.training.as_ref().map_or(0, |training| training.save_every);
    Plan {
        steps: (steps > 0).then(|| u64::from(steps)),
        save_every: (save_every > 0).then(|| u64::from(save_every)),
        saves_by_time: true,
        dtype: Some(profile.training.dtype),
        dataloader_workers: Some(profile.training.dataloader_workers),
        pin_memory: Some(profile.training.pin_memory),
        ..Plan::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen2.5 7B.
    const SEVEN_B: Shape = Shape {
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
    };

    fn gigabytes(profile: &str, training: &v1::Training) -> u64 {
        let profile = Profile::named(profile).unwrap();
        let python = crate::Python::Uv("uv".into());
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::PyTorch(crate::PyTorch::prepare(python, directory.path()).unwrap());
        let training = memory(training, &profile, &engine, "f32");
        (SEVEN_B.training(&training).peak_bytes + 500_000_000) / 1_000_000_000
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
