//! The projections of a transformer layer: their names and shapes.

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
    /// In the order in which a layer computes them.
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Returns the name in PEFT's `target_modules`: `q_proj` and so on.
    pub(crate) fn peft_name(self) -> &'static str {
        self.layer_path().rsplit('.').next().unwrap_or_default()
    }

    /// Parses a name of PEFT's `target_modules`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|module| module.peft_name() == name)
    }

    /// Returns the path within a layer, as in `self_attn.q_proj`.
    pub(crate) fn layer_path(self) -> &'static str {
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
}

/// The shape of a new LoRA adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    pub rank: usize,
    /// The numerator of the scale: alpha / rank, or alpha / sqrt(rank) with `rslora`.
    pub alpha: f64,
    pub modules: BTreeSet<LayerModule>,
    /// True to scale by alpha / sqrt(rank) instead of alpha / rank.
    pub rslora: bool,
}
