//! Blocking work on the runtime's threads for it.

/// Runs file I/O and hashing on the runtime's blocking threads, and propagates panics.
pub(crate) fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> {
    let task = tokio::task::spawn_blocking(work);
    async {
        match task.await {
            Ok(value) => value,
            // The task is cancelled only when the runtime shuts down, which also drops this future.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}
