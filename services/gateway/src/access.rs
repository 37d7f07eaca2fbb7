//! Who may call: looks at the bearer of every request, before anything else does. In an open
//! fleet whoever can reach the port may do everything, and this looks at nothing.

mod cut;
mod rate;
pub(crate) mod table;

use std::{
    convert::Infallible,
    future::poll_fn,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use authority::{BearerError, Caller};
use control::{Members, View};
use tokio::{sync::watch, time::timeout};
use tonic::{
    Code,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{HeaderMap, Request, Response, StatusCode, header},
    },
    transport::server::TcpConnectInfo,
};
use tower_layer::Layer;

use crate::{
    json::{self, Form},
    status::refused,
};

use self::{
    rate::{Rate, Rates},
    table::{Need, need},
};

/// Whom calls are let through for, and how often.
#[derive(Clone)]
pub(crate) struct Access {
    gate: Option<Arc<Gate>>,
}

/// Of a closed fleet.
struct Gate {
    view: watch::Receiver<View>,
    started: Instant,
    members: Mutex<Rates<String>>,
    strangers: Mutex<Rates<IpAddr>>,
    joins: Mutex<Rates<IpAddr>>,
}

/// A command that looks at everything, or a box that fetches many small files.
const MEMBER_RATE: Rate = Rate { burst: 2000, interval: Duration::from_millis(5) };
/// Those who show nothing, by address: health checks, renewals, mistakes.
const STRANGER_RATE: Rate = Rate { burst: 100, interval: Duration::from_millis(100) };
/// Joins alone, by address: nobody tries secrets, and a rack joins at once.
const JOIN_RATE: Rate = Rate { burst: 30, interval: Duration::from_secs(2) };
/// Whoever is not among so many shares one rate with the others.
const CALLERS_MAX: usize = 10_000;

/// How long a call waits for the gateway to have read who is a member.
const READ_LIMIT: Duration = Duration::from_secs(5);

const JOIN: &str = "/flotilla.v1.Members/Join";

#[derive(Debug, thiserror::Error)]
enum Denied {
    #[error(
        "this fleet is closed: show a bearer (authorization: Bearer …), as the commands do with --dir KIT; `flotilla user create` or `flotilla join` makes a kit (K101)"
    )]
    NoBearer,
    #[error(transparent)]
    Bearer(#[from] BearerError),
    #[error("{0}")]
    Void(String),
    #[error(
        "{name} has {is}, and this needs {needs}; `flotilla user create NAME --scope {scope}` makes a kit that may (K104)"
    )]
    Scope { name: String, is: String, needs: String, scope: String },
    #[error("there is no {path}, or nobody may call it; is this flotilla older than yours? (G108)")]
    NoSuchMethod { path: String },
    #[error("too many requests; try again in {} ms (G104)", wait.as_millis().max(1))]
    TooMany { wait: Duration },
    #[error("the gateway has not read yet who is a member; try again in a second (G105)")]
    NotYet,
}

impl Denied {
    fn code(&self) -> Code {
        match self {
            Self::NoBearer | Self::Bearer(_) | Self::Void(_) => Code::Unauthenticated,
            Self::Scope { .. } => Code::PermissionDenied,
            Self::NoSuchMethod { .. } => Code::Unimplemented,
            Self::TooMany { .. } => Code::ResourceExhausted,
            Self::NotYet => Code::Unavailable,
        }
    }

    /// As whoever asked understands it: gRPC, JSON, or HTTP.
    fn answer(&self, headers: &HeaderMap) -> Response<Body> {
        let is_grpc = headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
        let status = refused(self.code(), self.to_string());
        let mut answer = if is_grpc {
            status.into_http()
        } else if let Some(form) = Form::of(headers) {
            form.refusal(&status)
        } else {
            let mut answer = json::plain(&status);
            if let Self::NoSuchMethod { .. } = self {
                // It was a page that was asked for, for all that is known.
                *answer.status_mut() = StatusCode::NOT_FOUND;
            }
            answer
        };
        if let Self::TooMany { wait } = self {
            let seconds = wait.as_secs() + 1;
            answer.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        answer
    }
}

impl Access {
    /// Everybody may do everything.
    pub(crate) fn open() -> Self {
        Self { gate: None }
    }

