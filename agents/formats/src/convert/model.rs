//! Converts a Hugging Face model directory to one GGUF file.

use std::path::Path;

use super::atomic_file::AtomicFile;
use super::rows::{self, RowConversion};
use super::tensor_mapping::{self, TensorMapping};
use super::{ConversionDtype, ConvertError, ConvertProgress, metadata, rope, tokenizer};
use crate::gguf::{GgmlType, GgufWriter, PlannedGgufTensor};
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
    let mut fields = metadata::model_fields(&config, dtype);
    fields.extend(tokenizer::tokenizer_fields(dir, &config)?);
    let weights = ModelWeights::open(dir, &list_weight_files(dir)?)?;
    let steps = tensor_mapping::map_tensors(&config);
    tensor_mapping::check_complete(dir, &config, &weights, &steps)?;
    let rope_factors = rope::list_factors(&config);
    let mut planned: Vec<PlannedGgufTensor> = rope_factors.iter().map(plan_rope_factors).collect();
    planned.extend(steps.iter().map(|step| plan_tensor(step, dtype)));
    let failed = AtomicFile::write_error(out);
    let mut writer =
        GgufWriter::start(AtomicFile::create_at(out)?, &fields, &planned).map_err(&failed)?;
    let total = planned.iter().map(PlannedGgufTensor::byte_count).sum();
    let mut done = 0;
    for (_, factors) in &rope_factors {
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        done += bytes.len() as u64;
        writer.write(&bytes).map_err(&failed)?;
    }
    let of_steps = &planned[planned.len() - steps.len()..];
    for (step, planned) in steps.iter().zip(of_steps) {
        for name in step.source_names() {
            let tensor = weights.get(&name)?;
            let way = RowConversion {
                from: tensor.float_dtype()?,
                to: planned.kind,
                head: step.head,
                shifted: step.shifted,
            };
            rows::convert_rows(tensor, way, |piece| {
                done += piece.len() as u64;
                progress(done, total);
                writer.write(piece).map_err(&failed)
            })?;
        }
    }
    writer.into_output().commit_file()
}

fn plan_rope_factors((name, factors): &(&'static str, Vec<f32>)) -> PlannedGgufTensor {
    let (name, shape) = ((*name).to_owned(), vec![factors.len() as u64]);
    PlannedGgufTensor { name, shape, kind: GgmlType::F32 }
}

fn plan_tensor(step: &TensorMapping, dtype: ConversionDtype) -> PlannedGgufTensor {
    let shape = step.shape.clone();
    let kind = if step.is_router() { GgmlType::F32 } else { rows::target_type(dtype, &shape) };
    PlannedGgufTensor { name: step.gguf_name.clone(), kind, shape }
}
