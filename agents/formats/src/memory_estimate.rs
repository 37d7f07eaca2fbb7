//! Estimates of the memory that a training or a generation needs. The formulas count the bytes of
//! each tensor; two constants (allocator overhead and the memory of the process) were fitted to
//! measured peaks. The error is about ±10 % for training and ±20 % for generation.

use serde::Serialize;

use crate::ModelConfig;

/// The dimensions of a decoder with gated feed-forward layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    pub layers: u64,
    pub hidden: u64,
    /// Of a mixture of experts, the width of all experts that a token passes.
    pub intermediate: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub vocab: u64,
    /// True if the embedding is also the output head.
    pub tied: bool,
    /// True if q, k and v have biases.
    pub qkv_bias: bool,
    /// True if each head normalises q and k.
    pub qk_norm: bool,
    /// The parameters that the other fields do not describe: of further norms and biases, and of
    /// the experts that a token does not pass.
    pub other_parameters: u64,
    /// The parameters of all experts, which the other fields contain too. They keep their type in a
    /// base that is quantised.
    pub expert_parameters: u64,
}

/// The parameters that a training changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainingMethod {
    /// A LoRA adapter of this rank on all seven projections of every layer.
    Lora {
        rank: u64,
    },
    Full,
}

/// The settings that determine a training's peak memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedTraining {
    pub method: TrainingMethod,
    /// The sequences of one pass.
    pub batch: u64,
    /// The tokens of one sequence.
    pub sequence: u64,
    /// 2 or 4.
    pub bytes_per_weight: u64,
    /// True if only each layer's input is kept for the backward pass.
    pub checkpointing: bool,
    /// True if attention computes explicit score matrices.
    pub eager_attention: bool,
    /// True if the adapter's inputs have dropout, which keeps a mask.
    pub dropout: bool,
    /// True if the frozen matrices of layers are in 4 bits.
    pub quantized: bool,
}

/// The settings that determine a generation's peak memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedGeneration {
    pub sequences: u64,
    /// The tokens of prompt and completion.
    pub tokens: u64,
    pub bytes_per_weight: u64,
}

/// Estimated bytes; `peak_bytes` is the sum of the simultaneous parts and the overhead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    pub parameters: u64,
    pub trainable: u64,
    pub total: u64,
    pub peak_bytes: u64,
    pub parts: MemoryParts,
}

/// The parts of an estimate. Not all exist at once: the logits and a layer's activations alternate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MemoryParts {
    pub weights: u64,
    /// Trained parameters outside the base, gradients and Adam's moments.
    pub training: u64,
    /// Each layer's inputs with checkpointing; all activations otherwise.
    pub kept: u64,
    /// One layer's activations while it is recomputed.
    pub layer: u64,
    /// Logits, their softmax and gradients.
    pub logits: u64,
    pub kv_cache: u64,
    pub overhead: u64,
}

/// For each token and vocabulary entry of an unfused cross-entropy: logits in bf16, twice in f32,
/// and the gradients of both.
const LOGITS_BYTES_PER_ENTRY: u64 = 16;

/// Weight and gradient in f32, and Adam's two moments.
const TRAINED_BYTES_PER_PARAMETER: u64 = 16;

/// Of 1,000 weights in NF4: 4 bits each, and the scales of blocks of 64 in 8 bits.
const NF4_BYTES_PERMILLE: u64 = 520;

/// The memory that the allocator loses.
const OVERHEAD_PERMILLE: u64 = 30;
const PROCESS_BYTES: u64 = 600_000_000;
const GENERATING_PROCESS_BYTES: u64 = 1_600_000_000;

/// The copies of the key-value cache while it grows.
const CACHE_COPIES: u64 = 2;

/// An impossible configuration must not appear small.
fn saturating_product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

fn saturating_sum<const N: usize>(terms: [u64; N]) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

