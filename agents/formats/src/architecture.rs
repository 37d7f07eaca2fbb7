//! The table of supported architectures: their names in both formats, the parts of a layer, and the
//! engines that run them.

use crate::LayerModule;

/// A supported model architecture. `Qwen2` includes Qwen2.5, `Phi3` includes Phi-4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: each head of q and k is normalised before it is rotated.
    Qwen3,
    /// Llama 2 and 3.
    Llama,
    /// Mistral without images. Computes what Llama computes.
    Mistral,
    /// Gemma 2: norms also after the blocks, capped logits, every second layer local.
    Gemma2,
    /// Gemma 3, or the text part of one with images: five local layers before each global one.
    Gemma3,
    /// Phi-3 and Phi-4: q, k and v are one matrix, gate and up another.
    Phi3,
    /// Qwen3 with experts in every layer.
    Qwen3Moe,
    /// Granite 3: Llama with four factors.
    Granite,
    /// OLMo 2: norms only after the blocks.
    Olmo2,
    /// `SmolLM3`: Llama without rotation in every fourth layer.
    SmolLm3,
}

/// The tensors of an architecture's layers and its names.
#[derive(Debug)]
pub(crate) struct ArchitectureTraits {
    pub(crate) model_type: &'static str,
    pub(crate) class_name: &'static str,
    /// llama.cpp's name.
    pub(crate) gguf_name: &'static str,
    /// The norms of a layer that are as wide as the model: the names in Hugging Face's and in
    /// llama.cpp's files.
    pub(crate) layer_norms: &'static [(&'static str, &'static str)],
    pub(crate) query_norms: QueryNorms,
    /// True if q, k and v are one matrix, and gate and up another.
    pub(crate) fused: bool,
    /// True if llama.cpp rotates pairs of neighbouring elements of a head, where Hugging Face pairs
    /// the two halves: the rows of queries and keys are reordered.
    pub(crate) permuted: bool,
    /// True if norms multiply by 1 + weight, where llama.cpp multiplies by the weight.
    pub(crate) shifted_norms: bool,
    pub(crate) activation: &'static str,
    /// The value of `tie_word_embeddings` that transformers assumes.
    pub(crate) tied_by_default: bool,
    pub(crate) embedded: bool,
    /// The kind of model with images whose text part the architecture is as well.
    pub(crate) with_images: Option<ImageModel>,
}

/// A kind of model with images, as its `config.json` names it.
#[derive(Debug)]
pub(crate) struct ImageModel {
    pub(crate) model_type: &'static str,
    pub(crate) class_name: &'static str,
    /// The values that transformers assumes for fields that `text_config` leaves out.
    pub(crate) text_defaults: &'static [(&'static str, u32)],
}

/// The weights that normalise queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryNorms {
    Absent,
    /// One vector for every head of q, and one for those of k.
    Heads,
    /// All heads together.
    Whole,
}

/// Norms before attention and before the feed-forward part.
const NORMS_BEFORE: &[(&str, &str)] =
    &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")];
const NORMS_AROUND: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];
const NORMS_AFTER: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// What most architectures have; each row of the table changes some of it.
const USUAL: ArchitectureTraits = ArchitectureTraits {
    model_type: "llama",
    class_name: "LlamaForCausalLM",
    gguf_name: "llama",
    layer_norms: NORMS_BEFORE,
    query_norms: QueryNorms::Absent,
    fused: false,
    permuted: false,
    shifted_norms: false,
    activation: "silu",
    tied_by_default: false,
    embedded: false,
    with_images: None,
};

const QWEN2: ArchitectureTraits = ArchitectureTraits {
    model_type: "qwen2",
    class_name: "Qwen2ForCausalLM",
    gguf_name: "qwen2",
    embedded: true,
    ..USUAL
};
const QWEN3: ArchitectureTraits = ArchitectureTraits {
    model_type: "qwen3",
    class_name: "Qwen3ForCausalLM",
    gguf_name: "qwen3",
    query_norms: QueryNorms::Heads,
    embedded: true,
    ..USUAL
};
const LLAMA: ArchitectureTraits = ArchitectureTraits { permuted: true, embedded: true, ..USUAL };
const MISTRAL: ArchitectureTraits =
    ArchitectureTraits { model_type: "mistral", class_name: "MistralForCausalLM", ..LLAMA };
