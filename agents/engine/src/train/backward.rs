//! The backward pass, written out: no autograd graph, so nothing is computed for frozen weights
//! and every trainable tensor's gradient appears here by name.

use crate::model::weights::{
    self, EMBEDDING, HEAD, HEAD_NORMS, INPUT_NORM, NORM, POST_NORM, layer_name,
};
use crate::model::{
    Model,
    forward::{LayerTape, Pass, Trained},
};
use crate::ops::attention::{self, causal_attention};
use crate::ops::loss::Scored;
use crate::ops::matmul::{Phase, product_of_rows, project_back, sum_rows};
use crate::ops::rope::Rotation;
use crate::ops::{host, norm, sum_of, swiglu};
use crate::sequence::Sequence;
use candle_core::{Result, Tensor};
use formats::Module;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// Sequences packed one after another. The last token of each is only a target.
pub(super) struct Batch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<Range<usize>>,
    scored_rows: Vec<u32>,
    targets: Vec<u32>,
    /// Of each token, its sequence's number in the step and its place in that.
    places: Vec<u64>,
}

impl Batch {
    /// `first`: how many sequences of the step are in batches before this.
    pub(super) fn pack(sequences: &[&Sequence], first: usize) -> Self {
        let mut batch = Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            sequences: Vec::new(),
            scored_rows: Vec::new(),
            targets: Vec::new(),
            places: Vec::new(),
        };
        for (Sequence { tokens, scored, .. }, number) in sequences.iter().zip(first as u64..) {
            let (start, inputs) = (batch.tokens.len(), tokens.len() - 1);
            batch.tokens.extend_from_slice(&tokens[..inputs]);
            batch.positions.extend(0..inputs as u32);
            batch.sequences.push(start..start + inputs);
            batch.scored_rows.extend(scored.clone().map(|target| (start + target - 1) as u32));
            batch.targets.extend_from_slice(&tokens[scored.clone()]);
            batch.places.extend((0..inputs as u64).map(|place| number << 32 | place));
        }
        batch
    }

    pub(super) fn places(&self) -> Vec<u64> {
        self.places.clone()
    }
}

/// Gradients by parameter name.
#[derive(Default)]
pub(super) struct Gradients {
    by_name: BTreeMap<String, Tensor>,
}

impl Gradients {
    pub(super) fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    fn add(&mut self, name: String, gradient: Tensor) -> Result<()> {
        let sum = match self.by_name.get(&name) {
            Some(before) => sum_of(before, &gradient)?,
            None => gradient,
        };
        self.by_name.insert(name, sum);
        Ok(())
    }

    /// Euclidean norm over all of them, in f64 and in a fixed order.
    pub(super) fn norm(&self) -> Result<f64> {
        let tensors: Vec<&Tensor> = self.by_name.values().collect();
        let square = |tensor: &&Tensor| -> Result<f64> {
            if !tensor.device().is_cpu() {
                return Ok(f64::from(tensor.sqr()?.sum_all()?.to_scalar::<f32>()?));
            }
            Ok(host(tensor)?.iter().map(|x| f64::from(*x) * f64::from(*x)).sum())
        };
        let squares = tensors.par_iter().map(square).collect::<Result<Vec<f64>>>()?;
        Ok(squares.iter().sum::<f64>().sqrt())
    }

