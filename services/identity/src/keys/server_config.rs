//! The configuration of a fleet's NATS servers: accounts, certificates, and connections between
//! servers.
//!
//! A server run by the user has a directory `keys` below its working directory. Its files are
//! written together, with paths relative to the working directory, and copied to its host.

use std::path::Path;

use nkeys::KeyPair;

use super::FleetAuthority;
use crate::{
    AuthorityError, SubjectPermissions,
    certificates::{self, ServerUsage},
    claims::{self, UserClaims},
    credentials::{encode_seed, format_credentials},
    files,
};

/// The directory with the files of servers that store the log, below the fleet's keys.
const LOG_SERVER_DIR: &str = "nats";
/// The directory of leaf nodes, through which other sites reach the log, and their user name.
const LEAF: &str = "leaf";

/// The interval at which a server asks others for account tokens it missed, in seconds. The request
/// contains only a hash of two tokens.
const ASK_EVERY_S: u32 = 5;
/// The validity of the token with which account tokens are pushed; it is issued when needed.
const SYSTEM_TOKEN_S: u64 = 3600;

struct ServerKeyPaths<'a> {
    /// Where the server stores account tokens.
    accounts: &'a Path,
    certificate: &'a Path,
    key: &'a Path,
}

impl FleetAuthority {
    /// Returns the part of a nats-server's configuration that restricts it to this fleet.
    /// `accounts` is the directory in which the server stores account tokens.
    pub fn nats_config(&self, accounts: &Path, now: u64) -> Result<String, AuthorityError> {
        let (certificate, key) = (self.server_certificate_path(), self.server_key_path());
        self.common_config(&ServerKeyPaths { accounts, certificate: &certificate, key: &key }, now)
    }

    /// Writes the `keys` directories for NATS servers run by the user: `nats` for those that store
    /// the log, `leaf` for those of other sites.
    pub fn write_server_keys(&self, now: u64) -> Result<(), AuthorityError> {
        let at = self.directory.join(LOG_SERVER_DIR);
        files::create_private_directory(&at)?;
        files::write_public(&at.join("cluster.conf"), format!("{WRITTEN}{ROUTES}").as_bytes())?;
        files::write_public(
            &at.join("leafnodes.conf"),
            format!("{WRITTEN}{LEAF_PORT}").as_bytes(),
        )?;
        let chain = files::read_text(&self.server_certificate_path())?;
        self.write_common_files(&at, &chain, &files::read_secret(&self.server_key_path())?, now)?;

        let at = self.directory.join(LEAF);
        files::create_private_directory(&at)?;
        files::write_public(&at.join("leaf.conf"), self.leaf_remotes().as_bytes())?;
        files::write_secret(&at.join("leaf.creds"), self.leaf_user_creds(now)?.as_bytes())?;
        files::write_secret(&at.join("system.creds"), self.leaf_system_creds(now)?.as_bytes())?;
        let (fleet, hosts) = (&self.metadata.fleet, &self.metadata.hosts);
        let pair =
            certificates::issue_server_certificate(fleet, &self.ca, hosts, ServerUsage::Leaf, now)?;
        self.write_common_files(&at, &pair.certificate, &pair.key, now)
    }

    fn write_common_files(
        &self,
        at: &Path,
        certificate: &str,
        key: &str,
        now: u64,
    ) -> Result<(), AuthorityError> {
        let account = self.account.public_key();
        let domain = format!("{WRITTEN}default_js_domain: {{ {account}: \"\" }}\n");
        let names = ServerKeyPaths {
            accounts: Path::new("accounts"),
            certificate: Path::new("keys/server.pem"),
            key: Path::new("keys/server-key.pem"),
        };
        let common = self.common_config(&names, now)?;
        files::write_public(&at.join("nats.conf"), common.as_bytes())?;
        files::write_public(&at.join("domain.conf"), domain.as_bytes())?;
        files::write_public(&at.join("ca.pem"), self.ca.certificate.as_bytes())?;
        files::write_public(&at.join("server.pem"), certificate.as_bytes())?;
        Ok(files::write_secret(&at.join("server-key.pem"), key.as_bytes())?)
    }

