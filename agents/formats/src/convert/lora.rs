//! PEFT LoRA to GGUF LoRA. llama.cpp scales every pair by alpha / rank with one alpha for all;
//! what an adapter scales otherwise (rsLoRA, `alpha_pattern`) is multiplied into its B.

use std::path::Path;

use super::output::Output;
use super::pairs::{self, Pair, Place};
use super::{ConvertError, Dtype, names, rows};
use crate::Config;
use crate::gguf::{Planned, TensorKind, Value, Writer};
use crate::peft::Settings;

/// A PEFT LoRA adapter of `base` (a model directory, of which the configuration is read) as a
/// GGUF adapter for llama.cpp's `--lora`. What is written follows from the adapter's content
/// alone, not from where it is.
///
/// # Errors
/// When the adapter is of a kind that llama.cpp does not compute, does not fit the base, or a
/// file cannot be read or written.
pub fn lora(base: &Path, adapter: &Path, out: &Path, dtype: Dtype) -> Result<(), ConvertError> {
    let kind = match dtype {
        Dtype::F32 => TensorKind::F32,
        Dtype::F16 => TensorKind::F16,
        Dtype::Bf16 => TensorKind::BF16,
        Dtype::Q8_0 => return Err(ConvertError::Q8Adapter),
    };
    let config = Config::load(base)?;
    let settings = Settings::load(adapter)?;
    let pairs = pairs::read(base, adapter, &config, &settings)?;
    let alpha = common_alpha(&pairs);
    let fields = fields(&config, alpha);
    let planned: Vec<Planned> = pairs.iter().flat_map(|pair| plan(pair, kind)).collect();
    let failed = Output::failed(out);
    let mut writer = Writer::start(Output::create(out)?, &fields, &planned).map_err(&failed)?;
    for pair in &pairs {
        for values in [a(pair), b(pair, &config, alpha)] {
            let mut bytes = Vec::new();
            rows::encode(&values, kind, &mut bytes);
            writer.write(&bytes).map_err(&failed)?;
        }
    }
    writer.finish().finish()
}

fn fields(config: &Config, alpha: f32) -> Vec<(String, Value)> {
    let architecture = names::architecture(config.architecture);
    [
        ("general.architecture", Value::from(architecture)),
        ("general.type", Value::from("adapter")),
        ("adapter.type", Value::from("lora")),
        ("adapter.lora.alpha", Value::F32(alpha)),
        ("general.quantization_version", Value::U32(2)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// The alpha that makes alpha / rank the scale of most pairs.
fn common_alpha(pairs: &[Pair]) -> f32 {
    let wanted = |alpha: f32| pairs.iter().filter(|pair| pair.alpha() == alpha).count();
    let first_of_most = pairs.iter().rev().max_by_key(|pair| wanted(pair.alpha()));
    first_of_most.map_or(1.0, Pair::alpha)
}

fn plan(pair: &Pair, kind: TensorKind) -> [Planned; 2] {
    let tensor = |end: &str, shape: [usize; 2]| Planned {
        name: format!("{}.lora_{end}", pair.place.gguf()),
        shape: shape.map(|size| size as u64).into(),
        kind,
    };
    let a = match pair.place {
        Place::Embedding => [pair.inputs, pair.rank],
        _ => [pair.rank, pair.inputs],
    };
    [tensor("a", a), tensor("b", [pair.outputs, pair.rank])]
}

fn a(pair: &Pair) -> Vec<f32> {
    match pair.place {
        Place::Embedding => rows::transposed(&pair.a, pair.inputs),
        _ => pair.a.clone(),
    }
}

fn b(pair: &Pair, config: &Config, alpha: f32) -> Vec<f32> {
    let factor = (pair.scale * pair.rank as f64 / f64::from(alpha)) as f32;
    let mut values = match pair.place {
        Place::Layer(_, module) if names::is_permuted(config.architecture, module) => {
            rows::interleave(&pair.b, pair.rank, config.head_dim)
        }
        _ => pair.b.clone(),
    };
    if pair.alpha() != alpha {
        values.iter_mut().for_each(|value| *value *= factor);
    }
    values
}
