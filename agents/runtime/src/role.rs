//! What an agent can do.

use std::time::Duration;

use conduct::Pace;
use futures::{FutureExt, future::BoxFuture};
use wire::WorkKind;

use crate::{Ahead, Job, JobError, Needs};

/// What held jobs may still take when the process is asked to stop.
const GRACE: Duration = Duration::from_secs(2);

/// One role of an agent.
pub trait Role: Send + Sync + 'static {
    /// The facts that call for it.
    fn kind(&self) -> WorkKind;

    /// Resolves when there is room for one more job. Cancel-safe.
    fn room(&self) -> BoxFuture<'_, ()>;

    /// Does a job and writes its results. Must be safe to repeat: an earlier try may have
    /// got anywhere.
    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>>;

    /// What it runs models with, and what is to be known of it; empty when it runs none.
    fn engine(&self) -> String {
        String::new()
    }

    /// What it can do here that not every box can.
    fn abilities(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether it uses the GPU, so that what the doctor finds wrong with that keeps it from work.
    fn uses_gpu(&self) -> bool {
        false
    }

    /// What a job needs of the box, and what there is; `None` when it does not matter or nobody
    /// knows.
    fn needs<'a>(&'a self, _job: &'a Job) -> BoxFuture<'a, Result<Option<Needs>, JobError>> {
        async { Ok(None) }.boxed()
    }

    /// Makes ready what the next jobs will need of a checkpoint, as far as no job waits for that.
    fn foresee<'a>(&'a self, _ahead: &'a Ahead) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    /// The agent takes nothing new any more: it is drained, or stopped. What can be handed over
    /// half done may be brought to where that is.
    fn leave(&self) {}

    /// What a job may take to be handed over or ended, once the process is to stop.
    fn grace(&self) -> Duration {
        GRACE
    }

    /// How it draws samples, if it does.
    fn pace(&self) -> Option<Pace> {
        None
    }
}
