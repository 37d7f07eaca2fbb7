//! Limits the memory of requests: submissions contain files, so only a few are received at a time;
//! all other requests are small.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{Request, Response},
    },
    server::NamedService,
};

use crate::{
    MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, SUBMIT_BYTES_MAX, rpc::runs_server::RunsServer,
    runs::RunsService, status::build_status, submitted_files::limit_files,
};

/// Maximum submissions received at a time; further ones wait in their connections.
const SUBMISSIONS_MAX: usize = 4;
/// The longest wait for another submission to end.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// Time limit of a submission: enough for the largest one at 0.5 MB/s, and the work on it.
pub(crate) const SUBMIT_LIMIT: Duration = Duration::from_secs(150);
pub(crate) const SUBMIT: &str = "/flotilla.v1.Runs/Submit";

/// The service `flotilla.v1.Runs` with size and time limits by method.
#[derive(Clone)]
pub(crate) struct BoundedRunsService {
    submit: RunsServer<RunsService>,
    others: RunsServer<RunsService>,
    permits: Arc<Semaphore>,
}

impl BoundedRunsService {
    /// Takes a factory, as it needs two servers with different size limits.
    pub(crate) fn new(runs: impl Fn() -> RunsService) -> Self {
        let server = |bytes| {
            RunsServer::new(runs())
                .max_decoding_message_size(bytes)
                .max_encoding_message_size(MESSAGE_BYTES_MAX)
        };
        Self {
            submit: server(SUBMIT_BYTES_MAX),
            others: server(REQUEST_BYTES_MAX),
            permits: Arc::new(Semaphore::new(SUBMISSIONS_MAX)),
        }
    }
}

/// Waits for the permit to receive a submission; `most` of them are received at a time.
pub(crate) async fn acquire_permit(
    permits: &Arc<Semaphore>,
    most: usize,
) -> Result<OwnedSemaphorePermit, Status> {
    match timeout(WAIT_LIMIT, permits.clone().acquire_owned()).await {
        Ok(Ok(permit)) => Ok(permit),
        Ok(Err(_)) | Err(_) => {
            let busy = format!("{most} runs are being submitted; try again later (G104)");
            Err(build_status(Code::ResourceExhausted, busy))
        }
    }
}

impl NamedService for BoundedRunsService {
    const NAME: &'static str = <RunsServer<RunsService> as NamedService>::NAME;
}

impl Service<Request<Body>> for BoundedRunsService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if !request.uri().path().ends_with("/Submit") {
            return self.others.call(request);
        }
        let (mut submit, permits) = (self.submit.clone(), self.permits.clone());
        Box::pin(async move {
            let _permit = match acquire_permit(&permits, SUBMISSIONS_MAX).await {
                Ok(permit) => permit,
                Err(busy) => return Ok(busy.into_http()),
            };
            match timeout(SUBMIT_LIMIT, submit.call(request.map(limit_files))).await {
                Ok(answered) => answered,
                Err(_) => {
                    let late = format!(
                        "not submitted within {SUBMIT_LIMIT:?}; list the runs before submitting again (G102)"
                    );
                    Ok(build_status(Code::DeadlineExceeded, late).into_http())
                }
            }
        })
    }
}
