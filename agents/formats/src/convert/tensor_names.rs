//! The names of architectures and tensors in GGUF files.

use crate::{Architecture, LayerModule};

/// Returns llama.cpp's name, for `general.architecture` and as the prefix of its settings.
pub(super) fn architecture_name(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
        Architecture::Llama => "llama",
    }
}

pub(super) const TOKEN_EMBEDDING: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";
/// Only for Llama 3.1's scaling.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
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

/// Returns true if llama.cpp needs the rows in another order: for Llama it rotates pairs of
/// neighbouring elements of a head, where Hugging Face pairs the two halves, so the rows of queries
/// and keys are reordered.
pub(super) fn is_permuted(architecture: Architecture, module: LayerModule) -> bool {
    architecture == Architecture::Llama && matches!(module, LayerModule::Query | LayerModule::Key)
}
