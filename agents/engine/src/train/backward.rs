//! The backward pass, written out without an autograd graph: no gradient is computed for frozen
//! weights, and the gradient of every trainable tensor appears here by name.

use crate::model::weights::{
    self, EMBEDDING, FINAL_NORM, HEAD, HEAD_NORMS, INPUT_NORM, POST_NORM, layer_parameter_name,
};
use crate::model::{
    LanguageModel,
    forward::{ForwardPass, LayerTape, TrainedAdapter},
};
use crate::ops::attention::{self, causal_attention};
use crate::ops::loss::ScoredRows;
use crate::ops::matmul::{MatmulPhase, multiply_transposed, project_back, sum_rows};
use crate::ops::rope::RotaryEmbedding;
use crate::ops::{add_tensors, host_f32, norm, swiglu};
use crate::sequence::TokenSequence;
use candle_core::{Result, Tensor};
use formats::LayerModule;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// Sequences packed one after another. The last token of each is only a target.
pub(super) struct PackedBatch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<Range<usize>>,
    scored_rows: Vec<u32>,
    targets: Vec<u32>,
    /// The place of each token in the step: the number of its sequence in the upper 32 bits, its
    /// position there in the lower ones.
    places: Vec<u64>,
}

impl PackedBatch {
    /// Numbers the sequences from `first`, the number of them in earlier batches of the step.
    pub(super) fn pack_sequences(sequences: &[&TokenSequence], first: usize) -> Self {
        let mut batch = Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            sequences: Vec::new(),
            scored_rows: Vec::new(),
            targets: Vec::new(),
            places: Vec::new(),
        };
        for (sequence, number) in sequences.iter().zip(first as u64..) {
            let tokens = &sequence.tokens;
            let (start, inputs) = (batch.tokens.len(), tokens.len() - 1);
            batch.tokens.extend_from_slice(&tokens[..inputs]);
            batch.positions.extend(0..inputs as u32);
            batch.sequences.push(start..start + inputs);
            for target in sequence.scored_positions() {
                batch.scored_rows.push((start + target - 1) as u32);
                batch.targets.push(tokens[target]);
            }
            batch.places.extend((0..inputs as u64).map(|place| number << 32 | place));
        }
        batch
    }

    pub(super) fn token_places(&self) -> Vec<u64> {
        self.places.clone()
    }
}

#[derive(Default)]
pub(super) struct ParameterGradients {
    by_name: BTreeMap<String, Tensor>,
}

impl ParameterGradients {
    pub(super) fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    fn add_gradient(&mut self, name: String, gradient: Tensor) -> Result<()> {
        let sum = match self.by_name.get(&name) {
            Some(before) => add_tensors(before, &gradient)?,
            None => gradient,
        };
        self.by_name.insert(name, sum);
        Ok(())
    }

    pub(super) fn retain_named(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.by_name.retain(|name, _| is_kept(name));
    }

    /// Returns the Euclidean norm, in f64 and in a fixed order.
    pub(super) fn global_norm(&self) -> Result<f64> {
        let tensors: Vec<&Tensor> = self.by_name.values().collect();
        let square = |tensor: &&Tensor| -> Result<f64> {
            if !tensor.device().is_cpu() {
                return Ok(f64::from(tensor.sqr()?.sum_all()?.to_scalar::<f32>()?));
            }
            Ok(host_f32(tensor)?.iter().map(|x| f64::from(*x) * f64::from(*x)).sum())
        };
        let squares = tensors.par_iter().map(square).collect::<Result<Vec<f64>>>()?;
        Ok(squares.iter().sum::<f64>().sqrt())
    }

