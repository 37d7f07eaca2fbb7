//! The settings that only some architectures have.

use super::fields::{ConfigFields, MAX_POSITIONS, MAX_WIDTH};
use super::{ModelConfig, ModelConfigError};
use crate::Architecture;

/// The settings that only some architectures have; those of others are absent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ArchitectureDetails {
    /// The experts of every layer, of a mixture of experts.
    pub experts: Option<ExpertShape>,
    /// The tokens that local layers see (Gemma 2 and 3), or all layers (Phi-3). llama.cpp lacks the
    /// window of Phi-3.
    pub sliding_window: Option<usize>,
    /// The base of the frequencies in local layers (Gemma 3).
    pub local_rope_theta: Option<f64>,
    /// The divisor of positions in global layers (Gemma 3).
    pub linear_rope_factor: Option<f64>,
    /// The bound of attention scores (Gemma 2).
    pub attention_softcap: Option<f64>,
    /// The bound of logits (Gemma 2).
    pub logit_softcap: Option<f64>,
    /// The rotation of Phi-3 and Phi-4.
    pub long_rope: Option<LongRope>,
    pub granite: Option<GraniteFactors>,
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertShape {
    pub count: usize,
    /// The experts that a token passes; at most `count`.
    pub used: usize,
    /// The width of an expert's feed-forward part.
    pub width: usize,
}

/// The rotation of Phi-3 and Phi-4. Both lists are empty without rope scaling.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// The rotated part of a head, at most 1.
    pub rotated_share: f64,
    pub original_max_positions: usize,
    /// The divisors of the frequencies beyond the original positions.
    pub long_factors: Vec<f32>,
    pub short_factors: Vec<f32>,
    /// Multiplies queries and keys.
    pub attention_factor: f64,
}

/// Granite's factors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GraniteFactors {
    pub embedding: f64,
    pub attention: f64,
    pub residual: f64,
    /// The divisor of logits.
    pub logits: f64,
}

/// The part of the details that comes from the rope's settings.
#[derive(Default)]
pub(super) struct RopeDetails {
    pub(super) local_theta: Option<f64>,
    pub(super) linear_factor: Option<f64>,
    pub(super) long_rope: Option<LongRope>,
}

const MAX_EXPERTS: usize = 1 << 12;

impl ArchitectureDetails {
    pub(super) fn read_from(
        fields: &ConfigFields<'_>,
        architecture: Architecture,
        rope: RopeDetails,
    ) -> Result<Self, ModelConfigError> {
        let mut details = Self {
            local_rope_theta: rope.local_theta,
            linear_rope_factor: rope.linear_factor,
            long_rope: rope.long_rope,
            ..Self::default()
        };
        match architecture {
            Architecture::Gemma2 => {
                let window = fields.read_size("sliding_window", MAX_POSITIONS)?;
                details.sliding_window = Some(window);
                details.attention_softcap = Some(fields.read_number("attn_logit_softcapping")?);
                details.logit_softcap = Some(fields.read_number("final_logit_softcapping")?);
            }
            Architecture::Gemma3 => {
                let window = fields.read_size("sliding_window", MAX_POSITIONS)?;
                details.sliding_window = Some(window);
                if let Some(other) = fields.get("attn_logit_softcapping") {
                    return Err(fields.unsupported_error("attn_logit_softcapping", other, "none"));
                }
                details.logit_softcap = fields.read_optional_number("final_logit_softcapping")?;
            }
            Architecture::Phi3 => details.sliding_window = fields.read_window(architecture)?,
            Architecture::Qwen3Moe => details.experts = Some(read_experts(fields)?),
            Architecture::Granite => {
                details.granite = Some(GraniteFactors {
                    embedding: fields.read_number_or("embedding_multiplier", 1.0)?,
                    attention: fields.read_number_or("attention_multiplier", 1.0)?,
                    residual: fields.read_number_or("residual_multiplier", 1.0)?,
                    logits: fields.read_number_or("logits_scaling", 1.0)?,
                });
            }
            Architecture::Qwen2
            | Architecture::Qwen3
            | Architecture::Llama
            | Architecture::Mistral
            | Architecture::Olmo2
            | Architecture::SmolLm3 => {}
        }
        Ok(details)
    }
}

