//! A measurement in a worker process of its own.

use std::ffi::OsString;

use agent::{JobError, JobFault, WorkerLauncher, WorkerProcess};
use futures::future::ready;

use crate::{
    backend::{CHUNK_TIMEOUT, CHUNK_TIMEOUT_MIN},
    messages::{MeasureAnswer, MeasureFault, MeasureProgress, MeasureRequest, MeasureResult},
};

/// Starts a worker and returns its measurement.
///
/// # Errors
/// When the worker refuses the measurement, hangs or dies; with a known cause, if its log or the
/// kernel's shows one.
pub(crate) async fn call_worker(
    launch: &WorkerLauncher,
    request: &MeasureRequest,
    mut on_progress: impl FnMut(MeasureProgress) + Send,
) -> Result<MeasureResult, JobError> {
    let command = launch.worker_command("eval", "eval", Vec::<OsString>::new());
    let worker = WorkerProcess::start(&command)?;
    let mut silence = launch.silence_timeout(CHUNK_TIMEOUT, CHUNK_TIMEOUT_MIN);
    let measured = worker.call_with_progress(request, &mut silence, |progress| {
        if let Ok(progress) = serde_json::from_value(progress) {
            on_progress(progress);
        }
        ready(())
    });
    match measured.await {
        Ok(MeasureAnswer::Measured(measured)) => Ok(*measured),
        Ok(MeasureAnswer::Failed { blame, message }) => {
            let fault = match blame {
                MeasureFault::Content => JobFault::InvalidInput,
                MeasureFault::Box => JobFault::HostUnfit,
                MeasureFault::Work => JobFault::WorkFailed,
            };
            let failed = JobError::from_worker(fault, message, &worker).await;
            Err(failed.with_known_cause(&worker.read_kernel_log().await))
        }
        Err(error) => Err(JobError::from_model_worker(error, &worker).await),
    }
}