impl PlannedTraining {
    /// Returns the training with the next memory-saving change, and the change's name.
    fn next_smaller(&self, can_halve: bool) -> Option<(String, Self)> {
        let it = *self;
        if !it.checkpointing {
            return Some(("checkpointing".into(), Self { checkpointing: true, ..it }));
        }
        if it.method == TrainingMethod::Full {
            let method = TrainingMethod::Lora { rank: USUAL_RANK };
            return Some((format!("lora of rank {USUAL_RANK}"), Self { method, ..it }));
        }
        if it.bytes_per_weight > 2 && can_halve {
            return Some(("weights of 2 bytes".into(), Self { bytes_per_weight: 2, ..it }));
        }
        if it.batch > 1 {
            let batch = it.batch / 2;
            return Some((format!("batch {batch}, accumulated"), Self { batch, ..it }));
        }
        let sequence = it.sequence / 2;
        (sequence >= SHORTEST_SEQUENCE)
            .then(|| (format!("sequences of {sequence} tokens"), Self { sequence, ..it }))
    }
}

/// The rank of an adapter that is proposed instead of full training.
const USUAL_RANK: u64 = 16;

/// The shortest useful length of an example, in tokens.
const SHORTEST_SEQUENCE: u64 = 128;

impl ModelShape {
    /// Returns the part of a model's configuration that decides its memory use.
    pub fn from_config(config: &ModelConfig) -> Self {
        let wide = |size: usize| size as u64;
        let (layers, hidden) = (wide(config.layers), wide(config.hidden_size));
        let (intermediate, expert_parameters) = match &config.details.experts {
            Some(experts) => {
                let [count, used, width] = [experts.count, experts.used, experts.width].map(wide);
                let all = saturating_product([3, layers, hidden, count, width]);
                (saturating_product([used, width]), all)
            }
            None => (wide(config.intermediate_size), 0),
        };
        let described = Self {
            layers,
            hidden,
            intermediate,
            heads: wide(config.heads),
            kv_heads: wide(config.kv_heads),
            head_dim: wide(config.head_dim),
            vocab: wide(config.vocab_size),
            tied: config.tied_embeddings,
            qkv_bias: config.attention_bias,
            qk_norm: config.has_head_norms(),
            other_parameters: 0,
            expert_parameters,
        };
        let all = u64::try_from(config.count_parameters()).unwrap_or(u64::MAX);
        Self { other_parameters: all.saturating_sub(described.parameter_count()), ..described }
    }

    fn kv_width(&self) -> u64 {
        saturating_product([self.kv_heads, self.head_dim])
    }

    fn query_width(&self) -> u64 {
        saturating_product([self.heads, self.head_dim])
    }

    /// Returns the exact number of parameters.
    pub fn parameter_count(&self) -> u64 {
        let Self { hidden, intermediate, vocab, layers, .. } = *self;
        let (query, kv) = (self.query_width(), self.kv_width());
        let biases = if self.qkv_bias { saturating_sum([query, kv, kv]) } else { 0 };
        let head_norms = if self.qk_norm { saturating_product([2, self.head_dim]) } else { 0 };
        let attention = saturating_product([2, hidden, saturating_sum([query, kv])]);
        let feed_forward = saturating_product([3, hidden, intermediate]);
        let layer = saturating_sum([
            attention,
            biases,
            head_norms,
            feed_forward,
            saturating_product([2, hidden]),
        ]);
        let tables = if self.tied { 1 } else { 2 };
        saturating_sum([
            saturating_product([tables, vocab, hidden]),
            saturating_product([layers, layer]),
            hidden,
            self.other_parameters,
        ])
    }

    /// Returns the exact number of parameters of an adapter on all seven projections.
    pub(crate) fn lora_parameter_count(&self, rank: u64) -> u64 {
        let Self { hidden, intermediate, layers, .. } = *self;
        let attention = saturating_product([
            2,
            saturating_sum([hidden, self.query_width(), hidden, self.kv_width()]),
        ]);
        let feed_forward = saturating_product([3, saturating_sum([hidden, intermediate])]);
        saturating_product([rank, layers, saturating_sum([attention, feed_forward])])
    }

