//! Connects to a NATS server: authenticates, and checks that the server is suitable.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_nats::{Auth, AuthError, Client, ConnectErrorKind, ServerAddr, jetstream};
use identity::{AuthorityError, MemberIdentity, UserJwtInfo};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use wire::{AgentId, format_error_chain};

use crate::{
    backoff::RetryBackoff,
    connection_state::{self, ConnectionState},
    request_error::RequestError,
    version::{self, ServerVersion},
};

/// Attempts of a member whose credentials are refused, and the pause between them.
const REFUSED_ATTEMPTS: u32 = 3;
const REFUSED_PAUSE: Duration = Duration::from_millis(300);
/// Time limit for one address: DNS, TCP, TLS and the NATS handshake on a bad Wi-Fi link.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the first answer of JetStream. A server may still recover its streams; the
/// servers of a new cluster elect a leader first, in up to 9 s.
const JETSTREAM_LIMIT: Duration = Duration::from_secs(15);
/// Time limit for JetStream's answer through a server that does not run it, such as a leaf node,
/// whose hub may answer.
const HUB_LIMIT: Duration = Duration::from_secs(5);
/// A dead connection is noticed after two pings.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Addresses and credentials for a connection to the bus.
#[derive(Debug, Clone, Default)]
pub struct ConnectOptions {
    /// Server URLs, `nats://host:4222` or `tls://…`; several for a cluster. A secret before the
    /// host (`user:password@` or `token@`) is used and never shown.
    pub urls: Vec<String>,
    /// Credentials of a member of a closed fleet. Only servers certified by that fleet's authority
    /// are trusted then.
    pub identity: Option<MemberIdentity>,
    /// `.creds` file with a user JWT and its seed.
    pub credentials_file: Option<PathBuf>,
    /// PEM file of the certificate authority that signed the server's certificate.
    pub tls_ca: Option<PathBuf>,
    /// PEM file; requires `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// PEM file; requires `tls_cert`.
    pub tls_key: Option<PathBuf>,
    /// Monitoring URLs (`http://host:8222`), one for each server, used to check their durability.
    pub monitor_urls: Vec<String>,
    /// Name and role of this connection in the server's list and in the headers of its facts.
    pub producer: FactProducer,
}

/// A publisher of facts, as named in their headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FactProducer {
    pub name: String,
    /// For example `coordinator`.
    pub role: String,
}

impl Default for FactProducer {
    fn default() -> Self {
        Self { name: "unnamed".to_owned(), role: "peer".to_owned() }
    }
}

/// A connection to the log, the buckets and the presence subjects of a fleet.
///
/// Clones are cheap and share the connection. It reconnects by itself; requests made meanwhile
/// wait, within their time limits. Only methods that document it retry.
///
/// ```text
/// connect -> prepare_log (coordinator only) -> publish_fact / follow_facts / join_work_queue -> close
/// ```
#[derive(Clone)]
pub struct Bus {
    pub(crate) shared: Arc<BusState>,
}

pub(crate) struct BusState {
    pub(crate) client: Client,
    pub(crate) context: jetstream::Context,
    pub(crate) connection: Arc<ConnectionState>,
    pub(crate) producer: FactProducer,
    /// Name of the member of a closed fleet: the last token of the subject of each fact it
    /// publishes.
    pub(crate) author: Option<AgentId>,
    /// True in a member's own account, which imports a few subjects of the fleet's account and
    /// cannot create consumers.
    pub(crate) restricted: bool,
    /// Prefix of the subjects of answers.
    pub(crate) inbox_prefix: String,
    pub(crate) monitor_urls: Vec<String>,
    /// Unset until the server was asked.
    pub(crate) log_accepts_batches: OnceLock<bool>,
}

