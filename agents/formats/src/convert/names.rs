//! What tensors are called here and there.

use crate::{Architecture, Module};

/// As llama.cpp calls it: `general.architecture` and the prefix of its settings.
pub(super) fn architecture(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
        Architecture::Llama => "llama",
    }
}

pub(super) const TOKEN_EMBEDDING: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";
/// What Llama 3.1 divides its frequencies by.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
pub(super) const OUTPUT_NORM: &str = "output_norm.weight";

/// `rest` is `weight` or `bias`.
pub(super) fn module(layer: usize, module: Module, rest: &str) -> String {
    let name = match module {
        Module::Query => "attn_q",
        Module::Key => "attn_k",
        Module::Value => "attn_v",
        Module::Output => "attn_output",
        Module::Gate => "ffn_gate",
        Module::Up => "ffn_up",
        Module::Down => "ffn_down",
    };
    format!("blk.{layer}.{name}.{rest}")
}

/// llama.cpp turns neighbouring numbers of a head where Hugging Face turns one of each half, so
/// rows that make queries and keys are reordered. Its other architectures do as Hugging Face.
pub(super) fn is_permuted(architecture: Architecture, module: Module) -> bool {
    architecture == Architecture::Llama && matches!(module, Module::Query | Module::Key)
}