    /// Adds the gradients of `scale` times the batch's summed loss; returns the summed loss.
    /// Trains the adapter where one is, else the whole model. `computes_anew`: the backward pass
    /// has of each layer only what went into it.
    pub(super) fn add_batch(
        &mut self,
        model: &Model,
        trained: Option<Trained<'_>>,
        batch: &Batch,
        scale: f64,
        computes_anew: bool,
    ) -> Result<f64> {
        let heads = model.heads();
        let rotation = model.rotation(&batch.positions)?;
        let pass = Pass { phase: Phase::Prefill, rotation, trained };
        let mut attend = |_, query: &Tensor, key: &Tensor, value: &Tensor| {
            causal_attention(&heads, query, key, value, &batch.sequences)
        };
        let mut x = model.embed(&batch.tokens)?;
        let mut tapes = Vec::with_capacity(model.config.layers);
        for layer in 0..model.config.layers {
            let (output, tape) = model.layer(layer, &pass, &x, &mut attend)?;
            tapes.push(if computes_anew { Kept::Input(x) } else { Kept::Tape(Box::new(tape)) });
            x = output;
        }
        let full = trained.is_none();
        let hidden = model.final_norm(&x)?;
        let (loss, hidden_grad) = self.head(model, full, batch, &hidden, scale)?;
        let epsilon = model.config.norm_epsilon;
        let (mut grad, norm_grad) =
            norm::rms_norm_backward(&x, &model.weights.norm, &hidden_grad, epsilon, full)?;
        if let Some(norm_grad) = norm_grad {
            self.add(NORM.into(), norm_grad)?;
        }
        while let Some(kept) = tapes.pop() {
            let index = tapes.len();
            let tape = match kept {
                Kept::Tape(tape) => *tape,
                Kept::Input(x) => model.tape(index, &pass, &x, &mut attend)?,
            };
            let layer = &model.weights.layers[index];
            let mut back = LayerPass { gradients: self, model, trained, index, layer, tape: &tape };
            grad = back.run(&grad, &pass.rotation, &batch.sequences)?;
        }
        if full {
            let tokens = Tensor::new(batch.tokens.as_slice(), &model.device)?;
            let table = model.weights.embedding.tensor()?.zeros_like()?;
            let table = table.index_add(&tokens, &grad, 0)?;
            self.add(EMBEDDING.into(), table)?;
        }
        Ok(loss)
    }

    /// Loss and gradient of the final hidden states.
    fn head(
        &mut self,
        model: &Model,
        full: bool,
        batch: &Batch,
        hidden: &Tensor,
        scale: f64,
    ) -> Result<(f64, Tensor)> {
        let name = if model.config.tied_embeddings { EMBEDDING } else { HEAD };
        let rows = Tensor::new(batch.scored_rows.as_slice(), &model.device)?;
        let head = model.weights.output();
        let scored = hidden.index_select(&rows, 0)?;
        let scored = Scored { hidden: &scored, head, targets: &batch.targets };
        let mut weights: BTreeMap<usize, Tensor> = BTreeMap::new();
        let (loss, gradient) = if full {
            scored.gradient_with_logits(scale, |of_logits, block, hidden| {
                let more = product_of_rows(of_logits, hidden, model.precision())?;
                let sum = match weights.remove(&block.start) {
                    Some(before) => sum_of(&before, &more)?,
                    None => more,
                };
                weights.insert(block.start, sum);
                Ok(())
            })?
        } else {
            scored.gradient(scale)?
        };
        if !weights.is_empty() {
            let parts: Vec<Tensor> = weights.into_values().collect();
            self.add(name.into(), Tensor::cat(&parts, 0)?)?;
        }
        Ok((loss, hidden.zeros_like()?.index_add(&rows, &gradient, 0)?))
    }
}

/// Of a layer, for the backward pass.
enum Kept {
    Tape(Box<LayerTape>),
    Input(Tensor),
}

/// Backward through one layer.
struct LayerPass<'a> {
    gradients: &'a mut Gradients,
    model: &'a Model,
    trained: Option<Trained<'a>>,
    index: usize,
    layer: &'a weights::Layer,
    tape: &'a LayerTape,
}

