//! A gateway's door to a store, for tests: the real routes on a free port of loopback, without the
//! rest of a gateway. It can be killed in the middle of a request and started again. Who calls is
//! what a bearer says: `box-1.trainer`, `ann.operator`, `box-2.trainer+watcher`.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{self, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use axum::{Router, extract::Request, http::HeaderValue, response::Response};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use identity::{GatewayCaller, MemberRole, UserScope};
use store::{GatewayStore, Store};
use tempfile::TempDir;
use tokio::{net::TcpListener, runtime::Runtime};
use wire::AgentId;

/// Runs on threads of its own until killed or dropped.
pub struct DoorServer {
    url: String,
    env: BTreeMap<String, String>,
    bearers: TempDir,
    address: SocketAddr,
    runtime: Option<Runtime>,
    seen: Seen,
}

/// What its threads share with the test.
#[derive(Clone, Default)]
struct Seen {
    requests: Arc<Mutex<Vec<String>>>,
    elsewhere_is_shut: Arc<AtomicBool>,
}

impl DoorServer {
    /// Before the store of that address.
    ///
    /// # Errors
    /// When no thread or port can be had, or the store cannot be opened.
    pub fn start(url: &str, env: BTreeMap<String, String>) -> io::Result<Self> {
        let mut server = Self {
            url: url.to_owned(),
            env,
            bearers: tempfile::tempdir()?,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            runtime: None,
            seen: Seen::default(),
        };
        server.restart()?;
        Ok(server)
    }

    /// How whoever shows that bearer reaches it.
    ///
    /// # Errors
    /// When the bearer cannot be written.
    pub fn door(&self, who: &str) -> io::Result<GatewayStore> {
        let bearer = self.bearers.path().join(who);
        fs::write(&bearer, format!("{who}\n"))?;
        Ok(GatewayStore { gateway: self.address.to_string(), ca: None, bearer: Some(bearer) })
    }

    /// `METHOD /path?query` of every request so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.seen.requests).clone()
    }

    /// From now on it redirects to where nobody listens, as from a box that reaches nothing but
    /// the gateway.
    pub fn shut_elsewhere(&self) {
        self.seen.elsewhere_is_shut.store(true, Ordering::Relaxed);
    }

    /// Breaks all connections and closes the port, without finishing anything.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // On a thread of its own, for this may be an async test, where waiting is refused.
            let stopped = thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            let _ = stopped.join();
        }
    }

    /// Opens the same store behind the same port again.
    ///
    /// # Errors
    /// When the port or the store cannot be had.
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("door-server")
            .enable_all()
            .build()?;
        let (url, env) = (self.url.clone(), self.env.clone());
        let opening = runtime.spawn(async move { Store::open_with_env(&url, env).await });
        let store = thread::scope(|scope| scope.spawn(|| runtime.block_on(opening)).join());
        let store = store.map_err(|_| io::Error::other("opening the store panicked"))?;
        let store = store.map_err(io::Error::other)?.map_err(io::Error::other)?;
        let listener = net::TcpListener::bind(self.address)?;
        listener.set_nonblocking(true)?;
        self.address = listener.local_addr()?;
        let routes = gateway::store_proxy::build_routes(&store);
        let seen = self.seen.clone();
        runtime.spawn(async move { serve(listener, routes, seen).await });
        self.runtime = Some(runtime);
        Ok(())
    }
}

impl Drop for DoorServer {
    fn drop(&mut self) {
        // Also where blocking is not allowed, in an async test.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(listener: net::TcpListener, routes: Router, seen: Seen) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let Seen { requests, elsewhere_is_shut } = seen;
    let sent = axum::middleware::map_response(move |mut answer: Response| {
        if let Some(place) = answer.headers_mut().get_mut("location")
            && elsewhere_is_shut.load(Ordering::Relaxed)
        {
            *place = HeaderValue::from_static("http://127.0.0.1:9/nobody");
        }
        async { answer }
    });
    let known = axum::middleware::map_request(move |mut request: Request| {
        lock(&requests).push(format!("{} {}", request.method(), request.uri()));
        let shown = request.headers().get("authorization").and_then(|shown| shown.to_str().ok());
        if let Some(caller) = shown.and_then(|shown| caller(shown.strip_prefix("Bearer ")?)) {
            request.extensions_mut().insert(caller);
        }
        async { request }
    });
    let routes = routes.layer(known).layer(sent);
    while let Ok((socket, _)) = listener.accept().await {
        let service = TowerToHyperService::new(routes.clone());
        tokio::spawn(async move {
            // A connection that breaks is the client's to report.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

fn caller(bearer: &str) -> Option<GatewayCaller> {
    let (name, parts) = bearer.rsplit_once('.')?;
    let name = AgentId::new(name).ok()?;
    let (scope, roles, expires_at) = (None, [].into(), None);
    let mut caller = GatewayCaller { name, scope, roles, public_key: String::new(), expires_at };
    for part in parts.split('+') {
        match part {
            "reader" => caller.scope = Some(UserScope::Reader),
            "operator" => caller.scope = Some(UserScope::Operator),
            "admin" => caller.scope = Some(UserScope::Admin),
            role => {
                caller.roles.insert(role.parse::<MemberRole>().ok()?);
            }
        }
    }
    Some(caller)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
