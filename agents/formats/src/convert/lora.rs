//! Converts a PEFT LoRA adapter to a GGUF adapter. llama.cpp scales every pair by alpha / rank with
//! one alpha for all. If the scale of a pair differs (rsLoRA, `alpha_pattern`), the difference is
//! multiplied into its B.

use std::path::Path;

use super::atomic_file::AtomicFile;
use super::pairs::{self, LoraPair};
use super::{ConversionDtype, ConvertError, rows};
use crate::ModelConfig;
use crate::gguf::{GgmlType, GgufValue, GgufWriter, PlannedGgufTensor};
use crate::peft::AdapterSettings;

/// Converts a PEFT LoRA adapter to a GGUF adapter for llama.cpp's `--lora`. `base` is the directory
/// of the base model, whose configuration is read. The output depends only on the adapter's
/// content, not on its path.
pub fn convert_lora(
    base: &Path,
    adapter: &Path,
    out: &Path,
    dtype: ConversionDtype,
) -> Result<(), ConvertError> {
    let kind = match dtype {
        ConversionDtype::F32 => GgmlType::F32,
        ConversionDtype::F16 => GgmlType::F16,
        ConversionDtype::Bf16 => GgmlType::BF16,
        ConversionDtype::Q8_0 => return Err(ConvertError::Q8Adapter),
    };
    let config = ModelConfig::from_dir(base)?;
    let settings = AdapterSettings::from_dir(adapter)?;
    let pairs = pairs::read_pairs(base, adapter, &config, &settings)?;
    let alpha = common_alpha(&pairs);
    let fields = adapter_fields(&config, alpha);
    let planned: Vec<PlannedGgufTensor> =
        pairs.iter().flat_map(|pair| plan_pair(pair, kind)).collect();
    let failed = AtomicFile::write_error(out);
    let mut writer =
        GgufWriter::start(AtomicFile::create_at(out)?, &fields, &planned).map_err(&failed)?;
    for pair in &pairs {
        for values in [lora_a_values(pair), lora_b_values(pair, alpha)] {
            let mut bytes = Vec::new();
            rows::encode_rows(&values, kind, &mut bytes);
            writer.write(&bytes).map_err(&failed)?;
        }
    }
    writer.into_output().commit_file()
}

fn adapter_fields(config: &ModelConfig, alpha: f32) -> Vec<(String, GgufValue)> {
    let architecture = config.architecture.gguf_name();
    [
        ("general.architecture", GgufValue::from(architecture)),
        ("general.type", GgufValue::from("adapter")),
        ("adapter.type", GgufValue::from("lora")),
        ("adapter.lora.alpha", GgufValue::F32(alpha)),
        ("general.quantization_version", GgufValue::U32(2)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// Returns the alpha with which most pairs have the scale alpha / rank.
fn common_alpha(pairs: &[LoraPair]) -> f32 {
    let wanted = |alpha: f32| pairs.iter().filter(|pair| pair.effective_alpha() == alpha).count();
    let first_of_most = pairs.iter().rev().max_by_key(|pair| wanted(pair.effective_alpha()));
    first_of_most.map_or(1.0, LoraPair::effective_alpha)
}

fn plan_pair(pair: &LoraPair, kind: GgmlType) -> [PlannedGgufTensor; 2] {
    let tensor = |end: &str, shape: [usize; 2]| PlannedGgufTensor {
        name: format!("{}.lora_{end}", pair.place.gguf_name),
        shape: shape.map(|size| size as u64).into(),
        kind,
    };
    let is_embedding = pair.place.is_embedding();
    let a = if is_embedding { [pair.inputs, pair.rank] } else { [pair.rank, pair.inputs] };
    [tensor("a", a), tensor("b", [pair.outputs, pair.rank])]
}

/// Orders the values as llama.cpp does; the A of an embedding is transposed.
fn lora_a_values(pair: &LoraPair) -> Vec<f32> {
    match pair.place.is_embedding() {
        true => rows::transpose_rows(&pair.a, pair.inputs),
        false => pair.a.clone(),
    }
}

/// Multiplies the part of the scale that `alpha` does not cover into B.
fn lora_b_values(pair: &LoraPair, alpha: f32) -> Vec<f32> {
    let factor = (pair.scale * pair.rank as f64 / f64::from(alpha)) as f32;
    let mut values = match pair.place.head {
        Some(head) => rows::interleave_rows(&pair.b, pair.rank, head),
        None => pair.b.clone(),
    };
    if pair.effective_alpha() != alpha {
        values.iter_mut().for_each(|value| *value *= factor);
    }
    values
}