    /// Adds the gradients of the weighted sum of losses, and returns the sum without weights.
    /// `weigh` gets the loss of each scored token and returns its weight. Trains the adapter if
    /// there is one, otherwise the whole model. With `recomputes`, only the input of each layer is
    /// kept for the backward pass.
    pub(super) fn add_batch(
        &mut self,
        model: &LanguageModel,
        trained: Option<TrainedAdapter<'_>>,
        batch: &PackedBatch,
        weigh: impl FnOnce(&[f64]) -> Result<Vec<f64>>,
        recomputes: bool,
    ) -> Result<f64> {
        let heads = model.head_shape();
        let rotation = model.rotary_embedding(&batch.positions)?;
        let pass = ForwardPass { phase: MatmulPhase::Prefill, rotation, trained };
        let mut attend = |_, query: &Tensor, key: &Tensor, value: &Tensor| {
            causal_attention(&heads, query, key, value, &batch.sequences)
        };
        let mut x = model.embed_tokens(&batch.tokens)?;
        let mut tapes = Vec::with_capacity(model.config.layers);
        for layer in 0..model.config.layers {
            let (output, tape) = model.run_layer(layer, &pass, &x, &mut attend)?;
            tapes.push(if recomputes {
                LayerRecord::Input(x)
            } else {
                LayerRecord::Tape(Box::new(tape))
            });
            x = output;
        }
        let full = trained.is_none();
        let hidden = model.apply_final_norm(&x)?;
        let (loss, hidden_grad) = self.add_head_gradient(model, full, batch, &hidden, weigh)?;
        let epsilon = model.config.norm_epsilon;
        let (mut grad, norm_grad) =
            norm::rms_norm_backward(&x, &model.weights.norm, &hidden_grad, epsilon, full)?;
        if let Some(norm_grad) = norm_grad {
            self.add_gradient(FINAL_NORM.into(), norm_grad)?;
        }
        while let Some(kept) = tapes.pop() {
            let index = tapes.len();
            let tape = match kept {
                LayerRecord::Tape(tape) => *tape,
                LayerRecord::Input(x) => model.rebuild_tape(index, &pass, &x, &mut attend)?,
            };
            let layer = &model.weights.layers[index];
            let mut back =
                LayerBackward { gradients: self, model, trained, index, layer, tape: &tape };
            grad = back.run(&grad, &pass.rotation, &batch.sequences)?;
        }
        if full {
            let tokens = Tensor::new(batch.tokens.as_slice(), &model.device)?;
            let table = model.weights.embedding.to_tensor()?.zeros_like()?;
            let table = table.index_add(&tokens, &grad, 0)?;
            self.add_gradient(EMBEDDING.into(), table)?;
        }
        Ok(loss)
    }

    /// Returns the loss and the gradient of the final hidden states; adds that of the head in a
    /// full training.
    fn add_head_gradient(
        &mut self,
        model: &LanguageModel,
        full: bool,
        batch: &PackedBatch,
        hidden: &Tensor,
        weigh: impl FnOnce(&[f64]) -> Result<Vec<f64>>,
    ) -> Result<(f64, Tensor)> {
        let name = if model.config.tied_embeddings { EMBEDDING } else { HEAD };
        let rows = Tensor::new(batch.scored_rows.as_slice(), &model.device)?;
        let head = model.weights.output_matrix();
        let scored = hidden.index_select(&rows, 0)?;
        let scored = ScoredRows { hidden: &scored, head, targets: &batch.targets };
        let mut weights: BTreeMap<usize, Tensor> = BTreeMap::new();
        let (loss, gradient) = if full {
            scored.gradient_with_logits(weigh, |of_logits, block, hidden| {
                let more = multiply_transposed(of_logits, hidden, model.matrix_dtype())?;
                let sum = match weights.remove(&block.start) {
                    Some(before) => add_tensors(&before, &more)?,
                    None => more,
                };
                weights.insert(block.start, sum);
                Ok(())
            })?
        } else {
            scored.loss_gradient(weigh)?
        };
        if !weights.is_empty() {
            let parts: Vec<Tensor> = weights.into_values().collect();
            self.add_gradient(name.into(), Tensor::cat(&parts, 0)?)?;
        }
        Ok((loss, hidden.zeros_like()?.index_add(&rows, &gradient, 0)?))
    }
}

enum LayerRecord {
    Tape(Box<LayerTape>),
    Input(Tensor),
}

struct LayerBackward<'a> {
    gradients: &'a mut ParameterGradients,
    model: &'a LanguageModel,
    trained: Option<TrainedAdapter<'a>>,
    index: usize,
    layer: &'a weights::LayerWeights,
    tape: &'a LayerTape,
}

