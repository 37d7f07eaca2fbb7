//! The handle of one running program.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use serde_json::{Map, Value};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    LineBounds, LineFailure, LineProgramError, ProgramLauncher,
    answer_lines::ID_FIELD,
    program_task::{PendingLine, ProgramShared, ProgramTask},
};

/// Requests that wait until the task of the process takes them.
const QUEUE_MAX: usize = 64;

/// A process that answers lines of JSON. When the last clone is dropped, its stdin is closed, and
/// it is killed if it does not end soon.
#[derive(Debug, Clone)]
pub struct LineProgram {
    requests: mpsc::Sender<PendingLine>,
    shared: Arc<ProgramShared>,
    bounds: LineBounds,
}

impl LineProgram {
    /// Starts a process. Must be called in a tokio runtime, which drives the process's pipes until
    /// it ends.
    ///
    /// # Errors
    /// When the process cannot be started. A program that fails later fails its requests.
    pub async fn start(
        launcher: &dyn ProgramLauncher,
        bounds: LineBounds,
    ) -> Result<Self, LineProgramError> {
        let failed = |problem| LineProgramError::new(LineFailure::NotStarted, problem);
        let launched = launcher.launch_program().await.map_err(failed)?;
        let shared: Arc<ProgramShared> = Arc::default();
        let (requests, queue) = mpsc::channel(QUEUE_MAX);
        let task = ProgramTask::new(launched, bounds, queue, Arc::clone(&shared));
        tokio::spawn(task.map_err(failed)?.run());
        Ok(Self { requests, shared, bounds })
    }

    /// Sends one object and returns the answer, both without their `id`. Several requests may be
    /// sent at once; a program that answers them one after another needs time for all of them. A
    /// request that gets no answer within `timeout` ends the process. Dropping the future does
    /// not: its answer is dropped when it comes.
    ///
    /// # Errors
    /// When the request is too long, or the process ends, hangs or breaks the protocol.
    pub async fn request_answer(
        &self,
        mut request: Map<String, Value>,
        timeout: Duration,
    ) -> Result<Map<String, Value>, LineProgramError> {
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        request.insert(ID_FIELD.to_owned(), id.into());
        let (reply, answered) = oneshot::channel();
        let line = self.encode_request(&request)?;
        let deadline = Instant::now() + timeout;
        let pending = PendingLine { id, line, deadline, timeout, reply };
        let sent = self.requests.send(pending).await.is_ok();
        if sent && let Ok(reply) = answered.await {
            return reply;
        }
        // The process ended before it could read the request.
        let end = self.shared.end.get().cloned();
        Err(end.unwrap_or_else(LineProgramError::interrupted))
    }

    /// Returns false once the process has ended.
    pub fn is_running(&self) -> bool {
        !self.requests.is_closed()
    }

    /// Returns true for the first call after the process has failed.
    pub(crate) fn should_count_failure(&self) -> bool {
        !self.shared.is_counted.swap(true, Ordering::Relaxed)
    }

    fn encode_request(&self, request: &Map<String, Value>) -> Result<Vec<u8>, LineProgramError> {
        let refused = |problem| LineProgramError::new(LineFailure::Request, problem);
        let mut line = serde_json::to_vec(request).map_err(|error| refused(error.to_string()))?;
        let bytes_max = self.bounds.request_bytes_max;
        if line.len() > bytes_max {
            let bytes = line.len();
            return Err(refused(format!("a request of {bytes} bytes is longer than {bytes_max}")));
        }
        line.push(b'\n');
        Ok(line)
    }
}
