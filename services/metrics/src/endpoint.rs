//! `GET /metrics` and nothing else.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::CONTENT_TYPE,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::{net::TcpListener, sync::Semaphore};

use crate::page::{Source, registry, render};

/// What the text is, for those who ask over HTTP.
const CONTENT_TYPE_TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Served at once; more wait.
const CONNECTIONS_MAX: usize = 16;

/// A request's head may take so long, …
const HEAD_LIMIT: Duration = Duration::from_secs(5);

/// … and all that comes over one connection so long.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);

/// A request's head is no longer.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// Where metrics are served.
#[derive(Debug)]
pub struct Endpoint(TcpListener);

impl Endpoint {
    /// At the address that somebody asked for, if they did.
    ///
    /// # Errors
    /// As [`Endpoint::bind`].
    pub async fn bind_if_any(address: Option<SocketAddr>) -> anyhow::Result<Option<Self>> {
        match address {
            Some(address) => Self::bind(address).await.map(Some),
            None => Ok(None),
        }
    }

    /// # Errors
    /// When the address is not this box's, or taken.
    pub async fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("serve metrics at {address}"))?;
        tracing::info!(address = %listener.local_addr()?, "metrics are served at /metrics");
        Ok(Self(listener))
    }

    /// Serves for as long as it is polled, and what it began for as long as that may take.
    pub async fn serve(self, source: impl Source) -> Infallible {
        let registry = Arc::new(registry(source));
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(permit) = room.clone().acquire_owned().await else {
                unreachable!("nobody closes it");
            };
            let Ok((stream, _)) = self.0.accept().await else {
                // Out of file descriptors, most likely.
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            let registry = registry.clone();
            tokio::spawn(async move {
                let _permit = permit;
                let answer = service_fn(|request| std::future::ready(answer(&request, &registry)));
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_LIMIT)
                    .max_buf_size(HEAD_BYTES_MAX)
                    .serve_connection(TokioIo::new(stream), answer);
                // Whoever asked may have gone.
                let _ = tokio::time::timeout(CONNECTION_LIMIT, connection).await;
            });
        }
    }
}

fn answer(
    request: &Request<Incoming>,
    registry: &Registry,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => (StatusCode::OK, CONTENT_TYPE_TEXT, render(registry)),
        (_, "/metrics") => (StatusCode::METHOD_NOT_ALLOWED, "text/plain", "only GET\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "text/plain", "there is only /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    Ok(response)
}