    fn common_config(
        &self,
        files: &ServerKeyPaths<'_>,
        now: u64,
    ) -> Result<String, AuthorityError> {
        let (account, system) = (self.account.public_key(), self.system.public_key());
        let fleet = &self.metadata.fleet;
        let operator_jwt = claims::sign_operator(&self.operator, &system, fleet, now)?;
        let account_jwt = self.fleet_account_jwt()?;
        let system_jwt = self.system_account_jwt()?;
        Ok(format!(
            r#"{WRITTEN}operator: {operator_jwt}
system_account: {system}
resolver {{
  type: full
  dir: {accounts}
  allow_delete: false
  # How often a server asks the others for revocations that it missed.
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
            accounts = quote_path(files.accounts)?,
            certificate = quote_path(files.certificate)?,
            key = quote_path(files.key)?,
        ))
    }

    /// Returns two connections to the log: for the messages of members, and for account tokens.
    fn leaf_remotes(&self) -> String {
        let url = |host: &String| {
            let is_v6 = host.parse::<std::net::Ipv6Addr>().is_ok();
            let host = if is_v6 { format!("[{host}]") } else { host.clone() };
            format!("\"nats-leaf://{host}:7422\"")
        };
        let urls = self.metadata.hosts.iter().map(url).collect::<Vec<_>>().join(", ");
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

    /// Returns the credentials that forward the messages of all members of a site.
    fn leaf_user_creds(&self, now: u64) -> Result<String, AuthorityError> {
        let (seed, jwt) =
            self.create_leaf_user(&self.account, &SubjectPermissions::for_leaf_node(), now)?;
        Ok(format_credentials(&jwt, &seed))
    }

    /// Returns the credentials that receive new account tokens and request those that were missed.
    fn leaf_system_creds(&self, now: u64) -> Result<String, AuthorityError> {
        let permissions = SubjectPermissions {
            publish: vec!["$SYS.REQ.CLAIMS.PACK".to_owned(), "_INBOX.>".to_owned()],
            subscribe: vec!["$SYS.REQ.CLAIMS.UPDATE".to_owned(), "$SYS._INBOX.>".to_owned()],
        };
        let (seed, jwt) = self.create_leaf_user(&self.system, &permissions, now)?;
        Ok(format_credentials(&jwt, &seed))
    }

    /// Creates a user and returns its seed and token, which is valid as long as the signing key.
    fn create_leaf_user(
        &self,
        account: &KeyPair,
        permissions: &SubjectPermissions,
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
        let jwt = claims::sign_user(&self.signing, &account.public_key(), &claims)?;
        Ok((encode_seed(&key)?, jwt))
    }

    /// Creates a user that may push account tokens to servers for one hour, and returns its seed
    /// and token.
    pub fn create_system_user(&self, now: u64) -> Result<(String, String), AuthorityError> {
        let permissions = SubjectPermissions {
            publish: vec!["$SYS.REQ.CLAIMS.UPDATE".to_owned()],
            subscribe: vec!["_INBOX.>".to_owned()],
        };
        let key = KeyPair::new_user();
        // Sign with the account's own key: servers accept it independent of the signing keys they
        // know.
        let claims = UserClaims {
            name: "flotilla",
            public_key: &key.public_key(),
            issued_at: now,
            expires_at: Some(now + SYSTEM_TOKEN_S),
            permissions: &permissions,
        };
        let jwt = claims::sign_user(&self.system, &self.system.public_key(), &claims)?;
        Ok((encode_seed(&key)?, jwt))
    }
}

const WRITTEN: &str = "# Written by flotilla from the fleet's keys; changes are lost.\n";

/// A server with a route may do everything, so certificates are verified.
const ROUTES: &str = r#"tls {
  cert_file: "keys/server.pem"
  key_file: "keys/server-key.pem"
  ca_file: "keys/ca.pem"
  verify: true
  timeout: 5
}
"#;

/// Leaf nodes present credentials like clients.
const LEAF_PORT: &str = r#"tls {
  cert_file: "keys/server.pem"
  key_file: "keys/server-key.pem"
  timeout: 5
}
"#;

/// Fails if the path is not UTF-8 or contains quotes, backslashes or newlines.
fn quote_path(path: &Path) -> Result<String, AuthorityError> {
    let text = path.to_str().filter(|text| !text.contains(['"', '\n', '\\']));
    text.map(|text| format!("\"{text}\""))
        .ok_or_else(|| AuthorityError::Path { path: path.to_owned() })
}
