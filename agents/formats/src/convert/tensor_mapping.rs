//! The list of a model's tensors: their names in both formats, and their shapes.

use std::collections::BTreeSet;
use std::path::Path;

use super::{ConvertError, tensor_names};
use crate::safetensors::ModelWeights;
use crate::{ExpertShape, LayerModule, ModelConfig};

#[derive(Debug)]
pub(crate) struct TensorMapping {
    /// Hugging Face's name. `*` stands for the number of an expert.
    pub(crate) name: String,
    pub(crate) gguf_name: String,
    /// The shape in the GGUF file.
    pub(crate) shape: Vec<u64>,
    /// The rows in a head, if they must be reordered.
    pub(crate) head: Option<usize>,
    /// True if the GGUF file has the values plus 1.
    pub(crate) shifted: bool,
    /// The number of Hugging Face tensors that are stacked in the file.
    pub(crate) experts: Option<usize>,
}

impl TensorMapping {
    /// Lists the names of Hugging Face's tensors, in the order of their data in the GGUF file.
    pub(super) fn source_names(&self) -> Vec<String> {
        match self.experts {
            Some(count) => (0..count).map(|one| self.name.replace('*', &one.to_string())).collect(),
            None => vec![self.name.clone()],
        }
    }

    /// Returns the shape of each of Hugging Face's tensors.
    fn source_shape(&self) -> &[u64] {
        if self.experts.is_some() { self.shape.get(1..).unwrap_or_default() } else { &self.shape }
    }

    /// Returns true for the weight that chooses experts, which llama.cpp keeps in f32.
    pub(super) fn is_router(&self) -> bool {
        self.gguf_name.ends_with(".ffn_gate_inp.weight")
    }
}

/// Lists all tensors of a model, in the order of the GGUF file.
pub(crate) fn map_tensors(config: &ModelConfig) -> Vec<TensorMapping> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let mut list = MappingList { config, steps: Vec::new() };
    list.push("model.embed_tokens.weight", tensor_names::TOKEN_EMBEDDING, &[vocab, hidden]);
    for layer in 0..config.layers {
        list.push_layer(layer);
    }
    list.push_norm("model.norm.weight", tensor_names::OUTPUT_NORM, hidden);
    if !config.tied_embeddings {
        list.push("lm_head.weight", tensor_names::OUTPUT, &[vocab, hidden]);
    }
    list.steps
}

struct MappingList<'a> {
    config: &'a ModelConfig,
    steps: Vec<TensorMapping>,
}

