//! The written-out backward pass against candle's autograd over a naive model.

use super::*;
use crate::adapter::LoraAdapter;
use crate::dropout::LoraDropout;
use crate::ops::testing::{assert_close, random};
use candle_core::{D, DType, Device, Var};
use formats::LoraSpec;
use formats::{Architecture, ModelConfig};

fn config(architecture: Architecture) -> ModelConfig {
    let scaling = formats::RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 32,
    };
    ModelConfig {
        architecture,
        vocab_size: 50,
        hidden_size: 32,
        intermediate_size: 48,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        // As in Qwen3, the heads together are wider than the model.
        head_dim: if architecture == Architecture::Qwen3 { 12 } else { 8 },
        max_positions: 64,
        norm_epsilon: 1e-6,
        rope_theta: 1e4,
        rope_scaling: (architecture == Architecture::Llama).then_some(scaling),
        attention_bias: architecture != Architecture::Qwen3,
        tied_embeddings: architecture == Architecture::Qwen2,
        eos_tokens: vec![49],
        initializer_range: 0.3,
        details: formats::ArchitectureDetails::default(),
    }
}

/// A model of candle's differentiable operations: one sequence, every parameter by name.
struct Naive<'a> {
    config: &'a ModelConfig,
    parameters: BTreeMap<String, Var>,
    scale: f64,
    rate: f64,
}

