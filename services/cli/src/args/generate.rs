//! Arguments of `flotilla generate`.

use std::path::PathBuf;

use clap::Args;
use formats::ConversionDtype;

use super::{ConverterArgs, GeneratorToolArgs, conversion_dtype_parser};

/// Arguments of `flotilla generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Model: a directory, or an `org/name` in the Hugging Face cache
    #[arg(long)]
    pub model: PathBuf,
    /// PEFT adapter directory
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Prompt text
    #[arg(long)]
    pub prompt: String,
    /// Number of samples
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub n: u32,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Sampling temperature from 0 to 10; 0 is greedy
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Sample from the k most likely tokens; 0 means all
    #[arg(long, default_value_t = 0)]
    pub top_k: u32,
    /// Sample from the most likely tokens up to this total probability; 1 means all
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Maximum number of tokens of a sample
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Engine that generates: candle, llama.cpp, or the URL of an OpenAI-compatible server
    #[arg(long, default_value = "candle", value_name = "ENGINE")]
    pub engine: generator::GeneratorEngineChoice,
    #[command(flatten)]
    pub tools: GeneratorToolArgs,
    #[command(flatten)]
    pub converters: ConverterArgs,
    /// Hardware profile for llama.cpp: a name or a file [default: detected]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Weight type: f32, bf16 or q8_0 for candle; f32, f16 or bf16 for llama.cpp, where f32 also
    /// computes in f32 [default: f32 for candle, the profile's type for llama.cpp]
    #[arg(long, value_name = "TYPE", value_parser = conversion_dtype_parser())]
    pub dtype: Option<ConversionDtype>,
    /// CPU cores of llama.cpp [default: all]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Device of the candle engine: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu")]
    pub device: String,
}
