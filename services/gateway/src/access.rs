//! Access control: checks the bearer of each request before any other layer. In an open fleet every
//! client that can reach the port may do everything, and nothing is checked.

mod body_deadline;
mod rate_limiter;
pub(crate) mod requirements;
mod revocation;

use std::{
    convert::Infallible,
    future::poll_fn,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use control::{MemberRegistry, MembershipView};
use identity::{BearerError, GatewayCaller, UserScope};
use tokio::{sync::watch, time::timeout};
use tonic::{
    Code,
    body::Body,
    codegen::{
        BoxFuture,
        http::{HeaderMap, Request, Response, StatusCode, Uri, header},
    },
};
use wire::clock::unix_seconds;

use crate::{
    connection::{self, ConnectionInfo},
    json::{self, JsonFormat},
    middleware::{InnerService, Middleware},
    status::build_status,
};

use self::{
    body_deadline::RequestSender,
    rate_limiter::{RateLimit, RateLimiter},
    requirements::{AccessRequirement, has_secret, requirement_for},
};

/// The middleware that decides which calls pass, and how often.
///
/// In a closed fleet each request goes through these steps:
///
/// 1. Look up the [`AccessRequirement`] of its path; unknown paths are rejected.
/// 2. If the path is open to all, count the request for its address.
/// 3. Otherwise verify the bearer and count the request for the member.
/// 4. Check the member's scope, add the [`GatewayCaller`] to the request, and forward it.
/// 5. Abort the call if the member's rights end while it is open ([`revocation`]).
#[derive(Clone)]
pub(crate) struct AccessControl {
    /// Absent in an open fleet.
    gate: Option<Arc<AccessGate>>,
}

struct AccessGate {
    /// Members and issuers, updated by [`sync_access`].
    view: watch::Receiver<MembershipView>,
    started: Instant,
    members: Mutex<RateLimiter<String>>,
    /// Requests without a valid bearer.
    unauthenticated: Mutex<RateLimiter<IpAddr>>,
    /// Join tokens and login codes.
    secrets: Mutex<RateLimiter<IpAddr>>,
}

/// Enough for a command that reads everything, or a box that fetches many small files.
const MEMBER_RATE: RateLimit = RateLimit { burst: 2000, interval: Duration::from_millis(5) };
/// Requests without a valid bearer: health checks, renewals, mistakes.
const UNAUTHENTICATED_RATE: RateLimit =
    RateLimit { burst: 100, interval: Duration::from_millis(100) };
/// Too low to guess secrets, high enough for a rack of boxes that join together.
const SECRET_RATE: RateLimit = RateLimit { burst: 30, interval: Duration::from_secs(2) };
/// The callers that are counted separately; all further callers share one rate.
const CALLERS_MAX: usize = 10_000;

const LOAD_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
enum AccessDenied {
    #[error(
        "this fleet is closed: send a bearer (authorization: Bearer …; commands: --dir DIR); create credentials with `flotilla user create` or `flotilla join` (K101)"
    )]
    NoBearer,
    #[error(transparent)]
    Bearer(#[from] BearerError),
    #[error("{0}")]
    Revoked(String),
    #[error(
        "{name} has {is}, and this needs {needs}; an admin makes credentials with `flotilla user create NAME --scope {scope} --out DIR` (K104)"
    )]
    Scope { name: String, is: String, needs: String, scope: String },
    #[error("unknown or disabled path {path}; the gateway may be older than the client (G108)")]
    NoSuchMethod { path: String },
    #[error("too many requests; try again in {} ms (G104)", wait.as_millis().max(1))]
    RateLimited { wait: Duration },
    #[error(
        "the request did not arrive within {limit:?}; send it again, faster or in parts (G102)"
    )]
    Late { limit: Duration },
    #[error("the gateway is still loading the member list; try again in a second (G105)")]
    NotLoaded,
}

impl AccessDenied {
    fn status_code(&self) -> Code {
        match self {
            Self::NoBearer | Self::Bearer(_) | Self::Revoked(_) => Code::Unauthenticated,
            Self::Scope { .. } => Code::PermissionDenied,
            Self::NoSuchMethod { .. } => Code::Unimplemented,
            Self::RateLimited { .. } => Code::ResourceExhausted,
            Self::Late { .. } => Code::DeadlineExceeded,
            Self::NotLoaded => Code::Unavailable,
        }
    }

