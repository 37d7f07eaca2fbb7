//! The keys of a fleet, in one directory of its first host. Any process that can read them controls
//! the fleet.
//!
//! An *operator* key signs accounts. One *account* is the fleet's; each member except the
//! coordinator and admins has its own. The *signing key* signs the users of these accounts. On the
//! *system account* servers receive account tokens.

mod server_config;

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use nkeys::{KeyPair, KeyPairType};
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::{
    AuthorityError, GatewayCaller, Member, SubjectPermissions, bearer,
    certificates::{self, PemPair, ServerUsage},
    claims::{self, AccountClaims, AccountPurpose, UserClaims},
    credentials::{encode_seed, read_key_pair},
    files,
};

const METADATA_FILE: &str = "fleet.json";
const VERSION: u32 = 1;
/// A server certificate is renewed this many seconds before its expiry.
const SERVER_RENEW_S: u64 = 300 * 24 * 3600;

/// The keys of a fleet; issues accounts, user tokens and certificates.
///
/// ```text
/// create_or_open -> ensure_server_certificate -> issue_credentials (per member)
/// rotate_signing_key -> members renew -> retire_signing_keys
/// ```
///
/// Changes of the metadata file are locked and re-read, because several processes of the host may
/// change it. The key files themselves are replaced atomically.
pub struct FleetAuthority {
    directory: PathBuf,
    metadata: FleetMetadata,
    operator: KeyPair,
    account: KeyPair,
    signing: KeyPair,
    system: KeyPair,
    ca: PemPair,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetMetadata {
    version: u32,
    fleet: String,
    /// Seconds since 1970.
    created: u64,
    /// Hosts in the servers' certificate.
    hosts: Vec<String>,
    /// Issue time of the servers' certificate in seconds since 1970; 0 if it has to be issued.
    server_made: u64,
    /// Earlier signing keys whose signatures are still valid.
    #[serde(default)]
    retiring: Vec<String>,
    /// The last change of the valid signing keys, in seconds since 1970; 0 if there was none.
    #[serde(default, skip_serializing_if = "is_zero")]
    issuers_since: u64,
    /// Revoked coordinators and admins by public key, with the time of the revocation.
    #[serde(default)]
    revoked: BTreeMap<String, u64>,
}

/// The access of a member to the fleet: granted or ended. Times are in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberAccess {
    Granted {
        at: u64,
    },
    /// Revoked or expired; `granted_at` is the time of the last grant.
    Ended {
        granted_at: u64,
    },
}

impl MemberAccess {
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Ended { .. })
    }

    pub fn granted_at(self) -> u64 {
        match self {
            Self::Granted { at } | Self::Ended { granted_at: at } => at,
        }
    }
}

/// The tokens that prove that a key belongs to a member.
#[derive(Debug, Clone)]
pub struct MemberTokens {
    pub jwt: String,
    pub bearer: String,
}

/// The outcome of [`FleetAuthority::create_or_open`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateOutcome {
    New,
    /// The directory already contained keys; they were not changed.
    AlreadyExisted,
}

impl FleetAuthority {
    /// Creates the keys of a fleet in `directory`, or opens existing ones without changing them.
    pub fn create_or_open(
        directory: &Path,
        fleet: &str,
        hosts: &[String],
        now: u64,
    ) -> Result<(Self, CreateOutcome), AuthorityError> {
        if directory.join(METADATA_FILE).exists() {
            return Ok((Self::open(directory)?, CreateOutcome::AlreadyExisted));
        }
        let path = directory.join("operator.nk");
        if path.exists() {
            return Err(AuthorityError::Unfinished { path });
        }
        files::create_private_directory(directory)?;
        for (name, key) in [
            ("operator.nk", KeyPair::new_operator()),
            ("account.nk", KeyPair::new_account()),
            ("signing.nk", KeyPair::new_account()),
            ("system.nk", KeyPair::new_account()),
        ] {
            files::write_secret(&directory.join(name), encode_seed(&key)?.as_bytes())?;
        }
        let ca = certificates::issue_ca(fleet, now)?;
        files::write_secret(&directory.join("ca-key.pem"), ca.key.as_bytes())?;
        files::write_public(&directory.join("ca.pem"), ca.certificate.as_bytes())?;
        let about = FleetMetadata {
            version: VERSION,
            fleet: fleet.to_owned(),
            created: now,
            hosts: Vec::new(),
            server_made: 0,
            retiring: Vec::new(),
            issuers_since: 0,
            revoked: BTreeMap::new(),
        };
        // Write this file last: its presence shows that the keys are complete.
        write_metadata(directory, &about)?;
        let mut made = Self::open(directory)?;
        made.ensure_server_certificate(hosts, now)?;
        Ok((made, CreateOutcome::New))
    }

