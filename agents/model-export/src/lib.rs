//! Writes a trained model in the form that another program loads, and compares what was written
//! with the model, before it counts as done.
//!
//! - `export` merges the adapter, converts and quantizes.
//! - `verify` scores a text with the model and with the exported file.
//! - `format` has the forms and the types of weights.
//! - `settings` has the files that Ollama needs beside the model.

mod export;
mod format;
mod settings;
mod verify;

pub use export::{ExportError, ExportRequest, ExportedModel, export_model};
pub use format::{ExportFormat, WeightType};