const GEMMA2: ArchitectureTraits = ArchitectureTraits {
    model_type: "gemma2",
    class_name: "Gemma2ForCausalLM",
    gguf_name: "gemma2",
    layer_norms: NORMS_AROUND,
    shifted_norms: true,
    activation: "gelu_pytorch_tanh",
    tied_by_default: true,
    ..USUAL
};
const GEMMA3: ArchitectureTraits = ArchitectureTraits {
    model_type: "gemma3_text",
    class_name: "Gemma3ForCausalLM",
    gguf_name: "gemma3",
    query_norms: QueryNorms::Heads,
    with_images: Some(ImageModel {
        model_type: "gemma3",
        class_name: "Gemma3ForConditionalGeneration",
        text_defaults: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("max_position_embeddings", 131_072),
            ("sliding_window", 4096),
        ],
    }),
    ..GEMMA2
};
const PHI3: ArchitectureTraits = ArchitectureTraits {
    model_type: "phi3",
    class_name: "Phi3ForCausalLM",
    gguf_name: "phi3",
    fused: true,
    ..USUAL
};
const QWEN3_MOE: ArchitectureTraits = ArchitectureTraits {
    model_type: "qwen3_moe",
    class_name: "Qwen3MoeForCausalLM",
    gguf_name: "qwen3moe",
    embedded: false,
    ..QWEN3
};
const GRANITE: ArchitectureTraits = ArchitectureTraits {
    model_type: "granite",
    class_name: "GraniteForCausalLM",
    gguf_name: "granite",
    permuted: true,
    ..USUAL
};
const OLMO2: ArchitectureTraits = ArchitectureTraits {
    model_type: "olmo2",
    class_name: "Olmo2ForCausalLM",
    gguf_name: "olmo2",
    layer_norms: NORMS_AFTER,
    query_norms: QueryNorms::Whole,
    ..USUAL
};
const SMOLLM3: ArchitectureTraits = ArchitectureTraits {
    model_type: "smollm3",
    class_name: "SmolLM3ForCausalLM",
    gguf_name: "smollm3",
    permuted: true,
    tied_by_default: true,
    ..USUAL
};

impl Architecture {
    pub const ALL: [Self; 11] = [
        Self::Qwen2,
        Self::Qwen3,
        Self::Llama,
        Self::Mistral,
        Self::Gemma2,
        Self::Gemma3,
        Self::Phi3,
        Self::Qwen3Moe,
        Self::Granite,
        Self::Olmo2,
        Self::SmolLm3,
    ];

    pub(crate) fn traits(self) -> &'static ArchitectureTraits {
        match self {
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
            Self::Llama => &LLAMA,
            Self::Mistral => &MISTRAL,
            Self::Gemma2 => &GEMMA2,
            Self::Gemma3 => &GEMMA3,
            Self::Phi3 => &PHI3,
            Self::Qwen3Moe => &QWEN3_MOE,
            Self::Granite => &GRANITE,
            Self::Olmo2 => &OLMO2,
            Self::SmolLm3 => &SMOLLM3,
        }
    }

    /// Returns the `model_type` of `config.json`.
    pub fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// Returns the class name in `architectures` of `config.json`.
    pub(crate) fn class_name(self) -> &'static str {
        self.traits().class_name
    }

    /// Returns llama.cpp's name, for `general.architecture` and as the prefix of its settings.
    pub(crate) fn gguf_name(self) -> &'static str {
        self.traits().gguf_name
    }

    /// Returns true if the embedded engine computes the architecture. PyTorch and llama.cpp compute
    /// all of them.
    pub(crate) fn is_embedded(self) -> bool {
        self.traits().embedded
    }

    /// Returns the architectures that the embedded engine computes.
    pub fn list_embedded() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|architecture| architecture.is_embedded())
    }

    /// Returns true if llama.cpp needs the rows of a projection in another order.
    pub(crate) fn is_permuted(self, module: LayerModule) -> bool {
        self.traits().permuted && matches!(module, LayerModule::Query | LayerModule::Key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_table_have_names_of_their_own() {
        for (index, one) in Architecture::ALL.into_iter().enumerate() {
            for other in &Architecture::ALL[..index] {
                assert_ne!(one.model_type(), other.model_type());
                assert_ne!(one.class_name(), other.class_name());
                let shared = (one, *other) == (Architecture::Mistral, Architecture::Llama);
                assert_eq!(one.gguf_name() == other.gguf_name(), shared, "{one:?} {other:?}");
            }
        }
        let embedded: Vec<&str> =
            Architecture::list_embedded().map(Architecture::model_type).collect();
        assert_eq!(embedded, ["qwen2", "qwen3", "llama", "mistral"]);
    }
}
