//! The model of the comparison: random weights in the shape of Qwen2.5-0.5B, one token a byte.

use std::{fs::File, path::Path};

use anyhow::Context;
use engine::{Device, Dtype, Shape};
use rustix::fs::{Advice, fadvise};
use serde_json::Value;

use super::{CHUNKS, CONTEXT, Model};
use crate::output;

const SHAPE: Shape = Shape {
    hidden_size: 896,
    intermediate_size: 4864,
    layers: 24,
    heads: 14,
    kv_heads: 2,
    max_positions: 4096,
};

/// The byte tokenizer uses the first 260 rows.
const VOCAB: u32 = 151_936;

pub(super) fn write(scratch: &Path) -> anyhow::Result<Model> {
    output::say("engines: writing random weights in the shape of Qwen2.5-0.5B …");
    let directory = scratch.join("model");
    engine::write_scratch(&directory, &SHAPE)?;
    widen(&directory)?;
    // What is published is mostly bf16.
    engine::Model::init_from(&directory, 1, &Device::Cpu)?.save(&directory)?;
    engine::Model::load_as(&directory, &Device::Cpu, Dtype::Bf16)?.save(&directory)?;
    let text = scratch.join("text.txt");
    // One token a byte, and one newline at the end that llama-perplexity removes.
    let mut bytes: Vec<u8> = (b'a'..=b'z').cycle().take(CHUNKS * CONTEXT).collect();
    bytes.push(b'\n');
    std::fs::write(&text, bytes).context("write the text")?;
    let weights = directory.join("model.safetensors");
    let weight_bytes = std::fs::metadata(&weights).context("measure the weights")?.len();
    Ok(Model { directory, text, weights, weight_bytes })
}

/// From memory to the disk alone. On a box, each engine brings a model's file into memory in its own
/// way; where the pages of a file lie that was just written is no engine's doing.
pub(super) fn evict(files: &[&Path]) -> anyhow::Result<()> {
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

/// Gives the configuration its vocabulary, and an end token that no text has.
fn widen(directory: &Path) -> anyhow::Result<()> {
    let path = directory.join("config.json");
    let text = std::fs::read_to_string(&path).context("read the configuration")?;
    let mut config: Value = serde_json::from_str(&text).context("read the configuration")?;
    config["vocab_size"] = VOCAB.into();
    config["eos_token_id"] = (VOCAB - 1).into();
    std::fs::write(&path, config.to_string()).context("write the configuration")?;
    std::fs::write(directory.join("generation_config.json"), "{}").context("write its settings")
}
