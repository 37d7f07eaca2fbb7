//! A Hugging Face model directory to one GGUF file.

use std::path::Path;

use super::output::Output;
use super::plan::{self, Step};
use super::rows::{self, Way};
use super::{ConvertError, Dtype, Progress, names, rope, tokenizer};
use crate::gguf::{Planned, TensorKind, Value, Writer};
use crate::safetensors::Weights;
use crate::{Config, weight_files};

/// A Hugging Face model directory as one GGUF file, tokenizer included.
///
/// # Errors
/// When the model is of a kind that cannot be converted, or a file cannot be read or written.
pub fn model(
    dir: &Path,
    out: &Path,
    dtype: Dtype,
    progress: &mut Progress<'_>,
) -> Result<(), ConvertError> {
    let config = Config::load(dir)?;
    let mut fields = fields(&config, dtype);
    fields.extend(tokenizer::fields(dir, &config)?);
    let weights = Weights::open(dir, &weight_files(dir)?)?;
    let steps = plan::steps(&config);
    plan::check_complete(dir, &config, &weights, &steps)?;
    let rope_factors = rope::factors(&config);
    let mut planned: Vec<Planned> =
        rope_factors.iter().map(|factors| planned_factors(factors)).collect();
    planned.extend(steps.iter().map(|step| planned_step(step, dtype)));
    let failed = Output::failed(out);
    let mut writer = Writer::start(Output::create(out)?, &fields, &planned).map_err(&failed)?;
    let total = planned.iter().map(Planned::bytes).sum();
    let mut done = 0;
    if let Some(factors) = &rope_factors {
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        done += bytes.len() as u64;
        writer.write(&bytes).map_err(&failed)?;
    }
    let of_steps = &planned[planned.len() - steps.len()..];
    for (step, planned) in steps.iter().zip(of_steps) {
        let tensor = weights.get(&step.name)?;
        let way = Way { from: tensor.element()?, to: planned.kind, head: step.head };
        rows::convert(tensor, way, |piece| {
            done += piece.len() as u64;
            progress(done, total);
            writer.write(piece).map_err(&failed)
        })?;
    }
    writer.finish().finish()
}

fn planned_factors(factors: &[f32]) -> Planned {
    let (name, shape) = (names::ROPE_FACTORS.into(), vec![factors.len() as u64]);
    Planned { name, shape, kind: TensorKind::F32 }
}

fn planned_step(step: &Step, dtype: Dtype) -> Planned {
    let shape = step.shape.clone();
    Planned { name: step.gguf.clone(), kind: rows::kind(dtype, &shape), shape }
}

fn fields(config: &Config, dtype: Dtype) -> Vec<(String, Value)> {
    let architecture = names::architecture(config.architecture);
    let count = |value: usize| Value::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut fields = vec![
        ("general.architecture".into(), Value::from(architecture)),
        ("general.type".into(), Value::from("model")),
        ("general.file_type".into(), Value::U32(file_type(dtype))),
        ("general.quantization_version".into(), Value::U32(2)),
    ];
    let settings = [
        ("block_count", count(config.layers)),
        ("context_length", count(config.max_positions)),
        ("embedding_length", count(config.hidden_size)),
        ("feed_forward_length", count(config.intermediate_size)),
        ("attention.head_count", count(config.heads)),
        ("attention.head_count_kv", count(config.kv_heads)),
        ("attention.key_length", count(config.head_dim)),
        ("attention.value_length", count(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Value::F32(config.norm_epsilon as f32)),
        ("rope.dimension_count", count(config.head_dim)),
        ("rope.freq_base", Value::F32(config.rope_theta as f32)),
        ("vocab_size", count(config.vocab_size)),
    ];
    fields.extend(settings.map(|(name, value)| (format!("{architecture}.{name}"), value)));
    fields
}

/// As llama.cpp numbers what most of a file's tensors are.
fn file_type(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Q8_0 => 7,
        Dtype::Bf16 => 32,
    }
}
