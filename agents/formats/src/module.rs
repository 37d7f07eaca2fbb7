//! The projections of a transformer layer: their names and shapes.

use crate::config::Config;
use std::collections::BTreeSet;

/// A projection of a layer that can carry a LoRA pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Module {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

impl Module {
    /// In the order a layer computes them.
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// As in PEFT's `target_modules`: `q_proj`, …
    pub fn name(self) -> &'static str {
        self.path().rsplit('.').next().unwrap_or_default()
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|module| module.name() == name)
    }

    pub fn path(self) -> &'static str {
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

    /// `model.layers.<layer>.<path>.<rest>`
    pub fn parameter(self, layer: usize, rest: &str) -> String {
        format!("model.layers.{layer}.{}.{rest}", self.path())
    }

    /// (outputs, inputs)
    pub fn shape(self, config: &Config) -> (usize, usize) {
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

/// What a new adapter looks like.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    pub rank: usize,
    pub alpha: f64,
    pub modules: BTreeSet<Module>,
    /// Scale by alpha / sqrt(rank) in place of alpha / rank.
    pub rslora: bool,
}
