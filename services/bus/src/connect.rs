//! Joining a NATS server: who we are, how we prove it, and whether the server will do.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use async_nats::{Auth, AuthError, Client, ConnectErrorKind, ServerAddr, jetstream};
use authority::{AuthorityError, Held, Identity};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use wire::{AgentId, chain};

use crate::{
    backoff::Backoff,
    connection::{self, Connection},
    publish_all::Batches,
    request::RequestError,
    version::{self, Version},
};

/// One address: DNS, TCP, TLS and the handshake on a bad Wi-Fi link.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A server that just listens recovers its streams before JetStream answers; servers of a cluster that
/// have just found each other choose their leader first, in up to 9 s.
const JETSTREAM_LIMIT: Duration = Duration::from_secs(15);
/// Of one that has none itself; a leaf node's hub has.
const HUB_LIMIT: Duration = Duration::from_secs(5);
/// A dead peer is noticed after two of these.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Where the bus is and how to get in.
#[derive(Debug, Clone, Default)]
pub struct ConnectOptions {
    /// `nats://host:4222`, or `tls://…`; several for a cluster. `user:password@` or `token@`
    /// before the host is used, and never shown.
    pub urls: Vec<String>,
    /// Who we are in a closed fleet; its authority is then the only one whose servers are trusted.
    pub identity: Option<Identity>,
    /// A `.creds` file: user JWT and seed.
    pub credentials_file: Option<PathBuf>,
    /// The certificate authority that signed the server's certificate.
    pub tls_ca: Option<PathBuf>,
    /// A client certificate; needs `tls_key`.
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    /// Every server's monitoring URL (`http://host:8222`), to check its durability.
    pub monitor_urls: Vec<String>,
    /// Who is connecting: named in the server's connection list and in every fact's header.
    pub producer: Producer,
}

/// Who writes a fact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Producer {
    pub name: String,
    pub role: String,
}

impl Default for Producer {
    fn default() -> Self {
        Self { name: "unnamed".to_owned(), role: "peer".to_owned() }
    }
}

/// A connection to the bus. Cheap to clone; reconnects by itself.
#[derive(Clone)]
pub struct Bus {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) client: Client,
    pub(crate) context: jetstream::Context,
    pub(crate) connection: Arc<Connection>,
    pub(crate) producer: Producer,
    /// In a closed fleet: what all facts are signed with, as their subject's end.
    pub(crate) author: Option<AgentId>,
    /// In an account of our own, with what it imports of the fleet's: we make no consumers there.
    pub(crate) restricted: bool,
    /// How the subjects begin at which answers come.
    pub(crate) inbox: String,
    pub(crate) monitor_urls: Vec<String>,
    pub(crate) batches: Batches,
}

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("connect to the bus: no URL given; pass one such as nats://127.0.0.1:4222 (B101)")]
    NoUrl,
    #[error("connect to the bus: {url:?} is not a NATS URL; write it as nats://host:4222 (B101)")]
    Url {
        url: String,
        #[source]
        source: std::io::Error,
    },
    #[error("connect to the bus: read the credentials {} (B101)", path.display())]
    Credentials {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("connect to the bus as {name} (B103)")]
    Identity {
        name: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error(
        "connect to the bus: a client certificate needs both its certificate and its key file (B101)"
    )]
    HalfCertificate,
    #[error("connect to the bus at {urls}: the server refused these credentials (B103)")]
    Refused { urls: String },
    #[error(
        "connect to the bus at {urls}: TLS failed; is that the right fleet's server, and the \
         certificate authority (--nats-ca, or the kit's ca.pem) its own? (B103)"
    )]
    Tls {
        urls: String,
        #[source]
        source: async_nats::ConnectError,
    },
    #[error("connect to the bus at {urls}: is a nats-server running and reachable there? (B102)")]
    Unreachable {
        urls: String,
        #[source]
        source: async_nats::ConnectError,
    },
    #[error("connect to the bus at {urls}: no answer within {limit:?} (B102)")]
    TimedOut { urls: String, limit: Duration },
    #[error(
        "the nats-server at {urls} is version {found}, but {} or newer is needed; upgrade it \
         (deploy/fetch-nats-server.sh gets one) (B105)",
        version::MINIMUM
    )]
    TooOld { urls: String, found: String },
    #[error(
        "the nats-server at {urls} (version {found}) runs without JetStream; start it with -js \
         or a `jetstream {{}}` block in its configuration (B105)"
    )]
    NoJetStream { urls: String, found: String },
    #[error("ask the nats-server at {urls} for its JetStream account")]
    Account {
        urls: String,
        #[source]
        source: RequestError,
    },
}