/// The reason why no connection to the bus was made.
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
    #[error(
        "connect to the bus at {urls}: the server refused these credentials; they may be \
             revoked, expired or of another fleet (B103)"
    )]
    Refused { urls: String },
    #[error(
        "connect to the bus at {urls}: TLS failed; is that the right fleet's server, and the \
         certificate authority (--nats-ca, or the credentials' ca.pem) its own? (B103)"
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
        "the nats-server at {urls} is version {found}, but {} or newer is needed; upgrade it to one \
         of its releases (B105)",
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
    /// Connects, and checks that the server is new enough and has JetStream. Fails after bounded
    /// time if no server of the list is suitable; the caller decides whether to retry.
    ///
    /// While a server takes the accounts of new members, it may refuse members that it knows:
    /// credentials of a member are tried a few times.
    pub async fn connect(options: &ConnectOptions) -> Result<Self, ConnectError> {
        let mut attempt = 1;
        loop {
            match Self::connect_once(options).await {
                Err(ConnectError::Refused { .. })
                    if options.identity.is_some() && attempt < REFUSED_ATTEMPTS =>
                {
                    attempt += 1;
                    tokio::time::sleep(REFUSED_PAUSE).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn connect_once(options: &ConnectOptions) -> Result<Self, ConnectError> {
        let addresses = parse_addresses(&options.urls)?;
        let urls = display_addresses(&addresses);
        let connection = Arc::new(ConnectionState::new());
        let member = options.identity.as_ref().map(MemberLogin::from_identity).transpose()?;
        let nats = build_nats_options(options, member.as_ref(), &connection).await?;
        let nats = apply_url_secret(nats, &addresses);
        let limit = CONNECT_LIMIT * u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        let client = match timeout(limit, nats.connect(addresses)).await {
            Ok(Ok(client)) => client,
            Ok(Err(source)) => return Err(connect_error(urls, source)),
            Err(_) => return Err(ConnectError::TimedOut { urls, limit }),
        };
        // Wait for the event of this first connection; later requests must not mistake it for a
        // reconnect.
        let mut generation = connection.generation.subscribe();
        let seen = timeout(CONNECT_LIMIT, generation.wait_for(|count| *count > 0)).await.is_ok();
        if !seen {
            return Err(ConnectError::TimedOut { urls, limit: CONNECT_LIMIT });
        }
        let bus = Self {
            shared: Arc::new(BusState {
                context: jetstream::new(client.clone()),
                client,
                connection,
                producer: options.producer.clone(),
                inbox_prefix: member
                    .as_ref()
                    .map_or("_INBOX".to_owned(), MemberLogin::inbox_prefix),
                restricted: member.as_ref().is_some_and(|member| !member.unlimited),
                author: member.map(|member| member.name),
                monitor_urls: options.monitor_urls.clone(),
                log_accepts_batches: OnceLock::new(),
            }),
        };
        bus.check_server(urls).await?;
        Ok(bus)
    }

    /// Waits for JetStream after the version check: 15 s, or 5 s if a hub has to answer.
    async fn check_server(&self, urls: String) -> Result<(), ConnectError> {
        let info = self.shared.client.server_info();
        let found = info.version.clone();
        if ServerVersion::parse(&found).is_none_or(|version| version < version::MINIMUM) {
            return Err(ConnectError::TooOld { urls, found });
        }
        let limit = if info.jetstream { JETSTREAM_LIMIT } else { HUB_LIMIT };
        let deadline = Instant::now() + limit;
        let mut backoff = RetryBackoff::with_deadline(deadline);
        loop {
            let answer =
                timeout_at(deadline, self.call_api::<serde_json::Value>("INFO", &())).await;
            let source = match answer {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(source)) => source,
                Err(_) => RequestError::TimedOut { limit },
            };
            if !source.is_transient() || !backoff.wait().await {
                // A leaf node runs no JetStream itself; its hub has to answer.
                if !info.jetstream && matches!(source, RequestError::NoResponders { .. }) {
                    return Err(ConnectError::NoJetStream { urls, found });
                }
                return Err(ConnectError::Account { urls, source });
            }
        }
    }

    /// Returns the name of this connection in the headers of its facts.
    pub fn producer_name(&self) -> &str {
        &self.shared.producer.name
    }

    /// Returns true while the connection is up.
    pub fn is_connected(&self) -> bool {
        *self.shared.connection.connected.borrow()
    }

    /// Returns a counter of connections. State that the server kept for an earlier connection may
    /// be lost.
    pub fn watch_connections(&self) -> watch::Receiver<u64> {
        self.shared.connection.generation.subscribe()
    }

    /// Returns false once the connection is closed for good; true while it is up or being
    /// re-established.
    pub fn is_open(&self) -> bool {
        !*self.shared.connection.closed.borrow()
    }

    /// Returns the version of the connected nats-server.
    pub fn server_version(&self) -> String {
        self.shared.client.server_info().version
    }

    /// Sends buffered messages and closes the connection for all clones.
    pub async fn close(&self) {
        // This fails only if the connection is already closed.
        let _ = self.shared.client.drain().await;
    }
}

pub(crate) fn parse_addresses(urls: &[String]) -> Result<Vec<ServerAddr>, ConnectError> {
    if urls.is_empty() {
        return Err(ConnectError::NoUrl);
    }
    let parse = |url: &String| {
        // A secret may precede the host.
        let shown = || url.rsplit('@').next().unwrap_or_default().to_owned();
        url.parse().map_err(|source| ConnectError::Url { url: shown(), source })
    };
    urls.iter().map(parse).collect()
}

pub(crate) fn display_addresses(addresses: &[ServerAddr]) -> String {
    let show = |address: &ServerAddr| {
        format!("{}://{}:{}", address.scheme(), address.host(), address.port())
    };
    addresses.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// async-nats ignores secrets in URLs, so the first user and password, or token, is applied here.
fn apply_url_secret(
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

struct MemberLogin<'a> {
    identity: &'a MemberIdentity,
    name: AgentId,
    /// True if the token allows all subjects; the member then uses the fleet's own account.
    unlimited: bool,
}

impl<'a> MemberLogin<'a> {
    fn from_identity(identity: &'a MemberIdentity) -> Result<Self, ConnectError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| ConnectError::Identity {
            name: identity.name.clone(),
            source,
        };
        let jwt = identity.read_jwt().map_err(|error| wrong(error.into()))?;
        let held = UserJwtInfo::read_unverified(&jwt).map_err(|error| wrong(error.into()))?;
        let name = AgentId::new(held.name).map_err(|error| wrong(error.into()))?;
        Ok(Self { identity, name, unlimited: held.unlimited })
    }

    fn inbox_prefix(&self) -> String {
        format!("_INBOX_{}", self.name)
    }

    /// Trusts only the fleet's servers. Each attempt reads the newest token, which may have been
    /// renewed.
    fn login_options(&self) -> Result<async_nats::ConnectOptions, ConnectError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| ConnectError::Identity {
            name: self.name.to_string(),
            source,
        };
        let ca = self.identity.read_ca().map_err(|error| wrong(error.into()))?;
        let tls =
            identity::fleet_client_config(ca.as_bytes()).map_err(|error| wrong(error.into()))?;
        let identity = self.identity.clone();
        let prove = move |nonce: Vec<u8>| {
            let proof = sign_challenge(&identity, &nonce)
                .map_err(|error| AuthError::new(format_error_chain(&error)));
            std::future::ready(proof)
        };
        Ok(async_nats::ConnectOptions::with_auth_callback(prove)
            .custom_inbox_prefix(self.inbox_prefix())
            .tls_client_config(tls)
            .require_tls(true))
    }
}

fn sign_challenge(identity: &MemberIdentity, nonce: &[u8]) -> Result<Auth, AuthorityError> {
    let mut auth = Auth::new();
    auth.jwt = Some(identity.read_jwt()?);
    auth.signature = Some(identity.sign_bytes(nonce)?);
    Ok(auth)
}

async fn build_nats_options(
    options: &ConnectOptions,
    member: Option<&MemberLogin<'_>>,
    connection: &Arc<ConnectionState>,
) -> Result<async_nats::ConnectOptions, ConnectError> {
    let producer = &options.producer;
    let weak = Arc::downgrade(connection);
    let entering = member.map(MemberLogin::login_options).transpose()?;
    let mut nats = entering
        .unwrap_or_default()
        .name(format!("flotilla {} {}", producer.role, producer.name))
        .connection_timeout(CONNECT_LIMIT)
        .ping_interval(PING_INTERVAL)
        .reconnect_delay_callback(connection_state::reconnect_delay)
        .event_callback(move |event| {
            let connection = weak.upgrade();
            async move {
                if let Some(connection) = connection {
                    connection.handle_event(event);
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
        _ if is_tls_failure(&source) => ConnectError::Tls { urls, source },
        _ => ConnectError::Unreachable { urls, source },
    }
}

/// Most TLS failures arrive as a read error of the kind "invalid data".
fn is_tls_failure(error: &async_nats::ConnectError) -> bool {
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