    /// Opens the keys in `directory`. Fails if other users of the host can read them.
    pub fn open(directory: &Path) -> Result<Self, AuthorityError> {
        let key = |name: &str| read_key_pair(&directory.join(name));
        let keys = (key("operator.nk")?, key("account.nk")?, key("signing.nk")?, key("system.nk")?);
        let (operator, account, signing, system) = keys;
        Ok(Self {
            operator,
            account,
            signing,
            system,
            ca: PemPair {
                certificate: files::read_text(&directory.join("ca.pem"))?,
                key: files::read_secret(&directory.join("ca-key.pem"))?,
            },
            // Read this file last: a signing key that is replaced meanwhile was recorded in it
            // before.
            metadata: read_metadata(directory)?,
            directory: directory.to_owned(),
        })
    }

    pub fn exists_in(directory: &Path) -> bool {
        directory.join(METADATA_FILE).exists()
    }

    pub fn fleet_name(&self) -> &str {
        &self.metadata.fleet
    }

    /// Returns the hosts in the servers' certificate, without those that all fleets share.
    pub fn server_hosts(&self) -> &[String] {
        &self.metadata.hosts
    }

    /// Returns the expiry of the servers' certificate, in seconds since 1970.
    pub fn server_expires_at(&self) -> u64 {
        certificates::server_expiry(self.metadata.server_made)
    }

    /// Returns the certificate authority in PEM.
    pub fn ca_pem(&self) -> &str {
        &self.ca.certificate
    }

    pub fn account_public_key(&self) -> String {
        self.account.public_key()
    }

    /// Returns the public keys whose signatures are valid for members, the current one first.
    pub fn issuer_keys(&self) -> Vec<String> {
        let retiring = self.metadata.retiring.iter().cloned();
        std::iter::once(self.signing.public_key()).chain(retiring).collect()
    }

    pub fn server_certificate_path(&self) -> PathBuf {
        self.directory.join("server.pem")
    }

    pub fn server_key_path(&self) -> PathBuf {
        self.directory.join("server-key.pem")
    }

    /// Ensures that the servers' certificate includes these hosts and is valid for at least 300
    /// days.
    pub fn ensure_server_certificate(
        &mut self,
        hosts: &[String],
        now: u64,
    ) -> Result<(), AuthorityError> {
        let mut all = self.metadata.hosts.clone();
        all.extend(hosts.iter().filter(|host| !self.metadata.hosts.contains(host)).cloned());
        all.dedup();
        let lasts = certificates::server_expiry(self.metadata.server_made) > now + SERVER_RENEW_S;
        if all == self.metadata.hosts && lasts && self.server_key_path().exists() {
            return Ok(());
        }
        self.renew_server_certificate(all, now)
    }

    /// Issues a new key and certificate for the servers.
    pub fn rotate_server_certificate(&mut self, now: u64) -> Result<(), AuthorityError> {
        self.renew_server_certificate(self.metadata.hosts.clone(), now)
    }

    fn renew_server_certificate(
        &mut self,
        hosts: Vec<String>,
        now: u64,
    ) -> Result<(), AuthorityError> {
        let pair = certificates::issue_server_certificate(
            &self.metadata.fleet,
            &self.ca,
            &hosts,
            ServerUsage::Cluster,
            now,
        )?;
        // Until both files are written, the certificate counts as missing.
        self.update_metadata(|about| about.server_made = 0)?;
        files::write_secret(&self.server_key_path(), pair.key.as_bytes())?;
        files::write_public(&self.server_certificate_path(), pair.certificate.as_bytes())?;
        self.update_metadata(|about| (about.hosts, about.server_made) = (hosts, now))
    }

