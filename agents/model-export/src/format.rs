//! The forms in which a model is written.

use formats::ConversionDtype;

/// The program for which a model is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportFormat {
    /// A Hugging Face directory with the adapter merged into the weights.
    Merged,
    /// One GGUF file, for llama.cpp and programs that embed it.
    Gguf,
    /// A GGUF file and a `Modelfile`.
    Ollama,
    /// A GGUF file in a directory for Lemonade's `--extra-models-dir`.
    Lemonade,
}

/// The type of the weights of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Converted here.
    Converted(ConversionDtype),
    /// Made by `llama-quantize`, which knows it by this name in capitals.
    Quantized(&'static str),
}

impl WeightType {
    /// The types of `llama-quantize` that can be chosen.
    const QUANTIZED: [&'static str; 6] = ["q4_0", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs"];

    /// Returns all names, the exact ones first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ConversionDtype::ALL.map(ConversionDtype::name).into_iter().chain(Self::QUANTIZED)
    }

    /// Parses a name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.to_lowercase();
        let quantized = || Self::QUANTIZED.into_iter().find(|it| *it == name).map(Self::Quantized);
        ConversionDtype::from_name(&name).map(Self::Converted).or_else(quantized)
    }

    /// Returns the largest distance from the trained model that is accepted, in nats per token.
    pub(crate) fn tolerance(self) -> f64 {
        match self {
            // An adapter is merged in the type of the base, which has 16 bits as a rule.
            Self::Converted(
                ConversionDtype::F32 | ConversionDtype::F16 | ConversionDtype::Bf16,
            ) => 0.05,
            Self::Converted(ConversionDtype::Q8_0) => 0.1,
            Self::Quantized(_) => 0.5,
        }
    }
}