    fn layer_activation_bytes(&self, training: &PlannedTraining) -> u64 {
        let PlannedTraining { batch, sequence, bytes_per_weight: bytes, .. } = *training;
        let Self { hidden, intermediate, heads, .. } = *self;
        let plain = saturating_product([
            bytes,
            saturating_sum([
                saturating_product([14, hidden]),
                saturating_product([2, self.kv_width()]),
                saturating_product([6, intermediate]),
            ]),
        ]);
        // The adapters need the projections' inputs a second time.
        let adapted = match training.method {
            TrainingMethod::Lora { .. } => {
                let kept = saturating_sum([bytes, u64::from(training.dropout)]);
                saturating_product([
                    kept,
                    saturating_sum([saturating_product([5, hidden]), intermediate]),
                ])
            }
            TrainingMethod::Full => 0,
        };
        let scores = if training.eager_attention {
            saturating_product([batch, heads, sequence, sequence, saturating_sum([4, bytes])])
        } else {
            0
        };
        saturating_sum([
            saturating_product([batch, sequence, saturating_sum([plain, adapted])]),
            scores,
        ])
    }

    /// Returns the bytes of the weights. Tables and experts are never quantised.
    fn weight_bytes(&self, training: &PlannedTraining) -> u64 {
        let (parameters, bytes) = (self.parameter_count(), training.bytes_per_weight);
        if !training.quantized {
            return saturating_product([parameters, bytes]);
        }
        let tables = saturating_product([if self.tied { 1 } else { 2 }, self.vocab, self.hidden]);
        let plain = saturating_sum([tables, self.expert_parameters]);
        let quantized = parameters.saturating_sub(plain);
        saturating_sum([
            saturating_product([plain, bytes]),
            saturating_product([quantized / 1000, NF4_BYTES_PERMILLE]),
        ])
    }

    /// Estimates the peak memory of a training.
    pub fn estimate_training(&self, training: &PlannedTraining) -> MemoryEstimate {
        let PlannedTraining { batch, sequence, bytes_per_weight: bytes, .. } = *training;
        let parameters = self.parameter_count();
        let (trainable, total) = match training.method {
            TrainingMethod::Lora { rank } => {
                let adapter = self.lora_parameter_count(rank);
                (adapter, saturating_sum([parameters, adapter]))
            }
            TrainingMethod::Full => (parameters, parameters),
        };
        let trained = match training.method {
            TrainingMethod::Lora { .. } => {
                saturating_product([TRAINED_BYTES_PER_PARAMETER, trainable])
            }
            // The weights are already counted; gradients have the weights' type, and both moments
            // are added.
            TrainingMethod::Full => saturating_product([parameters, saturating_sum([bytes, 8])]),
        };
        let tokens = saturating_product([batch, sequence]);
        let layer = self.layer_activation_bytes(training);
        let logits = saturating_product([tokens, self.vocab, LOGITS_BYTES_PER_ENTRY]);
        let weights = self.weight_bytes(training);
        let (kept, at_once) = if training.checkpointing {
            let kept = saturating_product([self.layers, tokens, self.hidden, bytes]);
            (kept, saturating_sum([kept, logits.max(layer)]))
        } else {
            let kept = saturating_product([self.layers, layer]);
            (kept, saturating_sum([kept, logits]))
        };
        let all = saturating_sum([weights, trained, at_once]);
        let overhead = saturating_sum([all / 1000 * OVERHEAD_PERMILLE, PROCESS_BYTES]);
        let parts =
            MemoryParts { weights, training: trained, kept, layer, logits, kv_cache: 0, overhead };
        MemoryEstimate {
            parameters,
            trainable,
            total,
            peak_bytes: saturating_sum([all, overhead]),
            parts,
        }
    }

