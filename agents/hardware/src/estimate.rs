//! How much memory a training or a generation needs, before it is tried. The formulas count
//! bytes a tensor at a time; two constants (the allocator's overhead and what a process needs
//! besides) were chosen on measured peaks. Believe training to ±10 %, generation to ±20 %.

use serde::Serialize;

/// Of a decoder with gated feed-forward layers (Qwen2, Qwen3, Llama).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub layers: u64,
    pub hidden: u64,
    pub intermediate: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub vocab: u64,
    /// The embedding serves as head.
    pub tied: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Norms of each head's q and k.
    pub qk_norm: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// A pair of this rank on all seven projections of every layer.
    Lora {
        rank: u64,
    },
    Full,
}

/// What decides a training's peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Training {
    pub method: Method,
    /// Sequences of one pass, and their tokens.
    pub batch: u64,
    pub sequence: u64,
    /// Of the base: 2 or 4.
    pub bytes_per_weight: u64,
    /// Only each layer's input is kept for the backward pass.
    pub checkpointing: bool,
    /// Attention by explicit matrices of scores.
    pub eager_attention: bool,
    /// Dropout on the adapter's inputs, which keeps a mask.
    pub dropout: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generation {
    pub sequences: u64,
    /// Prompt and completion.
    pub tokens: u64,
    pub bytes_per_weight: u64,
}

/// Bytes, of which `peak` is the sum and its overhead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Estimate {
    pub parameters: u64,
    pub trainable: u64,
    pub total: u64,
    pub peak_bytes: u64,
    pub parts: Parts,
}

/// Not all of them exist at once: the logits and a layer's activations take turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Parts {
    pub weights: u64,
    /// Trained parameters beside the weights, gradients, Adam's moments.
    pub training: u64,
    /// Each layer's kept inputs, when checkpointing; all activations otherwise.
    pub kept: u64,
    /// One layer's activations while it is recomputed.
    pub layer: u64,
    /// Logits, their softmax and gradients.
    pub logits: u64,
    pub kv_cache: u64,
    pub overhead: u64,
}

/// Logits in bf16, twice in f32, and gradients of both: what an unfused cross-entropy holds for
/// each token and entry of the vocabulary.
const LOGITS_BYTES: u64 = 16;

/// f32 weights and gradients, and Adam's two moments.
const TRAINED_BYTES: u64 = 16;

/// What an allocator loses, in thousandths, and what a process needs besides.
const OVERHEAD_PERMILLE: u64 = 30;
const PROCESS_BYTES: u64 = 600_000_000;
const GENERATING_PROCESS_BYTES: u64 = 1_600_000_000;

/// Of the cache of keys and values, while it grows.
const COPIES: u64 = 2;

/// A configuration nobody could run must not be taken for a small one.
fn product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

fn sum<const N: usize>(terms: [u64; N]) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

impl Training {
    /// The same training with the next thing to give up given up.
    fn smaller(&self, can_halve: bool) -> Option<(String, Self)> {
        let it = *self;
        if !it.checkpointing {
            return Some(("checkpointing".into(), Self { checkpointing: true, ..it }));
        }
        if it.method == Method::Full {
            let method = Method::Lora { rank: USUAL_RANK };
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
        (sequence >= SHORTEST)
            .then(|| (format!("sequences of {sequence} tokens"), Self { sequence, ..it }))
    }
}

const USUAL_RANK: u64 = 16;

/// Shorter examples are no examples.
const SHORTEST: u64 = 128;

impl Shape {
    fn kv(&self) -> u64 {
        product([self.kv_heads, self.head_dim])
    }

    fn query(&self) -> u64 {
        product([self.heads, self.head_dim])
    }

    /// Exact.
    pub fn parameters(&self) -> u64 {
        let Self { hidden, intermediate, vocab, layers, .. } = *self;
        let (query, kv) = (self.query(), self.kv());
        let biases = if self.qkv_bias { sum([query, kv, kv]) } else { 0 };
        let head_norms = if self.qk_norm { product([2, self.head_dim]) } else { 0 };
        let attention = product([2, hidden, sum([query, kv])]);
        let feed_forward = product([3, hidden, intermediate]);
        let layer = sum([attention, biases, head_norms, feed_forward, product([2, hidden])]);
        let tables = if self.tied { 1 } else { 2 };
        sum([product([tables, vocab, hidden]), product([layers, layer]), hidden])
    }

