//! Arguments that name llama.cpp's own converters.

use std::path::PathBuf;

use clap::Args;
use llama::LlamaConverters;

/// The programs that convert models which are not converted natively.
#[derive(Debug, Args)]
pub(crate) struct ConverterArgs {
    /// Python interpreter with torch and transformers, such as VENV/bin/python; to train, also with
    /// peft and accelerate [default of trainers: `uv run`, which downloads them, if uv is on PATH]
    #[arg(long, value_name = "PYTHON", env = "FLOTILLA_PYTHON")]
    pub python: Option<PathBuf>,
    /// Directory of llama.cpp's sources, whose converters run models that are not converted
    /// natively, with the interpreter of --python
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP_SOURCES")]
    pub llama_cpp_sources: Option<PathBuf>,
}

impl ConverterArgs {
    /// Returns the converters, if they are named.
    ///
    /// # Errors
    /// When the sources are incomplete, or no interpreter is named.
    pub(crate) fn find_converters(&self) -> anyhow::Result<Option<LlamaConverters>> {
        let find = |dir| LlamaConverters::find_converters(dir, self.python.as_deref());
        Ok(self.llama_cpp_sources.as_deref().map(find).transpose()?)
    }
}
