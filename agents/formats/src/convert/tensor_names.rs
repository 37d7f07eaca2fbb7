//! The names of architectures and tensors in GGUF files.

use crate::{Architecture, LayerModule};

/// Returns llama.cpp's name of an architecture, for `general.architecture` and as the prefix of its
/// settings.
pub(super) fn architecture_name(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
        Architecture::Llama => "llama",
    }
}

/// The token embedding.
pub(super) const TOKEN_EMBEDDING: &str = "token_embd.weight";
/// The output layer.
pub(super) const OUTPUT: &str = "output.weight";
/// The divisors of the rope frequencies, for Llama 3.1's scaling.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The norm before the output layer.
pub(super) const OUTPUT_NORM: &str = "output_norm.weight";

/// Returns the name of a projection's tensor. `rest` is `weight` or `bias`.
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

/// Returns true if llama.cpp needs the rows of a projection in another order. For Llama it rotates
/// pairs of neighbouring elements of a head; Hugging Face pairs the two halves. So the rows that
/// produce queries and keys are reordered. For other architectures llama.cpp uses Hugging Face's
/// order.
pub(super) fn is_permuted(architecture: Architecture, module: LayerModule) -> bool {
    architecture == Architecture::Llama && matches!(module, LayerModule::Query | LayerModule::Key)
}
