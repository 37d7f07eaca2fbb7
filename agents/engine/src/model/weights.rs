//! The parameters of a model, each under its Hugging Face name.

use super::MatrixDtype;
use crate::ops::matrix::WeightMatrix;
use candle_core::Tensor;
use formats::LayerModule;
use formats::ModelConfig;

/// The kind decides initialisation and element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParameterKind {
    Matrix,
    Bias,
    Norm,
}

#[derive(Debug)]
pub(crate) struct ModelParameter {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: ParameterKind,
}

/// `weight` is `[out, in]`.
#[derive(Debug, Clone)]
pub(crate) struct LinearWeights {
    pub(crate) weight: WeightMatrix,
    pub(crate) bias: Option<Tensor>,
}

#[derive(Debug, Clone)]
pub(crate) struct LayerWeights {
    pub(crate) input_norm: Tensor,
    pub(crate) post_norm: Tensor,
    /// The norms of the query and key heads (Qwen3).
    pub(crate) head_norms: Option<[Tensor; 2]>,
    /// The projections, in the order of `LayerModule::ALL`.
    pub(crate) linears: Vec<LinearWeights>,
}

#[derive(Debug, Clone)]
pub(crate) struct DecoderWeights {
    pub(crate) embedding: WeightMatrix,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) norm: Tensor,
    /// The output matrix; `None` if the embedding serves as head.
    pub(crate) head: Option<WeightMatrix>,
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const FINAL_NORM: &str = "model.norm.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

pub(crate) fn layer_parameter_name(layer: usize, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}

/// A source of parameters, for example a directory or a random stream.
pub(crate) trait ParameterSource {
    type Error: From<candle_core::Error>;

    fn load_vector(&mut self, parameter: ModelParameter) -> Result<Tensor, Self::Error>;

    /// Returns a matrix, which may be mapped into memory.
    fn load_matrix(&mut self, parameter: ModelParameter) -> Result<WeightMatrix, Self::Error>;
}

impl<E: From<candle_core::Error>, F: FnMut(ModelParameter) -> Result<Tensor, E>> ParameterSource
    for F
{
    type Error = E;

    fn load_vector(&mut self, parameter: ModelParameter) -> Result<Tensor, E> {
        self(parameter)
    }

    fn load_matrix(&mut self, parameter: ModelParameter) -> Result<WeightMatrix, E> {
        Ok(self(parameter)?.into())
    }
}

/// Converts the matrices of another source to 8 bits.
struct QuantizingSource<S>(S);

impl<S: ParameterSource> ParameterSource for QuantizingSource<S> {
    type Error = S::Error;

    fn load_vector(&mut self, parameter: ModelParameter) -> Result<Tensor, S::Error> {
        self.0.load_vector(parameter)
    }

    fn load_matrix(&mut self, parameter: ModelParameter) -> Result<WeightMatrix, S::Error> {
        Ok(self.0.load_matrix(parameter)?.into_quantized()?)
    }
}

impl DecoderWeights {
    /// Loads the parameters from a source. Matrices are converted to 8 bits one by one if `dtype`
    /// says so.
    pub(crate) fn build<S: ParameterSource>(
        config: &ModelConfig,
        dtype: MatrixDtype,
        source: S,
    ) -> Result<Self, S::Error> {
        match dtype {
            MatrixDtype::F32 | MatrixDtype::Bf16 => Self::load_parts(config, source),
            MatrixDtype::Q8_0 => Self::load_parts(config, QuantizingSource(source)),
        }
    }

    fn load_parts<S: ParameterSource>(
        config: &ModelConfig,
        mut source: S,
    ) -> Result<Self, S::Error> {
        let ModelConfig { vocab_size, hidden_size, layers, tied_embeddings, .. } = *config;
        let table = vec![vocab_size, hidden_size];
        let matrix = |name: &str, shape| ModelParameter {
            name: name.into(),
            shape,
            kind: ParameterKind::Matrix,
        };
        let embedding = source.load_matrix(matrix(EMBEDDING, table.clone()))?;
        let mut built = Vec::with_capacity(layers);
        for layer in 0..layers {
            built.push(build_layer(config, layer, &mut source)?);
        }
        let shape = vec![hidden_size];
        let norm = source.load_vector(ModelParameter {
            name: FINAL_NORM.into(),
            shape,
            kind: ParameterKind::Norm,
        })?;
        let head =
            if tied_embeddings { None } else { Some(source.load_matrix(matrix(HEAD, table))?) };
        Ok(Self { embedding, layers: built, norm, head })
    }

