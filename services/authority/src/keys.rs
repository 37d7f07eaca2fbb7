//! The keys of a fleet, in one directory of its first machine. Whoever has them is the fleet.
//!
//! An *operator* key vouches for accounts; one *account* is the fleet, and each member but its own
//! has another; their *signing key* makes users of them, and the *system account* is where a server
//! hears of accounts.

mod servers;

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use nkeys::{KeyPair, KeyPairType};
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::{
    FileError, Member, Permissions, bearer,
    certificates::{self, CertificateError, Pair, Use},
    claims::{self, AccountClaims, ClaimsError, Part, UserClaims},
    files,
    kit::{key_pair, seed},
};

const ABOUT: &str = "fleet.json";
const VERSION: u32 = 1;
/// A certificate is made anew when it ends within so long.
const SERVER_RENEW_S: u64 = 300 * 24 * 3600;

/// A fleet's keys, and what they make.
pub struct Authority {
    directory: PathBuf,
    about: About,
    operator: KeyPair,
    account: KeyPair,
    signing: KeyPair,
    system: KeyPair,
    ca: Pair,
}

/// Everything about them that is no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    version: u32,
    fleet: String,
    created: u64,
    /// Names and addresses the servers' certificate is for.
    hosts: Vec<String>,
    /// When that was made.
    server_made: u64,
    /// Public keys that made members before the present one, and still count.
    #[serde(default)]
    retiring: Vec<String>,
    /// When it was last changed which keys make members; 0: never.
    #[serde(default, skip_serializing_if = "is_zero")]
    issuers_since: u64,
    /// Of members that ran the fleet and were cut off: their keys, and when.
    #[serde(default)]
    revoked: BTreeMap<String, u64>,
}

/// Whether a member may connect. Times are in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// For as long as its token says.
    Granted { at: u64 },
    /// It was cut off, or its time is over; what it had was granted then.
    Over { granted_at: u64 },
}

impl Access {
    pub fn is_over(self) -> bool {
        matches!(self, Self::Over { .. })
    }

    /// When it was granted.
    pub fn at(self) -> u64 {
        match self {
            Self::Granted { at } | Self::Over { granted_at: at } => at,
        }
    }
}

/// What proves that a key is a member's.
#[derive(Debug, Clone)]
pub struct Admission {
    /// For the bus.
    pub jwt: String,
    /// For the gateway.
    pub bearer: String,
}

