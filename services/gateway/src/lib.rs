//! The control API over gRPC and as JSON, and the web page: maps the services of `control.proto` to
//! `control::FleetControl`, with health and reflection.
//!
//! Decides who may call, limits, status codes and how calls end; the crate `control` implements the
//! operations. In an open fleet every client that can reach the port may do everything. In a closed
//! fleet every client shows a bearer over TLS, and members without the store's keys read and write
//! its files through [`store_proxy`].
//!
//! Architecture Invariant: nothing outside this crate names tonic.

mod access;
mod arguments;
mod call;
mod call_counts;
mod call_metrics;
mod channels;
mod checkpoints;
pub mod client;
mod connection;
pub mod discovery;
mod error;
mod evals;
mod fleet;
mod health;
mod json;
mod leftover_removal;
mod member_limit;
mod members;
mod middleware;
mod openai;
mod openapi;
mod page;
mod polled_body;
mod reserved_port;
mod runs;
mod stalled_stream;
mod status;
pub mod store_proxy;
mod submission_limit;
mod submitted_files;
mod tls;
mod transfer_limit;
mod views;

use std::{convert::Infallible, io, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Context;
use control::{FleetControl, MemberRegistry, MembershipView};
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::{
    service::Routes,
    transport::{Server, server::Router},
};
use tower_layer::{Identity, Stack};

use crate::{
    access::AccessControl,
    call::CallContext,
    json::JsonTranslator,
    middleware::MiddlewareLayer,
    openai::ModelProxy,
    rpc::{
        channels_server::ChannelsServer, checkpoints_server::CheckpointsServer,
        evals_server::EvalsServer, fleet_server::FleetServer, members_server::MembersServer,
    },
};

pub use call_counts::{CallCounts, CallStats};
pub use reserved_port::ReservedPort;
pub use tls::{GatewayTls, GatewayTlsError};

/// Generated servers and clients of the services; their messages are `wire::v1`.
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, reason = "generated code")]
pub mod rpc {
    tonic::include_proto!("flotilla.v1");
}

/// The largest call in bytes: a submission with a run spec and the files it names.
pub const SUBMIT_BYTES_MAX: usize = 64 << 20;
/// The largest call about a channel: a spec from which it learns, and the files that it names.
const CHANNEL_BYTES_MAX: usize = 4 << 20;
/// The limit of all other calls, which contain only a few names and numbers.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The largest answer in bytes: a fact (at most 8 MiB) as escaped JSON in a run event.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// The calls of one connection that are answered at a time; further calls wait.
const CALLS_PER_CONNECTION: usize = 64;
/// The open calls of one connection, streams included; further calls wait in the client.
const OPEN_CALLS_PER_CONNECTION: u32 = 256;
/// A vanished peer is detected after this interval plus [`PING_LIMIT`].
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_LIMIT: Duration = Duration::from_secs(10);
/// Enough for a part of a file on a network with some latency.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// The time that calls in progress have when the gateway stops.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// The configuration of a gateway.
#[derive(Debug, Clone)]
pub struct Config {
    /// The listen address; port 0 selects a free port.
    pub listen: SocketAddr,
    /// Without certificate and key, all traffic is unencrypted.
    pub tls: Option<GatewayTls>,
}

/// A failure to open the gateway's port.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error(transparent)]
    Tls(#[from] GatewayTlsError),
    #[error(
        "listen for gRPC on {address}: another program has that port; stop it, or choose another \
         port (0 takes a free one) (G107)"
    )]
    PortTaken { address: SocketAddr },
    #[error(
        "listen for gRPC on {address}: no such address on this machine; choose one of its own, or \
         0.0.0.0 for all of them (G107)"
    )]
    NoSuchAddress { address: SocketAddr },
    #[error("listen for gRPC on {address}")]
    Failed {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

impl BindError {
    fn new(address: SocketAddr, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::AddrInUse => Self::PortTaken { address },
            io::ErrorKind::AddrNotAvailable => Self::NoSuchAddress { address },
            _ => Self::Failed { address, source },
        }
    }
}

/// A gateway that owns its port but does not answer calls yet.
///
/// ```text
/// let gateway = bind_port(config).await?.with_members(registry);
/// let counts = gateway.call_counts();
/// gateway.serve_calls(control, stop).await?;
/// ```
pub struct BoundGateway {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    members: Option<MemberRegistry>,
    counts: CallCounts,
    redaction: Option<PathBuf>,
}

