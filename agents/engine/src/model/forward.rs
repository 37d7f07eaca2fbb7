//! The forward pass over rows of tokens. The caller supplies the attention: over packed sequences
//! or over a cache. A layer's tape keeps what its backward pass needs.

use super::LanguageModel;
use crate::adapter::LoraAdapter;
use crate::dropout::LoraDropout;
use crate::ops::matmul::{self, MatmulPhase, PreparedRows, ProjectionSum};
use crate::ops::matrix::WeightMatrix;
use crate::ops::{add_tensors, norm, rope::RotaryEmbedding, swiglu};
use candle_core::{Result, Tensor};
use formats::LayerModule;

/// Computes the attention of one layer from (layer, query, key, value) after rotation; returns
/// `[rows, heads * dim]`.
pub(crate) type AttentionFn<'a> =
    dyn FnMut(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a;

#[derive(Clone, Copy)]
pub(crate) struct TrainedAdapter<'a> {
    pub(crate) adapter: &'a LoraAdapter,
    pub(crate) dropout: Option<&'a LoraDropout>,
}

pub(crate) struct ForwardPass<'a> {
    pub(crate) phase: MatmulPhase,
    pub(crate) rotation: RotaryEmbedding,
    pub(crate) trained: Option<TrainedAdapter<'a>>,
}

struct LowRankInput {
    /// `scale * x Aᵀ`.
    values: Tensor,
    rows: PreparedRows,
    b: WeightMatrix,
}

pub(crate) struct ProjectionOutput {
    pub(crate) out: Tensor,
    /// `scale * x Aᵀ` after dropout, if the projection has a LoRA pair.
    pub(crate) low: Option<Tensor>,
}

/// The intermediate results of a layer that its backward pass needs. Norms and activations are
/// recomputed from their inputs: they cost little beside the products, and would need a third of
/// the memory (arXiv:2205.05198).
pub(crate) struct LayerTape {
    pub(crate) input: Tensor,
    /// Query and key before their head norms (Qwen3).
    pub(crate) unnormed: Option<[Tensor; 2]>,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) attended: Tensor,
    /// The hidden states between attention and feed-forward part.
    pub(crate) middle: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    /// The low-rank inputs of each module, in the order of `LayerModule::ALL`.
    pub(crate) lows: Vec<Option<Tensor>>,
}

impl LanguageModel {
    pub(crate) fn rotary_embedding(&self, positions: &[u32]) -> Result<RotaryEmbedding> {
        RotaryEmbedding::new(positions, &self.frequencies, &self.device)
    }

    pub(crate) fn embed_tokens(&self, tokens: &[u32]) -> Result<Tensor> {
        self.weights.embedding.select_rows(tokens, &self.device)
    }

    /// Computes the final, normalised hidden states, which the head reads.
    pub(crate) fn hidden_states(
        &self,
        phase: MatmulPhase,
        tokens: &[u32],
        positions: &[u32],
        attend: &mut AttentionFn<'_>,
    ) -> Result<Tensor> {
        let pass =
            ForwardPass { phase, rotation: self.rotary_embedding(positions)?, trained: None };
        let mut x = self.embed_tokens(tokens)?;
        for layer in 0..self.weights.layers.len() {
            x = self.run_layer(layer, &pass, &x, attend)?.0;
        }
        self.apply_final_norm(&x)
    }

    pub(crate) fn apply_final_norm(&self, x: &Tensor) -> Result<Tensor> {
        norm::rms_norm(x, &self.weights.norm, self.config.norm_epsilon)
    }

    /// Expects one row of each sequence in `hidden`.
    pub(crate) fn compute_logits(&self, hidden: &Tensor) -> Result<Tensor> {
        matmul::project_rows(MatmulPhase::Decode, hidden, self.weights.output_matrix(), None)
    }

    pub(crate) fn run_layer(
        &self,
        index: usize,
        pass: &ForwardPass<'_>,
        input: &Tensor,
        attend: &mut AttentionFn<'_>,
    ) -> Result<(Tensor, LayerTape)> {
        let (mut tape, activated) = self.run_before_down(index, pass, input, attend)?;
        let [down] = self.project_modules(index, [LayerModule::Down], pass, &activated)?;
        tape.lows.push(down.low);
        Ok((add_tensors(&tape.middle, &down.out)?, tape))
    }

    /// Leaves out the layer's last product, a fourth of the work.
    pub(crate) fn rebuild_tape(
        &self,
        index: usize,
        pass: &ForwardPass<'_>,
        input: &Tensor,
        attend: &mut AttentionFn<'_>,
    ) -> Result<LayerTape> {
        let (mut tape, activated) = self.run_before_down(index, pass, input, attend)?;
        let rows = PreparedRows::new(pass.phase, &activated, self.matrix_form())?;
        let [low] = self.low_rank_inputs(index, [LayerModule::Down], pass, &activated, &rows)?;
        tape.lows.push(low.map(|low| low.values));
        Ok(tape)
    }

