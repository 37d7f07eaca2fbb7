//! Ending what a caller has under way when it is a member no more.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use authority::{BearerError, Caller};
use bytes::Bytes;
use control::View;
use futures::future::BoxFuture;
use http_body::{Body as _, Frame, SizeHint};
use tokio::{sync::watch, time::sleep};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, Response},
};

use super::{Denied, now_s};
use crate::status::refused;

/// Far enough away that looking again costs nothing; timers do not reach as far as some kits.
const LOOK_AGAIN: Duration = Duration::from_secs(24 * 3600);

/// When, and why, a caller's calls are over.
pub(super) type Over = BoxFuture<'static, Denied>;

pub(super) fn over(mut view: watch::Receiver<View>, caller: Caller) -> Over {
    Box::pin(async move {
        let expires_at = caller.expires_at;
        let mut objection = None;
        let objected = view.wait_for(|view| {
            objection = view.roll.objection(&caller);
            objection.is_some()
        });
        let gone = async {
            if objected.await.is_err() {
                // The gateway ends, and says so itself.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = gone => {}
            () = expiry(expires_at) => {
                return Denied::Bearer(BearerError::Expired { seconds: 0 });
            }
        }
        Denied::Void(objection.map_or_else(String::new, |objection| objection.to_string()))
    })
}

async fn expiry(at: Option<u64>) {
    loop {
        let left = at.map_or(LOOK_AGAIN, |at| Duration::from_secs(at.saturating_sub(now_s())));
        if left.is_zero() {
            return;
        }
        sleep(left.min(LOOK_AGAIN)).await;
    }
}

/// Answers, unless it is over before; and ends the answer when it is over.
pub(super) async fn until(
    mut over: Over,
    asked: HeaderMap,
    answering: impl Future<Output = Result<Response<Body>, Infallible>> + Send,
) -> Result<Response<Body>, Infallible> {
    let answer = tokio::select! {
        denied = &mut over => return Ok(denied.answer(&asked)),
        answer = answering => answer?,
    };
    let is_grpc = answer
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    Ok(answer.map(|inner| {
        // What is whole already needs no watching.
        if inner.is_end_stream() {
            inner
        } else {
            Body::new(Cut { inner, over: Some(over), is_grpc })
        }
    }))
}

/// A body that ends when its reader is a member no more.
struct Cut {
    inner: Body,
    over: Option<Over>,
    is_grpc: bool,
}

impl http_body::Body for Cut {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(over) = &mut self.over else { return Poll::Ready(None) };
        if let Poll::Ready(denied) = over.as_mut().poll(cx) {
            self.over = None;
            return Poll::Ready(Some(last(&denied, self.is_grpc)));
        }
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.over.is_none() || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// gRPC has a word for it; HTTP only breaks off.
fn last(denied: &Denied, is_grpc: bool) -> Result<Frame<Bytes>, Status> {
    let status = refused(denied.code(), denied.to_string());
    if !is_grpc {
        return Err(Status::from_error(Box::new(io::Error::other(denied.to_string()))));
    }
    let mut trailers = HeaderMap::new();
    status.add_header(&mut trailers)?;
    Ok(Frame::trailers(trailers))
}
