//! The HTTP endpoint, which serves only `GET /metrics`.

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

use crate::metrics_page::{MetricsSource, build_registry, render_registry};

const OPENMETRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Further connections wait.
const CONNECTIONS_MAX: usize = 16;

const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The limit of one connection, with all its requests.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);

const HEAD_BYTES_MAX: usize = 16 * 1024;

/// A bound address at which metrics are served.
#[derive(Debug)]
pub struct MetricsEndpoint(TcpListener);

impl MetricsEndpoint {
    /// Binds to an address, if there is one.
    pub async fn bind_optional(address: Option<SocketAddr>) -> anyhow::Result<Option<Self>> {
        match address {
            Some(address) => Self::bind_address(address).await.map(Some),
            None => Ok(None),
        }
    }

    /// Binds to an address.
    pub(crate) async fn bind_address(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("serve metrics at {address}"))?;
        tracing::info!(address = %listener.local_addr()?, "metrics are served at /metrics");
        Ok(Self(listener))
    }

    /// Serves a source's metrics for as long as it is polled. Connections that are already accepted
    /// are served until they end or reach their time limit.
    pub async fn serve_source(self, source: impl MetricsSource) -> Infallible {
        let registry = Arc::new(build_registry(source));
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(permit) = room.clone().acquire_owned().await else {
                unreachable!("nobody closes it");
            };
            let Ok((stream, _)) = self.0.accept().await else {
                // The likely cause is a lack of file descriptors.
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            let registry = registry.clone();
            tokio::spawn(async move {
                let _permit = permit;
                let answer =
                    service_fn(|request| std::future::ready(answer_request(&request, &registry)));
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .max_buf_size(HEAD_BYTES_MAX)
                    .serve_connection(TokioIo::new(stream), answer);
                // The client may have closed the connection.
                let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
            });
        }
    }
}

fn answer_request(
    request: &Request<Incoming>,
    registry: &Registry,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => {
            (StatusCode::OK, OPENMETRICS_CONTENT_TYPE, render_registry(registry))
        }
        (_, "/metrics") => (StatusCode::METHOD_NOT_ALLOWED, "text/plain", "only GET\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "text/plain", "unknown path; use /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    Ok(response)
}