/// What `create` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    New,
    /// Nothing of it was changed.
    WasThere,
}

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} is not a key (K110)", path.display())]
    Key {
        path: PathBuf,
        #[source]
        source: nkeys::error::Error,
    },
    #[error("make a key (K110)")]
    Make(#[source] nkeys::error::Error),
    #[error("{} does not describe a fleet's keys (K110)", path.display())]
    About {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} is of version {found}; this program knows {VERSION}: upgrade it (K110)", path.display())]
    Newer { path: PathBuf, found: u32 },
    #[error("{} belongs to an unfinished `flotilla init`; remove that directory and try again (K110)", path.display())]
    Unfinished { path: PathBuf },
    #[error("a nats-server cannot have the path {}: choose one in UTF-8 without quotes (K110)", path.display())]
    Path { path: PathBuf },
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    #[error(transparent)]
    Claims(#[from] ClaimsError),
}

impl Authority {
    /// The keys in `directory`, which are made if there are none. What is there stays as it is.
    ///
    /// # Errors
    /// When the directory cannot be used, or holds something else.
    pub fn create(
        directory: &Path,
        fleet: &str,
        hosts: &[String],
        now: u64,
    ) -> Result<(Self, Created), AuthorityError> {
        if directory.join(ABOUT).exists() {
            return Ok((Self::open(directory)?, Created::WasThere));
        }
        let path = directory.join("operator.nk");
        if path.exists() {
            return Err(AuthorityError::Unfinished { path });
        }
        files::private_directory(directory)?;
        for (name, key) in [
            ("operator.nk", KeyPair::new_operator()),
            ("account.nk", KeyPair::new_account()),
            ("signing.nk", KeyPair::new_account()),
            ("system.nk", KeyPair::new_account()),
        ] {
            files::write_secret(&directory.join(name), seed(&key)?.as_bytes())?;
        }
        let ca = certificates::new_authority(fleet, now)?;
        files::write_secret(&directory.join("ca-key.pem"), ca.key.as_bytes())?;
        files::write_public(&directory.join("ca.pem"), ca.certificate.as_bytes())?;
        let about = About {
            version: VERSION,
            fleet: fleet.to_owned(),
            created: now,
            hosts: Vec::new(),
            server_made: 0,
            retiring: Vec::new(),
            issuers_since: 0,
            revoked: BTreeMap::new(),
        };
        // Last: with it they are complete.
        write_about(directory, &about)?;
        let mut made = Self::open(directory)?;
        made.serve(hosts, now)?;
        Ok((made, Created::New))
    }

    /// # Errors
    /// When a file is missing, damaged, or open to others.
    pub fn open(directory: &Path) -> Result<Self, AuthorityError> {
        let key = |name: &str| key_pair(&directory.join(name));
        let keys = (key("operator.nk")?, key("account.nk")?, key("signing.nk")?, key("system.nk")?);
        let (operator, account, signing, system) = keys;
        Ok(Self {
            operator,
            account,
            signing,
            system,
            ca: Pair {
                certificate: files::read(&directory.join("ca.pem"))?,
                key: files::read_secret(&directory.join("ca-key.pem"))?,
            },
            // Last: a signing key that is replaced meanwhile is in it before.
            about: read_about(directory)?,
            directory: directory.to_owned(),
        })
    }

    /// Whether a directory holds a fleet's keys.
    pub fn is_in(directory: &Path) -> bool {
        directory.join(ABOUT).exists()
    }

    pub fn fleet(&self) -> &str {
        &self.about.fleet
    }

    /// Names and addresses the servers' certificate is for, besides those of every fleet.
    pub fn hosts(&self) -> &[String] {
        &self.about.hosts
    }

    /// When the servers' certificate ends, in seconds since 1970.
    pub fn server_expires(&self) -> u64 {
        certificates::server_expires(self.about.server_made)
    }

    /// The certificate authority, in PEM.
    pub fn ca_pem(&self) -> &str {
        &self.ca.certificate
    }

    /// The public key of the account that is the fleet, at its servers.
    pub fn account(&self) -> String {
        self.account.public_key()
    }

    /// Public keys whose signatures make members.
    pub fn issuers(&self) -> Vec<String> {
        let retiring = self.about.retiring.iter().cloned();
        std::iter::once(self.signing.public_key()).chain(retiring).collect()
    }

    pub fn server_certificate(&self) -> PathBuf {
        self.directory.join("server.pem")
    }

    pub fn server_key(&self) -> PathBuf {
        self.directory.join("server-key.pem")
    }

    /// Makes sure that the servers' certificate is for these hosts too, and lasts.
    ///
    /// # Errors
    /// When a name will not do, or a file cannot be written.
    pub fn serve(&mut self, hosts: &[String], now: u64) -> Result<(), AuthorityError> {
        let mut all = self.about.hosts.clone();
        all.extend(hosts.iter().filter(|host| !self.about.hosts.contains(host)).cloned());
        all.dedup();
        let lasts = certificates::server_expires(self.about.server_made) > now + SERVER_RENEW_S;
        if all == self.about.hosts && lasts && self.server_key().exists() {
            return Ok(());
        }
        self.renew_server(all, now)
    }

    /// Makes a new key and certificate for the servers.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn rotate_server(&mut self, now: u64) -> Result<(), AuthorityError> {
        self.renew_server(self.about.hosts.clone(), now)
    }

    fn renew_server(&mut self, hosts: Vec<String>, now: u64) -> Result<(), AuthorityError> {
        let pair =
            certificates::new_server(&self.about.fleet, &self.ca, &hosts, Use::Cluster, now)?;
        // Until both are there, they are to be made.
        self.change(|about| about.server_made = 0)?;
        files::write_secret(&self.server_key(), pair.key.as_bytes())?;
        files::write_public(&self.server_certificate(), pair.certificate.as_bytes())?;
        self.change(|about| (about.hosts, about.server_made) = (hosts, now))
    }

    /// Other processes of the fleet's machine may be changing it too.
    fn change(&mut self, change: impl FnOnce(&mut About)) -> Result<(), AuthorityError> {
        let _lock = files::lock(&self.directory)?;
        let mut about = read_about(&self.directory)?;
        change(&mut about);
        write_about(&self.directory, &about)?;
        self.about = about;
        Ok(())
    }

    /// Makes members with a new key from now on. Those of the old one stay members until
    /// [`Authority::retire`]: by then they have renewed.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn rotate_signing(&mut self, now: u64) -> Result<(), AuthorityError> {
        let (new, old) = (KeyPair::new_account(), self.signing.public_key());
        // First: what was signed with the old key counts at every moment.
        self.change(|about| {
            about.retiring.push(old);
            about.issuers_since = now;
        })?;
        files::write_secret(&self.directory.join("signing.nk"), seed(&new)?.as_bytes())?;
        self.signing = new;
        Ok(())
    }

    /// What was made with earlier signing keys counts no longer.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn retire(&mut self, now: u64) -> Result<usize, AuthorityError> {
        let mut retired = 0;
        self.change(|about| {
            retired = std::mem::take(&mut about.retiring).len();
            about.issuers_since = now;
        })?;
        Ok(retired)
    }

    /// Cuts off whoever has this key in the fleet's own account, for good.
    ///
    /// # Errors
    /// When that cannot be written down.
    pub fn revoke(&mut self, public_key: &str, now: u64) -> Result<(), AuthorityError> {
        self.change(|about| {
            about.revoked.insert(public_key.to_owned(), now);
        })
    }

    /// When whoever has this key was cut off.
    pub fn revoked_at(&self, public_key: &str) -> Option<u64> {
        self.about.revoked.get(public_key).copied()
    }

    /// Everything a member is given for its key.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn admit(
        &self,
        member: &Member,
        public_key: &str,
        now: u64,
        expires_at: Option<u64>,
    ) -> Result<Admission, AuthorityError> {
        let permissions = Permissions::of(member);
        let claims = UserClaims {
            name: member.name.as_str(),
            public_key,
            issued_at: now,
            expires_at,
            permissions: &permissions,
        };
        let account = match member.standing.runs_the_fleet() {
            true => self.account.public_key(),
            false => self.account_of(public_key)?.public_key(),
        };
        let jwt = claims::user(&self.signing, &account, &claims)?;
        let bearer = bearer::mint(&self.signing, member, public_key, now, expires_at)?;
        Ok(Admission { jwt, bearer })
    }

    /// What servers are told of a member whose key this is: when it is let in, or let in for longer,
    /// and when that is over. Of those that run the fleet, [`Authority::revoke`] says who was cut off.
    ///
    /// A token that says that it is over is newer than those before it, by whichever clock they were
    /// made: servers that tell each other keep the newest.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn member_account(
        &self,
        member: &Member,
        public_key: &str,
        access: Access,
    ) -> Result<String, AuthorityError> {
        let (name, account) = (member.name.as_str(), self.account_of(public_key)?.public_key());
        let since = self.about.issuers_since;
        match access {
            _ if member.standing.runs_the_fleet() => self.account_jwt(),
            Access::Granted { at } => {
                let claims = AccountClaims {
                    account: &account,
                    name,
                    signing: &self.issuers(),
                    revoked: &[],
                    part: Part::Member {
                        fleet: &self.account.public_key(),
                        permissions: &Permissions::of(member),
                    },
                };
                Ok(claims::account(&self.operator, &claims, at.max(since))?)
            }
            Access::Over { granted_at } => {
                let claims = AccountClaims {
                    account: &account,
                    name,
                    signing: &[],
                    revoked: &[public_key],
                    part: Part::Over,
                };
                Ok(claims::account(&self.operator, &claims, granted_at.max(since) + 1)?)
            }
        }
    }

    /// The account of a member's key follows from it and from the fleet's, so that it needs no
    /// record, and only the fleet can tell. It signs nothing.
    fn account_of(&self, public_key: &str) -> Result<KeyPair, AuthorityError> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, seed(&self.account)?.as_bytes());
        let tag = hmac::sign(&key, format!("flotilla account of {public_key}").as_bytes());
        let bytes = tag.as_ref().try_into().expect("SHA-256 has 32 bytes");
        KeyPair::new_from_raw(KeyPairType::Account, bytes).map_err(AuthorityError::Make)
    }

    /// What a server is told of the fleet as it is now.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn account_jwt(&self) -> Result<String, AuthorityError> {
        let claims = AccountClaims {
            account: &self.account.public_key(),
            name: &self.about.fleet,
            signing: &self.issuers(),
            revoked: &self.about.revoked.keys().map(String::as_str).collect::<Vec<_>>(),
            part: Part::Fleet,
        };
        let revoked = self.about.revoked.values().max().copied().unwrap_or(0);
        Ok(claims::account(&self.operator, &claims, self.changed().max(revoked))?)
    }

    /// And of its system account, when it starts: JetStream itself is served from there, and stops for
    /// a moment when the account changes.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub(crate) fn system_jwt(&self) -> Result<String, AuthorityError> {
        let claims = AccountClaims {
            account: &self.system.public_key(),
            name: "SYS",
            signing: &self.issuers(),
            revoked: &[],
            part: Part::System,
        };
        Ok(claims::account(&self.operator, &claims, self.changed())?)
    }

    /// When the keys were last changed. Tokens of accounts are made then, and not now: the same
    /// account has the same token, and a server that has it does nothing. One that is another, even
    /// by its time alone, has servers forget what they are about to answer to members.
    fn changed(&self) -> u64 {
        self.about.created.max(self.about.issuers_since)
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("about", &self.about).finish_non_exhaustive()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde has it")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn read_about(directory: &Path) -> Result<About, AuthorityError> {
    let path = directory.join(ABOUT);
    let about: About = serde_json::from_str(&files::read(&path)?)
        .map_err(|source| AuthorityError::About { path: path.clone(), source })?;
    if about.version != VERSION {
        return Err(AuthorityError::Newer { path, found: about.version });
    }
    Ok(about)
}

fn write_about(directory: &Path, about: &About) -> Result<(), AuthorityError> {
    let path = directory.join(ABOUT);
    let text = serde_json::to_vec_pretty(about)
        .map_err(|source| AuthorityError::About { path: path.clone(), source })?;
    Ok(files::write_secret(&path, &text)?)
}
