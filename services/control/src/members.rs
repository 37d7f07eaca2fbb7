//! The members of a closed fleet: join tokens, joining, renewal and revocation. The records are in
//! a bucket that is written only by compare-and-set, so any coordinator can change them, and a
//! crash wastes at most one use of a token.
//!
//! Architecture Invariant: no record contains a secret, and a member's private key never reaches
//! this process.

mod join;
mod join_tokens;
mod login_codes;
mod provisioning;
mod records;
mod revocation;
mod revocation_list;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use bus::{
    Bus, CasOutcome, MemberEntry, MembersError as BucketError, system_account::PushAccountsError,
};
use futures::StreamExt;
use identity::{
    AuthorityError, Fingerprint, FleetAuthority, JoinTokenError, Member, MemberKind, MemberRole,
    MemberTokens, ProofError, RandomnessError, UnknownRoleError, UnknownScopeError,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    sync::{Notify, watch},
    time::interval,
};
use wire::{AgentId, IdError, Timestamp, format_error_chain, v1};

use self::{login_codes::LoginCodes, records::MemberRecord};

pub use revocation_list::{DenyReason, RevocationList};

const MEMBER: &str = "member.";
const TOKEN: &str = "token.";
/// Attempts while other writers change the record.
const WRITE_ATTEMPTS_MAX: u32 = 64;
/// Another process may rotate the fleet's keys.
const KEYS_CHECK_INTERVAL: Duration = Duration::from_secs(1);
const ERROR_PAUSE: Duration = Duration::from_millis(200);

/// The settings of a membership: the addresses that members are given, and the validity.
#[derive(Debug, Clone)]
pub struct MembershipConfig {
    /// Directory with the fleet's keys.
    pub keys_dir: PathBuf,
    /// Addresses that this process can reach.
    pub nats_servers: Vec<String>,
    /// Addresses that members can reach.
    pub advertised_nats: Vec<String>,
    /// Gateways as `host:port`, with addresses that members can reach.
    pub advertised_gateways: Vec<String>,
    pub store: String,
    /// Validity of an agent's membership until its next renewal.
    pub member_ttl: Duration,
    /// Time limit of a delivered job, which its agent extends while it works.
    pub lease: Duration,
}

/// The registry of the members of a closed fleet: decides who may join, issues credentials, and
/// keeps the NATS servers up to date. A member has one of these states:
///
/// - *active*: its record is current, and the servers accept its account;
/// - *expired*: its credentials have ended, and it may renew them with its key;
/// - *revoked*: its key is refused for good; the name may join again with another key.
///
/// An agent joins in this order: check the proof of its key, spend a use of the join token, write
/// the member's record, push its account to the NATS servers, and return the credentials. Each step
/// can be repeated after a crash, because a token counts a member only once.
#[derive(Clone)]
pub struct MemberRegistry {
    shared: Arc<RegistryState>,
}

struct RegistryState {
    bus: Bus,
    config: MembershipConfig,
    /// Held while the revoked keys are written and pushed.
    revocation_lock: tokio::sync::Mutex<()>,
    /// Notified when the servers may know other accounts than the records contain.
    resync_request: Notify,
    login_codes: Mutex<LoginCodes>,
}

/// The data by which the gateway judges calls.
#[derive(Debug, Clone, Default)]
pub struct MembershipView {
    /// Public keys of the issuers whose bearer tokens are valid.
    pub issuers: Vec<String>,
    pub revocations: RevocationList,
}