    /// Returns the cumulative changes after which the training fits, and its estimate then; a tight
    /// fit is the last resort. `None` if no change helps. The batch of a step can stay the same,
    /// because halved passes are accumulated twice as often.
    pub fn shrink_to_fit(
        &self,
        training: &PlannedTraining,
        budget: u64,
        can_halve: bool,
    ) -> Option<(Vec<String>, MemoryEstimate)> {
        let (mut now, mut changes, mut tight) = (*training, Vec::new(), None);
        loop {
            let estimate = self.estimate_training(&now);
            match estimate.budget_fit(budget) {
                BudgetFit::Fits => return Some((changes, estimate)),
                BudgetFit::Tight => {
                    tight.get_or_insert_with(|| (changes.clone(), estimate));
                }
                BudgetFit::DoesNotFit => {}
            }
            let Some((name, smaller)) = now.next_smaller(can_halve) else { return tight };
            // Repeated halving is listed once.
            let kind = name.split(' ').next().unwrap_or_default();
            changes.retain(|change: &String| !change.starts_with(kind));
            changes.push(name);
            now = smaller;
        }
    }

    /// Estimates the peak memory of a generation with transformers, whose cache is copied as it
    /// grows.
    pub fn estimate_generation(&self, generation: &PlannedGeneration) -> MemoryEstimate {
        let PlannedGeneration { sequences, tokens, bytes_per_weight } = *generation;
        let parameters = self.parameter_count();
        let weights = saturating_product([parameters, bytes_per_weight]);
        let a_token = saturating_product([2, bytes_per_weight, self.layers, self.kv_width()]);
        let kv_cache = saturating_product([CACHE_COPIES, sequences, tokens, a_token]);
        let overhead = GENERATING_PROCESS_BYTES;
        let parts = MemoryParts { weights, kv_cache, overhead, ..MemoryParts::default() };
        let peak_bytes = saturating_sum([weights, kv_cache, overhead]);
        MemoryEstimate { parameters, trainable: 0, total: parameters, peak_bytes, parts }
    }
}

/// The relation of an estimate and its margin to a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetFit {
    Fits,
    /// The estimate fits, but not with its margin.
    Tight,
    DoesNotFit,
}

const TRAINING_MARGIN_PERCENT: u64 = 10;
const GENERATION_MARGIN_PERCENT: u64 = 20;

