//! Who belongs to a closed fleet: join tokens, joining, renewing, cutting off. Records live in a
//! bucket that is written by compare-and-set alone, so any coordinator may do this and a crash
//! leaves at worst a use of a token spent.
//!
//! Architecture Invariant: a secret is in no record; a member's key never comes here.

mod admit;
mod join;
mod records;
mod revoke;
mod roll;
mod tokens;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use authority::{
    Admission, Authority, AuthorityError, Fingerprint, JoinTokenError, Member, NoRandomness,
    ProofError, Role, Standing, UnknownRole, UnknownScope,
};
use bus::{Bus, MembersError as BucketError, Slot, Written, system::SystemError};
use futures::StreamExt;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    sync::{Notify, watch},
    time::interval,
};
use wire::{AgentId, IdError, Timestamp, chain, v1};

use self::records::MemberRecord;

pub use roll::{Objection, Roll};

/// Keys of the bucket.
const MEMBER: &str = "member.";
const TOKEN: &str = "token.";
/// Records somebody else may write at the same moment.
const TRIES: u32 = 64;
/// How often the fleet's keys are looked at: they may be rotated under us.
const KEYS_EVERY: Duration = Duration::from_secs(1);
/// After an error of the bus.
const PAUSE: Duration = Duration::from_millis(200);

/// What members are given, and for how long.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The fleet's keys.
    pub keys: PathBuf,
    /// NATS servers, as this process reaches them.
    pub servers: Vec<String>,
    /// And as boxes do.
    pub nats: Vec<String>,
    /// `host:port`, as boxes reach it.
    pub gateways: Vec<String>,
    pub store: String,
    /// What an agent is let in for, until it renews.
    pub member_ttl: Duration,
    /// What work is handed out for, until it is kept.
    pub lease: Duration,
}

/// The membership of a closed fleet.
#[derive(Clone)]
pub struct Members {
    shared: Arc<Shared>,
}

struct Shared {
    bus: Bus,
    terms: Terms,
    /// Held while the keys' list of the revoked is written and told.
    revoking: tokio::sync::Mutex<()>,
    /// What servers were told may not be what stands in the records.
    doubt: Notify,
}

/// What calls are judged by.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// Public keys whose bearers count.
    pub issuers: Vec<String>,
    pub roll: Roll,
}

