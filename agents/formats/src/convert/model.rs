//! Converts a Hugging Face model directory to one GGUF file.

use std::path::Path;

use super::atomic_file::AtomicFile;
use super::rows::{self, RowConversion};
use super::tensor_mapping::{self, TensorMapping};
use super::{ConversionDtype, ConvertError, ConvertProgress, rope, tensor_names, tokenizer};
use crate::gguf::{GgmlType, GgufValue, GgufWriter, PlannedGgufTensor};
use crate::safetensors::ModelWeights;
use crate::{ModelConfig, list_weight_files};

/// Converts a Hugging Face model directory to one GGUF file, including the tokenizer.
pub fn convert_model(
    dir: &Path,
    out: &Path,
    dtype: ConversionDtype,
    progress: &mut ConvertProgress<'_>,
) -> Result<(), ConvertError> {
    let config = ModelConfig::from_dir(dir)?;
    let mut fields = model_fields(&config, dtype);
    fields.extend(tokenizer::tokenizer_fields(dir, &config)?);
    let weights = ModelWeights::open(dir, &list_weight_files(dir)?)?;
    let steps = tensor_mapping::map_tensors(&config);
    tensor_mapping::check_complete(dir, &config, &weights, &steps)?;
    let rope_factors = rope::compute_divisors(&config);
    let mut planned: Vec<PlannedGgufTensor> =
        rope_factors.iter().map(|factors| plan_rope_factors(factors)).collect();
    planned.extend(steps.iter().map(|step| plan_tensor(step, dtype)));
    let failed = AtomicFile::write_error(out);
    let mut writer =
        GgufWriter::start(AtomicFile::create_at(out)?, &fields, &planned).map_err(&failed)?;
    let total = planned.iter().map(PlannedGgufTensor::byte_count).sum();
    let mut done = 0;
    if let Some(factors) = &rope_factors {
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        done += bytes.len() as u64;
        writer.write(&bytes).map_err(&failed)?;
    }
    let of_steps = &planned[planned.len() - steps.len()..];
    for (step, planned) in steps.iter().zip(of_steps) {
        let tensor = weights.get(&step.name)?;
        let way = RowConversion { from: tensor.float_dtype()?, to: planned.kind, head: step.head };
        rows::convert_rows(tensor, way, |piece| {
            done += piece.len() as u64;
            progress(done, total);
            writer.write(piece).map_err(&failed)
        })?;
    }
    writer.into_output().commit_file()
}

fn plan_rope_factors(factors: &[f32]) -> PlannedGgufTensor {
    let (name, shape) = (tensor_names::ROPE_FACTORS.into(), vec![factors.len() as u64]);
    PlannedGgufTensor { name, shape, kind: GgmlType::F32 }
}

fn plan_tensor(step: &TensorMapping, dtype: ConversionDtype) -> PlannedGgufTensor {
    let shape = step.shape.clone();
    PlannedGgufTensor {
        name: step.gguf_name.clone(),
        kind: rows::target_type(dtype, &shape),
        shape,
    }
}

fn model_fields(config: &ModelConfig, dtype: ConversionDtype) -> Vec<(String, GgufValue)> {
    let architecture = tensor_names::architecture_name(config.architecture);
    let count = |value: usize| GgufValue::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut fields = vec![
        ("general.architecture".into(), GgufValue::from(architecture)),
        ("general.type".into(), GgufValue::from("model")),
        ("general.file_type".into(), GgufValue::U32(file_type_id(dtype))),
        ("general.quantization_version".into(), GgufValue::U32(2)),
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
        ("attention.layer_norm_rms_epsilon", GgufValue::F32(config.norm_epsilon as f32)),
        ("rope.dimension_count", count(config.head_dim)),
        ("rope.freq_base", GgufValue::F32(config.rope_theta as f32)),
        ("vocab_size", count(config.vocab_size)),
    ];
    fields.extend(settings.map(|(name, value)| (format!("{architecture}.{name}"), value)));
    fields
}

/// Returns llama.cpp's number for the type of most tensors.
fn file_type_id(dtype: ConversionDtype) -> u32 {
    match dtype {
        ConversionDtype::F32 => 0,
        ConversionDtype::F16 => 1,
        ConversionDtype::Q8_0 => 7,
        ConversionDtype::Bf16 => 32,
    }
}