impl MappingList<'_> {
    /// Adds a tensor whose rows keep their order.
    fn push(&mut self, name: &str, gguf: &str, shape: &[usize]) -> &mut TensorMapping {
        self.steps.push(TensorMapping {
            name: name.into(),
            gguf_name: gguf.into(),
            shape: shape.iter().map(|size| *size as u64).collect(),
            head: None,
            shifted: false,
            experts: None,
        });
        self.steps.last_mut().expect("one was added")
    }

    fn push_norm(&mut self, name: &str, gguf: &str, size: usize) {
        let shifted = self.config.architecture.traits().shifted_norms;
        self.push(name, gguf, &[size]).shifted = shifted;
    }

    fn push_layer_norm(&mut self, layer: usize, name: &str, gguf: &str, size: usize) {
        let name = format!("model.layers.{layer}.{name}.weight");
        self.push_norm(&name, &format!("blk.{layer}.{gguf}.weight"), size);
    }

    fn push_layer(&mut self, layer: usize) {
        let config = self.config;
        let traits = config.architecture.traits();
        let (first, others) = traits.layer_norms.split_at(traits.layer_norms.len().min(1));
        for (name, gguf) in first {
            self.push_layer_norm(layer, name, gguf, config.hidden_size);
        }
        let (attention, feed_forward) = LayerModule::ALL.split_at(4);
        if traits.fused {
            self.push_fused(layer);
        } else {
            attention.iter().for_each(|module| self.push_module(layer, *module));
            match config.details.experts {
                Some(experts) => self.push_experts(layer, experts),
                None => feed_forward.iter().for_each(|module| self.push_module(layer, *module)),
            }
        }
        if let Some([query, key]) = config.query_norm_sizes() {
            self.push_layer_norm(layer, "self_attn.q_norm", "attn_q_norm", query);
            self.push_layer_norm(layer, "self_attn.k_norm", "attn_k_norm", key);
        }
        for (name, gguf) in others {
            self.push_layer_norm(layer, name, gguf, config.hidden_size);
        }
    }

    fn push_module(&mut self, layer: usize, module: LayerModule) {
        let config = self.config;
        let (outputs, inputs) = config.weight_shape(module);
        let permuted = config.architecture.is_permuted(module);
        let mut push = |rest: &str, shape: &[usize]| {
            let name = module.parameter_name(layer, rest);
            let gguf = tensor_names::module_tensor_name(layer, module, rest);
            self.push(&name, &gguf, shape).head = permuted.then_some(config.head_dim);
        };
        push("weight", &[outputs, inputs]);
        if config.has_bias(module) {
            push("bias", &[outputs]);
        }
    }

    /// Adds the projections of layers whose q, k and v are one matrix, and gate and up another.
    fn push_fused(&mut self, layer: usize) {
        let ModelConfig { hidden_size, intermediate_size, heads, kv_heads, head_dim, .. } =
            *self.config;
        let (query, kv) = (heads * head_dim, kv_heads * head_dim);
        for (path, gguf, shape) in [
            ("self_attn.qkv_proj", "attn_qkv", [query + 2 * kv, hidden_size]),
            ("self_attn.o_proj", "attn_output", [hidden_size, query]),
            ("mlp.gate_up_proj", "ffn_up", [2 * intermediate_size, hidden_size]),
            ("mlp.down_proj", "ffn_down", [hidden_size, intermediate_size]),
        ] {
            let name = format!("model.layers.{layer}.{path}.weight");
            self.push(&name, &format!("blk.{layer}.{gguf}.weight"), &shape);
        }
    }

    fn push_experts(&mut self, layer: usize, experts: ExpertShape) {
        let ExpertShape { count, width, .. } = experts;
        let hidden = self.config.hidden_size;
        let router = format!("model.layers.{layer}.mlp.gate.weight");
        self.push(&router, &format!("blk.{layer}.ffn_gate_inp.weight"), &[count, hidden]);
        for (path, gguf, shape) in [
            ("gate_proj", "ffn_gate_exps", [count, width, hidden]),
            ("up_proj", "ffn_up_exps", [count, width, hidden]),
            ("down_proj", "ffn_down_exps", [count, hidden, width]),
        ] {
            let name = format!("model.layers.{layer}.mlp.experts.*.{path}.weight");
            let gguf = format!("blk.{layer}.{gguf}.weight");
            self.push(&name, &gguf, &shape).experts = Some(count);
        }
    }
}

/// Checks that every tensor exists with the right shape and a supported type, and that none is left
/// out.
pub(super) fn check_complete(
    dir: &Path,
    config: &ModelConfig,
    weights: &ModelWeights,
    steps: &[TensorMapping],
) -> Result<(), ConvertError> {
    let mut known = BTreeSet::new();
    for step in steps {
        for name in step.source_names() {
            let tensor = weights.get(&name)?;
            tensor.float_dtype()?;
            tensor.expect_shape(step.source_shape())?;
            known.insert(name);
        }
    }
    // A tied output layer is the embedding, and the frequencies follow from the configuration.
    let needless = |name: &str| {
        name.ends_with(".rotary_emb.inv_freq") || config.tied_embeddings && name == "lm_head.weight"
    };
    match weights.tensor_names().find(|name| !known.contains(*name) && !needless(name)) {
        None => Ok(()),
        Some(name) => Err(ConvertError::UnknownTensor {
            dir: dir.into(),
            name: name.into(),
            architecture: config.architecture.model_type(),
        }),
    }
}
