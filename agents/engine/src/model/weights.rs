//! The parameters of a model, each under its Hugging Face name.

use candle_core::Tensor;
use formats::Config;
use formats::Module;

/// What a parameter is, for initialisation and weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Matrix,
    Bias,
    Norm,
}

#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: Kind,
}

/// `weight` is `[out, in]`.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) input_norm: Tensor,
    pub(crate) post_norm: Tensor,
    /// Qwen3's norms of the heads of q and of k.
    pub(crate) head_norms: Option<[Tensor; 2]>,
    /// In the order of [`Module::ALL`].
    pub(crate) linears: Vec<Linear>,
}

#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) embedding: Tensor,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor,
    /// `None` when the embedding serves as head.
    pub(crate) head: Option<Tensor>,
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const NORM: &str = "model.norm.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

pub(crate) fn layer_name(layer: usize, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}

impl Weights {
    /// Asks `make` for every parameter of such a model.
    pub(crate) fn build<E>(
        config: &Config,
        mut make: impl FnMut(Parameter) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        let Config { vocab_size, hidden_size, layers, tied_embeddings, .. } = *config;
        let table = vec![vocab_size, hidden_size];
        let mut make = |name: String, shape, kind| make(Parameter { name, shape, kind });
        let embedding = make(EMBEDDING.into(), table.clone(), Kind::Matrix)?;
        let mut built = Vec::with_capacity(layers);
        for layer in 0..layers {
            built.push(build_layer(config, layer, &mut make)?);
        }
        let norm = make(NORM.into(), vec![hidden_size], Kind::Norm)?;
        let head =
            if tied_embeddings { None } else { Some(make(HEAD.into(), table, Kind::Matrix)?) };
        Ok(Self { embedding, layers: built, norm, head })
    }

    /// `[vocab, hidden]`
    pub(crate) fn output(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub(crate) fn named(&self) -> Vec<(String, &Tensor)> {
        let mut named = vec![(EMBEDDING.to_owned(), &self.embedding)];
        for (index, layer) in self.layers.iter().enumerate() {
            named.push((layer_name(index, INPUT_NORM), &layer.input_norm));
            for (module, linear) in Module::ALL.into_iter().zip(&layer.linears) {
                named.push((module.parameter(index, "weight"), &linear.weight));
                named
                    .extend(linear.bias.iter().map(|bias| (module.parameter(index, "bias"), bias)));
            }
            let head_norms = layer.head_norms.iter().flatten();
            named
                .extend(HEAD_NORMS.into_iter().map(|name| layer_name(index, name)).zip(head_norms));
            named.push((layer_name(index, POST_NORM), &layer.post_norm));
        }
        named.push((NORM.into(), &self.norm));
        named.extend(self.head.iter().map(|head| (HEAD.to_owned(), head)));
        named
    }
}

pub(crate) const INPUT_NORM: &str = "input_layernorm.weight";
pub(crate) const POST_NORM: &str = "post_attention_layernorm.weight";
pub(crate) const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];

fn build_layer<E>(
    config: &Config,
    layer: usize,
    make: &mut impl FnMut(String, Vec<usize>, Kind) -> Result<Tensor, E>,
) -> Result<Layer, E> {
    let width = vec![config.hidden_size];
    let input_norm = make(layer_name(layer, INPUT_NORM), width.clone(), Kind::Norm)?;
    let mut linears = Vec::with_capacity(Module::ALL.len());
    for module in Module::ALL {
        let (outputs, inputs) = module.shape(config);
        let weight = make(module.parameter(layer, "weight"), vec![outputs, inputs], Kind::Matrix)?;
        let bias = if config.has_bias(module) {
            Some(make(module.parameter(layer, "bias"), vec![outputs], Kind::Bias)?)
        } else {
            None
        };
        linears.push(Linear { weight, bias });
    }
    let head_norms = if config.has_head_norms() {
        let mut norm = |name| make(layer_name(layer, name), vec![config.head_dim], Kind::Norm);
        Some([norm(HEAD_NORMS[0])?, norm(HEAD_NORMS[1])?])
    } else {
        None
    };
    let post_norm = make(layer_name(layer, POST_NORM), width, Kind::Norm)?;
    Ok(Layer { input_norm, post_norm, head_norms, linears })
}
