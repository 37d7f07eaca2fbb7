//! A real S3 server (`s3s-fs`) for tests: on a free port of loopback, over a directory of its
//! own, with authentication; it can be killed in the middle of a request and started again,
//! and made to answer badly.
//!
//! Not for tests of atomicity: its conditional puts race.

mod faults;

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

use faults::Weather;
pub use faults::{FaultCounts, Faults};

const BUCKET: &str = "fleet";
const ACCESS_KEY: &str = "test-access-key";
const SECRET_KEY: &str = "test-secret-key";

/// Runs on threads of its own until killed or dropped.
pub struct S3Server {
    root: TempDir,
    address: SocketAddr,
    runtime: Option<Runtime>,
    seen: Seen,
}

/// What a server's threads share with the test.
#[derive(Clone, Default)]
struct Seen {
    requests: Arc<Mutex<Vec<String>>>,
    /// Those of them that copied an object within the store.
    copied: Arc<Mutex<Vec<String>>>,
    /// Requests that showed a bearer, which S3 has no use for.
    bearers: Arc<AtomicUsize>,
    weather: Arc<Mutex<Weather>>,
}

impl S3Server {
    /// # Errors
    /// When no directory, thread or port can be had.
    pub fn start() -> io::Result<Self> {
        Self::start_on(Ipv4Addr::LOCALHOST)
    }

    /// As `start`, on another address of this machine.
    ///
    /// # Errors
    /// As `start`.
    pub fn start_on(host: Ipv4Addr) -> io::Result<Self> {
        let root = tempfile::tempdir()?;
        fs::create_dir(root.path().join(BUCKET))?;
        let address = SocketAddr::from((host, 0));
        let mut server = Self { root, address, runtime: None, seen: Seen::default() };
        server.restart()?;
        Ok(server)
    }

    /// What to give `Store::open`, or `FLOTILLA_STORE`.
    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/store")
    }

    /// What the environment of a client must hold, beside the URL.
    pub fn env(&self) -> BTreeMap<String, String> {
        [
            ("AWS_ENDPOINT", format!("http://{}", self.address)),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
    }

    /// Where the objects under `url()` are files, for tests that damage them.
    pub fn dir(&self) -> PathBuf {
        self.root.path().join(BUCKET).join("store")
    }

    /// `METHOD /path?query` of every request so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.seen.requests).clone()
    }

    /// Those of them that copied an object to another key, without its bytes.
    pub fn copied(&self) -> Vec<String> {
        lock(&self.seen.copied).clone()
    }

    /// How many requests so far showed a bearer, which is nobody's business here.
    pub fn bearers(&self) -> usize {
        self.seen.bearers.load(Ordering::Relaxed)
    }

    /// From now on it answers so.
    pub fn set_faults(&self, faults: Faults) {
        lock(&self.seen.weather).faults = faults;
    }

    /// What went wrong so far because it was told to.
    pub fn fault_counts(&self) -> FaultCounts {
        lock(&self.seen.weather).counts
    }

    /// Breaks all connections and closes the port, without finishing anything.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            lock(&self.seen.weather).dead = true;
            // On a thread of its own, for this may be an async test, where waiting is refused.
            let stopped = thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            let _ = stopped.join();
        }
    }

    /// Serves the same objects on the same port again.
    ///
    /// # Errors
    /// When the port cannot be had.
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
        let seen = self.seen.clone();
        lock(&seen.weather).dead = false;
        runtime.spawn(async move { serve(listener, service, seen).await });
        self.runtime = Some(runtime);
        Ok(())
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // Also where blocking is not allowed, in an async test.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn service(root: &Path) -> io::Result<s3s::service::S3Service> {
    let files =
        s3s_fs::FileSystem::new(root).map_err(|error| io::Error::other(format!("{error:?}")))?;
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
    Ok(service.build())
}

async fn serve(listener: net::TcpListener, service: s3s::service::S3Service, seen: Seen) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((socket, _)) = listener.accept().await {
        let (service, seen) = (service.clone(), seen.clone());
        let noting = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            let asked = format!("{} {}", request.method(), request.uri());
            if request.headers().contains_key("x-amz-copy-source") {
                lock(&seen.copied).push(asked.clone());
            }
            lock(&seen.requests).push(asked);
            let shown = request.headers().get("authorization");
            if shown.is_some_and(|shown| shown.as_bytes().starts_with(b"Bearer")) {
                seen.bearers.fetch_add(1, Ordering::Relaxed);
            }
            let (service, weather) = (service.clone(), seen.weather.clone());
            async move { faults::answer(service, &weather, request).await }
        });
        tokio::spawn(async move {
            // A connection that breaks is the client's to report.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), noting)
                .await;
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
