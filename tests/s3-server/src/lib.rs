//! A real S3 server (`s3s-fs`) for tests, with authentication, on a free loopback port over its own
//! directory. It can be killed during a request and restarted, and it can inject faults.
//!
//! Do not use it to test atomicity: its conditional puts have races.
//!
//! [`GarageServer`] is a server of others, to test against its behaviour too.

mod faults;
mod garage;

use std::{
    collections::BTreeMap,
    fs, io,
    net::{self, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use s3s::{auth::SimpleAuth, service::S3ServiceBuilder};
use tempfile::TempDir;
use tokio::{net::TcpListener, runtime::Runtime};

use faults::FaultState;
pub use faults::{FaultCounts, Faults};
pub use garage::GarageServer;

const BUCKET: &str = "fleet";
const ACCESS_KEY: &str = "test-access-key";
const SECRET_KEY: &str = "test-secret-key";

/// A running S3 server, on its own threads until it is killed or dropped.
pub struct S3Server {
    root: TempDir,
    address: SocketAddr,
    runtime: Option<Runtime>,
    shared: SharedState,
}

/// State that the server's threads share with the test.
#[derive(Clone, Default)]
struct SharedState {
    requests: Arc<Mutex<Vec<String>>>,
    /// Requests that copied an object within the store.
    copied: Arc<Mutex<Vec<String>>>,
    /// The number of requests with a bearer token, which S3 does not use.
    bearers: Arc<AtomicUsize>,
    fault_state: Arc<Mutex<FaultState>>,
}

impl S3Server {
    /// Starts a server on loopback.
    ///
    /// # Errors
    /// If no directory, thread or port is available.
    pub fn start() -> io::Result<Self> {
        Self::start_on(Ipv4Addr::LOCALHOST)
    }

    /// Starts a server on another address of this machine.
    ///
    /// # Errors
    /// See `start`.
    pub fn start_on(host: Ipv4Addr) -> io::Result<Self> {
        let root = tempfile::tempdir()?;
        fs::create_dir(root.path().join(BUCKET))?;
        let address = SocketAddr::from((host, 0));
        let mut server = Self { root, address, runtime: None, shared: SharedState::default() };
        server.restart()?;
        Ok(server)
    }

    /// Returns the URL for `Store::open` or `FLOTILLA_STORE`.
    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/store")
    }

    /// Returns the environment variables that a client needs.
    pub fn env(&self) -> BTreeMap<String, String> {
        client_variables(self.address, ACCESS_KEY, SECRET_KEY, "us-east-1")
    }

    /// Returns the directory with the objects below `url()`, for tests that damage them.
    pub fn dir(&self) -> PathBuf {
        self.root.path().join(BUCKET).join("store")
    }

    /// Returns `METHOD /path?query` of every request so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.shared.requests).clone()
    }

    /// Returns the requests that copied an object to another key on the server.
    pub fn copied(&self) -> Vec<String> {
        lock(&self.shared.copied).clone()
    }

    /// Returns the number of requests so far that contained a bearer token.
    pub fn bearers(&self) -> usize {
        self.shared.bearers.load(Ordering::Relaxed)
    }

    /// Injects these faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        lock(&self.shared.fault_state).faults = faults;
    }

    /// Returns the number of faults injected so far.
    pub fn fault_counts(&self) -> FaultCounts {
        lock(&self.shared.fault_state).counts
    }

    /// Breaks all connections and closes the port.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            lock(&self.shared.fault_state).killed = true;
            // In a thread of its own, because async tests must not block.
            let stopped = thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            let _ = stopped.join();
        }
    }

    /// Serves the same objects on the same port again.
    ///
    /// # Errors
    /// If the port is not available.
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("s3-server")
            .enable_all()
            .build()?;
        let listener = net::TcpListener::bind(self.address)?;
        listener.set_nonblocking(true)?;
        self.address = listener.local_addr()?;
        let service = service(self.root.path())?;
        let shared = self.shared.clone();
        lock(&shared.fault_state).killed = false;
        runtime.spawn(async move { serve(listener, service, shared).await });
        self.runtime = Some(runtime);
        Ok(())
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // Works in async tests too, which must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns the environment variables of a client with these keys.
fn client_variables(
    address: SocketAddr,
    access_key: &str,
    secret_key: &str,
    region: &str,
) -> BTreeMap<String, String> {
    [
        ("AWS_ENDPOINT", format!("http://{address}")),
        ("AWS_ACCESS_KEY_ID", access_key.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", secret_key.to_owned()),
        ("AWS_REGION", region.to_owned()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

fn service(root: &Path) -> io::Result<s3s::service::S3Service> {
    let files =
        s3s_fs::FileSystem::new(root).map_err(|error| io::Error::other(format!("{error:?}")))?;
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
    Ok(service.build())
}

async fn serve(listener: net::TcpListener, service: s3s::service::S3Service, shared: SharedState) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((socket, _)) = listener.accept().await {
        let (service, shared) = (service.clone(), shared.clone());
        let handler = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            let line = format!("{} {}", request.method(), request.uri());
            if request.headers().contains_key("x-amz-copy-source") {
                lock(&shared.copied).push(line.clone());
            }
            lock(&shared.requests).push(line);
            let authorization = request.headers().get("authorization");
            if authorization
                .is_some_and(|authorization| authorization.as_bytes().starts_with(b"Bearer"))
            {
                shared.bearers.fetch_add(1, Ordering::Relaxed);
            }
            let (service, fault_state) = (service.clone(), shared.fault_state.clone());
            async move { faults::respond(service, &fault_state, request).await }
        });
        tokio::spawn(async move {
            // Clients report broken connections.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), handler)
                .await;
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
