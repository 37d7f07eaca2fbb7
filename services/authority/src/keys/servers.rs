//! What a fleet's NATS servers are told: who is who, and how they know each other.
//!
//! A server of the user's own has a directory `keys` below the one it runs in; what goes there is
//! written as a whole, with paths from there, and copied to its host.

use std::path::Path;

use nkeys::KeyPair;

use super::{Authority, AuthorityError};
use crate::{
    Permissions,
    certificates::{self, Use},
    claims::{self, UserClaims},
    files,
    kit::{credentials, seed},
};

/// Below the fleet's keys: of servers that keep the log.
const LOG: &str = "nats";
/// And of leaf nodes, which are other sites' doors to it.
const LEAF: &str = "leaf";

/// It asks with a hash of two tokens.
const ASK_EVERY_S: u32 = 5;
/// Token of a server's own administration, made when it is needed.
const SYSTEM_TOKEN_S: u64 = 3600;

/// Where a server finds what its configuration names.
struct Files<'a> {
    /// Where it keeps what it is told of accounts.
    accounts: &'a Path,
    certificate: &'a Path,
    key: &'a Path,
}

impl Authority {
    /// What makes a nats-server this fleet's, as a part of its configuration; `accounts` is a
    /// directory where it keeps what it is told of accounts.
    ///
    /// # Errors
    /// When it cannot be signed, or a path cannot stand in such a file.
    pub fn nats_config(&self, accounts: &Path, now: u64) -> Result<String, AuthorityError> {
        let (certificate, key) = (self.server_certificate(), self.server_key());
        self.common_part(&Files { accounts, certificate: &certificate, key: &key }, now)
    }

    /// Writes what NATS servers of the user's own have as `keys`: `nats` for those that keep the
    /// log, `leaf` for those of other sites.
    ///
    /// # Errors
    /// When it cannot be signed, or a file cannot be written.
    pub fn write_server_keys(&self, now: u64) -> Result<(), AuthorityError> {
        let at = self.directory.join(LOG);
        files::private_directory(&at)?;
        files::write_public(&at.join("cluster.conf"), format!("{WRITTEN}{ROUTES}").as_bytes())?;
        files::write_public(
            &at.join("leafnodes.conf"),
            format!("{WRITTEN}{LEAF_PORT}").as_bytes(),
        )?;
        let chain = files::read(&self.server_certificate())?;
        self.write_common(&at, &chain, &files::read_secret(&self.server_key())?, now)?;

        let at = self.directory.join(LEAF);
        files::private_directory(&at)?;
        files::write_public(&at.join("leaf.conf"), self.remotes().as_bytes())?;
        files::write_secret(&at.join("leaf.creds"), self.leaf_user(now)?.as_bytes())?;
        files::write_secret(&at.join("system.creds"), self.leaf_system_user(now)?.as_bytes())?;
        let (fleet, hosts) = (&self.about.fleet, &self.about.hosts);
        let pair = certificates::new_server(fleet, &self.ca, hosts, Use::Leaf, now)?;
        self.write_common(&at, &pair.certificate, &pair.key, now)
    }

    fn write_common(
        &self,
        at: &Path,
        certificate: &str,
        key: &str,
        now: u64,
    ) -> Result<(), AuthorityError> {
        let account = self.account.public_key();
        let domain = format!("{WRITTEN}default_js_domain: {{ {account}: \"\" }}\n");
        let names = Files {
            accounts: Path::new("accounts"),
            certificate: Path::new("keys/server.pem"),
            key: Path::new("keys/server-key.pem"),
        };
        let common = self.common_part(&names, now)?;
        files::write_public(&at.join("nats.conf"), common.as_bytes())?;
        files::write_public(&at.join("domain.conf"), domain.as_bytes())?;
        files::write_public(&at.join("ca.pem"), self.ca.certificate.as_bytes())?;
        files::write_public(&at.join("server.pem"), certificate.as_bytes())?;
        Ok(files::write_secret(&at.join("server-key.pem"), key.as_bytes())?)
    }

    fn common_part(&self, files: &Files<'_>, now: u64) -> Result<String, AuthorityError> {
        let (account, system) = (self.account.public_key(), self.system.public_key());
        let fleet = &self.about.fleet;
        let operator_jwt = claims::operator(&self.operator, &system, fleet, now)?;
        let account_jwt = self.account_jwt()?;
        let system_jwt = self.system_jwt()?;
        Ok(format!(
            r#"{WRITTEN}operator: {operator_jwt}
system_account: {system}
resolver {{
  type: full
  dir: {accounts}
  allow_delete: false
  # A server that was away asks the others this often who was cut off meanwhile.
  interval: "{ASK_EVERY_S}s"
}}
resolver_preload {{
  {account}: {account_jwt}
  {system}: {system_jwt}
}}
# Permissions travel in the tokens of members.
max_control_line: 64KB
tls {{
  cert_file: {certificate}
  key_file: {key}
  timeout: 5
}}
"#,
            accounts = quoted(files.accounts)?,
            certificate = quoted(files.certificate)?,
            key = quoted(files.key)?,
        ))
    }

