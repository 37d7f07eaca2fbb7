//! The forward pass over rows of tokens. How rows attend to each other is the caller's: packed
//! sequences or a cache. What a backward pass needs of a layer is kept in its tape.

use super::Model;
use crate::adapter::Adapter;
use crate::dropout::Dropout;
use crate::ops::matmul::{self, Phase, Projection, Rows};
use crate::ops::{norm, rope::Rotation, sum_of, swiglu};
use candle_core::{Result, Tensor};
use formats::Module;

/// Attention of one layer: (layer, query, key, value) after rotation, to `[rows, heads * dim]`.
pub(crate) type Attend<'a> = dyn FnMut(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a;

/// An adapter in training.
#[derive(Clone, Copy)]
pub(crate) struct Trained<'a> {
    pub(crate) adapter: &'a Adapter,
    pub(crate) dropout: Option<&'a Dropout>,
}

/// What all layers of a pass have in common.
pub(crate) struct Pass<'a> {
    pub(crate) phase: Phase,
    pub(crate) rotation: Rotation,
    pub(crate) trained: Option<Trained<'a>>,
}

/// `scale * x Aᵀ` of a LoRA pair, also as it is multiplied, and the pair's other half.
struct Low<'a> {
    values: Tensor,
    rows: Rows,
    b: &'a Tensor,
}

/// What one projection computed.
pub(crate) struct Projected {
    pub(crate) out: Tensor,
    /// `scale * x Aᵀ` where the projection has a LoRA pair, of what that sees of x.
    pub(crate) low: Option<Tensor>,
}

/// Norms and activations are computed again from what they are of: they are no work beside the
/// products, and would be a third of the memory (arXiv:2205.05198).
pub(crate) struct LayerTape {
    pub(crate) input: Tensor,
    /// Query and key before their norms, where they have them.
    pub(crate) unnormed: Option<[Tensor; 2]>,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) attended: Tensor,
    pub(crate) middle: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    /// In the order of [`Module::ALL`].
    pub(crate) lows: Vec<Option<Tensor>>,
}

impl Model {
    pub(crate) fn rotation(&self, positions: &[u32]) -> Result<Rotation> {
        Rotation::new(positions, &self.frequencies, &self.device)
    }