    /// Of an adapter on all seven projections. Exact.
    pub fn lora_parameters(&self, rank: u64) -> u64 {
        let Self { hidden, intermediate, layers, .. } = *self;
        let attention = product([2, sum([hidden, self.query(), hidden, self.kv()])]);
        let feed_forward = product([3, sum([hidden, intermediate])]);
        product([rank, layers, sum([attention, feed_forward])])
    }

    /// Activations of one layer that its backward pass needs.
    fn layer_activations(&self, training: &Training) -> u64 {
        let Training { batch, sequence, bytes_per_weight: bytes, .. } = *training;
        let Self { hidden, intermediate, heads, .. } = *self;
        let plain = product([
            bytes,
            sum([product([14, hidden]), product([2, self.kv()]), product([6, intermediate])]),
        ]);
        // Inputs of the projections, once more for their adapters.
        let adapted = match training.method {
            Method::Lora { .. } => {
                let kept = sum([bytes, u64::from(training.dropout)]);
                product([kept, sum([product([5, hidden]), intermediate])])
            }
            Method::Full => 0,
        };
        let scores = if training.eager_attention {
            product([batch, heads, sequence, sequence, sum([4, bytes])])
        } else {
            0
        };
        sum([product([batch, sequence, sum([plain, adapted])]), scores])
    }

    /// What training takes at its peak.
    pub fn training(&self, training: &Training) -> Estimate {
        let Training { batch, sequence, bytes_per_weight: bytes, .. } = *training;
        let parameters = self.parameters();
        let (trainable, total) = match training.method {
            Method::Lora { rank } => {
                let adapter = self.lora_parameters(rank);
                (adapter, sum([parameters, adapter]))
            }
            Method::Full => (parameters, parameters),
        };
        let trained = match training.method {
            Method::Lora { .. } => product([TRAINED_BYTES, trainable]),
            // The weights are counted already; gradients of their kind, and both moments.
            Method::Full => product([parameters, sum([bytes, 8])]),
        };
        let tokens = product([batch, sequence]);
        let layer = self.layer_activations(training);
        let logits = product([tokens, self.vocab, LOGITS_BYTES]);
        let weights = product([parameters, bytes]);
        let (kept, at_once) = if training.checkpointing {
            let kept = product([self.layers, tokens, self.hidden, bytes]);
            (kept, sum([kept, logits.max(layer)]))
        } else {
            let kept = product([self.layers, layer]);
            (kept, sum([kept, logits]))
        };
        let all = sum([weights, trained, at_once]);
        let overhead = sum([all / 1000 * OVERHEAD_PERMILLE, PROCESS_BYTES]);
        let parts =
            Parts { weights, training: trained, kept, layer, logits, kv_cache: 0, overhead };
        Estimate { parameters, trainable, total, peak_bytes: sum([all, overhead]), parts }
    }

    /// Changes after which it fits, each on top of those before, and what it then takes; the last
    /// resort is that it is tight. `None` when nothing helps. The step's batch can stay what it
    /// is: halved passes are accumulated twice as often.
    pub fn shrink(
        &self,
        training: &Training,
        budget: u64,
        can_halve: bool,
    ) -> Option<(Vec<String>, Estimate)> {
        let (mut now, mut changes, mut tight) = (*training, Vec::new(), None);
        loop {
            let estimate = self.training(&now);
            match estimate.verdict(budget) {
                Verdict::Fits => return Some((changes, estimate)),
                Verdict::Tight => {
                    tight.get_or_insert_with(|| (changes.clone(), estimate));
                }
                Verdict::DoesNotFit => {}
            }
            let Some((name, smaller)) = now.smaller(can_halve) else { return tight };
            // Halved again and again is said once.
            let kind = name.split(' ').next().unwrap_or_default();
            changes.retain(|change: &String| !change.starts_with(kind));
            changes.push(name);
            now = smaller;
        }
    }

