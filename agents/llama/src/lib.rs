//! Runs llama.cpp's programs as supervised child processes: finds them, builds their command lines,
//! and checks what they print before it is used. Synchronous; used inside worker processes.

pub mod completion;
mod converters;
mod environment;
mod gguf_cache;
mod installation;
mod perplexity;
mod process;
mod quantize;
pub mod scoring;
mod server;

pub use converters::{ConverterError, LlamaConverters, require_converters};
pub use environment::ProcessEnvironment;
pub use gguf_cache::{CachedGguf, GgufCache, GgufCacheError, local_model_key};
pub use installation::{InstallationError, LlamaInstallation, ProgramOptions};
pub use perplexity::{
    ChunkSelection, LlamaPerplexity, LlamaPerplexityError, PerplexityRequest, PerplexityRunner,
};
pub use process::{LlamaProcess, ProcessEvent, ProcessLine, ProcessStream, ProgramOutput};
pub use quantize::{QuantizeError, quantize_model};
pub use server::{
    LlamaServer, LlamaServerError, LlamaServerSettings, ServedModel, ServerAddress, ServerProgram,
};
