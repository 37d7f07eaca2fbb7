//! What an agent can do.

use futures::future::BoxFuture;
use wire::WorkKind;

use crate::{Job, JobError};

/// One role of an agent.
pub trait Role: Send + Sync + 'static {
    /// The facts that call for it.
    fn kind(&self) -> WorkKind;

    /// Resolves when there is room for one more job. Cancel-safe.
    fn room(&self) -> BoxFuture<'_, ()>;

    /// Does a job and writes its results. Must be safe to repeat: an earlier try may have
    /// got anywhere.
    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>>;

    /// Generated tokens a second, if this role generates and knows.
    fn tokens_per_s(&self) -> f64 {
        0.0
    }
}