/// The reason why a request about membership is refused.
#[derive(Debug, thiserror::Error)]
pub enum MembershipRefusal {
    #[error(
        "the join token is unknown or its secret is wrong; `flotilla token create` makes one (K106)"
    )]
    NoToken,
    #[error("there is no join token {id}; `flotilla token list` lists all (K106)")]
    UnknownToken { id: String },
    #[error("join token {id} was revoked; ask for a new one (flotilla token create) (K107)")]
    TokenRevoked { id: String },
    #[error(
        "join token {id} expired {ago_s} s ago; ask for a new one (flotilla token create) (K107)"
    )]
    TokenExpired { id: String, ago_s: u64 },
    #[error(
        "join token {id} is used up (it was good for {uses}); ask for a new one (flotilla token create) (K107)"
    )]
    TokenUsedUp { id: String, uses: u32 },
    #[error(
        "this join token does not admit a {role}: it is for {offered}; choose one of these, or ask \
         for another token (K107)"
    )]
    RoleNotOffered { role: MemberRole, offered: String },
    #[error(
        "the name {name} is another member's; choose another name (`join --name NAME`), or revoke \
         that member (K108)"
    )]
    NameTaken { name: String },
    #[error(
        "the key for {name} belongs to {other}: each member needs its own key; choose another \
         directory for the credentials (K108)"
    )]
    KeyTaken { name: String, other: String },
    #[error("the name {name} is the fleet's own; choose another name (K108)")]
    Reserved { name: String },
    #[error(
        "{name} is already a member with other rights; revoke it (flotilla agents revoke {name}), \
         remove its credentials, and join again (K108)"
    )]
    RightsChanged { name: String },
    #[error("there is no member {name}; `flotilla members list` lists all (K109)")]
    NoMember { name: String },
    #[error(
        "{name} was revoked, and its key with it; remove its credentials, and join again with a new join token (K109)"
    )]
    Revoked { name: String },
    #[error(
        "this proof was already used; retry with a new one, and check that this machine's clock \
         does not go back (K114)"
    )]
    ProofReused,
    #[error(
        "{name} is a user: its credentials are not renewed; ask an administrator for a new one (flotilla \
         user create) (K103)"
    )]
    NotRenewed { name: String },
    #[error(
        "the login code is unknown: it works once, for 10 minutes, until the gateway restarts; \
         `flotilla open` makes another link (K120)"
    )]
    UnknownLoginCode,
    #[error("there are too many unused login codes; each ends after 10 minutes (G104)")]
    TooManyLoginCodes,
    #[error("{field}: {problem} (G101)")]
    Field { field: &'static str, problem: String },
    #[error(transparent)]
    Proof(#[from] ProofError),
    #[error(transparent)]
    Name(#[from] IdError),
    #[error(transparent)]
    Role(#[from] UnknownRoleError),
    #[error(transparent)]
    Scope(#[from] UnknownScopeError),
}

/// A failure of a request about membership.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    #[error(transparent)]
    Refused(#[from] MembershipRefusal),
    #[error("too many concurrent writes to {0}; try again (R105)")]
    Busy(String),
    #[error("the record {key} is damaged, or of a newer version (K119)")]
    Damaged {
        key: String,
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Bucket(#[from] BucketError),
    #[error(transparent)]
    Presence(#[from] bus::PresenceError),
    #[error("use the fleet's keys")]
    Keys(#[from] AuthorityError),
    #[error("use the fleet's keys")]
    Certificate(#[from] JoinTokenError),
    #[error("use the fleet's keys")]
    Tls(#[from] identity::FleetTlsError),
    #[error(
        "{name} is recorded as revoked, and the gateway refuses it, but the bus was not updated; \
         revoke it again (K116)"
    )]
    NotRevokedEverywhere {
        name: String,
        #[source]
        source: PushAccountsError,
    },
    #[error("{name} is a member now, but the bus was not updated; try again (K116)")]
    NotAdmitted {
        name: String,
        #[source]
        source: PushAccountsError,
    },
    #[error(transparent)]
    Random(#[from] RandomnessError),
}

impl MemberRegistry {
    pub fn new(bus: Bus, config: MembershipConfig) -> Self {
        let revoking = tokio::sync::Mutex::new(());
        Self {
            shared: Arc::new(RegistryState {
                bus,
                config,
                revocation_lock: revoking,
                resync_request: Notify::new(),
                login_codes: Mutex::default(),
            }),
        }
    }

    /// Called for each use, because other processes rotate the keys.
    fn open_authority(&self) -> Result<FleetAuthority, AuthorityError> {
        FleetAuthority::open(&self.shared.config.keys_dir)
    }

    /// Keeps `view` and the NATS servers up to date with the bucket and the keys, until the events
    /// of the bucket end or the future is dropped.
    pub async fn sync_membership(&self, view: &watch::Sender<MembershipView>) {
        tokio::join!(self.update_view(view), self.sync_servers(view.subscribe()));
    }

    /// Applies the events of the bucket, and checks the keys at [`KEYS_CHECK_INTERVAL`].
    async fn update_view(&self, view: &watch::Sender<MembershipView>) {
        let mut events = std::pin::pin!(self.shared.bus.follow_members());
        let mut look = interval(KEYS_CHECK_INTERVAL);
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => view.send_modify(|view| view.revocations.apply_event(event)),
                    Some(Err(error)) => {
                        tracing::warn!(error = %format_error_chain(&error), "cannot follow the members");
                        tokio::time::sleep(ERROR_PAUSE).await;
                    }
                    None => return,
                },
                _ = look.tick() => match self.open_authority() {
                    Ok(keys) => {
                        let issuers = keys.issuer_keys();
                        view.send_if_modified(|view| {
                            let changed = view.issuers != issuers;
                            view.issuers = issuers;
                            changed
                        });
                    }
                    Err(error) => tracing::error!(error = %format_error_chain(&error), "cannot read the keys"),
                },
            }
        }
    }

    /// Returns every member that was ever admitted. The fleet's own members have no records and are
    /// not included.
    pub async fn list_members(&self) -> Result<Vec<v1::MemberInfo>, MembershipError> {
        let everybody = self.read_members().await?.into_iter();
        Ok(everybody.map(|(member, record)| member_info(member.name.to_string(), record)).collect())
    }

    /// Pushes the member's account before its credentials are issued.
    async fn issue_membership(
        &self,
        name: &AgentId,
        record: &MemberRecord,
    ) -> Result<v1::Membership, MembershipError> {
        let authority = self.open_authority()?;
        let member = Member { name: name.clone(), standing: record.standing.clone() };
        self.provision_member(&member, record).await?;
        let (now, until) = (record.renewed_ms / 1000, record.expires_ms / 1000);
        let MemberTokens { jwt, bearer } =
            authority.issue_tokens(&member, &record.key, now, Some(until))?;
        let config = &self.shared.config;
        let (roles, pool, scope) = standing_fields(&record.standing);
        Ok(v1::Membership {
            name: name.to_string(),
            user_jwt: jwt,
            bearer,
            expires_at: Some(timestamp_from_ms(record.expires_ms)),
            valid_s: to_seconds(record.expires_ms.saturating_sub(record.renewed_ms)),
            nats: config.advertised_nats.clone(),
            gateways: config.advertised_gateways.clone(),
            store: config.store.clone(),
            ca_pem: authority.ca_pem().to_owned(),
            roles,
            pool,
            scope,
        })
    }

    /// Returns the fingerprint of the fleet's CA, which identifies the fleet in proofs.
    fn fleet_fingerprint(&self) -> Result<Fingerprint, MembershipError> {
        Ok(Fingerprint::from_pem(self.open_authority()?.ca_pem())?)
    }

    async fn read_record<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<(u64, Option<T>), MembershipError> {
        let MemberEntry { revision, value } = self.shared.bus.get_member_entry(key).await?;
        let record = value.map(|value| serde_json::from_slice(&value)).transpose();
        let record =
            record.map_err(|source| MembershipError::Damaged { key: key.to_owned(), source })?;
        Ok((revision, record))
    }

    /// Changes a record by compare-and-set and returns the stored one. `change` receives the
    /// current record on each attempt and returns the record to write; `None` leaves it unchanged.
    async fn rewrite_record<T>(
        &self,
        key: &str,
        mut change: impl FnMut(Option<&T>) -> Result<Option<T>, MembershipRefusal>,
    ) -> Result<Option<T>, MembershipError>
    where
        T: Serialize + DeserializeOwned + PartialEq,
    {
        let mut tried: Option<T> = None;
        for _ in 0..WRITE_ATTEMPTS_MAX {
            let (revision, before) = self.read_record::<T>(key).await?;
            // A write whose answer was lost is detected here.
            if tried.is_some() && before == tried {
                return Ok(before);
            }
            let Some(after) = change(before.as_ref())? else { return Ok(before) };
            let value = serde_json::to_vec(&after).expect("a record has only string keys").into();
            if let CasOutcome::Written(_) =
                self.shared.bus.put_member_entry(key, value, revision).await?
            {
                return Ok(Some(after));
            }
            tried = Some(after);
        }
        Err(MembershipError::Busy(key.to_owned()))
    }
}

fn member_info(name: String, record: MemberRecord) -> v1::MemberInfo {
    let (roles, pool, scope) = standing_fields(&record.standing);
    v1::MemberInfo {
        name,
        public_key: record.key,
        roles,
        pool,
        scope,
        joined_at: Some(timestamp_from_ms(record.joined_ms)),
        renewed_at: Some(timestamp_from_ms(record.renewed_ms)),
        expires_at: Some(timestamp_from_ms(record.expires_ms)),
        revoked_at: record.revoked_ms.map(timestamp_from_ms),
        token: record.token.unwrap_or_default(),
        host: record.host,
        version: record.version,
    }
}

fn standing_fields(standing: &MemberKind) -> (Vec<String>, String, String) {
    match standing {
        MemberKind::Agent { roles, pool } => {
            let roles = roles.iter().map(ToString::to_string).collect();
            (roles, pool.to_string(), String::new())
        }
        MemberKind::User { scope } => (Vec::new(), String::new(), scope.to_string()),
        MemberKind::Coordinator => (Vec::new(), String::new(), "coordinator".to_owned()),
    }
}

fn parse_roles(names: &[String]) -> Result<BTreeSet<MemberRole>, MembershipRefusal> {
    names.iter().map(|name| name.parse().map_err(MembershipRefusal::from)).collect()
}

fn timestamp_from_ms(ms: u64) -> Timestamp {
    wire::to_timestamp(Duration::from_millis(ms))
}

#[expect(clippy::cast_precision_loss, reason = "of some years at most")]
fn to_seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

/// Accepts 1 to `most_s` seconds; refuses others with `field` in the message.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
fn parse_duration_ms(
    field: &'static str,
    seconds: f64,
    most_s: f64,
) -> Result<u64, MembershipRefusal> {
    if !(1.0..=most_s).contains(&seconds) {
        let problem = format!("{seconds} s is not from 1 s to {most_s} s");
        return Err(MembershipRefusal::Field { field, problem });
    }
    Ok((seconds * 1000.0) as u64)
}

/// Removes control characters and returns at most 100 characters. Agents choose their host names
/// and versions themselves.
fn sanitise_text(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}