impl Bus {
    /// Connects, and checks that the server is new enough and has JetStream.
    ///
    /// # Errors
    /// When no server of the list will do, after bounded time. Retrying is up to the caller.
    pub async fn connect(options: &ConnectOptions) -> Result<Self, ConnectError> {
        authority::choose_provider();
        let addresses = addresses(&options.urls)?;
        let urls = shown(&addresses);
        let connection = Arc::new(Connection::new());
        let member = options.identity.as_ref().map(Entering::of).transpose()?;
        let nats = nats_options(options, member.as_ref(), &connection).await?;
        let nats = with_url_secret(nats, &addresses);
        let limit = CONNECT_LIMIT * u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        let client = match timeout(limit, nats.connect(addresses)).await {
            Ok(Ok(client)) => client,
            Ok(Err(source)) => return Err(connect_error(urls, source)),
            Err(_) => return Err(ConnectError::TimedOut { urls, limit }),
        };
        // The event of this first connection must not look like a reconnect to later requests.
        let mut generation = connection.generation.subscribe();
        let seen = timeout(CONNECT_LIMIT, generation.wait_for(|count| *count > 0)).await.is_ok();
        if !seen {
            return Err(ConnectError::TimedOut { urls, limit: CONNECT_LIMIT });
        }
        let bus = Self {
            shared: Arc::new(Shared {
                context: jetstream::new(client.clone()),
                client,
                connection,
                producer: options.producer.clone(),
                inbox: member.as_ref().map_or("_INBOX".to_owned(), Entering::inbox),
                restricted: member.as_ref().is_some_and(|member| !member.unlimited),
                author: member.map(|member| member.name),
                monitor_urls: options.monitor_urls.clone(),
                batches: Batches::default(),
            }),
        };
        bus.check_server(urls).await?;
        Ok(bus)
    }

    async fn check_server(&self, urls: String) -> Result<(), ConnectError> {
        let info = self.shared.client.server_info();
        let found = info.version.clone();
        if Version::parse(&found).is_none_or(|version| version < version::MINIMUM) {
            return Err(ConnectError::TooOld { urls, found });
        }
        let limit = if info.jetstream { JETSTREAM_LIMIT } else { HUB_LIMIT };
        let deadline = Instant::now() + limit;
        let mut backoff = Backoff::until(deadline);
        loop {
            let answer = timeout_at(deadline, self.api::<serde_json::Value>("INFO", &())).await;
            let source = match answer {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(source)) => source,
                Err(_) => RequestError::TimedOut { limit },
            };
            if !source.is_transient() || !backoff.wait().await {
                // A leaf node has none itself: then its hub is the one to answer.
                if !info.jetstream && matches!(source, RequestError::NoResponders { .. }) {
                    return Err(ConnectError::NoJetStream { urls, found });
                }
                return Err(ConnectError::Account { urls, source });
            }
        }
    }

    /// Who is connected, as it was named.
    pub fn name(&self) -> &str {
        &self.shared.producer.name
    }

    /// The biggest fact the server accepts, in bytes of JSON.
    pub fn max_fact_bytes(&self) -> usize {
        self.shared.client.max_payload().saturating_sub(crate::publish::HEADER_ALLOWANCE)
    }

    /// Whether the server can be reached right now.
    pub fn is_connected(&self) -> bool {
        *self.shared.connection.connected.borrow()
    }

    /// Changes with each new connection: what servers were told may be gone with the one before.
    pub fn connections(&self) -> watch::Receiver<u64> {
        self.shared.connection.generation.subscribe()
    }

    /// Whether it is connected or tries to be; false once it is closed for good.
    pub fn is_open(&self) -> bool {
        !*self.shared.connection.closed.borrow()
    }

    /// The version of the server we are connected to.
    pub fn server_version(&self) -> String {
        self.shared.client.server_info().version
    }

    /// Sends what is buffered and closes the connection, for all clones.
    pub async fn close(&self) {
        // Fails only when the connection is closed already.
        let _ = self.shared.client.drain().await;
    }
}

pub(crate) fn addresses(urls: &[String]) -> Result<Vec<ServerAddr>, ConnectError> {
    if urls.is_empty() {
        return Err(ConnectError::NoUrl);
    }
    let parse = |url: &String| {
        // A secret may stand before the host.
        let shown = || url.rsplit('@').next().unwrap_or_default().to_owned();
        url.parse().map_err(|source| ConnectError::Url { url: shown(), source })
    };
    urls.iter().map(parse).collect()
}