    /// Computes a layer up to the input of its down projection. The tape lacks that projection's
    /// low-rank input.
    fn run_before_down(
        &self,
        index: usize,
        pass: &ForwardPass<'_>,
        input: &Tensor,
        attend: &mut AttentionFn<'_>,
    ) -> Result<(LayerTape, Tensor)> {
        let layer = &self.weights.layers[index];
        let epsilon = self.config.norm_epsilon;
        let attention_input = norm::rms_norm(input, &layer.input_norm, epsilon)?;
        let modules = [LayerModule::Query, LayerModule::Key, LayerModule::Value];
        let [query, key, value] = self.project_modules(index, modules, pass, &attention_input)?;
        let mut lows = vec![query.low, key.low, value.low];
        let (mut query, mut key, value) = (query.out, key.out, value.out);
        let mut unnormed = None;
        if let Some([query_norm, key_norm]) = &layer.head_norms {
            let normed = [
                norm::rms_norm_heads(&query, query_norm, epsilon)?,
                norm::rms_norm_heads(&key, key_norm, epsilon)?,
            ];
            unnormed = Some([query, key]);
            [query, key] = normed;
        }
        let (query, key) =
            (pass.rotation.rotate_forward(&query)?, pass.rotation.rotate_forward(&key)?);
        let attended = attend(index, &query, &key, &value)?;
        let [output] = self.project_modules(index, [LayerModule::Output], pass, &attended)?;
        let middle = add_tensors(input, &output.out)?;
        let feed_input = norm::rms_norm(&middle, &layer.post_norm, epsilon)?;
        let modules = [LayerModule::Gate, LayerModule::Up];
        let [gate, up] = self.project_modules(index, modules, pass, &feed_input)?;
        let activated = swiglu::swiglu_forward(&gate.out, &up.out)?;
        lows.extend([output.low, gate.low, up.low]);
        let tape = LayerTape {
            input: input.clone(),
            unnormed,
            query,
            key,
            value,
            attended,
            middle,
            gate: gate.out,
            up: up.out,
            lows,
        };
        Ok((tape, activated))
    }

    /// Adds the LoRA pair of a module that has one.
    fn project_modules<const N: usize>(
        &self,
        index: usize,
        modules: [LayerModule; N],
        pass: &ForwardPass<'_>,
        x: &Tensor,
    ) -> Result<[ProjectionOutput; N]> {
        let rows = PreparedRows::new(pass.phase, x, self.matrix_form())?;
        let lows = self.low_rank_inputs(index, modules, pass, x, &rows)?;
        let linears = modules.map(|module| &self.weights.layers[index].linears[module as usize]);
        let all = linears.iter().zip(&lows).map(|(linear, low)| {
            let mut terms = vec![(&rows, linear.weight.clone())];
            terms.extend(low.iter().map(|low| (&low.rows, low.b.clone())));
            ProjectionSum { terms, bias: linear.bias.as_ref() }
        });
        let outs = matmul::project_all(&all.collect::<Vec<_>>())?;
        let projected = outs
            .into_iter()
            .zip(lows)
            .map(|(out, low)| ProjectionOutput { out, low: low.map(|low| low.values) });
        let missing = || candle_core::Error::msg("a projection is missing");
        let projected: Vec<_> = projected.collect();
        projected.try_into().map_err(|_| missing())
    }

    /// Computes `scale * x Aᵀ` for each module; `rows` are the prepared rows of `x`.
    fn low_rank_inputs<const N: usize>(
        &self,
        index: usize,
        modules: [LayerModule; N],
        pass: &ForwardPass<'_>,
        x: &Tensor,
        rows: &PreparedRows,
    ) -> Result<[Option<LowRankInput>; N]> {
        let &ForwardPass { phase, trained, .. } = pass;
        let form = self.matrix_form().for_adapter();
        let adapter =
            trained.map_or(self.unmerged_adapter.as_deref(), |trained| Some(trained.adapter));
        let dropout = trained.and_then(|trained| trained.dropout);
        let mut pairs = Vec::with_capacity(N);
        for (place, module) in modules.into_iter().enumerate() {
            let pair = adapter.and_then(|adapter| adapter.pairs.get(&(index, module)));
            let Some(pair) = pair else { continue };
            let seen = dropout.map(|dropout| dropout.apply_mask(index, module, x)).transpose()?;
            let seen = seen.map(|seen| PreparedRows::new(phase, &seen, form)).transpose()?;
            pairs.push((place, pair, pair.matrices(), seen));
        }
        let own = match pairs.is_empty() || form == self.matrix_form() {
            true => None,
            false => Some(PreparedRows::new(phase, x, form)?),
        };
        let rows = own.as_ref().unwrap_or(rows);
        let down = pairs.iter().map(|(_, _, [a, _], seen)| {
            let terms = vec![(seen.as_ref().unwrap_or(rows), a.clone())];
            ProjectionSum { terms, bias: None }
        });
        let narrow = matmul::project_all(&down.collect::<Vec<_>>())?;
        let mut lows = [const { None }; N];
        for ((place, pair, [_, b], _), values) in pairs.into_iter().zip(narrow) {
            let values = (values * pair.scale)?;
            let rows = PreparedRows::new(phase, &values, form)?;
            lows[place] = Some(LowRankInput { rows, values, b });
        }
        Ok(lows)
    }
}