    /// How a leaf node reaches the log: once for what members say, and once to hear who was cut
    /// off.
    fn remotes(&self) -> String {
        let url = |host: &String| {
            let is_v6 = host.parse::<std::net::Ipv6Addr>().is_ok();
            let host = if is_v6 { format!("[{host}]") } else { host.clone() };
            format!("\"nats-leaf://{host}:7422\"")
        };
        let urls = self.about.hosts.iter().map(url).collect::<Vec<_>>().join(", ");
        let remote = |account: &str, credentials: &str| {
            format!(
                r#"  {{
    urls: [{urls}]
    account: {account}
    credentials: "keys/{credentials}"
    tls {{ ca_file: "keys/ca.pem", timeout: 5 }}
  }}
"#
            )
        };
        let members = remote(&self.account.public_key(), "leaf.creds");
        let system = remote(&self.system.public_key(), "system.creds");
        format!("{WRITTEN}remotes: [\n{members}{system}]\n")
    }

    /// Carries what the members of a site say, whoever they are.
    fn leaf_user(&self, now: u64) -> Result<String, AuthorityError> {
        let (seed, jwt) = self.carrier(&self.account, &Permissions::carrier(), now)?;
        Ok(credentials(&jwt, &seed))
    }

    /// Hears of new account tokens, and asks for those it missed.
    fn leaf_system_user(&self, now: u64) -> Result<String, AuthorityError> {
        let permissions = Permissions {
            publish: vec!["$SYS.REQ.CLAIMS.PACK".to_owned(), "_INBOX.>".to_owned()],
            subscribe: vec!["$SYS.REQ.CLAIMS.UPDATE".to_owned(), "$SYS._INBOX.>".to_owned()],
        };
        let (seed, jwt) = self.carrier(&self.system, &permissions, now)?;
        Ok(credentials(&jwt, &seed))
    }

    /// A leaf node's user of an account, for as long as the signing key counts.
    fn carrier(
        &self,
        account: &KeyPair,
        permissions: &Permissions,
        now: u64,
    ) -> Result<(String, String), AuthorityError> {
        let key = KeyPair::new_user();
        let claims = UserClaims {
            name: LEAF,
            public_key: &key.public_key(),
            issued_at: now,
            expires_at: None,
            permissions,
        };
        let jwt = claims::user(&self.signing, &account.public_key(), &claims)?;
        Ok((seed(&key)?, jwt))
    }

    /// A key and its token that may tell servers of a new account token: seed first.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn system_user(&self, now: u64) -> Result<(String, String), AuthorityError> {
        let permissions = Permissions {
            publish: vec!["$SYS.REQ.CLAIMS.UPDATE".to_owned()],
            subscribe: vec!["_INBOX.>".to_owned()],
        };
        let key = KeyPair::new_user();
        // Of the account's own key: servers know it whichever signing keys they know of.
        let claims = UserClaims {
            name: "flotilla",
            public_key: &key.public_key(),
            issued_at: now,
            expires_at: Some(now + SYSTEM_TOKEN_S),
            permissions: &permissions,
        };
        let jwt = claims::user(&self.system, &self.system.public_key(), &claims)?;
        Ok((seed(&key)?, jwt))
    }
}

const WRITTEN: &str = "# Written by flotilla from the fleet's keys; changes are lost.\n";

/// Whoever may make a route may do everything.
const ROUTES: &str = r#"tls {
  cert_file: "keys/server.pem"
  key_file: "keys/server-key.pem"
  ca_file: "keys/ca.pem"
  verify: true
  timeout: 5
}
"#;

/// Leaf nodes show credentials, as clients do.
const LEAF_PORT: &str = r#"tls {
  cert_file: "keys/server.pem"
  key_file: "keys/server-key.pem"
  timeout: 5
}
"#;

fn quoted(path: &Path) -> Result<String, AuthorityError> {
    let text = path.to_str().filter(|text| !text.contains(['"', '\n', '\\']));
    text.map(|text| format!("\"{text}\""))
        .ok_or_else(|| AuthorityError::Path { path: path.to_owned() })
}
