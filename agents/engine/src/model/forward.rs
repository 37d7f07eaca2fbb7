//! The forward pass over rows of tokens. How rows attend to each other is the caller's: packed
//! sequences or a cache. Every intermediate a backward pass needs is kept in a layer's tape.

use super::Model;
use super::weights::{Layer, Linear};
use crate::adapter::{Adapter, Module};
use crate::ops::{matmul, norm, rope::Rotation, swiglu};
use candle_core::{Result, Tensor};

/// Attention of one layer: (layer, query, key, value) after rotation, to `[rows, heads * dim]`.
pub(crate) type Attend<'a> = dyn FnMut(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a;

/// What one projection computed.
pub(crate) struct Projected {
    pub(crate) out: Tensor,
    /// `scale * x Aᵀ` where the projection has a LoRA pair.
    pub(crate) low: Option<Tensor>,
}

pub(crate) struct LayerTape {
    pub(crate) input: Tensor,
    pub(crate) attention_input: Tensor,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) attended: Tensor,
    pub(crate) middle: Tensor,
    pub(crate) feed_input: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) activated: Tensor,
    /// In the order of [`Module::ALL`].
    pub(crate) lows: Vec<Option<Tensor>>,
}

impl Model {
    pub(crate) fn rotation(&self, positions: &[u32]) -> Result<Rotation> {
        Rotation::new(positions, self.config.head_dim, self.config.rope_theta, &self.device)
    }

    pub(crate) fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        self.weights.embedding.index_select(&Tensor::new(tokens, &self.device)?, 0)
    }

    /// Final hidden states, normalised: what the head reads.
    pub(crate) fn hidden(
        &self,
        tokens: &[u32],
        positions: &[u32],
        attend: &mut Attend<'_>,
    ) -> Result<Tensor> {
        let rotation = self.rotation(positions)?;
        let mut x = self.embed(tokens)?;
        for layer in 0..self.weights.layers.len() {
            x = self.layer(layer, None, &rotation, &x, attend)?.0;
        }
        self.final_norm(&x)
    }

    pub(crate) fn final_norm(&self, x: &Tensor) -> Result<Tensor> {
        norm::rms_norm(x, &self.weights.norm, self.config.norm_epsilon)
    }

    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        matmul::project(hidden, self.weights.output(), None)
    }

    pub(crate) fn layer(
        &self,
        index: usize,
        adapter: Option<&Adapter>,
        rotation: &Rotation,
        input: &Tensor,
        attend: &mut Attend<'_>,
    ) -> Result<(Tensor, LayerTape)> {
        let layer = &self.weights.layers[index];
        let mut lows = Vec::with_capacity(Module::ALL.len());
        let mut project = |module, x: &Tensor| {
            let projected = project(layer, index, module, adapter, x)?;
            lows.push(projected.low);
            Ok::<_, candle_core::Error>(projected.out)
        };
        let epsilon = self.config.norm_epsilon;
        let attention_input = norm::rms_norm(input, &layer.input_norm, epsilon)?;
        let query = rotation.apply(&project(Module::Query, &attention_input)?)?;
        let key = rotation.apply(&project(Module::Key, &attention_input)?)?;
        let value = project(Module::Value, &attention_input)?;
        let attended = attend(index, &query, &key, &value)?;
        let middle = (input + project(Module::Output, &attended)?)?;
        let feed_input = norm::rms_norm(&middle, &layer.post_norm, epsilon)?;
        let gate = project(Module::Gate, &feed_input)?;
        let up = project(Module::Up, &feed_input)?;
        let activated = swiglu::swiglu(&gate, &up)?;
        let output = (&middle + project(Module::Down, &activated)?)?;
        let tape = LayerTape {
            input: input.clone(),
            attention_input,
            query,
            key,
            value,
            attended,
            middle,
            feed_input,
            gate,
            up,
            activated,
            lows,
        };
        Ok((output, tape))
    }
}

fn project(
    layer: &Layer,
    index: usize,
    module: Module,
    adapter: Option<&Adapter>,
    x: &Tensor,
) -> Result<Projected> {
    let Linear { weight, bias } = &layer.linears[module as usize];
    let Some(pair) = adapter.and_then(|adapter| adapter.pairs.get(&(index, module))) else {
        return Ok(Projected { out: matmul::project(x, weight, bias.as_ref())?, low: None });
    };
    let low = (matmul::product(x, &pair.a.t()?)? * pair.scale)?;
    let terms = [(x, &weight.t()?), (&low, &pair.b.t()?)];
    Ok(Projected { out: matmul::sum_of_products(&terms, bias.as_ref())?, low: Some(low) })
}