impl LayerPass<'_> {
    /// From the gradient of the layer's output to that of its input.
    fn run(
        &mut self,
        grad: &Tensor,
        rotation: &Rotation,
        sequences: &[Range<usize>],
    ) -> Result<Tensor> {
        let tape = self.tape;
        let epsilon = self.model.config.norm_epsilon;
        let activated = swiglu::swiglu(&tape.gate, &tape.up)?;
        let activated = self.linears(&activated, &[(Module::Down, grad)])?;
        let (gate, up) = swiglu::swiglu_backward(&tape.gate, &tape.up, &activated)?;
        drop(activated);
        let feed_input = norm::rms_norm(&tape.middle, &self.layer.post_norm, epsilon)?;
        let feed_input = self.linears(&feed_input, &[(Module::Gate, &gate), (Module::Up, &up)])?;
        let through_norm =
            self.norm(&tape.middle, &self.layer.post_norm, POST_NORM, &feed_input)?;
        let middle = sum_of(grad, &through_norm)?;
        let attended = self.linears(&tape.attended, &[(Module::Output, &middle)])?;
        let inner = attention::Backward {
            heads: &self.model.heads(),
            query: &tape.query,
            key: &tape.key,
            value: &tape.value,
            out: &tape.attended,
            grad: &attended,
            sequences,
        };
        let attention::Gradients { query, key, value } = inner.run()?;
        let [query, key] =
            self.head_norms([rotation.backward(&query)?, rotation.backward(&key)?])?;
        let projections = [(Module::Query, &query), (Module::Key, &key), (Module::Value, &value)];
        let input = norm::rms_norm(&tape.input, &self.layer.input_norm, epsilon)?;
        let input = self.linears(&input, &projections)?;
        let through_norm = self.norm(&tape.input, &self.layer.input_norm, INPUT_NORM, &input)?;
        sum_of(&middle, &through_norm)
    }

    /// From the gradients of query and key before rotation to those of their projections.
    fn head_norms(&mut self, grads: [Tensor; 2]) -> Result<[Tensor; 2]> {
        let (Some(weights), Some(inputs)) = (&self.layer.head_norms, &self.tape.unnormed) else {
            return Ok(grads);
        };
        let (epsilon, full) = (self.model.config.norm_epsilon, self.trained.is_none());
        let mut through = grads;
        for (index, name) in HEAD_NORMS.into_iter().enumerate() {
            let (x, weight, grad) = (&inputs[index], &weights[index], &through[index]);
            let (input, weight_grad) =
                norm::rms_norm_heads_backward(x, weight, grad, epsilon, full)?;
            if let Some(weight_grad) = weight_grad {
                self.gradients.add(layer_name(self.index, name), weight_grad)?;
            }
            through[index] = input;
        }
        Ok(through)
    }

    fn norm(&mut self, x: &Tensor, weight: &Tensor, name: &str, grad: &Tensor) -> Result<Tensor> {
        let (epsilon, full) = (self.model.config.norm_epsilon, self.trained.is_none());
        let (input, weight_grad) = norm::rms_norm_backward(x, weight, grad, epsilon, full)?;
        if let Some(weight_grad) = weight_grad {
            self.gradients.add(layer_name(self.index, name), weight_grad)?;
        }
        Ok(input)
    }

    /// Projections that share the input `x`, each with the gradient of its output: collects the
    /// gradients of their parameters and returns that of `x`.
    fn linears(&mut self, x: &Tensor, projections: &[(Module, &Tensor)]) -> Result<Tensor> {
        let index = self.index;
        let (mut low_grads, mut partly_seen) = (Vec::new(), Vec::new());
        for (module, grad) in projections {
            let linear = &self.layer.linears[*module as usize];
            let Some(Trained { adapter, dropout }) = self.trained else {
                let weight = product_of_rows(grad, x, self.model.precision())?;
                self.gradients.add(module.parameter(index, "weight"), weight)?;
                if linear.bias.is_some() {
                    self.gradients.add(module.parameter(index, "bias"), sum_rows(grad)?)?;
                }
                continue;
            };
            let low = self.tape.lows[*module as usize].as_ref();
            let (Some(pair), Some(low)) = (adapter.pairs.get(&(index, *module)), low) else {
                continue;
            };
            let precision = self.model.precision();
            let low_grad = (project_back(&[(grad, (&pair.b).into())])? * pair.scale)?;
            let seen = dropout.map(|dropout| dropout.apply(index, *module, x)).transpose()?;
            let a = product_of_rows(&low_grad, seen.as_ref().unwrap_or(x), precision)?;
            self.gradients.add(module.parameter(index, "lora_A.weight"), a)?;
            let b = product_of_rows(low, grad, precision)?.t()?.contiguous()?;
            self.gradients.add(module.parameter(index, "lora_B.weight"), b)?;
            match dropout {
                Some(dropout) => {
                    let grad = project_back(&[(&low_grad, (&pair.a).into())])?;
                    partly_seen.push(dropout.apply(index, *module, &grad)?);
                }
                None => low_grads.push((low_grad, &pair.a)),
            }
        }
        let frozen = projections
            .iter()
            .map(|(module, grad)| (*grad, self.layer.linears[*module as usize].weight.clone()));
        let low = low_grads.iter().map(|(grad, a)| (grad, (*a).into()));
        let all = project_back(&frozen.chain(low).collect::<Vec<_>>())?;
        partly_seen.iter().try_fold(all, |sum, grad| sum + grad)
    }
}

#[cfg(test)]
mod tests;