    pub(crate) fn closed(view: watch::Receiver<View>) -> Self {
        let gate = Gate {
            view,
            started: Instant::now(),
            members: Mutex::new(Rates::new(MEMBER_RATE, CALLERS_MAX)),
            strangers: Mutex::new(Rates::new(STRANGER_RATE, CALLERS_MAX)),
            joins: Mutex::new(Rates::new(JOIN_RATE, CALLERS_MAX)),
        };
        Self { gate: Some(Arc::new(gate)) }
    }
}

/// Keeps what calls are judged by as it is, until dropped; for ever in an open fleet.
pub(crate) async fn attend(members: Option<&Members>, view: &watch::Sender<View>) -> Infallible {
    if let Some(members) = members {
        members.attend(view).await;
    }
    std::future::pending().await
}

impl Gate {
    /// Who calls, if anybody has to; and that he may.
    fn admit(&self, request: &Request<Body>) -> Result<Option<Caller>, Denied> {
        let path = request.uri().path();
        let peer = peer(request);
        let Some(need) = need(path) else {
            self.stranger(peer)?;
            return Err(Denied::NoSuchMethod { path: path.chars().take(100).collect() });
        };
        if need == Need::Nothing {
            if path == JOIN {
                take(&self.joins, peer, self.started.elapsed())?;
            }
            self.stranger(peer)?;
            return Ok(None);
        }
        let caller = match self.caller(request.headers()) {
            Ok(caller) => caller,
            Err(denied) => {
                self.stranger(peer)?;
                return Err(denied);
            }
        };
        take(&self.members, caller.name.to_string(), self.started.elapsed())?;
        match need {
            Need::Scope(scope) if !need.is_met_by(&caller) => Err(Denied::Scope {
                name: caller.name.to_string(),
                is: caller.scope.map_or("no scope".into(), |scope| format!("the scope {scope}")),
                needs: scope.to_string(),
                scope: scope.to_string(),
            }),
            _ => Ok(Some(caller)),
        }
    }

    /// Who calls in the gateway's first moments waits.
    async fn has_read(&self) {
        let mut view = self.view.clone();
        // What came of it is looked at again.
        let _ = timeout(READ_LIMIT, view.wait_for(is_read)).await;
    }

    fn stranger(&self, peer: IpAddr) -> Result<(), Denied> {
        take(&self.strangers, peer, self.started.elapsed())
    }

    fn caller(&self, headers: &HeaderMap) -> Result<Caller, Denied> {
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, bearer)| bearer.trim())
            .ok_or(Denied::NoBearer)?;
        let view = self.view.borrow();
        if !is_read(&view) {
            return Err(Denied::NotYet);
        }
        let caller = Caller::of(bearer, &view.issuers, now_s())?;
        match view.roll.objection(&caller) {
            Some(objection) => Err(Denied::Void(objection.to_string())),
            None => Ok(caller),
        }
    }
}

fn is_read(view: &View) -> bool {
    view.roll.is_complete() && !view.issuers.is_empty()
}

fn take<K: Eq + std::hash::Hash>(
    rates: &Mutex<Rates<K>>,
    who: K,
    now: Duration,
) -> Result<(), Denied> {
    // A count that a panic left behind is still one.
    let mut rates = rates.lock().unwrap_or_else(PoisonError::into_inner);
    rates.take(who, now).map_err(|wait| Denied::TooMany { wait })
}

/// Whoever has an IPv6 address has a network full of them.
fn peer(request: &Request<Body>) -> IpAddr {
    let info = request.extensions().get::<TcpConnectInfo>();
    match info.and_then(TcpConnectInfo::remote_addr).map(|address| address.ip().to_canonical()) {
        Some(IpAddr::V6(address)) => {
            let network = u128::from(address) & !u128::from(u64::MAX);
            IpAddr::V6(network.into())
        }
        Some(address) => address,
        None => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl<S> Layer<S> for Access {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, access: self.clone() }
    }
}

/// The routes, behind the gate.
#[derive(Clone)]
pub(crate) struct Guarded<S> {
    inner: S,
    access: Access,
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Some(gate) = &self.access.gate else { return Box::pin(self.inner.call(request)) };
        let admitted = gate.admit(&request);
        if !matches!(admitted, Err(Denied::NotYet)) {
            return pass(gate, &mut self.inner, admitted, request);
        }
        let (gate, mut inner) = (gate.clone(), self.inner.clone());
        Box::pin(async move {
            gate.has_read().await;
            let admitted = gate.admit(&request);
            let Ok(()) = poll_fn(|cx| inner.poll_ready(cx)).await;
            pass(&gate, &mut inner, admitted, request).await
        })
    }
}

fn pass<S>(
    gate: &Gate,
    inner: &mut S,
    admitted: Result<Option<Caller>, Denied>,
    mut request: Request<Body>,
) -> BoxFuture<Response<Body>, Infallible>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    match admitted {
        Err(denied) => {
            log(request.uri().path(), &denied);
            let answer = denied.answer(request.headers());
            Box::pin(async move { Ok(answer) })
        }
        Ok(None) => Box::pin(inner.call(request)),
        Ok(Some(caller)) => {
            let over = cut::over(gate.view.clone(), caller.clone());
            request.extensions_mut().insert(caller);
            let headers = request.headers().clone();
            let answering = inner.call(request);
            Box::pin(cut::until(over, headers, answering))
        }
    }
}

/// Whoever comes too often does not fill our log as well.
fn log(path: &str, denied: &Denied) {
    let (code, path) = (denied.code(), path.chars().take(100).collect::<String>());
    match denied {
        Denied::TooMany { .. } => tracing::debug!(path, ?code, %denied, "denied"),
        _ => tracing::info!(path, ?code, %denied, "denied"),
    }
}
