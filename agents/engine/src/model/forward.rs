//! The forward pass over rows of tokens. How rows attend to each other is the caller's: packed
//! sequences or a cache. Every intermediate a backward pass needs is kept in a layer's tape.

use super::Model;
use super::weights::Linear;
use crate::adapter::{Adapter, Pair};
use crate::dropout::Dropout;
use crate::ops::{matmul, norm, rope::Rotation, swiglu};
use candle_core::{DType, Result, Tensor};
use formats::Module;

/// Attention of one layer: (layer, query, key, value) after rotation, to `[rows, heads * dim]`.
pub(crate) type Attend<'a> = dyn FnMut(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a;

/// An adapter in training.
#[derive(Clone, Copy)]
pub(crate) struct Trained<'a> {
    pub(crate) adapter: &'a Adapter,
    pub(crate) dropout: Option<&'a Dropout>,
}

/// What one projection computed.
pub(crate) struct Projected {
    pub(crate) out: Tensor,
    /// `scale * x Aᵀ` where the projection has a LoRA pair, of what that sees of x.
    pub(crate) low: Option<Tensor>,
}

pub(crate) struct LayerTape {
    pub(crate) input: Tensor,
    pub(crate) attention_input: Tensor,
    /// Query and key before their norms, where they have them.
    pub(crate) unnormed: Option<[Tensor; 2]>,
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
        Rotation::new(positions, &self.frequencies, &self.device)
    }

    pub(crate) fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let rows = self.weights.embedding.index_select(&Tensor::new(tokens, &self.device)?, 0)?;
        rows.to_dtype(DType::F32)
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
        trained: Option<Trained<'_>>,
        rotation: &Rotation,
        input: &Tensor,
        attend: &mut Attend<'_>,
    ) -> Result<(Tensor, LayerTape)> {
        let layer = &self.weights.layers[index];
        let mut lows = Vec::with_capacity(Module::ALL.len());
        let mut project = |module, x: &Tensor| {
            let projected = self.project(index, module, trained, x)?;
            lows.push(projected.low);
            Ok::<_, candle_core::Error>(projected.out)
        };
        let epsilon = self.config.norm_epsilon;
        let attention_input = norm::rms_norm(input, &layer.input_norm, epsilon)?;
        let mut query = project(Module::Query, &attention_input)?;
        let mut key = project(Module::Key, &attention_input)?;
        let mut unnormed = None;
        if let Some([query_norm, key_norm]) = &layer.head_norms {
            let normed = [
                norm::rms_norm_heads(&query, query_norm, epsilon)?,
                norm::rms_norm_heads(&key, key_norm, epsilon)?,
            ];
            unnormed = Some([query, key]);
            [query, key] = normed;
        }
        let (query, key) = (rotation.apply(&query)?, rotation.apply(&key)?);
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
            unnormed,
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

    fn project(
        &self,
        index: usize,
        module: Module,
        trained: Option<Trained<'_>>,
        x: &Tensor,
    ) -> Result<Projected> {
        let linear = &self.weights.layers[index].linears[module as usize];
        let pair = |adapter: &Adapter| adapter.pairs.get(&(index, module)).cloned();
        if let Some(Trained { adapter, dropout }) = trained
            && let Some(pair) = pair(adapter)
        {
            let seen = dropout.map(|dropout| dropout.apply(index, module, x)).transpose()?;
            return project_training(linear, &pair, x, seen.as_ref().unwrap_or(x));
        }
        let out = matmul::project(x, &linear.weight, linear.bias.as_ref())?;
        let Some(Pair { a, b, scale }) = self.beside.as_deref().and_then(pair) else {
            return Ok(Projected { out, low: None });
        };
        let low = (matmul::project(x, &a, None)? * scale)?;
        Ok(Projected { out: (out + matmul::project(&low, &b, None)?)?, low: None })
    }
}

/// The pair sees `seen` of `x`.
fn project_training(linear: &Linear, pair: &Pair, x: &Tensor, seen: &Tensor) -> Result<Projected> {
    let low = (matmul::product(seen, &pair.a.t()?)? * pair.scale)?;
    let terms = [(x, &linear.weight.t()?), (&low, &pair.b.t()?)];
    Ok(Projected { out: matmul::sum_of_products(&terms, linear.bias.as_ref())?, low: Some(low) })
}