    /// Changes the metadata file under a lock, because other processes of the host may change it.
    fn update_metadata(
        &mut self,
        change: impl FnOnce(&mut FleetMetadata),
    ) -> Result<(), AuthorityError> {
        let _lock = files::lock_directory(&self.directory)?;
        let mut about = read_metadata(&self.directory)?;
        change(&mut about);
        write_metadata(&self.directory, &about)?;
        self.metadata = about;
        Ok(())
    }

    /// Signs members with a new key from now on. Tokens signed with the old key stay valid until
    /// [`FleetAuthority::retire_signing_keys`]; members renew in the meantime.
    pub fn rotate_signing_key(&mut self, now: u64) -> Result<(), AuthorityError> {
        let (new, old) = (KeyPair::new_account(), self.signing.public_key());
        // Record the old key first, so that its signatures are valid at every moment.
        self.update_metadata(|about| {
            about.retiring.push(old);
            about.issuers_since = now;
        })?;
        files::write_secret(&self.directory.join("signing.nk"), encode_seed(&new)?.as_bytes())?;
        self.signing = new;
        Ok(())
    }

    /// Invalidates the tokens of all earlier signing keys, and returns the number of these keys.
    pub fn retire_signing_keys(&mut self, now: u64) -> Result<usize, AuthorityError> {
        let mut retired = 0;
        self.update_metadata(|about| {
            retired = std::mem::take(&mut about.retiring).len();
            about.issuers_since = now;
        })?;
        Ok(retired)
    }

    /// Revokes a key of the fleet's own account (coordinator or admin) permanently.
    pub fn revoke_key(&mut self, public_key: &str, now: u64) -> Result<(), AuthorityError> {
        self.update_metadata(|about| {
            about.revoked.insert(public_key.to_owned(), now);
        })
    }

    /// Returns the time of the revocation of a key of the fleet's own account, in seconds since
    /// 1970.
    pub fn revoked_at(&self, public_key: &str) -> Option<u64> {
        self.metadata.revoked.get(public_key).copied()
    }

    /// Issues the tokens of a member for its public key.
    pub fn issue_tokens(
        &self,
        member: &Member,
        public_key: &str,
        now: u64,
        expires_at: Option<u64>,
    ) -> Result<MemberTokens, AuthorityError> {
        let permissions = SubjectPermissions::for_member(member);
        let claims = UserClaims {
            name: member.name.as_str(),
            public_key,
            issued_at: now,
            expires_at,
            permissions: &permissions,
        };
        let account = match member.standing.uses_fleet_account() {
            true => self.account.public_key(),
            false => self.derive_account_key(public_key)?.public_key(),
        };
        let jwt = claims::sign_user(&self.signing, &account, &claims)?;
        let bearer = bearer::issue_bearer(&self.signing, member, public_key, now, expires_at)?;
        Ok(MemberTokens { jwt, bearer })
    }

    /// Issues a bearer with the rights of a verified caller that ends no later than the caller's.
    pub fn issue_session_bearer(
        &self,
        caller: &GatewayCaller,
        now: u64,
        expires_at: u64,
    ) -> Result<String, AuthorityError> {
        Ok(bearer::issue_session_bearer(&self.signing, caller, now, expires_at)?)
    }