impl Naive<'_> {
    fn new<'a>(model: &'a LanguageModel, adapter: Option<&LoraAdapter>, rate: f64) -> Naive<'a> {
        let mut named = model.weights.named_tensors().unwrap();
        named.extend(adapter.iter().flat_map(|adapter| adapter.named_parameters()));
        let var = |(name, tensor): (String, Tensor)| (name, Var::from_tensor(&tensor).unwrap());
        let scale = adapter.map_or(0.0, |adapter| adapter.pairs.values().next().unwrap().scale);
        Naive {
            config: &model.config,
            parameters: named.into_iter().map(var).collect(),
            scale,
            rate,
        }
    }

    fn get(&self, name: &str) -> &Tensor {
        self.parameters[name].as_tensor()
    }

    fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        let mean = x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let factor = (mean + self.config.norm_epsilon).unwrap().sqrt().unwrap();
        x.broadcast_div(&factor).unwrap().broadcast_mul(self.get(name)).unwrap()
    }

    /// `number` is that of the sequence in its step.
    fn linear(&self, x: &Tensor, layer: usize, module: LayerModule, number: u64) -> Tensor {
        let by = |x: &Tensor, part| {
            x.matmul(&self.get(&module.parameter_name(layer, part)).t().unwrap()).unwrap()
        };
        let mut out = by(x, "weight");
        if let Some(bias) = self.parameters.get(&module.parameter_name(layer, "bias")) {
            out = out.broadcast_add(bias).unwrap();
        }
        if self.scale != 0.0 {
            let places = (0..x.dim(0).unwrap() as u64).map(|place| number << 32 | place);
            let dropout = LoraDropout::for_step(self.rate, 3, 1, places.collect());
            let seen = dropout.map(|dropout| dropout.apply_mask(layer, module, x).unwrap());
            let low = by(&by(seen.as_ref().unwrap_or(x), "lora_A.weight"), "lora_B.weight");
            out = (out + (low * self.scale).unwrap()).unwrap();
        }
        out
    }

    /// Converts `[rows, heads * dim]` to `[heads, rows, dim]`.
    fn heads(&self, x: &Tensor, count: usize) -> Tensor {
        let x = x.reshape((x.dim(0).unwrap(), count, self.config.head_dim)).unwrap();
        let x = x.transpose(0, 1).unwrap();
        let index: Vec<u32> =
            (0..self.config.heads).map(|head| (head * count / self.config.heads) as u32).collect();
        x.contiguous().unwrap().index_select(&Tensor::new(index, &Device::Cpu).unwrap(), 0).unwrap()
    }

    /// Normalises query or key, `[heads, rows, dim]`.
    fn head_norm(&self, x: Tensor, layer: usize, name: &str) -> Tensor {
        let name = layer_parameter_name(layer, name);
        if self.parameters.contains_key(&name) { self.norm(&x, &name) } else { x }
    }

    fn rotate(&self, x: &Tensor) -> Tensor {
        let (rows, half) = (x.dim(1).unwrap(), self.config.head_dim / 2);
        let angle = |position: usize, i: usize| {
            let frequency = self.config.rope_theta.powf(-(i as f64) / half as f64);
            position as f64
                * self.config.rope_scaling.map_or(frequency, |scaling| {
                    let turns = 32.0 * frequency / std::f64::consts::TAU;
                    let share = ((turns - 1.0) / 3.0).clamp(0.0, 1.0);
                    frequency * share + frequency * (1.0 - share) / scaling.factor
                })
        };
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f32> = (0..rows)
                .flat_map(|p| (0..half).map(move |i| (p, i)))
                .map(|(position, i)| of(angle(position, i)) as f32)
                .collect();
            Tensor::from_vec(values, (1, rows, half), &Device::Cpu).unwrap()
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let low = x.narrow(2, 0, half).unwrap();
        let high = x.narrow(2, half, half).unwrap();
        let times = |x: &Tensor, table: &Tensor| x.broadcast_mul(table).unwrap();
        let out_low = (times(&low, &cos) - times(&high, &sin)).unwrap();
        let out_high = (times(&high, &cos) + times(&low, &sin)).unwrap();
        Tensor::cat(&[out_low, out_high], 2).unwrap()
    }

    fn attention(&self, layer: usize, [q, k, v]: [&Tensor; 3]) -> Tensor {
        let [q_name, k_name] = HEAD_NORMS;
        let (q, k) = (self.heads(q, self.config.heads), self.heads(k, self.config.kv_heads));
        let q = self.rotate(&self.head_norm(q, layer, q_name));
        let k = self.rotate(&self.head_norm(k, layer, k_name));
        let v = self.heads(v, self.config.kv_heads);
        let rows = q.dim(1).unwrap();
        let hidden = |i: usize| (0..rows).map(move |j| if j > i { -1e30f32 } else { 0.0 });
        let mask: Vec<f32> = (0..rows).flat_map(hidden).collect();
        let mask = Tensor::from_vec(mask, (1, rows, rows), &Device::Cpu).unwrap();
        let scale = 1.0 / (self.config.head_dim as f64).sqrt();
        let scores = (q.matmul(&k.t().unwrap()).unwrap() * scale).unwrap();
        let exp = scores.broadcast_add(&mask).unwrap().exp().unwrap();
        let p = exp.broadcast_div(&exp.sum_keepdim(D::Minus1).unwrap()).unwrap();
        let out = p.matmul(&v).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
        out.reshape((rows, ())).unwrap()
    }

    fn summed_loss(&self, sequence: &TokenSequence, number: u64) -> Tensor {
        let tokens = &sequence.tokens[..sequence.tokens.len() - 1];
        let tokens = Tensor::new(tokens, &Device::Cpu).unwrap();
        let mut x = self.get(EMBEDDING).index_select(&tokens, 0).unwrap();
        for layer in 0..self.config.layers {
            let input = self.norm(&x, &layer_parameter_name(layer, INPUT_NORM));
            let [q, k, v] = [LayerModule::Query, LayerModule::Key, LayerModule::Value]
                .map(|module| self.linear(&input, layer, module, number));
            let attended = self.attention(layer, [&q, &k, &v]);
            x = (x + self.linear(&attended, layer, LayerModule::Output, number)).unwrap();
            let input = self.norm(&x, &layer_parameter_name(layer, POST_NORM));
            let gate = self.linear(&input, layer, LayerModule::Gate, number).silu().unwrap();
            let up = self.linear(&input, layer, LayerModule::Up, number);
            x = (x + self.linear(&(gate * up).unwrap(), layer, LayerModule::Down, number)).unwrap();
        }
        let head = self.get(if self.config.tied_embeddings { EMBEDDING } else { HEAD });
        let logits = self.norm(&x, FINAL_NORM).matmul(&head.t().unwrap()).unwrap();
        let total = logits.exp().unwrap().sum_keepdim(D::Minus1).unwrap().log().unwrap();
        let scores = logits.broadcast_sub(&total).unwrap();
        let scored = sequence.scored.clone();
        let scores = scores.narrow(0, scored.start - 1, scored.len()).unwrap();
        let targets = Tensor::new(&sequence.tokens[scored], &Device::Cpu).unwrap();
        let chosen = scores.gather(&targets.unsqueeze(1).unwrap(), 1).unwrap();
        chosen.sum_all().unwrap().neg().unwrap()
    }
}

