//! Exporters: they send the log of a run to tools that users already have, such as MLflow,
//! TensorBoard, trackio, an OpenTelemetry collector, a webhook or files. `metric_points` names the
//! metrics of a run, `export_loop` reads the log, and each exporter knows one tool.
//!
//! This crate keeps no state in the fleet. The cursor of a run is stored in the tool itself, or in
//! a file beside the output. Therefore nothing is lost while a tool is unreachable, and an old run
//! is exported in the same way as a new one.
//!
//! Architecture Invariant: exporters do not know the bus, and `metric_points` does not know any
//! exporter.

mod cursor_file;
mod export_loop;
mod file;
mod http_client;
mod metric_points;
mod mlflow;
mod otlp;
mod tensorboard;
mod trackio;
mod webhook;

pub use export_loop::{ExportOptions, ExportRunsError, export_runs};
pub use file::FileExporter;
pub use mlflow::MlflowExporter;
pub use otlp::OtlpExporter;
pub use reqwest::Url;
pub use tensorboard::TensorBoardExporter;
pub use trackio::TrackioExporter;
pub use webhook::WebhookExporter;

use metric_points::RunUpdate;
use wire::RunId;

/// The reason why an exporter did not accept updates.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    /// A retry may succeed.
    #[error("{what}: {why} (T101)")]
    Transient { what: String, why: String },
    /// The tool will never accept the updates; `why` contains the remedy.
    #[error("{what}: {why} (T101)")]
    Permanent { what: String, why: String },
}

impl ExporterError {
    /// Converts a failed file operation. A full disk is transient, because space may be freed.
    fn from_file_error(what: String, error: &std::io::Error) -> Self {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let why = error.to_string();
        match error.kind() {
            StorageFull | QuotaExceeded => Self::Transient { what, why },
            _ => Self::Permanent { what, why },
        }
    }
}

/// An exporter: one tool that receives the updates of runs.
///
/// The export loop reads the cursor of a run once, and then passes newer updates in log order.
/// `write_updates` stores the new cursor together with the updates. After a crash the same updates
/// may arrive again and must change nothing.
///
/// ```text
/// cursor = exporter.read_cursor(run)
/// for each batch of facts:  exporter.write_updates(run, updates newer than cursor)
/// ```
pub trait RunExporter {
    /// Returns the sequence of the last exported fact of a run, or 0 if the tool has none or needs
    /// all facts again.
    fn read_cursor(
        &mut self,
        _run: &RunId,
    ) -> impl Future<Output = Result<u64, ExporterError>> + Send {
        std::future::ready(Ok(0))
    }

    /// Writes updates in log order and stores the sequence of the last one in the same step.
    /// Updates that were written before may arrive again and must change nothing.
    fn write_updates(
        &mut self,
        run: &RunId,
        updates: &[RunUpdate],
    ) -> impl Future<Output = Result<(), ExporterError>> + Send;
}