    /// Returns the account token that servers receive when a member's access begins or ends. For
    /// the coordinator and admins it is the fleet's account token; [`FleetAuthority::revoke_key`]
    /// revokes them.
    ///
    /// The token of an ended access has a later issue time than all before it, independent of
    /// clocks, because servers keep the newest token.
    pub fn member_account_jwt(
        &self,
        member: &Member,
        public_key: &str,
        access: MemberAccess,
    ) -> Result<String, AuthorityError> {
        let (name, account) =
            (member.name.as_str(), self.derive_account_key(public_key)?.public_key());
        let since = self.metadata.issuers_since;
        match access {
            _ if member.standing.uses_fleet_account() => self.fleet_account_jwt(),
            MemberAccess::Granted { at } => {
                let claims = AccountClaims {
                    account: &account,
                    name,
                    signing_keys: &self.issuer_keys(),
                    revoked: &[],
                    purpose: AccountPurpose::Member {
                        fleet: &self.account.public_key(),
                        permissions: &SubjectPermissions::for_member(member),
                    },
                };
                Ok(claims::sign_account(&self.operator, &claims, at.max(since))?)
            }
            MemberAccess::Ended { granted_at } => {
                let claims = AccountClaims {
                    account: &account,
                    name,
                    signing_keys: &[],
                    revoked: &[public_key],
                    purpose: AccountPurpose::Revoked,
                };
                Ok(claims::sign_account(&self.operator, &claims, granted_at.max(since) + 1)?)
            }
        }
    }

    /// Derives a member's account key from its public key and the fleet's account key
    /// (HMAC-SHA-256). It needs no record, and only the fleet can compute it.
    fn derive_account_key(&self, public_key: &str) -> Result<KeyPair, AuthorityError> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, encode_seed(&self.account)?.as_bytes());
        let tag = hmac::sign(&key, format!("flotilla account of {public_key}").as_bytes());
        let bytes = tag.as_ref().try_into().expect("SHA-256 has 32 bytes");
        KeyPair::new_from_raw(KeyPairType::Account, bytes).map_err(AuthorityError::Make)
    }

    /// Returns the token of the fleet's account.
    pub fn fleet_account_jwt(&self) -> Result<String, AuthorityError> {
        let claims = AccountClaims {
            account: &self.account.public_key(),
            name: &self.metadata.fleet,
            signing_keys: &self.issuer_keys(),
            revoked: &self.metadata.revoked.keys().map(String::as_str).collect::<Vec<_>>(),
            purpose: AccountPurpose::Fleet,
        };
        let revoked = self.metadata.revoked.values().max().copied().unwrap_or(0);
        Ok(claims::sign_account(&self.operator, &claims, self.keys_changed_at().max(revoked))?)
    }

    /// Returns the token of the system account for a server's start. JetStream is served from this
    /// account and stops for a moment when the account changes.
    pub(crate) fn system_account_jwt(&self) -> Result<String, AuthorityError> {
        let claims = AccountClaims {
            account: &self.system.public_key(),
            name: "SYS",
            signing_keys: &self.issuer_keys(),
            revoked: &[],
            purpose: AccountPurpose::System,
        };
        Ok(claims::sign_account(&self.operator, &claims, self.keys_changed_at())?)
    }

    /// Returns the time of the last change of the keys, in seconds since 1970: the issue time of
    /// account tokens. An unchanged account thus has an unchanged token, which a server ignores; a
    /// token that differs, even only in its time, makes a server drop the answers it is about to
    /// send to members.
    fn keys_changed_at(&self) -> u64 {
        self.metadata.created.max(self.metadata.issuers_since)
    }
}

impl fmt::Debug for FleetAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("about", &self.metadata).finish_non_exhaustive()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde has it")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn read_metadata(directory: &Path) -> Result<FleetMetadata, AuthorityError> {
    let path = directory.join(METADATA_FILE);
    let about: FleetMetadata = serde_json::from_str(&files::read_text(&path)?)
        .map_err(|source| AuthorityError::Metadata { path: path.clone(), source })?;
    if about.version != VERSION {
        return Err(AuthorityError::Newer { path, found: about.version, known: VERSION });
    }
    Ok(about)
}

fn write_metadata(directory: &Path, about: &FleetMetadata) -> Result<(), AuthorityError> {
    let path = directory.join(METADATA_FILE);
    let text = serde_json::to_vec_pretty(about)
        .map_err(|source| AuthorityError::Metadata { path: path.clone(), source })?;
    Ok(files::write_secret(&path, &text)?)
}