fn sequences() -> Vec<TokenSequence> {
    [(9, 4, 1), (3, 1, 2), (17, 10, 3)]
        .map(|(length, from, seed)| {
            let tokens = (0..length).map(|i| ((i * i + 7 * seed) % 50) as u32).collect();
            TokenSequence { tokens, scored: from..length, masked: Vec::new(), completion_bytes: 0 }
        })
        .into()
}

/// Values that make every gradient large enough to compare.
fn shaken(model: &mut LanguageModel, adapter: &mut Option<LoraAdapter>) {
    let shake = |(name, tensor): (String, Tensor)| {
        let noise = random(tensor.dims(), blake3::hash(name.as_bytes()).as_bytes()[0].into());
        (name, (tensor + (noise * 0.1).unwrap()).unwrap())
    };
    let weights = model.weights.named_tensors().unwrap().into_iter().map(shake).collect();
    super::super::replace_weights(model, weights).unwrap();
    if let Some(adapter) = adapter {
        let pairs = adapter.named_parameters().into_iter().map(shake).collect();
        adapter.replace_parameters(pairs).unwrap();
    }
}

fn compare(architecture: Architecture, lora: bool, rate: f64) {
    let mut model = LanguageModel::init_random(config(architecture), 1, &Device::Cpu).unwrap();
    let spec = LoraSpec { rank: 3, alpha: 5.0, modules: LayerModule::ALL.into(), rslora: false };
    let mut adapter = lora.then(|| LoraAdapter::new(&spec, &model.config, 2).unwrap());
    shaken(&mut model, &mut adapter);
    let sequences = sequences();
    let batch = PackedBatch::pack_sequences(&sequences.iter().collect::<Vec<_>>(), 0);
    let dropout = LoraDropout::for_step(rate, 3, 1, batch.token_places());
    let trained = |adapter| TrainedAdapter { adapter, dropout: dropout.as_ref() };
    let mut ours = ParameterGradients::default();
    let loss = ours
        .add_batch(
            &model,
            adapter.as_ref().map(trained),
            &batch,
            |losses| Ok(vec![0.5; losses.len()]),
            false,
        )
        .unwrap();
    let naive = Naive::new(&model, adapter.as_ref(), rate);
    let losses: Vec<Tensor> =
        sequences.iter().zip(0..).map(|(one, number)| naive.summed_loss(one, number)).collect();
    let total = Tensor::stack(&losses, 0).unwrap().sum_all().unwrap();
    let expected = f64::from(total.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap());
    assert!((loss - expected).abs() < 1e-3, "loss {loss} {expected}");
    let theirs = (total * 0.5).unwrap().backward().unwrap();
    let trained = match &adapter {
        Some(adapter) => adapter.named_parameters(),
        None => model.weights.named_tensors().unwrap(),
    };
    assert_eq!(ours.by_name.len(), trained.len());
    for (name, _) in trained {
        let gradient = ours.get(&name).unwrap_or_else(|| panic!("{name} has no gradient"));
        let size = gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(size > 1e-4, "{name} has no gradient to speak of: {size}");
        assert_close(gradient, theirs.get(&naive.parameters[&name]).unwrap(), 2e-4 + 1e-3 * size);
    }
}

#[test]
fn every_weight_gets_the_gradient_autograd_finds() {
    Architecture::list_embedded().for_each(|architecture| compare(architecture, false, 0.0));
}

#[test]
fn every_adapter_matrix_gets_the_gradient_autograd_finds() {
    Architecture::list_embedded().for_each(|architecture| compare(architecture, true, 0.0));
}

#[test]
fn an_adapter_that_does_not_see_all_gets_the_gradient_of_what_it_saw() {
    Architecture::list_embedded().for_each(|architecture| compare(architecture, true, 0.3));
}