/// The addresses without their secrets.
pub(crate) fn shown(addresses: &[ServerAddr]) -> String {
    let show = |address: &ServerAddr| {
        format!("{}://{}:{}", address.scheme(), address.host(), address.port())
    };
    addresses.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// async-nats ignores them.
fn with_url_secret(
    nats: async_nats::ConnectOptions,
    addresses: &[ServerAddr],
) -> async_nats::ConnectOptions {
    let Some(address) = addresses.iter().find(|address| address.has_user_pass()) else {
        return nats;
    };
    let user = address.username().unwrap_or_default().to_owned();
    match address.password() {
        Some(password) => nats.user_and_password(user, password.to_owned()),
        None => nats.token(user),
    }
}

/// A member on its way in.
struct Entering<'a> {
    identity: &'a Identity,
    name: AgentId,
    unlimited: bool,
}

impl<'a> Entering<'a> {
    fn of(identity: &'a Identity) -> Result<Self, ConnectError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| ConnectError::Identity {
            name: identity.name.clone(),
            source,
        };
        let jwt = identity.read_jwt().map_err(|error| wrong(error.into()))?;
        let held = Held::read(&jwt).map_err(|error| wrong(error.into()))?;
        let name = AgentId::new(held.name).map_err(|error| wrong(error.into()))?;
        Ok(Self { identity, name, unlimited: held.unlimited })
    }

    fn inbox(&self) -> String {
        format!("_INBOX_{}", self.name)
    }

    /// Each time with the newest token, which may have been renewed since.
    fn options(&self) -> Result<async_nats::ConnectOptions, ConnectError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| ConnectError::Identity {
            name: self.name.to_string(),
            source,
        };
        let ca = self.identity.read_ca().map_err(|error| wrong(error.into()))?;
        let tls = authority::client_config(ca.as_bytes()).map_err(|error| wrong(error.into()))?;
        let identity = self.identity.clone();
        let prove = move |nonce: Vec<u8>| {
            let proof = proof(&identity, &nonce).map_err(|error| AuthError::new(chain(&error)));
            std::future::ready(proof)
        };
        Ok(async_nats::ConnectOptions::with_auth_callback(prove)
            .custom_inbox_prefix(self.inbox())
            .tls_client_config(tls)
            .require_tls(true))
    }
}

fn proof(identity: &Identity, nonce: &[u8]) -> Result<Auth, AuthorityError> {
    let mut auth = Auth::new();
    auth.jwt = Some(identity.read_jwt()?);
    auth.signature = Some(identity.sign(nonce)?);
    Ok(auth)
}

async fn nats_options(
    options: &ConnectOptions,
    member: Option<&Entering<'_>>,
    connection: &Arc<Connection>,
) -> Result<async_nats::ConnectOptions, ConnectError> {
    let producer = &options.producer;
    let weak = Arc::downgrade(connection);
    let entering = member.map(Entering::options).transpose()?;
    let mut nats = entering
        .unwrap_or_default()
        .name(format!("flotilla {} {}", producer.role, producer.name))
        .connection_timeout(CONNECT_LIMIT)
        .ping_interval(PING_INTERVAL)
        .reconnect_delay_callback(connection::reconnect_delay)
        .event_callback(move |event| {
            let connection = weak.upgrade();
            async move {
                if let Some(connection) = connection {
                    connection.note(event);
                }
            }
        });
    if let Some(path) = &options.credentials_file {
        nats = nats
            .credentials_file(path)
            .await
            .map_err(|source| ConnectError::Credentials { path: path.clone(), source })?;
    }
    if let Some(ca) = &options.tls_ca {
        nats = nats.add_root_certificates(ca.clone()).require_tls(true);
    }
    Ok(match (&options.tls_cert, &options.tls_key) {
        (Some(cert), Some(key)) => nats.add_client_certificate(cert.clone(), key.clone()),
        (None, None) => nats,
        _ => return Err(ConnectError::HalfCertificate),
    })
}

fn connect_error(urls: String, source: async_nats::ConnectError) -> ConnectError {
    match source.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            ConnectError::Refused { urls }
        }
        ConnectErrorKind::Tls => ConnectError::Tls { urls, source },
        _ if is_tls(&source) => ConnectError::Tls { urls, source },
        _ => ConnectError::Unreachable { urls, source },
    }
}

/// Most failures of TLS come as those of reading: what came was not valid.
fn is_tls(error: &async_nats::ConnectError) -> bool {
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        let read = source.downcast_ref::<std::io::Error>();
        if read.is_some_and(|error| error.kind() == std::io::ErrorKind::InvalidData) {
            return true;
        }
        next = source.source();
    }
    false
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bus").field("producer", &self.shared.producer).finish_non_exhaustive()
    }
}
