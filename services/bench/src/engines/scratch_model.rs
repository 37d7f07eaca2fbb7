//! Writes the model of the comparison: random weights in the shape of Qwen2.5-0.5B, with one token
//! per byte.

use std::{fs::File, path::Path};

use anyhow::Context;
use cli::output;
use engine::{Device, MatrixDtype, ScratchShape};
use formats::ModelConfig;
use rustix::fs::{Advice, fadvise};
use serde_json::Value;

use super::{BenchModel, CHUNKS, CONTEXT, ModelSize};

/// The shape of Qwen2.5-0.5B.
const SHAPE: ScratchShape = ScratchShape {
    hidden_size: 896,
    intermediate_size: 4864,
    layers: 24,
    heads: 14,
    kv_heads: 2,
    max_positions: 4096,
};

/// Rows of the vocabulary. The byte tokenizer uses only the first 260.
const VOCAB: u32 = 151_936;

pub(super) fn write_model(scratch: &Path) -> anyhow::Result<BenchModel> {
    output::print_message("engines: writing random weights in the shape of Qwen2.5-0.5B …");
    let directory = scratch.join("model");
    engine::write_scratch_model(&directory, &SHAPE)?;
    set_vocabulary(&directory)?;
    // Published models are mostly bf16.
    engine::LanguageModel::init_from_directory(&directory, 1, &Device::Cpu)?
        .save_directory(&directory)?;
    engine::LanguageModel::load_with_dtype(&directory, &Device::Cpu, MatrixDtype::Bf16)?
        .save_directory(&directory)?;
    let text = scratch.join("text.txt");
    // One token per byte, and a final newline that llama-perplexity removes.
    let mut bytes: Vec<u8> = (b'a'..=b'z').cycle().take(CHUNKS * CONTEXT).collect();
    bytes.push(b'\n');
    std::fs::write(&text, bytes).context("write the text")?;
    let weights = directory.join("model.safetensors");
    let weight_bytes = std::fs::metadata(&weights).context("measure the weights")?.len();
    let size = model_size(&ModelConfig::from_dir(&directory)?)?;
    Ok(BenchModel { directory, text, weights, weight_bytes, size })
}

fn model_size(config: &ModelConfig) -> anyhow::Result<ModelSize> {
    let all = u64::try_from(config.count_parameters()).context("count the parameters")?;
    let table = u64::from(VOCAB) * SHAPE.hidden_size as u64;
    // Looking up a token multiplies nothing.
    let decode_products = if config.tied_embeddings { all } else { all - table };
    Ok(ModelSize {
        decoded_bytes: 2 * decode_products,
        prefill_products: decode_products - table,
        decode_products,
    })
}

/// Engines read model files in different ways. Without this, the placement of freshly written pages
/// would influence the comparison.
pub(super) fn evict_files(files: &[&Path]) -> anyhow::Result<()> {
    for path in files {
        let evict = || {
            let file = File::open(path)?;
            file.sync_all()?;
            Ok::<_, std::io::Error>(fadvise(&file, 0, None, Advice::DontNeed)?)
        };
        evict().with_context(|| format!("evict {} from memory", path.display()))?;
    }
    Ok(())
}

fn set_vocabulary(directory: &Path) -> anyhow::Result<()> {
    let path = directory.join("config.json");
    let text = std::fs::read_to_string(&path).context("read the configuration")?;
    let mut config: Value = serde_json::from_str(&text).context("read the configuration")?;
    config["vocab_size"] = VOCAB.into();
    config["eos_token_id"] = (VOCAB - 1).into();
    std::fs::write(&path, config.to_string()).context("write the configuration")?;
    std::fs::write(directory.join("generation_config.json"), "{}").context("write its settings")
}