/// Reads the experts. llama.cpp assumes experts in every layer, and weights that add up to 1.
fn read_experts(fields: &ConfigFields<'_>) -> Result<ExpertShape, ModelConfigError> {
    if let Some(step) = fields.get("decoder_sparse_step").filter(|step| **step != 1) {
        return Err(fields.unsupported_error("decoder_sparse_step", step, "1"));
    }
    let dense = fields.get("mlp_only_layers");
    if let Some(dense) = dense.filter(|dense| dense.as_array().is_none_or(|list| !list.is_empty()))
    {
        return Err(fields.unsupported_error("mlp_only_layers", dense, "none"));
    }
    if !fields.read_flag("norm_topk_prob")? {
        let found = serde_json::Value::Bool(false);
        return Err(fields.unsupported_error("norm_topk_prob", &found, "true"));
    }
    // transformers 5 writes the other name.
    let name =
        if fields.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let count = fields.read_size(name, MAX_EXPERTS)?;
    let used = fields.read_size("num_experts_per_tok", MAX_EXPERTS)?;
    if used > count {
        let expected = "at most num_experts";
        return Err(fields.invalid_error("num_experts_per_tok", used.to_string(), expected));
    }
    Ok(ExpertShape { count, used, width: fields.read_size("moe_intermediate_size", MAX_WIDTH)? })
}

impl ModelConfig {
    /// Checks settings against what llama.cpp derives from the shape.
    pub(super) fn check_details(&self, fields: &ConfigFields<'_>) -> Result<(), ModelConfigError> {
        let shared = self.hidden_size / self.heads;
        if matches!(self.architecture, Architecture::Gemma2 | Architecture::Gemma3) {
            // llama.cpp recognises the models of 27 billion parameters by their layers.
            let large = if self.architecture == Architecture::Gemma2 { 46 } else { 62 };
            let derived = if self.layers == large { shared } else { self.head_dim };
            let found = fields.read_number_or("query_pre_attn_scalar", 256.0)?;
            if found != derived as f64 {
                let expected = "the size of a head (in models of 27 billion parameters, \
                                hidden_size / num_attention_heads)";
                let found = found.to_string();
                return Err(fields.invalid_error("query_pre_attn_scalar", found, expected));
            }
        }
        let even = matches!(
            self.architecture,
            Architecture::Phi3 | Architecture::Granite | Architecture::Olmo2
        );
        if even && (self.head_dim != shared || !self.hidden_size.is_multiple_of(self.heads)) {
            let expected = "hidden_size / num_attention_heads";
            return Err(fields.invalid_error("head_dim", self.head_dim.to_string(), expected));
        }
        self.check_rope_factors(fields)
    }

    /// Checks that there is a divisor for each rotated pair of a head.
    fn check_rope_factors(&self, fields: &ConfigFields<'_>) -> Result<(), ModelConfigError> {
        let Some(rope) = &self.details.long_rope else { return Ok(()) };
        let rotated = self.rotated_dims();
        if rotated == 0 || !rotated.is_multiple_of(2) {
            let found = rope.rotated_share.to_string();
            let expected = "the share of an even number of dimensions";
            return Err(fields.invalid_error("partial_rotary_factor", found, expected));
        }
        for (field, factors) in
            [("long_factor", &rope.long_factors), ("short_factor", &rope.short_factors)]
        {
            let (count, has_none) = (factors.len(), rope.long_factors.is_empty());
            if count != rotated / 2 && !(has_none && count == 0) {
                let expected = "a number for each rotated pair of a head";
                return Err(fields.invalid_error(field, format!("{count} numbers"), expected));
            }
        }
        Ok(())
    }

    /// Returns the dimensions of a head that are rotated.
    pub(crate) fn rotated_dims(&self) -> usize {
        match &self.details.long_rope {
            Some(rope) => (rope.rotated_share * self.hidden_size as f64) as usize / self.heads,
            None => self.head_dim,
        }
    }
}
