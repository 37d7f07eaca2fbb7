//! The control API over gRPC and as JSON, and the web page: maps the services of `control.proto` onto
//! `control::Control`, with health and reflection. Decides who may call, limits, status codes and how calls end; what
//! the operations do is control's business. In an open fleet whoever can reach the port may do
//! everything; in a closed one everybody shows a bearer, over TLS, and members without the store's
//! keys have its files from here too: `door`.
//!
//! Architecture Invariant: nothing outside this crate names tonic.

mod access;
mod arguments;
mod call;
mod checkpoints;
pub mod client;
mod connection;
mod counts;
pub mod door;
mod evals;
mod fleet;
mod health;
mod json;
mod live;
mod members;
mod openapi;
mod page;
mod receive;
mod runs;
mod status;
mod tls;

use std::{convert::Infallible, io, net::SocketAddr, time::Duration};

use anyhow::Context;
use control::{Control, Members, View};
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::{
    service::Routes,
    transport::{Server, server::Router},
};
use tower_layer::{Identity, Stack};

use crate::{
    access::Access,
    call::Calls,
    json::Json,
    rpc::{
        checkpoints_server::CheckpointsServer, evals_server::EvalsServer,
        fleet_server::FleetServer, members_server::MembersServer,
    },
};

pub use counts::{Count, Counts};
pub use tls::{Tls, TlsError};

/// Servers and clients of the services; their messages are `wire::v1`.
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, reason = "generated code")]
pub mod rpc {
    tonic::include_proto!("flotilla.v1");
}

/// A run spec and the files it names; the largest call.
pub const SUBMIT_BYTES_MAX: usize = 64 << 20;
/// Every other call is a few names and numbers.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// A fact (at most 8 MiB) as escaped JSON in a run event; answers of unary calls are smaller.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Calls of one connection that are being answered; more wait.
const CALLS_PER_CONNECTION: usize = 64;
/// Calls of one connection that are open, streams included; more wait in the client.
const OPEN_PER_CONNECTION: u32 = 256;
/// A peer that vanished without a word is noticed after the two together.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_LIMIT: Duration = Duration::from_secs(10);
/// What a client may send ahead of us: enough for a part of a file on a network with some delay.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// What calls that are being answered have left when the gateway stops.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// How the gateway starts.
#[derive(Debug, Clone)]
pub struct Config {
    /// Port 0 takes a free one.
    pub listen: SocketAddr,
    /// None: everything is readable on the way.
    pub tls: Option<Tls>,
}

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(
        "listen for gRPC on {address}: another program has that port; stop it, or choose another \
         port (0 takes a free one) (G107)"
    )]
    Taken { address: SocketAddr },
    #[error(
        "listen for gRPC on {address}: no such address on this machine; choose one of its own, or \
         0.0.0.0 for all of them (G107)"
    )]
    NotHere { address: SocketAddr },
    #[error("listen for gRPC on {address}")]
    Failed {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// A gateway that has its port, but does not answer yet.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    members: Option<Members>,
    counts: Counts,
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Takes the port.
///
/// # Errors
/// When it is taken, or may not be used.
pub async fn bind(config: Config) -> Result<Bound, BindError> {
    let address = config.listen;
    let tls = config.tls.as_ref().map(tls::acceptor).transpose()?;
    let error = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => BindError::Taken { address },
        io::ErrorKind::AddrNotAvailable => BindError::NotHere { address },
        _ => BindError::Failed { address, source },
    };
    let listener = TcpListener::bind(address).await.map_err(error)?;
    let address = listener.local_addr().map_err(error)?;
    Ok(Bound { listener, address, tls, members: None, counts: Counts::default() })
}

impl Bound {
    /// Where clients connect; with the port that was chosen when the configured one was 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Of the calls that will be answered.
    pub fn counts(&self) -> Counts {
        self.counts.clone()
    }

    /// Only these may call, each what it may.
    #[must_use]
    pub fn closed(mut self, members: Members) -> Self {
        self.members = Some(members);
        self
    }

    /// Answers calls until `stop`: then streams end at once, calls being answered within
    /// seconds, and every connection is closed when this returns.
    ///
    /// # Errors
    /// When the server fails as a whole; no call can do that.
    pub async fn serve(self, control: Control, stop: CancellationToken) -> anyhow::Result<()> {
        let cut = CancellationToken::new();
        let _cut_when_dropped = cut.clone().drop_guard();
        let incoming = connection::incoming(self.listener, self.tls.clone(), cut.clone());
        let (health, health_service) = health::service();
        let calls = Calls::new(control.clone(), stop.clone(), self.counts.clone());
        let (view, seen) = watch::channel(View::default());
        let access = match &self.members {
            Some(_) => Access::closed(seen),
            None => Access::open(),
        };
        let store =
            control.store().await.context("open the store that members reach through us")?;
        let door = door::routes(store);
        let router = router(&calls, access, self.members.clone(), door)?;
        let router = router.add_service(health_service);
        let (tls, closed) = (self.tls.is_some(), self.members.is_some());
        tracing::info!(address = %self.address, tls, closed, "the gateway answers gRPC calls");
        if !(tls && closed || self.address.ip().is_loopback()) {
            tracing::warn!(
                address = %self.address,
                "whoever can reach the gateway may do everything, and read everything on the way; \
                 keep it on a network you trust, or make a closed fleet (flotilla init)"
            );
        }
        let serving = router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
        let stopping = async {
            health::report(&health, control.bus(), &stop).await;
            sleep(STOP_LIMIT).await;
            cut.cancel();
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            served = serving => served.with_context(|| format!("serve gRPC on {}", self.address)),
            never = stopping => match never {},
            never = access::attend(self.members.as_ref(), &view) => match never {},
        }
    }
}

fn router(
    calls: &Calls,
    access: Access,
    members: Option<Members>,
    door: axum::Router,
) -> anyhow::Result<Router<Stack<Json, Stack<Access, Identity>>>> {
    let runs = receive::BoundedRuns::new(|| runs::Runs(calls.clone()));
    let evals = EvalsServer::new(evals::Evals(calls.clone()))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let checkpoints = CheckpointsServer::new(checkpoints::Checkpoints(calls.clone()))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let fleet = FleetServer::new(fleet::Fleet(calls.clone()))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let members = MembersServer::new(members::Members(calls.clone(), members))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(wire::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let json = Json::new()?;
    let mut routes = Routes::default();
    let grpc = routes.axum_router_mut();
    *grpc = std::mem::take(grpc)
        .merge(door)
        .merge(page::routes())
        .merge(openapi::routes(json.services()));
    Ok(Server::builder()
        .concurrency_limit_per_connection(CALLS_PER_CONNECTION)
        .max_concurrent_streams(OPEN_PER_CONNECTION)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_LIMIT))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        // Browsers and curl, where there is no TLS to agree on anything better.
        .accept_http1(true)
        .layer(access)
        .layer(json)
        .add_routes(routes)
        .add_service(runs)
        .add_service(evals)
        .add_service(checkpoints)
        .add_service(fleet)
        .add_service(members)
        .add_service(reflection().build_v1().context("describe the services")?)
        .add_service(reflection().build_v1alpha().context("describe the services")?))
}
