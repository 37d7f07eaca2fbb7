//! Tower layers from one function of a request and the service behind the layer.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use tonic::{
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{Request, Response},
    },
};
use tower_layer::Layer;

/// The service behind a layer.
pub(crate) trait InnerService:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send + 'static>
    + Clone
    + Send
    + 'static
{
}

impl<S> InnerService for S where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Send + 'static,
        > + Clone
        + Send
        + 'static
{
}

pub(crate) trait Middleware: Clone {
    /// Answers a request. `inner` is ready; a clone of it has to become ready first.
    fn handle_request<S: InnerService>(
        &self,
        inner: &mut S,
        request: Request<Body>,
    ) -> BoxFuture<Response<Body>, Infallible>;
}

#[derive(Clone)]
pub(crate) struct MiddlewareLayer<M>(pub(crate) M);

impl<S, M: Middleware> Layer<S> for MiddlewareLayer<M> {
    type Service = MiddlewareService<M, S>;

    fn layer(&self, inner: S) -> Self::Service {
        MiddlewareService { inner, middleware: self.0.clone() }
    }
}

#[derive(Clone)]
pub(crate) struct MiddlewareService<M, S> {
    inner: S,
    middleware: M,
}

impl<M: Middleware, S: InnerService> Service<Request<Body>> for MiddlewareService<M, S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.middleware.handle_request(&mut self.inner, request)
    }
}
