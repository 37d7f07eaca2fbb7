//! The worker of a training on several boxes, kept from one slice to the next: loading a base takes
//! as long as many steps.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use agent::WorkerProcess;

/// A worker that no slice needs for so long ends: its memory may be needed.
const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// At most one worker between two slices.
#[derive(Clone, Default)]
pub(crate) struct KeptWorker(Arc<Mutex<Option<IdleWorker>>>);

struct IdleWorker {
    /// Identifies run, cycle and settings.
    training: String,
    worker: WorkerProcess,
    /// Distinguishes it from others of the same training.
    token: Arc<()>,
}

impl KeptWorker {
    /// Returns true if the worker of a training is kept here.
    pub(crate) fn serves_training(&self, training: &str) -> bool {
        let kept = self.0.lock();
        kept.is_ok_and(|kept| kept.as_ref().is_some_and(|it| it.serves_training(training)))
    }

    /// Removes and returns the worker of a training. That of another training ends.
    pub(super) fn take_worker(&self, training: &str) -> Option<WorkerProcess> {
        let kept = self.0.lock().ok()?.take()?;
        kept.serves_training(training).then_some(kept.worker)
    }

    /// Keeps a worker for the next slice of its training, for a minute.
    pub(super) fn keep_worker(&self, training: String, worker: WorkerProcess) {
        let token = Arc::new(());
        let place = self.clone();
        let kept = IdleWorker { training, worker, token: token.clone() };
        if let Ok(mut place) = self.0.lock() {
            *place = Some(kept);
        }
        tokio::spawn(async move {
            tokio::time::sleep(IDLE_LIMIT).await;
            let is_same = |kept: &IdleWorker| Arc::ptr_eq(&kept.token, &token);
            if let Ok(mut kept) = place.0.lock() {
                kept.take_if(|kept| is_same(kept));
            }
        });
    }

    /// Ends the worker of another training than this one.
    pub(crate) fn end_others(&self, training: &str) {
        if let Ok(mut kept) = self.0.lock() {
            kept.take_if(|kept| !kept.serves_training(training));
        }
    }

    /// Ends the worker.
    pub(crate) fn end_worker(&self) {
        if let Ok(mut kept) = self.0.lock() {
            *kept = None;
        }
    }
}

impl IdleWorker {
    fn serves_training(&self, training: &str) -> bool {
        self.training == training && self.worker.is_alive()
    }
}
