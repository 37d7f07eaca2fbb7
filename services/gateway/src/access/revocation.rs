//! Ends the open calls of a caller whose membership ends.

use std::{convert::Infallible, io, pin::Pin, task::Poll, time::Duration};

use bytes::Bytes;
use control::MembershipView;
use futures::future::BoxFuture;
use http_body::{Body as _, Frame};
use identity::{BearerError, GatewayCaller};
use tokio::{sync::watch, time::sleep};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, Response},
};
use wire::clock::unix_seconds;

use super::AccessDenied;
use crate::{polled_body::wrap_body, status::build_status};

/// Some credentials expire later than timers can reach; checking once a day costs nothing.
const RECHECK_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Resolves, with the reason, when a caller's rights end.
pub(super) type RevocationFuture = BoxFuture<'static, AccessDenied>;

/// Resolves when the caller's bearer expires or its member is revoked.
pub(super) fn wait_revoked(
    mut view: watch::Receiver<MembershipView>,
    caller: GatewayCaller,
) -> RevocationFuture {
    Box::pin(async move {
        let expires_at = caller.expires_at;
        let mut objection = None;
        let objected = view.wait_for(|view| {
            objection = view.revocations.deny_reason(&caller);
            objection.is_some()
        });
        let gone = async {
            if objected.await.is_err() {
                // The gateway is stopping and ends its calls itself.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = gone => {}
            () = wait_expiry(expires_at) => {
                return AccessDenied::Bearer(BearerError::Expired { seconds: 0 });
            }
        }
        AccessDenied::Revoked(objection.map_or_else(String::new, |objection| objection.to_string()))
    })
}

/// Waits until a time in seconds since 1970; without a time, forever.
async fn wait_expiry(at: Option<u64>) {
    loop {
        let left = at
            .map_or(RECHECK_INTERVAL, |at| Duration::from_secs(at.saturating_sub(unix_seconds())));
        if left.is_zero() {
            return;
        }
        sleep(left.min(RECHECK_INTERVAL)).await;
    }
}

/// Returns the inner service's response. If the revocation comes first, returns a denial instead;
/// if it comes while the body is streamed, ends the body.
pub(super) async fn abort_on_revocation(
    mut over: RevocationFuture,
    asked: HeaderMap,
    answering: impl Future<Output = Result<Response<Body>, Infallible>> + Send,
) -> Result<Response<Body>, Infallible> {
    let answer = tokio::select! {
        denied = &mut over => return Ok(denied.to_response(&asked)),
        answer = answering => answer?,
    };
    let is_grpc = answer
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    Ok(answer.map(|body| {
        wrap_body(body, move |body, cx| {
            if body.is_end_stream() {
                return Poll::Ready(None);
            }
            if let Poll::Ready(denied) = over.as_mut().poll(cx) {
                *body = Body::empty();
                return Poll::Ready(Some(final_frame(&denied, is_grpc)));
            }
            Pin::new(body).poll_frame(cx)
        })
    }))
}

/// Returns gRPC trailers with the status, or a transport error, as HTTP has no other way to report
/// it.
fn final_frame(denied: &AccessDenied, is_grpc: bool) -> Result<Frame<Bytes>, Status> {
    let status = build_status(denied.status_code(), denied.to_string());
    if !is_grpc {
        return Err(Status::from_error(Box::new(io::Error::other(denied.to_string()))));
    }
    let mut trailers = HeaderMap::new();
    status.add_header(&mut trailers)?;
    Ok(Frame::trailers(trailers))
}