impl LayerBackward<'_> {
    fn run(
        &mut self,
        grad: &Tensor,
        rotation: &RotaryEmbedding,
        sequences: &[Range<usize>],
    ) -> Result<Tensor> {
        let tape = self.tape;
        let epsilon = self.model.config.norm_epsilon;
        let activated = swiglu::swiglu_forward(&tape.gate, &tape.up)?;
        let activated = self.projections_backward(&activated, &[(LayerModule::Down, grad)])?;
        let (gate, up) = swiglu::swiglu_backward(&tape.gate, &tape.up, &activated)?;
        drop(activated);
        let feed_input = norm::rms_norm(&tape.middle, &self.layer.post_norm, epsilon)?;
        let feed_input = self.projections_backward(
            &feed_input,
            &[(LayerModule::Gate, &gate), (LayerModule::Up, &up)],
        )?;
        let through_norm =
            self.norm_backward(&tape.middle, &self.layer.post_norm, POST_NORM, &feed_input)?;
        let middle = add_tensors(grad, &through_norm)?;
        let attended =
            self.projections_backward(&tape.attended, &[(LayerModule::Output, &middle)])?;
        let inner = attention::AttentionBackward {
            heads: &self.model.head_shape(),
            query: &tape.query,
            key: &tape.key,
            value: &tape.value,
            out: &tape.attended,
            grad: &attended,
            sequences,
        };
        let attention::AttentionGradients { query, key, value } = inner.run()?;
        let [query, key] = self.head_norms_backward([
            rotation.rotate_backward(&query)?,
            rotation.rotate_backward(&key)?,
        ])?;
        let projections =
            [(LayerModule::Query, &query), (LayerModule::Key, &key), (LayerModule::Value, &value)];
        let input = norm::rms_norm(&tape.input, &self.layer.input_norm, epsilon)?;
        let input = self.projections_backward(&input, &projections)?;
        let through_norm =
            self.norm_backward(&tape.input, &self.layer.input_norm, INPUT_NORM, &input)?;
        add_tensors(&middle, &through_norm)
    }

    /// Computes the gradients of the query and key projections from those before rotation.
    fn head_norms_backward(&mut self, grads: [Tensor; 2]) -> Result<[Tensor; 2]> {
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
                self.gradients.add_gradient(layer_parameter_name(self.index, name), weight_grad)?;
            }
            through[index] = input;
        }
        Ok(through)
    }

    /// Returns the gradient of a norm's input; adds that of its weight in a full training.
    fn norm_backward(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        name: &str,
        grad: &Tensor,
    ) -> Result<Tensor> {
        let (epsilon, full) = (self.model.config.norm_epsilon, self.trained.is_none());
        let (input, weight_grad) = norm::rms_norm_backward(x, weight, grad, epsilon, full)?;
        if let Some(weight_grad) = weight_grad {
            self.gradients.add_gradient(layer_parameter_name(self.index, name), weight_grad)?;
        }
        Ok(input)
    }

    /// Adds the parameter gradients of projections that share the input `x`, whose gradient is
    /// returned.
    fn projections_backward(
        &mut self,
        x: &Tensor,
        projections: &[(LayerModule, &Tensor)],
    ) -> Result<Tensor> {
        let index = self.index;
        let (mut low_grads, mut partly_seen) = (Vec::new(), Vec::new());
        for (module, grad) in projections {
            let linear = &self.layer.linears[*module as usize];
            let Some(TrainedAdapter { adapter, dropout }) = self.trained else {
                let weight = multiply_transposed(grad, x, self.model.matrix_dtype())?;
                self.gradients.add_gradient(module.parameter_name(index, "weight"), weight)?;
                if linear.bias.is_some() {
                    self.gradients
                        .add_gradient(module.parameter_name(index, "bias"), sum_rows(grad)?)?;
                }
                continue;
            };
            let low = self.tape.lows[*module as usize].as_ref();
            let (Some(pair), Some(low)) = (adapter.pairs.get(&(index, *module)), low) else {
                continue;
            };
            let precision = self.model.matrix_dtype();
            let low_grad = (project_back(&[(grad, (&pair.b).into())])? * pair.scale)?;
            let seen = dropout.map(|dropout| dropout.apply_mask(index, *module, x)).transpose()?;
            let a = multiply_transposed(&low_grad, seen.as_ref().unwrap_or(x), precision)?;
            self.gradients.add_gradient(module.parameter_name(index, "lora_A.weight"), a)?;
            let b = multiply_transposed(low, grad, precision)?.t()?.contiguous()?;
            self.gradients.add_gradient(module.parameter_name(index, "lora_B.weight"), b)?;
            match dropout {
                Some(dropout) => {
                    let grad = project_back(&[(&low_grad, (&pair.a).into())])?;
                    partly_seen.push(dropout.apply_mask(index, *module, &grad)?);
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
