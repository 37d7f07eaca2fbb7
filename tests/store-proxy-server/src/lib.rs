//! The store proxy of a gateway for tests: the real routes on a free loopback port, without the
//! rest of the gateway. It can be killed during a request and restarted. The bearer is the identity
//! of the caller: `box-1.trainer`, `ann.operator`, `box-2.trainer+watcher`.

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

/// A running store proxy, on its own threads until it is killed or dropped.
pub struct StoreProxyServer {
    url: String,
    env: BTreeMap<String, String>,
    bearers: TempDir,
    address: SocketAddr,
    runtime: Option<Runtime>,
    shared: SharedState,
}

/// State that its threads share with the test.
#[derive(Clone, Default)]
struct SharedState {
    requests: Arc<Mutex<Vec<String>>>,
    blocks_redirects: Arc<AtomicBool>,
}

impl StoreProxyServer {
    /// Starts a proxy for the store with this URL.
    ///
    /// # Errors
    /// If the server cannot be started or the store cannot be opened.
    pub fn start(url: &str, env: BTreeMap<String, String>) -> io::Result<Self> {
        let mut server = Self {
            url: url.to_owned(),
            env,
            bearers: tempfile::tempdir()?,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            runtime: None,
            shared: SharedState::default(),
        };
        server.restart()?;
        Ok(server)
    }

    /// Returns the client configuration of the caller with this bearer.
    ///
    /// # Errors
    /// If the bearer cannot be written.
    pub fn gateway_store(&self, caller: &str) -> io::Result<GatewayStore> {
        let bearer = self.bearers.path().join(caller);
        fs::write(&bearer, format!("{caller}\n"))?;
        Ok(GatewayStore { gateway: self.address.to_string(), ca: None, bearer: Some(bearer) })
    }

    /// Returns `METHOD /path?query` of every request so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.shared.requests).clone()
    }

    /// Redirects to an unreachable address from now on, as on a host that only reaches the gateway.
    pub fn shut_elsewhere(&self) {
        self.shared.blocks_redirects.store(true, Ordering::Relaxed);
    }

    /// Breaks all connections and closes the port.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // In a thread of its own, because async tests must not block.
            let stopped = thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            let _ = stopped.join();
        }
    }

    /// Opens the same store again behind the same port.
    ///
    /// # Errors
    /// If the port or the store is not available.
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("store-proxy")
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
        let shared = self.shared.clone();
        runtime.spawn(async move { serve(listener, routes, shared).await });
        self.runtime = Some(runtime);
        Ok(())
    }
}

impl Drop for StoreProxyServer {
    fn drop(&mut self) {
        // Works in async tests too, which must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(listener: net::TcpListener, routes: Router, shared: SharedState) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let SharedState { requests, blocks_redirects } = shared;
    let rewrite_redirects = axum::middleware::map_response(move |mut answer: Response| {
        if let Some(location) = answer.headers_mut().get_mut("location")
            && blocks_redirects.load(Ordering::Relaxed)
        {
            *location = HeaderValue::from_static("http://127.0.0.1:9/nobody");
        }
        async { answer }
    });
    let authenticate = axum::middleware::map_request(move |mut request: Request| {
        lock(&requests).push(format!("{} {}", request.method(), request.uri()));
        let authorization = request
            .headers()
            .get("authorization")
            .and_then(|authorization| authorization.to_str().ok());
        if let Some(caller) = authorization
            .and_then(|authorization| parse_caller(authorization.strip_prefix("Bearer ")?))
        {
            request.extensions_mut().insert(caller);
        }
        async { request }
    });
    let routes = routes.layer(authenticate).layer(rewrite_redirects);
    while let Ok((socket, _)) = listener.accept().await {
        let service = TowerToHyperService::new(routes.clone());
        tokio::spawn(async move {
            // Clients report broken connections.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

fn parse_caller(bearer: &str) -> Option<GatewayCaller> {
    let (name, parts) = bearer.rsplit_once('.')?;
    let name = AgentId::new(name).ok()?;
    let (scope, roles, public_key) = (None, [].into(), String::new());
    let (expires_at, is_recorded) = (None, false);
    let mut caller = GatewayCaller { name, scope, roles, public_key, expires_at, is_recorded };
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