    /// Answers in the protocol of the request: gRPC, JSON or plain HTTP.
    fn to_response(&self, headers: &HeaderMap) -> Response<Body> {
        let is_grpc = headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
        let status = build_status(self.status_code(), self.to_string());
        let mut answer = if is_grpc {
            status.into_http()
        } else if let Some(form) = JsonFormat::from_headers(headers) {
            form.error_response(&status)
        } else {
            let mut answer = json::plain_response(&status);
            match self {
                // The request may be for a page, so 404 is the expected status.
                Self::NoSuchMethod { .. } => *answer.status_mut() = StatusCode::NOT_FOUND,
                Self::Late { .. } => *answer.status_mut() = StatusCode::REQUEST_TIMEOUT,
                _ => {}
            }
            answer
        };
        if let Self::RateLimited { wait } = self {
            let seconds = wait.as_secs() + 1;
            answer.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        answer
    }
}

/// Refuses a path that the gateway does not have, in the protocol of the request. tonic alone would
/// answer each of them with the status 200, as gRPC demands.
pub(crate) async fn refuse_path(uri: Uri, headers: HeaderMap) -> Response<Body> {
    let path = uri.path().chars().take(100).collect();
    AccessDenied::NoSuchMethod { path }.to_response(&headers)
}

impl AccessControl {
    pub(crate) fn for_open_fleet() -> Self {
        Self { gate: None }
    }

    pub(crate) fn for_closed_fleet(view: watch::Receiver<MembershipView>) -> Self {
        let gate = AccessGate {
            view,
            started: Instant::now(),
            members: Mutex::new(RateLimiter::new(MEMBER_RATE, CALLERS_MAX)),
            unauthenticated: Mutex::new(RateLimiter::new(UNAUTHENTICATED_RATE, CALLERS_MAX)),
            secrets: Mutex::new(RateLimiter::new(SECRET_RATE, CALLERS_MAX)),
        };
        Self { gate: Some(Arc::new(gate)) }
    }
}

/// Updates the view until dropped. Does nothing in an open fleet.
pub(crate) async fn sync_access(
    members: Option<&MemberRegistry>,
    view: &watch::Sender<MembershipView>,
) -> Infallible {
    if let Some(members) = members {
        members.sync_membership(view).await;
    }
    std::future::pending().await
}

impl AccessGate {
    /// Returns the caller, or `None` if the path is open to all.
    fn admit_request(
        &self,
        request: &Request<Body>,
    ) -> Result<Option<GatewayCaller>, AccessDenied> {
        let path = request.uri().path();
        let peer = peer_address(request);
        let Some(need) = requirement_for(path) else {
            self.count_stranger(peer)?;
            return Err(AccessDenied::NoSuchMethod { path: path.chars().take(100).collect() });
        };
        if need == AccessRequirement::Anonymous {
            if has_secret(path) {
                enforce_rate(&self.secrets, peer, self.started.elapsed())?;
            }
            self.count_stranger(peer)?;
            return Ok(None);
        }
        let caller = match self.verify_caller(request.headers()) {
            Ok(caller) => caller,
            Err(denied) => {
                self.count_stranger(peer)?;
                return Err(denied);
            }
        };
        enforce_rate(&self.members, caller.name.to_string(), self.started.elapsed())?;
        let least = match need {
            AccessRequirement::Scope(scope) => scope,
            _ => UserScope::Reader,
        };
        match least {
            scope if !need.is_met_by(&caller) => Err(AccessDenied::Scope {
                name: caller.name.to_string(),
                is: caller.scope.map_or("no scope".into(), |scope| format!("the scope {scope}")),
                needs: scope.to_string(),
                scope: scope.to_string(),
            }),
            _ => Ok(Some(caller)),
        }
    }

    /// Waits for at most 5 s. Calls in the gateway's first moments wait here.
    async fn wait_until_loaded(&self) {
        let mut view = self.view.clone();
        // The caller checks again, so a timeout needs no handling here.
        let _ = timeout(LOAD_LIMIT, view.wait_for(is_loaded)).await;
    }

    fn count_stranger(&self, peer: IpAddr) -> Result<(), AccessDenied> {
        enforce_rate(&self.unauthenticated, peer, self.started.elapsed())
    }