impl MemoryEstimate {
    /// Compares the estimate and its margin with a budget.
    pub fn budget_fit(&self, budget_bytes: u64) -> BudgetFit {
        let margin =
            if self.trainable == 0 { GENERATION_MARGIN_PERCENT } else { TRAINING_MARGIN_PERCENT };
        let with_margin = saturating_sum([self.peak_bytes, self.peak_bytes / 100 * margin]);
        if with_margin <= budget_bytes {
            BudgetFit::Fits
        } else if self.peak_bytes <= budget_bytes {
            BudgetFit::Tight
        } else {
            BudgetFit::DoesNotFit
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn qwen(
        hidden: u64,
        intermediate: u64,
        layers: u64,
        heads: u64,
        kv_heads: u64,
        vocab: u64,
        tied: bool,
    ) -> ModelShape {
        let head_dim = hidden / heads;
        let (qkv_bias, qk_norm) = (true, false);
        ModelShape {
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            vocab,
            tied,
            qkv_bias,
            qk_norm,
            other_parameters: 0,
            expert_parameters: 0,
        }
    }

    const HALF_B: ModelShape = qwen(896, 4864, 24, 14, 2, 151_936, true);
    const ONE_AND_HALF_B: ModelShape = qwen(1536, 8960, 28, 12, 2, 151_936, true);
    const THREE_B: ModelShape = qwen(2048, 11_008, 36, 16, 2, 151_936, true);
    const SEVEN_B: ModelShape = qwen(3584, 18_944, 28, 28, 4, 152_064, false);

    #[test]
    fn parameters_of_the_qwen2_5_family_are_exact() {
        let counts =
            [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(|shape| shape.parameter_count());
        assert_eq!(counts, [494_032_768, 1_543_714_304, 3_085_938_688, 7_615_616_512]);
        let ranks = [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(|it| it.lora_parameter_count(1));
        assert_eq!(ranks, [549_888, 1_154_048, 1_870_848, 2_523_136]);
        assert_eq!(SEVEN_B.lora_parameter_count(32), 80_740_352);
    }

    fn lora(rank: u64, batch: u64, sequence: u64, bytes_per_weight: u64) -> PlannedTraining {
        PlannedTraining {
            method: TrainingMethod::Lora { rank },
            batch,
            sequence,
            bytes_per_weight,
            checkpointing: true,
            eager_attention: false,
            dropout: false,
            quantized: false,
        }
    }

    /// (shape, training, measured GB, tolerance)
    #[test]
    fn estimates_meet_measured_peaks() {
        let eager = |training| PlannedTraining { eager_attention: true, ..training };
        for (shape, training, measured, tolerance) in [
            // From the report of an R9700 run; the rest from halo-forge's memory logs.
            (SEVEN_B, lora(32, 2, 256, 2), 18.6, 0.03),
            (HALF_B, eager(lora(16, 2, 2048, 2)), 11.86, 0.04),
            (ONE_AND_HALF_B, eager(lora(16, 2, 2048, 2)), 14.50, 0.03),
            (THREE_B, eager(lora(16, 2, 2048, 2)), 18.53, 0.03),
        ] {
            let estimate = shape.estimate_training(&training).peak_bytes as f64 / 1e9;
            let off = estimate / measured - 1.0;
            assert!(off.abs() < tolerance, "{estimate:.2} GB beside {measured} GB measured");
        }
    }

    #[test]
    fn trainings_that_ran_out_of_memory_are_refused_and_others_are_not() {
        const MI50: u64 = 32 << 30;
        let verdict =
            |training: &PlannedTraining| THREE_B.estimate_training(training).budget_fit(MI50);
        assert_eq!(verdict(&lora(8, 1, 1024, 4)), BudgetFit::Fits);
        assert_eq!(verdict(&lora(8, 2, 4096, 4)), BudgetFit::DoesNotFit);
        assert_eq!(verdict(&lora(16, 4, 4096, 4)), BudgetFit::DoesNotFit);
        let kept = PlannedTraining { checkpointing: false, dropout: true, ..lora(32, 2, 256, 2) };
        let without = SEVEN_B.estimate_training(&kept).peak_bytes;
        assert_eq!((without + 50_000_000) / 100_000_000, 254, "25.4 GB without checkpointing");
    }

    #[test]
    fn the_rest_of_the_figures_people_reported_come_out() {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let weights = |bytes| {
            [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(|it| gb(it.parameter_count() * bytes))
        };
        for (found, expected) in [
            (weights(2), [0.988, 3.087, 6.172, 15.231]),
            (weights(4), [1.976, 6.175, 12.344, 30.462]),
        ] {
            for (found, expected) in found.into_iter().zip(expected) {
                assert!((found - expected).abs() < 0.001, "{found} beside {expected}");
            }
        }
        let kv = |shape: ModelShape| 4 * shape.layers * shape.kv_width();
        let caches = [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(kv);
        assert_eq!(caches, [12_288, 28_672, 36_864, 57_344]);
        let peak = |shape: ModelShape, training: PlannedTraining| {
            gb(shape.estimate_training(&training).peak_bytes)
        };
        let eager = PlannedTraining { eager_attention: true, ..lora(16, 2, 2048, 2) };
        let seven = peak(SEVEN_B, eager);
        assert!((20.0..31.0).contains(&seven), "GTT 20 to 30 GB was seen: {seven}");
        for (found, expected) in [
            (peak(THREE_B, lora(8, 1, 1024, 4)), 16.4),
            (peak(THREE_B, lora(8, 2, 4096, 4)), 36.6),
            (peak(THREE_B, lora(16, 4, 4096, 4)), 59.8),
            (peak(ONE_AND_HALF_B, lora(4, 1, 1024, 4)), 9.8),
            (peak(SEVEN_B, lora(8, 1, 1024, 4)), 35.6),
        ] {
            assert!((found / expected - 1.0).abs() < 0.02, "{found} beside {expected}");
        }
        let seven = SEVEN_B.estimate_training(&lora(32, 2, 256, 2));
        assert_eq!(seven.total, 7_696_356_864);
        assert_eq!(THREE_B.lora_parameter_count(8), 14_966_784);
        assert_eq!(ONE_AND_HALF_B.lora_parameter_count(4), 4_616_192);
    }

    #[test]
    fn a_base_in_four_bits_keeps_tables_and_experts_in_their_type() {
        let weights = |shape: &ModelShape, quantized| {
            let training = PlannedTraining { quantized, ..lora(16, 1, 512, 2) };
            shape.estimate_training(&training).parts.weights as f64 / 1e9
        };
        let small = weights(&SEVEN_B, true);
        assert!((small - 5.57).abs() < 0.01, "{small} GB of 15.2");
        // Qwen3 30B-A3B.
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": false,
            "attention_bias": false,
        });
        let map = config.as_object().unwrap();
        let config = ModelConfig::from_json(map, std::path::Path::new("config.json")).unwrap();
        let shape = ModelShape::from_config(&config);
        let (plain, small) = (weights(&shape, false), weights(&shape, true));
        assert!((plain - 61.06).abs() < 0.01, "{plain} GB");
        // 57.98 GB are of experts, 1.24 GB of tables.
        assert!((small - 59.70).abs() < 0.01, "{small} GB");
    }

    #[test]
    fn an_oversized_training_is_shrunk_until_it_does() {
        const MI50: u64 = 31 << 30;
        let large = lora(8, 4, 4096, 4);
        let (changes, estimate) = THREE_B.shrink_to_fit(&large, MI50, false).unwrap();
        assert_eq!(changes, ["batch 1, accumulated"]);
        assert_eq!(estimate.budget_fit(MI50), BudgetFit::Fits);
        let full = PlannedTraining { method: TrainingMethod::Full, checkpointing: false, ..large };
        let (changes, _) = THREE_B.shrink_to_fit(&full, MI50, true).unwrap();
        assert_eq!(changes[..2], ["checkpointing", "lora of rank 16"]);
        assert_eq!(SEVEN_B.shrink_to_fit(&large, 8 << 30, true), None);
        assert_eq!(SEVEN_B.shrink_to_fit(&lora(8, 1, 512, 2), MI50, true).unwrap().0, [""; 0]);
    }

    #[test]
    fn no_size_overflows() {
        let most = u64::MAX;
        let shape = ModelShape {
            layers: most,
            hidden: most,
            intermediate: most,
            heads: most,
            kv_heads: most,
            head_dim: most,
            vocab: most,
            tied: false,
            qkv_bias: true,
            qk_norm: true,
            other_parameters: most,
            expert_parameters: most,
        };
        let training = PlannedTraining { eager_attention: true, ..lora(most, most, most, most) };
        assert_eq!(shape.estimate_training(&training).peak_bytes, most);
        assert_eq!(shape.estimate_training(&training).budget_fit(31 << 30), BudgetFit::DoesNotFit);
        let generation =
            PlannedGeneration { sequences: most, tokens: most, bytes_per_weight: most };
        assert_eq!(shape.estimate_generation(&generation).peak_bytes, most);
        assert_eq!(shape.shrink_to_fit(&training, 1 << 30, true), None);
    }

    #[test]
    fn full_fine_tuning_counts_gradients_and_moments_of_every_weight() {
        let full = PlannedTraining { method: TrainingMethod::Full, ..lora(1, 1, 1024, 4) };
        let parts = ONE_AND_HALF_B.estimate_training(&full).parts;
        assert_eq!(parts.weights + parts.training, 16 * ONE_AND_HALF_B.parameter_count());
    }

    #[test]
    fn generation_peaks_are_within_their_margin() {
        for (shape, measured) in [(HALF_B, 5.12), (ONE_AND_HALF_B, 8.07), (THREE_B, 14.3)] {
            let generation = PlannedGeneration { sequences: 64, tokens: 1224, bytes_per_weight: 2 };
            let estimate = shape.estimate_generation(&generation).peak_bytes as f64 / 1e9;
            let off: f64 = estimate / measured - 1.0;
            assert!(off.abs() < 0.2, "{estimate:.2} GB beside {measured} GB measured");
        }
    }
}
