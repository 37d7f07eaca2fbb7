//! A model hub for tests. It serves the files of a directory on a free loopback port, and writes
//! uploads there, in the way that the client libraries of Hugging Face expect.
//!
//! A model is `<org>/<name>/` below the directory, with the branch `main` at [`COMMIT`]; another
//! branch is `<org>/<name>@<branch>/`. A commit replaces the files of its branch. A data set is
//! `datasets/<org>/<name>/`; `datasets/<org>/<name>.parquet/` is its branch `refs/convert/parquet`,
//! with [`CONVERTED_COMMIT`]. A data set whose name begins with `private-` needs a token. Files of
//! [`LFS_BYTES`] or more are in large file storage, which is on a port of its own. No file is in Xet.

mod branches;
mod datasets;
mod downloads;
mod uploads;

use std::{
    collections::{BTreeMap, BTreeSet},
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
    Method, Request, Response, StatusCode, body::Incoming, header,
    http::response::Builder as Answer, service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime};

/// The commit of every model before the first upload, and of the default branch of every data set.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The commit of the branch `refs/convert/parquet` of every data set.
pub const CONVERTED_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
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
    /// The newest commit of a branch, by repository and branch. Absent: [`COMMIT`].
    heads: BTreeMap<(String, String), String>,
    /// Private repositories.
    private: BTreeSet<String>,
    refusals: Vec<PlannedRefusal>,
    /// The old and the new name of renamed repositories.
    renamed: Vec<(String, String)>,
    /// Lists say that files are empty.
    hides_sizes: bool,
    /// The only token that may write; absent: any.
    token: Option<String>,
}

/// Requests that are refused.
struct PlannedRefusal {
    /// A part of their paths.
    path: String,
    status: u16,
    message: String,
    /// The number of them that are left.
    times: usize,
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

    /// Refuses the next requests whose path contains `path`.
    pub fn refuse_next(&self, path: &str, times: usize, status: u16, message: &str) {
        let (path, message) = (path.to_owned(), message.to_owned());
        self.state.records().refusals.push(PlannedRefusal { path, status, message, times });
    }

    /// Redirects requests for a repository to its new name.
    pub fn rename_repository(&self, old: &str, new: &str) {
        self.state.records().renamed.push((old.to_owned(), new.to_owned()));
    }

    /// Lists the files of data sets without their sizes from now on.
    pub fn hide_sizes(&self) {
        self.state.records().hides_sizes = true;
    }

    /// Refuses other tokens for writing.
    pub fn require_token(&self, token: &str) {
        self.state.records().token = Some(format!("Bearer {token}"));
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
                let request = HubRequest { head, body };
                let refused = state.refuse_request(&request);
                Ok::<_, Infallible>(refused.unwrap_or_else(|| respond(&state, &request)))
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

    /// Returns an error for a planned refusal or another token than the required one, and a redirection
    /// for the old name of a repository.
    fn refuse_request(&self, request: &HubRequest) -> Option<HubResponse> {
        let mut records = self.records();
        let path = request.head.uri.path();
        let find_renamed = |(old, _): &&(String, String)| path.contains(&format!("/{old}/"));
        if let Some((old, new)) = records.renamed.iter().find(find_renamed) {
            let place = request.head.uri.to_string().replacen(old, new, 1);
            let answer = Response::builder().status(StatusCode::TEMPORARY_REDIRECT);
            return Some(respond_empty(answer.header(header::LOCATION, place)));
        }
        let mut planned = records.refusals.iter_mut();
        if let Some(planned) = planned.find(|it| it.times > 0 && path.contains(&it.path)) {
            planned.times -= 1;
            let status = StatusCode::from_u16(planned.status).expect("a legal status");
            return Some(refuse(status, &planned.message));
        }
        let token = request.head.headers.get(header::AUTHORIZATION);
        let is_wrong = records.token.as_ref().is_some_and(|it| token.is_none_or(|had| had != it));
        let writes = path.starts_with("/api/") && request.head.method == Method::POST;
        let message = "Invalid credentials in Authorization header";
        (is_wrong && writes).then(|| refuse(StatusCode::UNAUTHORIZED, message))
    }

    fn respond(&self, request: &HubRequest) -> HubResponse {
        match request.path_parts().as_slice() {
            ["api", "repos", "create"] => self.create_repository(request),
            ["api", "models", org, name, call, revision] => {
                let repo = format!("{org}/{name}");
                match *call {
                    "revision" => self.describe_model(&repo, revision),
                    "tree" => self.list_tree(&repo, revision),
                    "branch" => self.create_branch(&repo, revision),
                    "preupload" | "commit" => {
                        self.answer_upload_call(&repo, (*call, *revision), request)
                    }
                    _ => not_found("EntryNotFound"),
                }
            }
            ["api", "models", org, name] => {
                self.describe_model(&format!("{org}/{name}"), branches::MAIN)
            }
            ["api", "models", ..] => not_found("EntryNotFound"),
            ["api", "datasets", org, name, "revision", revision] => {
                self.list_dataset([org, name], revision, request)
            }
            ["api", "datasets", org, name, "tree", revision] => {
                self.list_dataset_tree([org, name], revision, request)
            }
            ["api", "datasets", org, name] => {
                self.list_dataset([org, name], branches::MAIN, request)
            }
            ["datasets", org, name, "resolve", revision, file @ ..] => {
                self.describe_dataset_file([org, name], revision, &file.join("/"), request)
            }
            [_, _, "info", "lfs", "objects", "batch"] => self.answer_batch(request),
            ["lfs", call] => self.finish_object(call, request),
            [org, name, "resolve", revision, file @ ..] => {
                let repo = format!("{org}/{name}");
                self.describe_model_file(&repo, revision, &file.join("/"), request)
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

fn refuse(status: StatusCode, message: &str) -> HubResponse {
    let body = json!({ "error": message }).to_string();
    build_response(Response::builder().status(status), body.into())
}

fn respond_json(value: &Value) -> HubResponse {
    let answer = Response::builder().header(header::CONTENT_TYPE, "application/json");
    build_response(answer, value.to_string().into())
}

fn respond_empty(answer: Answer) -> HubResponse {
    build_response(answer, Bytes::new())
}

fn build_response(answer: Answer, bytes: Bytes) -> HubResponse {
    answer.body(Full::new(bytes)).expect("its headers are legal")
}