/// Why somebody is not let in, or not let out.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(
        "there is no such join token, or its secret is another; `flotilla token create` makes one (K106)"
    )]
    NoToken,
    #[error("there is no join token {id}; `flotilla token list` shows which there are (K106)")]
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
        "this join token does not let in a {role}: it is for {offered}; choose of these, or ask for another (K107)"
    )]
    NotOffered { role: Role, offered: String },
    #[error(
        "the name {name} is another member's; choose another name, or revoke that one (flotilla agents revoke {name}) (K108)"
    )]
    NameTaken { name: String },
    #[error(
        "the key shown for {name} is that of {other}, and a member has a key of its own; choose another directory for the kit (K108)"
    )]
    KeyTaken { name: String, other: String },
    #[error("the name {name} is the fleet's own; choose another name (K108)")]
    Reserved { name: String },
    #[error(
        "{name} is a member with other rights, which its key keeps; revoke it (flotilla agents revoke {name}), remove its kit, and let it in anew (K108)"
    )]
    Changed { name: String },
    #[error("there is no member {name}; `flotilla members list` shows which there are (K109)")]
    NoMember { name: String },
    #[error(
        "{name} was revoked, and its key with it; remove its kit, and join again with a new join token (K109)"
    )]
    Revoked { name: String },
    #[error(
        "this proof was used already; ask again with a new one, and see that this machine's clock does not go back (K114)"
    )]
    Repeated,
    #[error(
        "{name} is a user: its kit is not renewed; whoever administers the fleet makes a new one (flotilla user create) (K103)"
    )]
    NotRenewed { name: String },
    #[error("{field}: {problem} (G101)")]
    Field { field: &'static str, problem: String },
    #[error(transparent)]
    Proof(#[from] ProofError),
    #[error(transparent)]
    Name(#[from] IdError),
    #[error(transparent)]
    Role(#[from] UnknownRole),
    #[error(transparent)]
    Scope(#[from] UnknownScope),
}

#[derive(Debug, thiserror::Error)]
pub enum MembersError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("too many others write {0} at this moment; try again (R105)")]
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
    Tls(#[from] authority::TlsError),
    #[error(
        "{name} is recorded as revoked, and the gateway refuses it, but the bus was not told; do it again (K116)"
    )]
    NotTold {
        name: String,
        #[source]
        source: SystemError,
    },
    #[error("the bus was not told of {name}, who is a member all the same; ask again (K116)")]
    NotAdmitted {
        name: String,
        #[source]
        source: SystemError,
    },
    #[error(transparent)]
    Random(#[from] NoRandomness),
}

impl Members {
    pub fn new(bus: Bus, terms: Terms) -> Self {
        let revoking = tokio::sync::Mutex::new(());
        Self { shared: Arc::new(Shared { bus, terms, revoking, doubt: Notify::new() }) }
    }

    /// Opened anew each time: the keys are rotated by other processes.
    fn authority(&self) -> Result<Authority, AuthorityError> {
        Authority::open(&self.shared.terms.keys)
    }

    /// Keeps `view` as the bucket and the keys are, and the servers told of both, for as long as it
    /// is polled.
    pub async fn attend(&self, view: &watch::Sender<View>) {
        tokio::join!(self.keep(view), self.keep_servers_told(view.subscribe()));
    }

    async fn keep(&self, view: &watch::Sender<View>) {
        let mut events = std::pin::pin!(self.shared.bus.follow_members());
        let mut look = interval(KEYS_EVERY);
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => view.send_modify(|view| view.roll.apply(event)),
                    Some(Err(error)) => {
                        tracing::warn!(error = %chain(&error), "cannot follow the members");
                        tokio::time::sleep(PAUSE).await;
                    }
                    None => return,
                },
                _ = look.tick() => match self.authority() {
                    Ok(keys) => {
                        let issuers = keys.issuers();
                        view.send_if_modified(|view| {
                            let changed = view.issuers != issuers;
                            view.issuers = issuers;
                            changed
                        });
                    }
                    Err(error) => tracing::error!(error = %chain(&error), "cannot read the keys"),
                },
            }
        }
    }

    /// Every member that has ever been let in, by name; the fleet's own are not among them.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub async fn list(&self) -> Result<Vec<v1::MemberInfo>, MembersError> {
        let everybody = self.everybody().await?.into_iter();
        Ok(everybody.map(|(member, record)| info(member.name.to_string(), record)).collect())
    }

    /// What a member is given, for so long; the bus lets it in from now on.
    async fn membership(
        &self,
        name: &AgentId,
        record: &MemberRecord,
    ) -> Result<v1::Membership, MembersError> {
        let authority = self.authority()?;
        let member = Member { name: name.clone(), standing: record.standing.clone() };
        self.admit(&member, record).await?;
        let (now, until) = (record.renewed_ms / 1000, record.expires_ms / 1000);
        let Admission { jwt, bearer } = authority.admit(&member, &record.key, now, Some(until))?;
        let terms = &self.shared.terms;
        let (roles, pool, scope) = words(&record.standing);
        Ok(v1::Membership {
            name: name.to_string(),
            user_jwt: jwt,
            bearer,
            expires_at: Some(at(record.expires_ms)),
            valid_s: seconds(record.expires_ms.saturating_sub(record.renewed_ms)),
            nats: terms.nats.clone(),
            gateways: terms.gateways.clone(),
            store: terms.store.clone(),
            ca_pem: authority.ca_pem().to_owned(),
            roles,
            pool,
            scope,
        })
    }

    /// The fleet, as proofs name it.
    fn fleet(&self) -> Result<Fingerprint, MembersError> {
        Ok(Fingerprint::of_pem(self.authority()?.ca_pem())?)
    }

    async fn read<T: DeserializeOwned>(&self, key: &str) -> Result<(u64, Option<T>), MembersError> {
        let Slot { revision, value } = self.shared.bus.member_slot(key).await?;
        let record = value.map(|value| serde_json::from_slice(&value)).transpose();
        let record =
            record.map_err(|source| MembersError::Damaged { key: key.to_owned(), source })?;
        Ok((revision, record))
    }

    /// Rewrites a record until nobody comes between. `change` is asked anew each time and returns
    /// the record to write; `None` leaves it as it is.
    async fn rewrite<T>(
        &self,
        key: &str,
        mut change: impl FnMut(Option<&T>) -> Result<Option<T>, Refusal>,
    ) -> Result<Option<T>, MembersError>
    where
        T: Serialize + DeserializeOwned + PartialEq,
    {
        let mut tried: Option<T> = None;
        for _ in 0..TRIES {
            let (revision, before) = self.read::<T>(key).await?;
            // A write whose answer was lost is found here.
            if tried.is_some() && before == tried {
                return Ok(before);
            }
            let Some(after) = change(before.as_ref())? else { return Ok(before) };
            let value = serde_json::to_vec(&after).expect("a record has only string keys").into();
            if let Written::New(_) = self.shared.bus.set_member_slot(key, value, revision).await? {
                return Ok(Some(after));
            }
            tried = Some(after);
        }
        Err(MembersError::Busy(key.to_owned()))
    }
}

fn info(name: String, record: MemberRecord) -> v1::MemberInfo {
    let (roles, pool, scope) = words(&record.standing);
    v1::MemberInfo {
        name,
        public_key: record.key,
        roles,
        pool,
        scope,
        joined_at: Some(at(record.joined_ms)),
        renewed_at: Some(at(record.renewed_ms)),
        expires_at: Some(at(record.expires_ms)),
        revoked_at: record.revoked_ms.map(at),
        token: record.token.unwrap_or_default(),
        host: record.host,
        version: record.version,
    }
}

/// Roles, pool and scope as messages have them.
fn words(standing: &Standing) -> (Vec<String>, String, String) {
    match standing {
        Standing::Agent { roles, pool } => {
            let roles = roles.iter().map(ToString::to_string).collect();
            (roles, pool.to_string(), String::new())
        }
        Standing::User { scope } => (Vec::new(), String::new(), scope.to_string()),
        Standing::Coordinator => (Vec::new(), String::new(), "coordinator".to_owned()),
    }
}

fn roles(names: &[String]) -> Result<BTreeSet<Role>, Refusal> {
    names.iter().map(|name| name.parse().map_err(Refusal::from)).collect()
}

fn at(ms: u64) -> Timestamp {
    wire::timestamp(Duration::from_millis(ms))
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "of some years at most")]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

/// A number of seconds that somebody asked for, within bounds.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
fn milliseconds(field: &'static str, seconds: f64, most_s: f64) -> Result<u64, Refusal> {
    if !(1.0..=most_s).contains(&seconds) {
        let problem = format!("{seconds} s is not from 1 s to {most_s} s");
        return Err(Refusal::Field { field, problem });
    }
    Ok((seconds * 1000.0) as u64)
}

/// Host names and versions, as somebody says of himself.
fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}
