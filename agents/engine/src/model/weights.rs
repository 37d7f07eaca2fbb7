//! The parameters of a model, each under its Hugging Face name.

use crate::ops::matrix::Matrix;
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
    pub(crate) weight: Matrix,
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
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor,
    /// `None` when the embedding serves as head.
    pub(crate) head: Option<Matrix>,
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const NORM: &str = "model.norm.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

pub(crate) fn layer_name(layer: usize, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}

/// Where parameters come from.
pub(crate) trait Source {
    type Error;

    fn vector(&mut self, parameter: Parameter) -> Result<Tensor, Self::Error>;

    fn matrix(&mut self, parameter: Parameter) -> Result<Matrix, Self::Error>;
}

impl<E, F: FnMut(Parameter) -> Result<Tensor, E>> Source for F {
    type Error = E;

    fn vector(&mut self, parameter: Parameter) -> Result<Tensor, E> {
        self(parameter)
    }

    fn matrix(&mut self, parameter: Parameter) -> Result<Matrix, E> {
        Ok(self(parameter)?.into())
    }
}

impl Weights {
    /// Asks the source for every parameter of such a model.
    pub(crate) fn build<S: Source>(config: &Config, mut source: S) -> Result<Self, S::Error> {
        let Config { vocab_size, hidden_size, layers, tied_embeddings, .. } = *config;
        let table = vec![vocab_size, hidden_size];
        let matrix = |name: &str, shape| Parameter { name: name.into(), shape, kind: Kind::Matrix };
        let embedding = source.matrix(matrix(EMBEDDING, table.clone()))?;
        let mut built = Vec::with_capacity(layers);
        for layer in 0..layers {
            built.push(build_layer(config, layer, &mut source)?);
        }
        let shape = vec![hidden_size];
        let norm = source.vector(Parameter { name: NORM.into(), shape, kind: Kind::Norm })?;
        let head = if tied_embeddings { None } else { Some(source.matrix(matrix(HEAD, table))?) };
        Ok(Self { embedding, layers: built, norm, head })
    }

    /// `[vocab, hidden]`
    pub(crate) fn output(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// All parameters, vectors among them.
    pub(crate) fn named(&self) -> Vec<(String, Matrix)> {
        let mut named = vec![(EMBEDDING.to_owned(), self.embedding.clone())];
        for (index, layer) in self.layers.iter().enumerate() {
            named.push((layer_name(index, INPUT_NORM), (&layer.input_norm).into()));
            for (module, linear) in Module::ALL.into_iter().zip(&layer.linears) {
                named.push((module.parameter(index, "weight"), linear.weight.clone()));
                let bias = linear.bias.iter();
                named.extend(bias.map(|bias| (module.parameter(index, "bias"), bias.into())));
            }
            let head_norms = layer.head_norms.iter().flatten().map(Matrix::from);
            named
                .extend(HEAD_NORMS.into_iter().map(|name| layer_name(index, name)).zip(head_norms));
            named.push((layer_name(index, POST_NORM), (&layer.post_norm).into()));
        }
        named.push((NORM.into(), (&self.norm).into()));
        named.extend(self.head.iter().map(|head| (HEAD.to_owned(), head.clone())));
        named
    }

    /// As [`Self::named`]; what is mapped is copied.
    pub(crate) fn tensors(&self) -> candle_core::Result<Vec<(String, Tensor)>> {
        self.named().into_iter().map(|(name, matrix)| Ok((name, matrix.tensor()?))).collect()
    }
}

pub(crate) const INPUT_NORM: &str = "input_layernorm.weight";
pub(crate) const POST_NORM: &str = "post_attention_layernorm.weight";
pub(crate) const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];

fn build_layer<S: Source>(
    config: &Config,
    layer: usize,
    source: &mut S,
) -> Result<Layer, S::Error> {
    let norm = |name, width| {
        let (name, shape) = (layer_name(layer, name), vec![width]);
        Parameter { name, shape, kind: Kind::Norm }
    };
    let input_norm = source.vector(norm(INPUT_NORM, config.hidden_size))?;
    let mut linears = Vec::with_capacity(Module::ALL.len());
    for module in Module::ALL {
        let (outputs, inputs) = module.shape(config);
        let (name, shape) = (module.parameter(layer, "weight"), vec![outputs, inputs]);
        let weight = source.matrix(Parameter { name, shape, kind: Kind::Matrix })?;
        let bias = if config.has_bias(module) {
            let (name, shape) = (module.parameter(layer, "bias"), vec![outputs]);
            Some(source.vector(Parameter { name, shape, kind: Kind::Bias })?)
        } else {
            None
        };
        linears.push(Linear { weight, bias });
    }
    let head_norms = if config.has_head_norms() {
        let [query, key] = HEAD_NORMS.map(|name| source.vector(norm(name, config.head_dim)));
        Some([query?, key?])
    } else {
        None
    };
    let post_norm = source.vector(norm(POST_NORM, config.hidden_size))?;
    Ok(Layer { input_norm, post_norm, head_norms, linears })
}
