//! The projections of a transformer layer: their names and shapes.

use crate::config::ModelConfig;
use std::collections::BTreeSet;

/// A projection of a transformer layer, which can have a LoRA pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerModule {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

impl LayerModule {
    /// All projections, in the order in which a layer computes them.
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Returns the name in PEFT's `target_modules`: `q_proj` and so on.
    pub fn peft_name(self) -> &'static str {
        self.layer_path().rsplit('.').next().unwrap_or_default()
    }

    /// Parses a name of PEFT's `target_modules`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|module| module.peft_name() == name)
    }

    /// Returns the path within a layer, as in `self_attn.q_proj`.
    pub fn layer_path(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Returns the full name of a parameter, `model.layers.<layer>.<path>.<rest>`. `rest` is
    /// `weight` or `bias`.
    pub fn parameter_name(self, layer: usize, rest: &str) -> String {
        format!("model.layers.{layer}.{}.{rest}", self.layer_path())
    }

    /// Returns the shape of the weight: (outputs, inputs).
    pub fn weight_shape(self, config: &ModelConfig) -> (usize, usize) {
        let (query, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        match self {
            Self::Query => (query, config.hidden_size),
            Self::Key | Self::Value => (kv, config.hidden_size),
            Self::Output => (config.hidden_size, query),
            Self::Gate | Self::Up => (config.intermediate_size, config.hidden_size),
            Self::Down => (config.hidden_size, config.intermediate_size),
        }
    }
}

/// The shape of a new LoRA adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    pub rank: usize,
    /// The numerator of the scale: alpha / rank, or alpha / sqrt(rank) with `rslora`.
    pub alpha: f64,
    /// The projections that get a LoRA pair.
    pub modules: BTreeSet<LayerModule>,
    /// True to scale by alpha / sqrt(rank) instead of alpha / rank.
    pub rslora: bool,
}
