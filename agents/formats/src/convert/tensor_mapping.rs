//! The list of a model's tensors: their names in both formats, and their shapes.

use std::collections::BTreeSet;
use std::path::Path;

use super::{ConvertError, tensor_names};
use crate::safetensors::ModelWeights;
use crate::{LayerModule, ModelConfig};

#[derive(Debug)]
pub(crate) struct TensorMapping {
    /// Hugging Face's name.
    pub(crate) name: String,
    pub(crate) gguf_name: String,
    pub(crate) shape: Vec<u64>,
    /// The rows in a head, if they must be reordered.
    pub(crate) head: Option<usize>,
}

/// Lists all tensors of a model, in the order of the GGUF file.
pub(crate) fn map_tensors(config: &ModelConfig) -> Vec<TensorMapping> {
    let (vocab, hidden) = (config.vocab_size as u64, config.hidden_size as u64);
    let mut steps = vec![map_plain(
        "model.embed_tokens.weight",
        tensor_names::TOKEN_EMBEDDING,
        &[vocab, hidden],
    )];
    for layer in 0..config.layers {
        push_layer(&mut steps, config, layer);
    }
    steps.push(map_plain("model.norm.weight", tensor_names::OUTPUT_NORM, &[hidden]));
    if !config.tied_embeddings {
        steps.push(map_plain("lm_head.weight", tensor_names::OUTPUT, &[vocab, hidden]));
    }
    steps
}

/// Maps a tensor whose rows keep their order.
fn map_plain(name: &str, gguf: &str, shape: &[u64]) -> TensorMapping {
    TensorMapping { name: name.into(), gguf_name: gguf.into(), shape: shape.into(), head: None }
}

fn push_layer(steps: &mut Vec<TensorMapping>, config: &ModelConfig, layer: usize) {
    let norm = |name: &str, gguf: &str, size: usize| {
        let name = format!("model.layers.{layer}.{name}.weight");
        map_plain(&name, &format!("blk.{layer}.{gguf}.weight"), &[size as u64])
    };
    steps.push(norm("input_layernorm", "attn_norm", config.hidden_size));
    for module in LayerModule::ALL {
        let (outputs, inputs) = config.weight_shape(module);
        let permuted = tensor_names::is_permuted(config.architecture, module);
        let step = |rest: &str, shape: &[usize]| TensorMapping {
            name: module.parameter_name(layer, rest),
            gguf_name: tensor_names::module_tensor_name(layer, module, rest),
            shape: shape.iter().map(|size| *size as u64).collect(),
            head: permuted.then_some(config.head_dim),
        };
        steps.push(step("weight", &[outputs, inputs]));
        if config.has_bias(module) {
            steps.push(step("bias", &[outputs]));
        }
    }
    if config.has_head_norms() {
        steps.push(norm("self_attn.q_norm", "attn_q_norm", config.head_dim));
        steps.push(norm("self_attn.k_norm", "attn_k_norm", config.head_dim));
    }
    steps.push(norm("post_attention_layernorm", "ffn_norm", config.hidden_size));
}

/// Checks that every tensor exists with the right shape and a supported type, and that none is left
/// out.
pub(super) fn check_complete(
    dir: &Path,
    config: &ModelConfig,
    weights: &ModelWeights,
    steps: &[TensorMapping],
) -> Result<(), ConvertError> {
    for step in steps {
        let tensor = weights.get(&step.name)?;
        tensor.float_dtype()?;
        tensor.expect_shape(&step.shape)?;
    }
    let known: BTreeSet<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    // A tied output layer is the embedding, and the frequencies follow from the configuration.
    let needless = |name: &str| {
        name.ends_with(".rotary_emb.inv_freq") || config.tied_embeddings && name == "lm_head.weight"
    };
    match weights.tensor_names().find(|name| !known.contains(name) && !needless(name)) {
        None => Ok(()),
        Some(name) => Err(ConvertError::UnknownTensor {
            dir: dir.into(),
            name: name.into(),
            architecture: tensor_names::architecture_name(config.architecture),
        }),
    }
}