    /// Returns the matrix of the head, `[vocab, hidden]`.
    pub(crate) fn output_matrix(&self) -> &WeightMatrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Returns the matrices that rows of activations are multiplied with.
    pub(crate) fn matrices_mut(&mut self) -> Vec<&mut WeightMatrix> {
        let linears = self.layers.iter_mut().flat_map(|layer| &mut layer.linears);
        let output = self.head.as_mut().unwrap_or(&mut self.embedding);
        linears.map(|linear| &mut linear.weight).chain([output]).collect()
    }

    pub(crate) fn named_parameters(&self) -> Vec<(String, WeightMatrix)> {
        let mut named = vec![(EMBEDDING.to_owned(), self.embedding.clone())];
        for (index, layer) in self.layers.iter().enumerate() {
            named.push((layer_parameter_name(index, INPUT_NORM), (&layer.input_norm).into()));
            for (module, linear) in LayerModule::ALL.into_iter().zip(&layer.linears) {
                named.push((module.parameter_name(index, "weight"), linear.weight.clone()));
                let bias = linear.bias.iter();
                named.extend(bias.map(|bias| (module.parameter_name(index, "bias"), bias.into())));
            }
            let head_norms = layer.head_norms.iter().flatten().map(WeightMatrix::from);
            named.extend(
                HEAD_NORMS
                    .into_iter()
                    .map(|name| layer_parameter_name(index, name))
                    .zip(head_norms),
            );
            named.push((layer_parameter_name(index, POST_NORM), (&layer.post_norm).into()));
        }
        named.push((FINAL_NORM.into(), (&self.norm).into()));
        named.extend(self.head.iter().map(|head| (HEAD.to_owned(), head.clone())));
        named
    }

    /// Copies mapped parameters.
    pub(crate) fn named_tensors(&self) -> candle_core::Result<Vec<(String, Tensor)>> {
        self.named_parameters()
            .into_iter()
            .map(|(name, matrix)| Ok((name, matrix.to_tensor()?)))
            .collect()
    }
}

pub(crate) const INPUT_NORM: &str = "input_layernorm.weight";
pub(crate) const POST_NORM: &str = "post_attention_layernorm.weight";
pub(crate) const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];

fn build_layer<S: ParameterSource>(
    config: &ModelConfig,
    layer: usize,
    source: &mut S,
) -> Result<LayerWeights, S::Error> {
    let norm = |name, width| {
        let (name, shape) = (layer_parameter_name(layer, name), vec![width]);
        ModelParameter { name, shape, kind: ParameterKind::Norm }
    };
    let input_norm = source.load_vector(norm(INPUT_NORM, config.hidden_size))?;
    let mut linears = Vec::with_capacity(LayerModule::ALL.len());
    for module in LayerModule::ALL {
        let (outputs, inputs) = config.weight_shape(module);
        let (name, shape) = (module.parameter_name(layer, "weight"), vec![outputs, inputs]);
        let weight =
            source.load_matrix(ModelParameter { name, shape, kind: ParameterKind::Matrix })?;
        let bias = if config.has_bias(module) {
            let (name, shape) = (module.parameter_name(layer, "bias"), vec![outputs]);
            Some(source.load_vector(ModelParameter { name, shape, kind: ParameterKind::Bias })?)
        } else {
            None
        };
        linears.push(LinearWeights { weight, bias });
    }
    let head_norms = if config.has_head_norms() {
        let [query, key] = HEAD_NORMS.map(|name| source.load_vector(norm(name, config.head_dim)));
        Some([query?, key?])
    } else {
        None
    };
    let post_norm = source.load_vector(norm(POST_NORM, config.hidden_size))?;
    Ok(LayerWeights { input_norm, post_norm, head_norms, linears })
}
