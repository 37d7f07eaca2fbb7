//! A model hub for tests. It serves the files of a directory on a free loopback port, and writes
//! uploads there, in the way that the client libraries of Hugging Face expect.
//!
//! A model is `<org>/<name>/` below the directory. It has one commit, [`COMMIT`], and the branch
//! `main`. Files of [`LFS_BYTES`] or more are in large file storage, which is on a port of its own.
//! No file is in Xet.

mod downloads;
mod uploads;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs, io,
    net::{Ipv4Addr, TcpListener as Listener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response, StatusCode, body::Incoming, header, http::response::Builder as Answer,
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use tokio::{net::TcpListener, runtime::Runtime};

/// The commit of every model.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The size from which a file is in large file storage.
pub const LFS_BYTES: usize = 1024;
/// The size of a part of an upload; larger files are uploaded in several.
pub const PART_BYTES: usize = 64 << 10;

type HubResponse = Response<Full<Bytes>>;

/// A running hub, on its own thread until it is dropped.
pub struct HubServer {
    state: Arc<HubState>,
    runtime: Option<Runtime>,
}

struct HubState {
    models: PathBuf,
    hub_url: String,
    storage_url: String,
    records: Mutex<HubRecords>,
}

#[derive(Default)]
struct HubRecords {
    requests: Vec<RecordedRequest>,
    /// Objects of large file storage by SHA-256, and parts of them by `<SHA-256>/<number>`.
    objects: BTreeMap<String, Bytes>,
}

#[derive(Clone)]
struct RecordedRequest {
    line: String,
    has_token: bool,
}

/// A request and its body.
struct HubRequest {
    head: hyper::http::request::Parts,
    body: Bytes,
}

impl HubServer {
    /// Starts a hub for the models below a directory.
    ///
    /// # Errors
    /// If no thread or port is available.
    pub fn start(models: &Path) -> io::Result<Self> {
        let (hub, storage) = (bind_port()?, bind_port()?);
        let url = |listener: &Listener| Ok(format!("http://{}", listener.local_addr()?));
        let (hub_url, storage_url): (_, io::Result<_>) = (url(&hub)?, url(&storage));
        let state = Arc::new(HubState {
            models: models.to_owned(),
            hub_url,
            storage_url: storage_url?,
            records: Mutex::default(),
        });
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.spawn(serve(hub, state.clone(), HubState::respond));
        runtime.spawn(serve(storage, state.clone(), HubState::respond_as_storage));
        Ok(Self { state, runtime: Some(runtime) })
    }

    /// Returns the URL for `HF_ENDPOINT`.
    pub fn url(&self) -> String {
        self.state.hub_url.clone()
    }

    /// Returns `METHOD /path` of every request so far, also of those to large file storage, whose
    /// paths start with `/storage/`.
    pub fn requests(&self) -> Vec<String> {
        self.state.records().requests.iter().map(|request| request.line.clone()).collect()
    }

    /// Returns the requests that had a token.
    pub fn requests_with_token(&self) -> Vec<String> {
        let records = self.state.records();
        let with_token = records.requests.iter().filter(|request| request.has_token);
        with_token.map(|request| request.line.clone()).collect()
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

fn bind_port() -> io::Result<Listener> {
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn serve(
    listener: Listener,
    state: Arc<HubState>,
    respond: fn(&HubState, &HubRequest) -> HubResponse,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((stream, _)) = listener.accept().await {
        let state = state.clone();
        let answer = move |request: Request<Incoming>| {
            let state = state.clone();
            async move {
                let (head, body) = request.into_parts();
                // A body that breaks off is empty.
                let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                let line = format!("{} {}", head.method, head.uri.path());
                let has_token = head.headers.contains_key(header::AUTHORIZATION);
                state.records().requests.push(RecordedRequest { line, has_token });
                Ok::<_, Infallible>(respond(&state, &HubRequest { head, body }))
            }
        };
        tokio::spawn(async move {
            let builder = Builder::new(TokioExecutor::new());
            // A client that disconnects is no failure.
            let _ = builder.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
        });
    }
}

impl HubState {
    fn records(&self) -> MutexGuard<'_, HubRecords> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn respond(&self, request: &HubRequest) -> HubResponse {
        match request.path_parts().as_slice() {
            ["api", "repos", "create"] => self.create_repository(request),
            ["api", "models", org, name, call, "main"] => {
                self.answer_upload_call(&format!("{org}/{name}"), call, request)
            }
            [_, _, "info", "lfs", "objects", "batch"] => self.answer_batch(request),
            ["lfs", call] => self.finish_object(call, request),
            [org, name, "resolve", revision, file @ ..] => {
                self.describe_file(&[org, name], revision, &file.join("/"), request)
            }
            _ => not_found("RepoNotFound"),
        }
    }

    fn respond_as_storage(&self, request: &HubRequest) -> HubResponse {
        match request.path_parts().as_slice() {
            ["storage", "files", file @ ..] => match fs::read(self.models.join(file.join("/"))) {
                Ok(bytes) => downloads::send_bytes(Response::builder(), request, bytes),
                Err(_) => not_found("EntryNotFound"),
            },
            ["storage", "objects", key @ ..] => self.store_object(&key.join("/"), request),
            _ => not_found("EntryNotFound"),
        }
    }
}

impl HubRequest {
    fn path_parts(&self) -> Vec<&str> {
        self.head.uri.path().trim_start_matches('/').split('/').collect()
    }
}

fn not_found(code: &str) -> HubResponse {
    respond_empty(Response::builder().status(StatusCode::NOT_FOUND).header("x-error-code", code))
}

fn respond_empty(answer: Answer) -> HubResponse {
    build_response(answer, Bytes::new())
}

fn build_response(answer: Answer, bytes: Bytes) -> HubResponse {
    answer.body(Full::new(bytes)).expect("its headers are legal")
}
