//! The names of tensors in GGUF files.

use crate::LayerModule;

pub(super) const TOKEN_EMBEDDING: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";
/// Only for Llama 3.1's scaling.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Only for Phi's scaling.
pub(super) const ROPE_LONG_FACTORS: &str = "rope_factors_long.weight";
pub(super) const ROPE_SHORT_FACTORS: &str = "rope_factors_short.weight";
pub(super) const OUTPUT_NORM: &str = "output_norm.weight";

/// Expects `weight` or `bias` as `rest`.
pub(super) fn module_tensor_name(layer: usize, module: LayerModule, rest: &str) -> String {
    let name = match module {
        LayerModule::Query => "attn_q",
        LayerModule::Key => "attn_k",
        LayerModule::Value => "attn_v",
        LayerModule::Output => "attn_output",
        LayerModule::Gate => "ffn_gate",
        LayerModule::Up => "ffn_up",
        LayerModule::Down => "ffn_down",
    };
    format!("blk.{layer}.{name}.{rest}")
}
