//! Small models, adapters and texts with the figures that other programs computed of them. One set
//! is in this repository; a larger one is used as well if it lies beside the checkout.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The context of all perplexities, in tokens.
pub const GOLDEN_CONTEXT: usize = 512;

/// A directory of models (`hf`, and `gguf` of llama.cpp), adapters (`peft`, and `gguf-lora` of
/// llama.cpp) and texts (`corpus`), with its figures.
pub struct GoldenSet {
    pub root: PathBuf,
    pub figures: GoldenFigures,
}

#[derive(Debug, serde::Deserialize)]
pub struct GoldenFigures {
    pub perplexities: Vec<GoldenPerplexity>,
    pub sliding: Vec<SlidingPerplexity>,
    #[serde(default)]
    pub generations: Vec<GreedyGeneration>,
}

/// A perplexity of llama-perplexity. Numbers are text, as they were printed.
#[derive(Debug, serde::Deserialize)]
pub struct GoldenPerplexity {
    pub model: String,
    pub adapter: Option<String>,
    pub text: String,
    /// The number of chunks asked for; `None` for all.
    pub limit: Option<usize>,
    pub chunks: usize,
    pub perplexity: String,
    pub stderr: Option<String>,
    pub mean_nll: Option<String>,
}

/// A perplexity of transformers with a sliding window.
#[derive(Debug, serde::Deserialize)]
pub struct SlidingPerplexity {
    pub model: String,
    pub text: String,
    pub stride: usize,
    pub tokens: usize,
    pub perplexity: String,
    pub mean_nll: String,
    pub bits_per_byte: String,
}

/// The most likely tokens after a prompt, by transformers.
#[derive(Debug, serde::Deserialize)]
pub struct GreedyGeneration {
    pub model: String,
    pub adapter: Option<String>,
    pub prompt: String,
    pub tokens: Vec<u32>,
}

/// Returns the set of this repository.
pub fn small_set() -> GoldenSet {
    let root = own_path("data");
    GoldenSet { figures: read_figures(&root.join("manifest.json")), root }
}

/// Returns the models of further architectures in this repository, most of which the embedded engine
/// does not compute.
pub fn architecture_set() -> GoldenSet {
    let root = own_path("data");
    GoldenSet { figures: read_figures(&root.join("architectures.json")), root }
}

/// Returns the set of this repository, and the large one if it is present.
pub fn golden_sets() -> Vec<GoldenSet> {
    let root = own_path("../../../shared/data/golden");
    let large =
        root.is_dir().then(|| GoldenSet { root, figures: read_figures(&own_path("large.json")) });
    [small_set()].into_iter().chain(large).collect()
}

fn own_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read_figures(path: &Path) -> GoldenFigures {
    let text = std::fs::read(path).expect("the repository has this file");
    serde_json::from_slice(&text).expect("the file has figures")
}

/// Returns the Python script that makes a model of an architecture outside of the table, and measures
/// what PyTorch computes of it.
pub fn other_model_script() -> PathBuf {
    own_path("other_model.py")
}

impl GoldenSet {
    pub fn model_path(&self, name: &str) -> PathBuf {
        self.root.join("hf").join(name)
    }

    pub fn adapter_path(&self, name: &str) -> PathBuf {
        self.root.join("peft").join(name)
    }

    pub fn text_path(&self, name: &str) -> PathBuf {
        self.root.join("corpus").join(name)
    }

    /// Returns the perplexity of a policy on the first chunks of `eval_docs.txt`.
    pub fn first_chunks(&self, model: &str, adapter: Option<&str>) -> &GoldenPerplexity {
        let is_it = |figure: &&GoldenPerplexity| {
            figure.model == model && figure.adapter.as_deref() == adapter && figure.limit.is_some()
        };
        self.figures.perplexities.iter().find(is_it).expect("every policy has this figure")
    }

    /// Yields each model without an adapter once, if it has a figure.
    pub fn plain_models(&self) -> impl Iterator<Item = &str> {
        let plain = self.figures.perplexities.iter().filter(|figure| figure.adapter.is_none());
        plain.map(|figure| figure.model.as_str())
    }

    /// Yields each adapter after its base.
    pub fn adapted_models(&self) -> impl Iterator<Item = (&str, &str)> {
        let figures = self.figures.perplexities.iter();
        figures.filter_map(|figure| Some((figure.model.as_str(), figure.adapter.as_deref()?)))
    }
}

/// Panics if `value` differs from the printed number by more than one unit of its last digit: it is
/// rounded, and the last bits of a sum depend on its order.
#[track_caller]
pub fn assert_printed(value: f64, printed: &str, what: impl Display) {
    let decimals = printed.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let unit = 0.1_f64.powi(i32::try_from(decimals).expect("a few digits"));
    let expected: f64 = printed.parse().expect("a printed number");
    assert!((value - expected).abs() <= unit, "{what}: {value} for {printed}");
}
