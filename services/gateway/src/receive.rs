//! How much of requests is in memory at a time: submissions carry files, and few are taken
//! at once; everything else is a few names and numbers.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{sync::Semaphore, time::timeout};
use tonic::{
    Code,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{Request, Response},
    },
    server::NamedService,
};

use crate::{
    MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, SUBMIT_BYTES_MAX, rpc::runs_server::RunsServer,
    runs::Runs, status::refused,
};

/// Submissions being received or worked on; more wait in their connections.
const SUBMISSIONS_MAX: usize = 4;
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// The largest submission at half a megabyte a second, and the work on it.
const SUBMIT_LIMIT: Duration = Duration::from_secs(150);

/// `flotilla.v1.Runs`, with limits by method.
#[derive(Clone)]
pub(crate) struct BoundedRuns {
    submit: RunsServer<Runs>,
    others: RunsServer<Runs>,
    room: Arc<Semaphore>,
}

impl BoundedRuns {
    pub(crate) fn new(runs: impl Fn() -> Runs) -> Self {
        let server = |bytes| {
            RunsServer::new(runs())
                .max_decoding_message_size(bytes)
                .max_encoding_message_size(MESSAGE_BYTES_MAX)
        };
        Self {
            submit: server(SUBMIT_BYTES_MAX),
            others: server(REQUEST_BYTES_MAX),
            room: Arc::new(Semaphore::new(SUBMISSIONS_MAX)),
        }
    }
}

impl NamedService for BoundedRuns {
    const NAME: &'static str = <RunsServer<Runs> as NamedService>::NAME;
}

impl Service<Request<Body>> for BoundedRuns {
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
        let (mut submit, room) = (self.submit.clone(), self.room.clone());
        Box::pin(async move {
            let Ok(Ok(_permit)) = timeout(WAIT_LIMIT, room.acquire_owned()).await else {
                let busy =
                    format!("{SUBMISSIONS_MAX} runs are being submitted; try again later (G104)");
                return Ok(refused(Code::ResourceExhausted, busy).into_http());
            };
            match timeout(SUBMIT_LIMIT, submit.call(request)).await {
                Ok(answered) => answered,
                Err(_) => {
                    let late =
                        format!("not submitted within {SUBMIT_LIMIT:?}; look at the runs (G102)");
                    Ok(refused(Code::DeadlineExceeded, late).into_http())
                }
            }
        })
    }
}
