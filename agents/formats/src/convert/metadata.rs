//! The settings of a model as fields of a GGUF file.

use super::ConversionDtype;
use crate::gguf::GgufValue;
use crate::{ArchitectureDetails, LongRope, ModelConfig};

type NamedField = (&'static str, GgufValue);

/// Returns the fields of a model without those of its tokenizer.
pub(super) fn model_fields(
    config: &ModelConfig,
    dtype: ConversionDtype,
) -> Vec<(String, GgufValue)> {
    let architecture = config.architecture.gguf_name();
    let mut fields = vec![
        ("general.architecture".into(), GgufValue::from(architecture)),
        ("general.type".into(), GgufValue::from("model")),
        ("general.file_type".into(), GgufValue::U32(file_type_id(dtype))),
        ("general.quantization_version".into(), GgufValue::U32(2)),
    ];
    let mut settings = vec![
        ("block_count", count(config.layers)),
        ("context_length", count(config.max_positions)),
        ("embedding_length", count(config.hidden_size)),
        ("feed_forward_length", count(config.intermediate_size)),
        ("attention.head_count", count(config.heads)),
        ("attention.head_count_kv", count(config.kv_heads)),
        ("attention.key_length", count(config.head_dim)),
        ("attention.value_length", count(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", number(config.norm_epsilon)),
        ("rope.dimension_count", count(config.rotated_dims())),
        ("rope.freq_base", number(config.rope_theta)),
        ("vocab_size", count(config.vocab_size)),
    ];
    push_details(&mut settings, config);
    fields.extend(
        settings.into_iter().map(|(name, value)| (format!("{architecture}.{name}"), value)),
    );
    fields
}

/// Adds the settings that only some architectures have.
fn push_details(settings: &mut Vec<NamedField>, config: &ModelConfig) {
    let ArchitectureDetails {
        experts,
        sliding_window,
        local_rope_theta,
        linear_rope_factor,
        attention_softcap,
        logit_softcap,
        long_rope,
        granite,
    } = &config.details;
    if let Some(experts) = experts {
        settings.push(("expert_count", count(experts.count)));
        settings.push(("expert_used_count", count(experts.used)));
        settings.push(("expert_feed_forward_length", count(experts.width)));
    }
    let window = sliding_window.map(|window| ("attention.sliding_window", count(window)));
    settings.extend(window);
    settings.extend(local_rope_theta.map(|theta| ("rope.freq_base_swa", number(theta))));
    if let Some(factor) = linear_rope_factor {
        settings.push(("rope.scaling.type", GgufValue::from("linear")));
        settings.push(("rope.scaling.factor", number(*factor)));
    }
    settings.extend(attention_softcap.map(|bound| ("attn_logit_softcapping", number(bound))));
    settings.extend(logit_softcap.map(|bound| ("final_logit_softcapping", number(bound))));
    if let Some(granite) = granite {
        settings.push(("attention.scale", number(granite.attention)));
        settings.push(("embedding_scale", number(granite.embedding)));
        settings.push(("residual_scale", number(granite.residual)));
        settings.push(("logit_scale", number(granite.logits)));
    }
    if let Some(rope) = long_rope {
        push_long_rope(settings, config, rope);
    }
}

fn push_long_rope(settings: &mut Vec<NamedField>, config: &ModelConfig, rope: &LongRope) {
    settings.push(("rope.scaling.original_context_length", count(rope.original_max_positions)));
    if !rope.long_factors.is_empty() {
        settings.push(("rope.scaling.attn_factor", number(rope.attention_factor)));
    }
    if config.details.sliding_window.is_none() {
        settings.push(("attention.sliding_window", count(0)));
    }
}

fn count(value: usize) -> GgufValue {
    GgufValue::U32(u32::try_from(value).unwrap_or(u32::MAX))
}

fn number(value: f64) -> GgufValue {
    GgufValue::F32(value as f32)
}

/// Returns llama.cpp's number for the type of most tensors.
fn file_type_id(dtype: ConversionDtype) -> u32 {
    match dtype {
        ConversionDtype::F32 => 0,
        ConversionDtype::F16 => 1,
        ConversionDtype::Q8_0 => 7,
        ConversionDtype::Bf16 => 32,
    }
}
