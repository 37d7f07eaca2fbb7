//! Deadlines of request bodies: ends a request whose body is not complete within a time limit for
//! the whole body, however slowly it trickles (Slowloris).
//!
//! Requests that need no bearer have the shortest limit. The limit of an upload grows with its
//! length.

use std::{convert::Infallible, pin::Pin, task::Poll, time::Duration};

use http_body::Body as _;
use store::proxy_protocol::STORE_PATH;
use tokio::{sync::oneshot, time::sleep};
use tonic::{
    body::Body,
    codegen::http::{HeaderMap, Request, Response, header},
};

use super::AccessDenied;
use crate::{
    polled_body::wrap_body,
    status::build_status,
    submission_limit::{SUBMIT, SUBMIT_LIMIT},
    transfer_limit::{MEMBER_LIMIT, transfer_limit},
};

/// Such bodies have a few hundred bytes.
const UNAUTHENTICATED_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestSender {
    /// A client of a closed fleet, on a path that needs no bearer.
    Unauthenticated,
    /// A member of a closed fleet, or any client of an open fleet.
    Member,
}

pub(super) struct BodyDeadline {
    limit: Duration,
    /// Receives a value when the body misses its deadline.
    missed: oneshot::Receiver<()>,
}

/// Sets a time limit that starts at the first read of the body.
pub(super) fn limit_body(
    request: Request<Body>,
    sender: RequestSender,
) -> (Request<Body>, BodyDeadline) {
    let limit = find_limit(&request, sender);
    let (miss, missed) = oneshot::channel();
    let (mut miss, mut until) = (Some(miss), None);
    let request = request.map(|body| {
        wrap_body(body, move |body, cx| {
            let until = until.get_or_insert_with(|| Box::pin(sleep(limit)));
            // Data that is already here is not late, however slowly it is read.
            if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
                return Poll::Ready(frame);
            }
            if until.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            if miss.take().is_some_and(|miss| miss.send(()).is_ok()) {
                // The reader gets no error: `enforce_deadline` answers in place of the call.
                return Poll::Pending;
            }
            // The response has begun, so only the body can report the error.
            let denied = AccessDenied::Late { limit };
            Poll::Ready(Some(Err(build_status(denied.status_code(), denied.to_string()))))
        })
    });
    (request, BodyDeadline { limit, missed })
}

fn find_limit(request: &Request<Body>, sender: RequestSender) -> Duration {
    let path = request.uri().path();
    match sender {
        RequestSender::Unauthenticated => UNAUTHENTICATED_LIMIT,
        RequestSender::Member if path == SUBMIT => SUBMIT_LIMIT,
        RequestSender::Member
            if path.strip_prefix(STORE_PATH).is_some_and(|key| key.starts_with('/')) =>
        {
            let length = request.headers().get(header::CONTENT_LENGTH);
            let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
            let bytes = length.unwrap_or_default().min(store::PIECE_BYTES_MAX);
            transfer_limit(bytes)
        }
        RequestSender::Member => MEMBER_LIMIT,
    }
}

impl BodyDeadline {
    /// Waits for the answer of a call. If the body misses its deadline first, drops the call and
    /// returns an [`AccessDenied::Late`] response.
    pub(super) async fn enforce_deadline(
        self,
        asked: HeaderMap,
        answering: impl Future<Output = Result<Response<Body>, Infallible>> + Send,
    ) -> Result<Response<Body>, Infallible> {
        let Self { limit, missed } = self;
        let missed = async {
            // The sender is dropped with a body that is complete or no longer read.
            if missed.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            () = missed => {
                let denied = AccessDenied::Late { limit };
                tracing::debug!(%denied, "denied");
                Ok(denied.to_response(&asked))
            }
            answer = answering => answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures::stream;
    use http_body::Frame;
    use http_body_util::{BodyExt, StreamBody};
    use tokio::time::Instant;
    use tonic::{Status, codegen::http::StatusCode};

    use super::*;

    /// Builds a body of `bytes` bytes, one at a time.
    fn trickling(bytes: usize, every: Duration) -> Body {
        let frames = stream::unfold(0, move |sent| async move {
            if sent == bytes {
                return None;
            }
            sleep(every).await;
            Some((Ok::<_, Status>(Frame::data(Bytes::from_static(b"x"))), sent + 1))
        });
        Body::new(StreamBody::new(Box::pin(frames)))
    }

    fn request(path: &str, length: u64, body: Body) -> Request<Body> {
        let request = Request::post(path).header(header::CONTENT_LENGTH, length);
        request.body(body).unwrap()
    }

    /// Returns the status of the answer, and the time until it came.
    async fn answer(request: Request<Body>, sender: RequestSender) -> (StatusCode, Duration) {
        let began = Instant::now();
        let (request, deadline) = limit_body(request, sender);
        let reading = async {
            let read = request.into_body().collect().await;
            assert!(read.is_ok(), "a late body is not told as one that broke off");
            Ok(Response::new(Body::empty()))
        };
        let Ok(answer) = deadline.enforce_deadline(HeaderMap::new(), reading).await;
        (answer.status(), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn who_sends_a_byte_a_second_is_cut_when_its_time_is_over() {
        let second = Duration::from_secs(1);
        let join = "/flotilla.v1.Members/Join";
        for (sender, path, length, seconds) in [
            (RequestSender::Unauthenticated, join, 60_000, 10),
            (RequestSender::Member, "/flotilla.v1.Runs/List", 60_000, 60),
            (RequestSender::Member, SUBMIT, 60_000, 150),
            (RequestSender::Member, "/store/blobs/ab/abcd", 1 << 20, 60 + 32),
            (RequestSender::Member, "/store/blobs/ab/abcd", u64::MAX, 60 + 2048),
        ] {
            let trickling = trickling(60_000, second);
            let (status, took) = answer(request(path, length, trickling), sender).await;
            assert_eq!((status, took.as_secs()), (StatusCode::REQUEST_TIMEOUT, seconds), "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_is_slow_and_comes_is_not_cut() {
        // A client with 64 kB/s.
        let body = trickling(256, Duration::from_secs(1));
        let upload = request("/store/blobs/ab/abcd", 16 << 20, body);
        let (status, took) = answer(upload, RequestSender::Member).await;
        assert_eq!((status, took.as_secs()), (StatusCode::OK, 256));
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_whole_is_not_late_however_long_its_answer_takes() {
        let whole = request("/flotilla.v1.Runs/List", 1, trickling(1, Duration::ZERO));
        let (request, deadline) = limit_body(whole, RequestSender::Unauthenticated);
        let working = async {
            request.into_body().collect().await.unwrap();
            sleep(Duration::from_secs(1000)).await;
            Ok(Response::new(Body::empty()))
        };
        let Ok(answer) = deadline.enforce_deadline(HeaderMap::new(), working).await;
        assert_eq!(answer.status(), StatusCode::OK);
    }
}