    /// What generating takes at its peak by transformers, whose cache is copied as it grows.
    pub fn generation(&self, generation: &Generation) -> Estimate {
        let Generation { sequences, tokens, bytes_per_weight } = *generation;
        let parameters = self.parameters();
        let weights = product([parameters, bytes_per_weight]);
        let a_token = product([2, bytes_per_weight, self.layers, self.kv()]);
        let kv_cache = product([COPIES, sequences, tokens, a_token]);
        let overhead = GENERATING_PROCESS_BYTES;
        let parts = Parts { weights, kv_cache, overhead, ..Parts::default() };
        let peak_bytes = sum([weights, kv_cache, overhead]);
        Estimate { parameters, trainable: 0, total: parameters, peak_bytes, parts }
    }
}

/// Whether an estimate fits into a budget, its margin considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Fits,
    /// Within the estimate's margin of the budget.
    Tight,
    DoesNotFit,
}

/// In percent.
const TRAINING_MARGIN: u64 = 10;
const GENERATION_MARGIN: u64 = 20;

impl Estimate {
    pub fn verdict(&self, budget_bytes: u64) -> Verdict {
        let margin = if self.trainable == 0 { GENERATION_MARGIN } else { TRAINING_MARGIN };
        let with_margin = sum([self.peak_bytes, self.peak_bytes / 100 * margin]);
        if with_margin <= budget_bytes {
            Verdict::Fits
        } else if self.peak_bytes <= budget_bytes {
            Verdict::Tight
        } else {
            Verdict::DoesNotFit
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
    ) -> Shape {
        let head_dim = hidden / heads;
        let (qkv_bias, qk_norm) = (true, false);
        Shape {
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
        }
    }

    const HALF_B: Shape = qwen(896, 4864, 24, 14, 2, 151_936, true);
    const ONE_AND_HALF_B: Shape = qwen(1536, 8960, 28, 12, 2, 151_936, true);
    const THREE_B: Shape = qwen(2048, 11_008, 36, 16, 2, 151_936, true);
    const SEVEN_B: Shape = qwen(3584, 18_944, 28, 28, 4, 152_064, false);

    #[test]
    fn parameters_of_the_qwen2_5_family_are_exact() {
        let counts = [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(|shape| shape.parameters());
        assert_eq!(counts, [494_032_768, 1_543_714_304, 3_085_938_688, 7_615_616_512]);
        let ranks = [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(|it| it.lora_parameters(1));
        assert_eq!(ranks, [549_888, 1_154_048, 1_870_848, 2_523_136]);
        assert_eq!(SEVEN_B.lora_parameters(32), 80_740_352);
    }

    fn lora(rank: u64, batch: u64, sequence: u64, bytes_per_weight: u64) -> Training {
        Training {
            method: Method::Lora { rank },
            batch,
            sequence,
            bytes_per_weight,
            checkpointing: true,
            eager_attention: false,
            dropout: false,
        }
    }

    /// (shape, training, measured GB, tolerance)
    #[test]
    fn estimates_meet_measured_peaks() {
        let eager = |training| Training { eager_attention: true, ..training };
        for (shape, training, measured, tolerance) in [
            // An R9700 run's report; the rest from halo-forge's own memory logs.
            (SEVEN_B, lora(32, 2, 256, 2), 18.6, 0.03),
            (HALF_B, eager(lora(16, 2, 2048, 2)), 11.86, 0.04),
            (ONE_AND_HALF_B, eager(lora(16, 2, 2048, 2)), 14.50, 0.03),
            (THREE_B, eager(lora(16, 2, 2048, 2)), 18.53, 0.03),
        ] {
            let estimate = shape.training(&training).peak_bytes as f64 / 1e9;
            let off = estimate / measured - 1.0;
            assert!(off.abs() < tolerance, "{estimate:.2} GB beside {measured} GB measured");
        }
    }

    #[test]
    fn what_ran_out_of_memory_is_refused_and_what_ran_is_not() {
        const MI50: u64 = 32 << 30;
        let verdict = |training: &Training| THREE_B.training(training).verdict(MI50);
        assert_eq!(verdict(&lora(8, 1, 1024, 4)), Verdict::Fits);
        assert_eq!(verdict(&lora(8, 2, 4096, 4)), Verdict::DoesNotFit);
        assert_eq!(verdict(&lora(16, 4, 4096, 4)), Verdict::DoesNotFit);
        let kept = Training { checkpointing: false, dropout: true, ..lora(32, 2, 256, 2) };
        let without = SEVEN_B.training(&kept).peak_bytes;
        assert_eq!((without + 50_000_000) / 100_000_000, 254, "25.4 GB without checkpointing");
    }

    #[test]
    fn the_rest_of_the_figures_people_reported_come_out() {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let weights = |bytes| {
            [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(|it| gb(it.parameters() * bytes))
        };
        for (found, expected) in [
            (weights(2), [0.988, 3.087, 6.172, 15.231]),
            (weights(4), [1.976, 6.175, 12.344, 30.462]),
        ] {
            for (found, expected) in found.into_iter().zip(expected) {
                assert!((found - expected).abs() < 0.001, "{found} beside {expected}");
            }
        }
        let kv = |shape: Shape| 4 * shape.layers * shape.kv();
        let caches = [HALF_B, ONE_AND_HALF_B, THREE_B, SEVEN_B].map(kv);
        assert_eq!(caches, [12_288, 28_672, 36_864, 57_344]);
        let peak = |shape: Shape, training: Training| gb(shape.training(&training).peak_bytes);
        let eager = Training { eager_attention: true, ..lora(16, 2, 2048, 2) };
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
        let seven = SEVEN_B.training(&lora(32, 2, 256, 2));
        assert_eq!(seven.total, 7_696_356_864);
        assert_eq!(THREE_B.lora_parameters(8), 14_966_784);
        assert_eq!(ONE_AND_HALF_B.lora_parameters(4), 4_616_192);
    }

    #[test]
    fn what_does_not_fit_is_shrunk_until_it_does() {
        const MI50: u64 = 31 << 30;
        let large = lora(8, 4, 4096, 4);
        let (changes, estimate) = THREE_B.shrink(&large, MI50, false).unwrap();
        assert_eq!(changes, ["batch 1, accumulated"]);
        assert_eq!(estimate.verdict(MI50), Verdict::Fits);
        let full = Training { method: Method::Full, checkpointing: false, ..large };
        let (changes, _) = THREE_B.shrink(&full, MI50, true).unwrap();
        assert_eq!(changes[..2], ["checkpointing", "lora of rank 16"]);
        assert_eq!(SEVEN_B.shrink(&large, 8 << 30, true), None);
        assert_eq!(SEVEN_B.shrink(&lora(8, 1, 512, 2), MI50, true).unwrap().0, [""; 0]);
    }

    #[test]
    fn no_size_overflows() {
        let most = u64::MAX;
        let shape = Shape {
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
        };
        let training = Training { eager_attention: true, ..lora(most, most, most, most) };
        assert_eq!(shape.training(&training).peak_bytes, most);
        assert_eq!(shape.training(&training).verdict(31 << 30), Verdict::DoesNotFit);
        let generation = Generation { sequences: most, tokens: most, bytes_per_weight: most };
        assert_eq!(shape.generation(&generation).peak_bytes, most);
        assert_eq!(shape.shrink(&training, 1 << 30, true), None);
    }

    #[test]
    fn full_fine_tuning_counts_gradients_and_moments_of_every_weight() {
        let full = Training { method: Method::Full, ..lora(1, 1, 1024, 4) };
        let parts = ONE_AND_HALF_B.training(&full).parts;
        assert_eq!(parts.weights + parts.training, 16 * ONE_AND_HALF_B.parameters());
    }

    #[test]
    fn generation_peaks_are_within_their_margin() {
        for (shape, measured) in [(HALF_B, 5.12), (ONE_AND_HALF_B, 8.07), (THREE_B, 14.3)] {
            let generation = Generation { sequences: 64, tokens: 1224, bytes_per_weight: 2 };
            let estimate = shape.generation(&generation).peak_bytes as f64 / 1e9;
            let off: f64 = estimate / measured - 1.0;
            assert!(off.abs() < 0.2, "{estimate:.2} GB beside {measured} GB measured");
        }
    }
}