    pub(crate) fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        self.weights.embedding.select(tokens, &self.device)
    }

    /// Final hidden states, normalised: what the head reads.
    pub(crate) fn hidden(
        &self,
        phase: Phase,
        tokens: &[u32],
        positions: &[u32],
        attend: &mut Attend<'_>,
    ) -> Result<Tensor> {
        let pass = Pass { phase, rotation: self.rotation(positions)?, trained: None };
        let mut x = self.embed(tokens)?;
        for layer in 0..self.weights.layers.len() {
            x = self.layer(layer, &pass, &x, attend)?.0;
        }
        self.final_norm(&x)
    }

    pub(crate) fn final_norm(&self, x: &Tensor) -> Result<Tensor> {
        norm::rms_norm(x, &self.weights.norm, self.config.norm_epsilon)
    }

    /// Of one token of each sequence.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        matmul::project(Phase::Decode, hidden, self.weights.output(), None)
    }

    pub(crate) fn layer(
        &self,
        index: usize,
        pass: &Pass<'_>,
        input: &Tensor,
        attend: &mut Attend<'_>,
    ) -> Result<(Tensor, LayerTape)> {
        let (mut tape, activated) = self.up_to_down(index, pass, input, attend)?;
        let [down] = self.project(index, [Module::Down], pass, &activated)?;
        tape.lows.push(down.low);
        Ok((sum_of(&tape.middle, &down.out)?, tape))
    }

    /// The tape of a layer whose output is known: without its last product, a fourth of it.
    pub(crate) fn tape(
        &self,
        index: usize,
        pass: &Pass<'_>,
        input: &Tensor,
        attend: &mut Attend<'_>,
    ) -> Result<LayerTape> {
        let (mut tape, activated) = self.up_to_down(index, pass, input, attend)?;
        let rows = Rows::new(pass.phase, &activated, self.precision())?;
        let [low] = self.lows(index, [Module::Down], pass, &activated, &rows)?;
        tape.lows.push(low.map(|low| low.values));
        Ok(tape)
    }

    /// The tape but for the pair of the last product, and what that product reads.
    fn up_to_down(
        &self,
        index: usize,
        pass: &Pass<'_>,
        input: &Tensor,
        attend: &mut Attend<'_>,
    ) -> Result<(LayerTape, Tensor)> {
        let layer = &self.weights.layers[index];
        let epsilon = self.config.norm_epsilon;
        let attention_input = norm::rms_norm(input, &layer.input_norm, epsilon)?;
        let modules = [Module::Query, Module::Key, Module::Value];
        let [query, key, value] = self.project(index, modules, pass, &attention_input)?;
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
        let (query, key) = (pass.rotation.apply(&query)?, pass.rotation.apply(&key)?);
        let attended = attend(index, &query, &key, &value)?;
        let [output] = self.project(index, [Module::Output], pass, &attended)?;
        let middle = sum_of(input, &output.out)?;
        let feed_input = norm::rms_norm(&middle, &layer.post_norm, epsilon)?;
        let modules = [Module::Gate, Module::Up];
        let [gate, up] = self.project(index, modules, pass, &feed_input)?;
        let activated = swiglu::swiglu(&gate.out, &up.out)?;
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

    /// `x` by several modules, each with its pair of an adapter where it has one.
    fn project<const N: usize>(
        &self,
        index: usize,
        modules: [Module; N],
        pass: &Pass<'_>,
        x: &Tensor,
    ) -> Result<[Projected; N]> {
        let rows = Rows::new(pass.phase, x, self.precision())?;
        let lows = self.lows(index, modules, pass, x, &rows)?;
        let linears = modules.map(|module| &self.weights.layers[index].linears[module as usize]);
        let all = linears.iter().zip(&lows).map(|(linear, low)| {
            let mut terms = vec![(&rows, linear.weight.clone())];
            terms.extend(low.iter().map(|low| (&low.rows, low.b.into())));
            Projection { terms, bias: linear.bias.as_ref() }
        });
        let outs = matmul::project_all(&all.collect::<Vec<_>>())?;
        let projected = outs
            .into_iter()
            .zip(lows)
            .map(|(out, low)| Projected { out, low: low.map(|low| low.values) });
        let missing = || candle_core::Error::msg("a projection is missing");
        let projected: Vec<_> = projected.collect();
        projected.try_into().map_err(|_| missing())
    }

    /// What the first halves of the modules' pairs make of `x`, which is `rows`.
    fn lows<'a, const N: usize>(
        &'a self,
        index: usize,
        modules: [Module; N],
        pass: &Pass<'a>,
        x: &Tensor,
        rows: &Rows,
    ) -> Result<[Option<Low<'a>>; N]> {
        let (precision, &Pass { phase, trained, .. }) = (self.precision(), pass);
        let adapter = trained.map_or(self.beside.as_deref(), |trained| Some(trained.adapter));
        let dropout = trained.and_then(|trained| trained.dropout);
        let mut pairs = Vec::with_capacity(N);
        for (place, module) in modules.into_iter().enumerate() {
            let pair = adapter.and_then(|adapter| adapter.pairs.get(&(index, module)));
            let Some(pair) = pair else { continue };
            let seen = dropout.map(|dropout| dropout.apply(index, module, x)).transpose()?;
            let seen = seen.map(|seen| Rows::new(phase, &seen, precision)).transpose()?;
            pairs.push((place, pair, seen));
        }
        let down = pairs.iter().map(|(_, pair, seen)| {
            let terms = vec![(seen.as_ref().unwrap_or(rows), (&pair.a).into())];
            Projection { terms, bias: None }
        });
        let narrow = matmul::project_all(&down.collect::<Vec<_>>())?;
        let mut lows = [const { None }; N];
        for ((place, pair, _), values) in pairs.iter().zip(narrow) {
            let values = (values * pair.scale)?;
            let rows = Rows::new(phase, &values, precision)?;
            lows[*place] = Some(Low { rows, values, b: &pair.b });
        }
        Ok(lows)
    }
}