impl std::fmt::Debug for BoundGateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Opens the configured port.
pub async fn bind_port(config: Config) -> Result<BoundGateway, BindError> {
    let tls = config.tls.as_ref().map(tls::build_acceptor).transpose()?;
    let error = |source| BindError::new(config.listen, source);
    let listener = TcpListener::bind(config.listen).await.map_err(error)?;
    let address = listener.local_addr().map_err(error)?;
    let (members, counts, redaction) = (None, CallCounts::default(), None);
    Ok(BoundGateway { listener, address, tls, members, counts, redaction })
}

impl BoundGateway {
    /// Returns the address with the actual port if the configured port was 0.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the counters of this gateway's calls.
    pub fn call_counts(&self) -> CallCounts {
        self.counts.clone()
    }

    /// Restricts calls to the members of this registry.
    #[must_use]
    pub fn with_members(mut self, members: MemberRegistry) -> Self {
        self.members = Some(members);
        self
    }

    /// Passes requests and answers through a redaction program before they are kept.
    #[must_use]
    pub fn with_redaction(mut self, program: Option<PathBuf>) -> Self {
        self.redaction = program;
        self
    }

    /// Answers calls until `stop` is cancelled. Then streams end immediately, calls in progress end
    /// within 2 s, and all connections are closed when this returns. Fails if the store cannot be
    /// opened, or the server as a whole fails.
    pub async fn serve_calls(
        self,
        control: FleetControl,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let cut = CancellationToken::new();
        let _cut_when_dropped = cut.clone().drop_guard();
        let incoming = connection::accept_connections(self.listener, self.tls.clone(), cut.clone());
        let (health, health_service) = health::health_service();
        let calls = CallContext::new(control.clone(), stop.clone(), self.counts.clone());
        let (view, seen) = watch::channel(MembershipView::default());
        let members = seen.clone();
        let access = match &self.members {
            Some(_) => AccessControl::for_closed_fleet(seen),
            None => AccessControl::for_open_fleet(),
        };
        let store =
            control.open_store().await.context("open the store for the gateway's members")?;
        let store_routes = store_proxy::build_routes(store);
        let models = ModelProxy::open(&control, self.redaction)
            .await
            .context("receive answers of models")?;
        let routes = store_routes.merge(models.build_routes());
        let router = build_router(&calls, access, self.members.clone(), routes)?;
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
            health::report_health(&health, control.bus(), &stop).await;
            sleep(STOP_LIMIT).await;
            cut.cancel();
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            served = serving => served.with_context(|| format!("serve gRPC on {}", self.address)),
            never = stopping => match never {},
            never = leftover_removal::remove_leftovers_hourly(store, &self.counts) => match never {},
            never = models.run(control.bus(), &members) => match never {},
            never = access::sync_access(self.members.as_ref(), &view) => match never {},
        }
    }
}

type GatewayRouter =
    Router<Stack<MiddlewareLayer<JsonTranslator>, Stack<MiddlewareLayer<AccessControl>, Identity>>>;

fn build_router(
    calls: &CallContext,
    access: AccessControl,
    members: Option<MemberRegistry>,
    http_routes: axum::Router,
) -> anyhow::Result<GatewayRouter> {
    let runs = submission_limit::BoundedRunsService::new(|| runs::RunsService(calls.clone()));
    let evals = EvalsServer::new(evals::EvalsService(calls.clone()))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let checkpoints = CheckpointsServer::new(checkpoints::CheckpointsService(calls.clone()))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let channels = ChannelsServer::new(channels::ChannelsService(calls.clone()))
        .max_decoding_message_size(CHANNEL_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let fleet = FleetServer::new(fleet::FleetService(calls.clone()))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let members = MembersServer::new(members::MembersService(calls.clone(), members))
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(wire::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let json = JsonTranslator::new()?;
    let mut routes = Routes::default();
    let grpc = routes.axum_router_mut();
    *grpc = std::mem::take(grpc)
        .merge(http_routes)
        .merge(page::build_routes())
        .merge(openapi::build_routes(json.descriptor_pool()))
        .fallback(access::refuse_path);
    Ok(Server::builder()
        .concurrency_limit_per_connection(CALLS_PER_CONNECTION)
        .max_concurrent_streams(OPEN_CALLS_PER_CONNECTION)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_LIMIT))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        // Browsers and curl use HTTP/1.1 if there is no TLS to negotiate HTTP/2.
        .accept_http1(true)
        .layer(MiddlewareLayer(access))
        .layer(MiddlewareLayer(json))
        .add_routes(routes)
        .add_service(runs)
        .add_service(evals)
        .add_service(checkpoints)
        .add_service(channels)
        .add_service(fleet)
        .add_service(members)
        .add_service(reflection().build_v1().context("describe the services")?)
        .add_service(reflection().build_v1alpha().context("describe the services")?))
}