    /// Verifies the bearer and checks that its member is not revoked.
    fn verify_caller(&self, headers: &HeaderMap) -> Result<GatewayCaller, AccessDenied> {
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, bearer)| bearer.trim())
            .ok_or(AccessDenied::NoBearer)?;
        let view = self.view.borrow();
        if !is_loaded(&view) {
            return Err(AccessDenied::NotLoaded);
        }
        let caller = GatewayCaller::verify_bearer(bearer, &view.issuers, unix_seconds())?;
        match view.revocations.deny_reason(&caller) {
            Some(objection) => Err(AccessDenied::Revoked(objection.to_string())),
            None => Ok(caller),
        }
    }
}

fn is_loaded(view: &MembershipView) -> bool {
    view.revocations.is_complete() && !view.issuers.is_empty()
}

fn enforce_rate<K: Eq + std::hash::Hash>(
    rates: &Mutex<RateLimiter<K>>,
    who: K,
    now: Duration,
) -> Result<(), AccessDenied> {
    // The counts remain usable after a panic of another thread.
    let mut rates = rates.lock().unwrap_or_else(PoisonError::into_inner);
    rates.count_request(who, now).map_err(|wait| AccessDenied::RateLimited { wait })
}

/// Returns the client's address, reduced to its /64 network for IPv6, as one host usually has a
/// whole network.
fn peer_address(request: &Request<Body>) -> IpAddr {
    let info = request.extensions().get::<ConnectionInfo>();
    match info.and_then(ConnectionInfo::remote_ip).map(|address| address.to_canonical()) {
        Some(IpAddr::V6(address)) => {
            let network = u128::from(address) & !u128::from(u64::MAX);
            IpAddr::V6(network.into())
        }
        Some(address) => address,
        None => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
    }
}

/// Returns the time in seconds since 1970.
impl Middleware for AccessControl {
    fn handle_request<S: InnerService>(
        &self,
        inner: &mut S,
        request: Request<Body>,
    ) -> BoxFuture<Response<Body>, Infallible> {
        if let Some(refusal) = connection::refuse_foreign_host(&request) {
            return Box::pin(async move { Ok(refusal) });
        }
        let Some(gate) = &self.gate else {
            let headers = request.headers().clone();
            let (request, deadline) = body_deadline::limit_body(request, RequestSender::Member);
            return Box::pin(deadline.enforce_deadline(headers, inner.call(request)));
        };
        let admitted = gate.admit_request(&request);
        if !matches!(admitted, Err(AccessDenied::NotLoaded)) {
            return forward_request(gate, inner, admitted, request);
        }
        let (gate, mut inner) = (gate.clone(), inner.clone());
        Box::pin(async move {
            gate.wait_until_loaded().await;
            let admitted = gate.admit_request(&request);
            let Ok(()) = poll_fn(|cx| inner.poll_ready(cx)).await;
            forward_request(&gate, &mut inner, admitted, request).await
        })
    }
}

/// Forwards an admitted request, or answers why it is denied.
fn forward_request(
    gate: &AccessGate,
    inner: &mut impl InnerService,
    admitted: Result<Option<GatewayCaller>, AccessDenied>,
    mut request: Request<Body>,
) -> BoxFuture<Response<Body>, Infallible> {
    match admitted {
        Err(denied) => {
            log_denial(request.uri().path(), &denied);
            let answer = denied.to_response(request.headers());
            Box::pin(async move { Ok(answer) })
        }
        Ok(None) => {
            let headers = request.headers().clone();
            let (request, deadline) =
                body_deadline::limit_body(request, RequestSender::Unauthenticated);
            Box::pin(deadline.enforce_deadline(headers, inner.call(request)))
        }
        Ok(Some(caller)) => {
            let over = revocation::wait_revoked(gate.view.clone(), caller.clone());
            request.extensions_mut().insert(caller);
            let headers = request.headers().clone();
            let (request, deadline) = body_deadline::limit_body(request, RequestSender::Member);
            let answering = deadline.enforce_deadline(headers.clone(), inner.call(request));
            Box::pin(revocation::abort_on_revocation(over, headers, answering))
        }
    }
}

/// Logs rate-limited calls at debug level, so that they do not fill the log.
fn log_denial(path: &str, denied: &AccessDenied) {
    let (code, path) = (denied.status_code(), path.chars().take(100).collect::<String>());
    match denied {
        AccessDenied::RateLimited { .. } => tracing::debug!(path, ?code, %denied, "denied"),
        _ => tracing::info!(path, ?code, %denied, "denied"),
    }
}
