//! The log, retold to what people already have: MLflow, TensorBoard, trackio, a receiver of traces,
//! a webhook, files. `points` says what the figures of a run are called there, `follow` reads the log, and
//! each sink knows one tracker. Nothing is kept here: how far a tracker is, it says itself, or a file
//! beside what was written does; so nothing is lost while one is away, and an old run is fed as
//! a new one is.
//!
//! Architecture Invariant: sinks know no bus, and `points` knows no sink.

mod file;
mod follow;
mod http;
mod mlflow;
mod otlp;
mod points;
mod state;
mod tensorboard;
mod trackio;
mod webhook;

pub use file::File;
pub use follow::{FeedError, Options, feed};
pub use mlflow::MlFlow;
pub use otlp::Otlp;
/// Where a tracker is.
pub use reqwest::Url;
pub use tensorboard::TensorBoard;
pub use trackio::Trackio;
pub use webhook::Webhook;

use points::Told;
use wire::RunId;

/// Why a tracker did not take what it was given.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// It is away, or busy: it may take it later.
    #[error("{what}: {why} (T101)")]
    Later { what: String, why: String },
    /// It will never take it; the remedy is in the words.
    #[error("{what}: {why} (T101)")]
    Never { what: String, why: String },
}

impl SinkError {
    /// A full disk may be freed; what else is wrong with a file stays.
    fn of_file(what: String, error: &std::io::Error) -> Self {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let why = error.to_string();
        match error.kind() {
            StorageFull | QuotaExceeded => Self::Later { what, why },
            _ => Self::Never { what, why },
        }
    }
}

/// A tracker.
pub trait Sink {
    /// The place in the log that it has of a run; 0 when it knows nothing of it.
    fn cursor(&mut self, run: &RunId) -> impl Future<Output = Result<u64, SinkError>> + Send;

    /// Takes what happened in a run, in order, and remembers the last one's place in the same
    /// step. What was taken before may come again, and changes nothing.
    fn take(
        &mut self,
        run: &RunId,
        told: &[Told],
    ) -> impl Future<Output = Result<(), SinkError>> + Send;
}
