//! A model hub for tests. It serves the files of a directory on a free loopback port, in the way
//! that the client library of Hugging Face expects.
//!
//! A model is `<org>/<name>/` below the directory. It has one commit, [`COMMIT`], and the branch
//! `main`. No file is in Xet.

use std::{
    convert::Infallible,
    fs, io,
    net::{Ipv4Addr, SocketAddr, TcpListener as Listener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, header,
    http::response::Builder as Answer, service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use tokio::{net::TcpListener, runtime::Runtime};

/// The commit of every model.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A running hub, on its own thread until it is dropped.
pub struct HubServer {
    address: SocketAddr,
    runtime: Option<Runtime>,
    requests: Requests,
}

type Requests = Arc<Mutex<Vec<String>>>;

impl HubServer {
    /// Starts a hub for the models below a directory.
    ///
    /// # Errors
    /// If no thread or port is available.
    pub fn start(models: &Path) -> io::Result<Self> {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let requests = Requests::default();
        runtime.spawn(serve(listener, models.to_owned(), requests.clone()));
        Ok(Self { address, runtime: Some(runtime), requests })
    }

    /// Returns the URL for `HF_ENDPOINT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns `METHOD /path` of every request so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Async tests must not block.
            runtime.shutdown_timeout(Duration::ZERO);
        }
    }
}

async fn serve(listener: Listener, models: PathBuf, requests: Requests) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((stream, _)) = listener.accept().await {
        let (models, requests) = (models.clone(), requests.clone());
        let answer = move |request: Request<Incoming>| {
            let line = format!("{} {}", request.method(), request.uri().path());
            requests.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            let answered = respond(&models, &request);
            async move { Ok::<_, Infallible>(answered) }
        };
        tokio::spawn(async move {
            let builder = Builder::new(TokioExecutor::new());
            // A client that disconnects is no failure.
            let _ = builder.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
        });
    }
}

/// `/<org>/<name>/resolve/<revision>/<file>`.
fn respond(models: &Path, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let parts: Vec<&str> = request.uri().path().trim_start_matches('/').split('/').collect();
    let [org, name, "resolve", revision, file @ ..] = parts.as_slice() else {
        return not_found("RepoNotFound");
    };
    let model = models.join(org).join(name);
    if !model.is_dir() {
        return not_found("RepoNotFound");
    }
    if ![COMMIT, "main"].contains(revision) {
        return not_found("RevisionNotFound");
    }
    match fs::read(model.join(file.join("/"))) {
        Ok(bytes) => file_response(request, Bytes::from(bytes)),
        Err(_) => not_found("EntryNotFound"),
    }
}

fn file_response(request: &Request<Incoming>, bytes: Bytes) -> Response<Full<Bytes>> {
    // A checksum of the length and of both ends, which is enough for the files of tests.
    let ends = bytes.iter().take(8).chain(bytes.iter().rev().take(8));
    let sum = ends.fold(bytes.len() as u64, |sum, b| sum.wrapping_mul(31) + u64::from(*b));
    let answer = Response::builder()
        .header(header::ETAG, format!("\"{sum:040x}\""))
        .header("x-repo-commit", COMMIT)
        .header(header::ACCEPT_RANGES, "bytes");
    if request.method() == Method::HEAD {
        return build_response(answer.header(header::CONTENT_LENGTH, bytes.len()), Bytes::new());
    }
    let range = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok());
    let from =
        range.and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse().ok());
    match from.filter(|from: &usize| *from < bytes.len()) {
        Some(from) => {
            build_response(answer.status(StatusCode::PARTIAL_CONTENT), bytes.slice(from..))
        }
        None => build_response(answer, bytes),
    }
}

fn not_found(code: &str) -> Response<Full<Bytes>> {
    build_response(
        Response::builder().status(StatusCode::NOT_FOUND).header("x-error-code", code),
        Bytes::new(),
    )
}

fn build_response(answer: Answer, bytes: Bytes) -> Response<Full<Bytes>> {
    answer.body(Full::new(bytes)).expect("its headers are legal")
}
