//! The files of an adapter of a 7B model, and the time to merge them.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, ensure};
use engine::{
    AdapterMerge, LayerModule, LoraAdapter, LoraSpec, MergeRule, ModelConfig, WeightChange,
};
use formats::peft::TENSOR_FILE;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::shared_training::{SharingMethod, count_bytes};

const RANK: usize = 16;

/// Two new adapters of this rank differ in as many values, those of A, as all of an adapter of rank
/// [`RANK`].
const CHANGED_RANK: usize = 36;

/// The share of changed values that is sent over a slow link.
const SENT: f64 = 0.01;

/// Adapters in a merge.
const MERGED: usize = 4;

/// Shape of Qwen2.5-7B.
const CONFIG: &str = r#"{
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
  "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
  "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": false
}"#;

/// An adapter of a 7B model.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LargeAdapter {
    /// Size of its weights, in f32.
    pub weight_bytes: u64,
    /// Size of its change with `send_share: 0.01`.
    pub change_bytes: u64,
    /// Seconds in which this machine merges four of them by `average`.
    pub merge_s: f64,
    /// The same by `stack`.
    pub stack_s: f64,
}

impl LargeAdapter {
    /// Returns what the result depends on besides the machine.
    pub(super) fn settings() -> Value {
        json!({ "rank": RANK, "sent": SENT, "merged": MERGED })
    }

    /// Measures files in a directory.
    pub(super) fn measure_files(directory: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(directory)?;
        std::fs::write(directory.join("config.json"), CONFIG)?;
        let config = ModelConfig::from_dir(directory)?;
        let write = |name: &str, rank: usize, seed: u64| {
            let modules = LayerModule::ALL.into_iter().collect();
            let lora = LoraSpec { rank, alpha: 32.0, rslora: false, modules };
            let path = directory.join(name);
            LoraAdapter::new(&lora, &config, seed)?.save_peft(&path, "base")?;
            anyhow::Ok(path)
        };
        let (start, trained) = (write("a", CHANGED_RANK, 1)?, write("b", CHANGED_RANK, 2)?);
        let change = WeightChange { start, trained, left_out: None, keep: SENT };
        change.write_change(&directory.join("change"), &directory.join("left"))?;
        let start = write("start", RANK, 1)?;
        let mut trained = Vec::new();
        for seed in 1..=MERGED as u64 {
            let adapter = write(&format!("trained-{seed}"), RANK, seed)?;
            fill_weights(&adapter, seed)?;
            trained.push((adapter, 1));
        }
        let measure =
            |method: SharingMethod| measure_merge(directory, &start, &trained, method.rule);
        Ok(Self {
            weight_bytes: count_bytes(&start)?,
            change_bytes: count_bytes(&directory.join("change"))?,
            merge_s: measure(SharingMethod::AVERAGE)?,
            stack_s: measure(SharingMethod::STACK)?,
        })
    }
}

/// Returns the seconds of a merge.
fn measure_merge(
    directory: &Path,
    start: &Path,
    trained: &[(PathBuf, u64)],
    rule: MergeRule,
) -> anyhow::Result<f64> {
    let (start, trained) = (start.to_owned(), trained.to_owned());
    let merge = AdapterMerge { start, velocity: None, trained, rule };
    let began = Instant::now();
    merge.write_merged(&directory.join("merged"), &directory.join("velocity"))?;
    Ok(began.elapsed().as_secs_f64())
}

/// Replaces all values of an adapter by random ones: B of a new one is 0, so that its products
/// would be as well.
fn fill_weights(adapter: &Path, seed: u64) -> anyhow::Result<()> {
    let path = adapter.join(TENSOR_FILE);
    let mut bytes = std::fs::read(&path)?;
    // safetensors: the length of the header in 8 bytes, the header, the values.
    let (length, rest) = bytes.split_first_chunk_mut::<8>().context("a file of tensors")?;
    let length = usize::try_from(u64::from_le_bytes(*length))?;
    ensure!(length <= rest.len(), "{} has no values", path.display());
    let mut random = fastrand::Rng::with_seed(seed);
    for value in rest[length..].as_chunks_mut::<4>().0 {
        *value = (random.f32() - 0.5).to_le_bytes();
    }
    Ok(std::fs::write(&path, bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_are_filled_and_the_header_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(TENSOR_FILE);
        let file = [&2u64.to_le_bytes()[..], b"{}", &[0; 12]].concat();
        std::fs::write(&path, &file).unwrap();
        fill_weights(directory.path(), 1).unwrap();
        let filled = std::fs::read(&path).unwrap();
        assert_eq!((filled.len(), &filled[..10]), (file.len(), &file[..10]));
        let mut values = filled[10..].as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it));
        assert!(values.all(|value| value != 0.0 && value.abs() <= 0.5));
        std::fs::write(&path, [9u8; 9]).unwrap();
        assert!(fill_weights(directory.path(), 1).is_err());
    }
}
