//! Pushes new account tokens to the servers of a closed fleet, so that they admit new members and
//! cut off revoked ones. Uses a separate connection to the system account.

use std::{collections::BTreeSet, time::Duration};

use async_nats::{ConnectErrorKind, rustls};
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::timeout;

use crate::connect::{display_addresses, parse_addresses};

/// For the connection, and for the first answer to each token.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Every server of a cluster answers; those that do not within this are treated as offline.
const FURTHER_ANSWERS_LIMIT: Duration = Duration::from_millis(300);
const TOKENS_IN_FLIGHT: usize = 64;
const CLAIMS_UPDATE_SUBJECT: &str = "$SYS.REQ.CLAIMS.UPDATE";

/// A user of the system account, who may push account tokens.
pub struct SystemAccountUser {
    /// Seed, `SU…`.
    pub seed: String,
    /// User token.
    pub jwt: String,
}

/// The reason why the servers did not accept the tokens.
#[derive(Debug, thiserror::Error)]
pub enum PushAccountsError {
    #[error("send the fleet's members to the nats-servers: {0:?} is not a NATS URL (B101)")]
    Url(String),
    #[error(
        "send the fleet's members to the nats-server at {urls}: it refuses the fleet's system \
         account; was it started with another fleet's keys? (B103)"
    )]
    Refused { urls: String },
    #[error("send the fleet's members to the nats-server at {urls}: cannot connect (B102)")]
    Unreachable {
        urls: String,
        #[source]
        source: async_nats::ConnectError,
    },
    #[error("send the fleet's members to the nats-server at {urls}: no answer (B102)")]
    Silent { urls: String },
    #[error("the nats-server rejected a member's account: {description} (B109)")]
    Rejected { description: String },
}

/// Answer of a server to a token.
#[derive(Deserialize)]
struct ClaimsAnswer {
    #[serde(default)]
    error: Option<RejectedAccount>,
    #[serde(default)]
    data: Option<AcceptedAccount>,
}

#[derive(Deserialize)]
struct AcceptedAccount {
    account: String,
}

#[derive(Deserialize)]
struct RejectedAccount {
    #[serde(default)]
    description: String,
}

/// The servers that must confirm a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushScope {
    /// One server, which passes the token on: sufficient to admit a member.
    AnyServer,
    /// All servers that answer: required to revoke a member everywhere.
    AllServers,
}

/// Pushes new account tokens to the servers. Fails if no server can be reached, or if one rejects a
/// token.
pub async fn push_accounts(
    urls: &[String],
    tls: rustls::ClientConfig,
    user: &SystemAccountUser,
    accounts: &[String],
    scope: PushScope,
) -> Result<(), PushAccountsError> {
    let addresses = parse_addresses(urls).map_err(|_| PushAccountsError::Url(urls.join(", ")))?;
    let urls = display_addresses(&addresses);
    let options = async_nats::ConnectOptions::with_credentials(&format_credentials(user))
        .map_err(|_| PushAccountsError::Refused { urls: urls.clone() })?
        .name("flotilla system")
        .connection_timeout(CONNECT_LIMIT)
        .tls_client_config(tls)
        .require_tls(true);
    let client = options.connect(addresses).await.map_err(|source| match source.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            PushAccountsError::Refused { urls: urls.clone() }
        }
        _ => PushAccountsError::Unreachable { urls: urls.clone(), source },
    })?;
    let pushed = push_tokens(&client, &urls, accounts, scope).await;
    // This fails only if the connection is already closed.
    let _ = client.drain().await;
    pushed
}

fn format_credentials(SystemAccountUser { seed, jwt }: &SystemAccountUser) -> String {
    format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
}

/// Pushes the tokens in groups of 64.
async fn push_tokens(
    client: &async_nats::Client,
    urls: &str,
    accounts: &[String],
    scope: PushScope,
) -> Result<(), PushAccountsError> {
    let silent = || PushAccountsError::Silent { urls: urls.to_owned() };
    for some in accounts.chunks(TOKENS_IN_FLIGHT) {
        let inbox = client.new_inbox();
        let mut answers = client.subscribe(inbox.clone()).await.map_err(|_| silent())?;
        for account in some {
            let sent = client.publish_with_reply(
                CLAIMS_UPDATE_SUBJECT,
                inbox.clone(),
                account.clone().into(),
            );
            sent.await.map_err(|_| silent())?;
        }
        let (mut taken, mut refused) = (BTreeSet::new(), None);
        let mut limit = CONNECT_LIMIT;
        while let Ok(Some(message)) = timeout(limit, answers.next()).await {
            match parse_claims_answer(&message.payload) {
                Ok(account) => {
                    taken.insert(account);
                }
                Err(description) => refused = Some(PushAccountsError::Rejected { description }),
            }
            if taken.len() >= some.len() {
                match scope {
                    PushScope::AnyServer => break,
                    PushScope::AllServers => limit = FURTHER_ANSWERS_LIMIT,
                }
            }
        }
        // One server that accepts a token does not prove that the others do.
        if taken.len() < some.len() || scope == PushScope::AllServers {
            refused.map_or(Ok(()), Err)?;
        }
        if taken.len() < some.len() {
            return Err(silent());
        }
    }
    Ok(())
}

/// Returns the account that the server accepted, or its reason for rejecting the token.
fn parse_claims_answer(answer: &[u8]) -> Result<String, String> {
    match serde_json::from_slice::<ClaimsAnswer>(answer) {
        Ok(ClaimsAnswer { error: Some(RejectedAccount { description }), .. }) => Err(description),
        Ok(ClaimsAnswer { data: Some(AcceptedAccount { account }), .. }) => Ok(account),
        Ok(ClaimsAnswer { .. }) => Err("an answer that names no account".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
