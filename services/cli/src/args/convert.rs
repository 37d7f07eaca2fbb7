//! Arguments of `flotilla convert`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use formats::{ConversionDtype, FloatDtype};

use super::{conversion_dtype_parser, float_dtype_parser};

/// The subcommands of `flotilla convert`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConvertCommand {
    /// Convert a PEFT LoRA adapter to a GGUF file for llama.cpp's --lora.
    Lora {
        /// Base model of the adapter: a directory, or an `org/name` in the Hugging Face cache.
        #[arg(long, alias = "base")]
        model: PathBuf,
        /// PEFT LoRA adapter directory.
        #[arg(long)]
        adapter: PathBuf,
        /// Tensor type of the output.
        #[arg(long, default_value = "f32", value_parser = float_dtype_parser())]
        dtype: FloatDtype,
        #[command(flatten)]
        out: ConvertOutputArgs,
    },
    /// Convert a Hugging Face model directory, with its tokenizer, to a GGUF file.
    Model {
        /// Model: a directory, or an `org/name` in the Hugging Face cache.
        #[arg(long)]
        model: PathBuf,
        /// Tensor type of the output.
        #[arg(long, value_parser = conversion_dtype_parser())]
        dtype: ConversionDtype,
        #[command(flatten)]
        out: ConvertOutputArgs,
    },
    /// Merge a PEFT LoRA adapter into its base and write a model directory in the base's dtype.
    Merge {
        /// Base model of the adapter: a directory, or an `org/name` in the Hugging Face cache.
        #[arg(long, alias = "base")]
        model: PathBuf,
        /// PEFT LoRA adapter directory.
        #[arg(long)]
        adapter: PathBuf,
        /// Output directory, which must not exist.
        #[arg(long)]
        out: PathBuf,
    },
    /// Show the contents of a GGUF or safetensors file, or of a model or adapter directory.
    Show {
        /// GGUF file, safetensors file, or directory of a model or an adapter
        path: PathBuf,
    },
}

/// The output file of a conversion.
#[derive(Debug, Args)]
pub(crate) struct ConvertOutputArgs {
    /// Output file, which appears only when it is complete
    #[arg(long)]
    pub out: PathBuf,
    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,
}
