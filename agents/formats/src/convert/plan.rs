//! Every tensor of a model: what it is called here and there, and its shape.

use std::collections::BTreeSet;
use std::path::Path;

use super::{ConvertError, names};
use crate::safetensors::Weights;
use crate::{Config, Module};

#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) gguf: String,
    pub(crate) shape: Vec<u64>,
    /// Rows of a head, when they are reordered.
    pub(crate) head: Option<usize>,
}

/// In the order of the file.
pub(crate) fn steps(config: &Config) -> Vec<Step> {
    let (vocab, hidden) = (config.vocab_size as u64, config.hidden_size as u64);
    let mut steps =
        vec![plain("model.embed_tokens.weight", names::TOKEN_EMBEDDING, &[vocab, hidden])];
    for layer in 0..config.layers {
        push_layer(&mut steps, config, layer);
    }
    steps.push(plain("model.norm.weight", names::OUTPUT_NORM, &[hidden]));
    if !config.tied_embeddings {
        steps.push(plain("lm_head.weight", names::OUTPUT, &[vocab, hidden]));
    }
    steps
}

fn plain(name: &str, gguf: &str, shape: &[u64]) -> Step {
    Step { name: name.into(), gguf: gguf.into(), shape: shape.into(), head: None }
}

fn push_layer(steps: &mut Vec<Step>, config: &Config, layer: usize) {
    let norm = |name: &str, gguf: &str, size: usize| {
        let name = format!("model.layers.{layer}.{name}.weight");
        plain(&name, &format!("blk.{layer}.{gguf}.weight"), &[size as u64])
    };
    steps.push(norm("input_layernorm", "attn_norm", config.hidden_size));
    for module in Module::ALL {
        let (outputs, inputs) = module.shape(config);
        let permuted = names::is_permuted(config.architecture, module);
        let step = |rest: &str, shape: &[usize]| Step {
            name: module.parameter(layer, rest),
            gguf: names::module(layer, module, rest),
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

/// Every tensor is there in the right shape and kind, and none is there that would be left out.
pub(super) fn check_complete(
    dir: &Path,
    config: &Config,
    weights: &Weights,
    steps: &[Step],
) -> Result<(), ConvertError> {
    for step in steps {
        let tensor = weights.get(&step.name)?;
        tensor.element()?;
        tensor.expect_shape(&step.shape)?;
    }
    let known: BTreeSet<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    // A tied output is the embedding again; frequencies follow from the configuration.
    let needless = |name: &str| {
        name.ends_with(".rotary_emb.inv_freq") || config.tied_embeddings && name == "lm_head.weight"
    };
    match weights.names().find(|name| !known.contains(name) && !needless(name)) {
        None => Ok(()),
        Some(name) => Err(ConvertError::UnknownTensor {
            dir: dir.into(),
            name: name.into(),
            architecture: names::architecture(config.architecture),
        }),
    }
}
