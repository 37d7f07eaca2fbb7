//! Bodies whose frames pass through a function.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::{Status, body::Body};

type PolledFrame = Poll<Option<Result<Frame<Bytes>, Status>>>;

/// Returns a body whose frames are those that `poll_frame` returns, which polls `inner`. It ends
/// when `inner` is complete.
pub(crate) fn wrap_body(
    inner: Body,
    poll_frame: impl FnMut(&mut Body, &mut Context<'_>) -> PolledFrame + Send + Unpin + 'static,
) -> Body {
    Body::new(PolledBody { inner, poll_frame })
}

struct PolledBody<F> {
    inner: Body,
    poll_frame: F,
}

impl<F> http_body::Body for PolledBody<F>
where
    F: FnMut(&mut Body, &mut Context<'_>) -> PolledFrame + Unpin,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame {
        let this = &mut *self;
        (this.poll_frame)(&mut this.inner, cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
