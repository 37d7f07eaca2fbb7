//! Telling the servers of a closed fleet who is let in and who was cut off: accounts' new tokens go
//! to the system account, on a connection made for it alone.

use std::{collections::BTreeSet, time::Duration};

use async_nats::{ConnectErrorKind, rustls};
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::timeout;

use crate::connect::{addresses, shown};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Every server of a cluster answers; this long after the first the rest count as away.
const REST_LIMIT: Duration = Duration::from_millis(300);
/// Tokens on their way.
const AT_ONCE: usize = 64;
const UPDATE: &str = "$SYS.REQ.CLAIMS.UPDATE";

/// Who may tell them.
pub struct SystemUser {
    pub seed: String,
    pub jwt: String,
}

#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    #[error("tell the nats-servers of the fleet's members: {0:?} is not a NATS URL (B101)")]
    Url(String),
    #[error(
        "tell the nats-server at {urls} of the fleet's members: it refuses the fleet's system account; was it started with another fleet's keys? (B103)"
    )]
    Refused { urls: String },
    #[error("tell the nats-server at {urls} of the fleet's members: cannot connect (B102)")]
    Unreachable {
        urls: String,
        #[source]
        source: async_nats::ConnectError,
    },
    #[error("tell the nats-server at {urls} of the fleet's members: no answer (B102)")]
    Silent { urls: String },
    #[error("the nats-server did not take a member's account: {description} (B109)")]
    Rejected { description: String },
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    error: Option<Rejection>,
    #[serde(default)]
    data: Option<Taken>,
}

#[derive(Deserialize)]
struct Taken {
    account: String,
}

#[derive(Deserialize)]
struct Rejection {
    #[serde(default)]
    description: String,
}

/// How many servers are to have heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// One, which tells the others, or is asked by them: enough to let somebody in.
    ByOne,
    /// All that answer: who is cut off is cut off everywhere.
    ByAll,
}

/// Hands the servers accounts' new tokens.
///
/// # Errors
/// When none can be reached, or one refuses a token.
pub async fn push_accounts(
    urls: &[String],
    tls: rustls::ClientConfig,
    user: &SystemUser,
    accounts: &[String],
    heard: Heard,
) -> Result<(), SystemError> {
    let addresses = addresses(urls).map_err(|_| SystemError::Url(urls.join(", ")))?;
    let urls = shown(&addresses);
    let options = async_nats::ConnectOptions::with_credentials(&credentials(user))
        .map_err(|_| SystemError::Refused { urls: urls.clone() })?
        .name("flotilla system")
        .connection_timeout(CONNECT_LIMIT)
        .tls_client_config(tls)
        .require_tls(true);
    let client = options.connect(addresses).await.map_err(|source| match source.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            SystemError::Refused { urls: urls.clone() }
        }
        _ => SystemError::Unreachable { urls: urls.clone(), source },
    })?;
    let told = tell(&client, &urls, accounts, heard).await;
    // Fails only when the connection is closed already.
    let _ = client.drain().await;
    told
}

/// As a `.creds` file has it.
fn credentials(SystemUser { seed, jwt }: &SystemUser) -> String {
    format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
}

async fn tell(
    client: &async_nats::Client,
    urls: &str,
    accounts: &[String],
    heard: Heard,
) -> Result<(), SystemError> {
    let silent = || SystemError::Silent { urls: urls.to_owned() };
    for some in accounts.chunks(AT_ONCE) {
        let inbox = client.new_inbox();
        let mut answers = client.subscribe(inbox.clone()).await.map_err(|_| silent())?;
        for account in some {
            let sent = client.publish_with_reply(UPDATE, inbox.clone(), account.clone().into());
            sent.await.map_err(|_| silent())?;
        }
        let (mut taken, mut refused) = (BTreeSet::new(), None);
        let mut limit = CONNECT_LIMIT;
        while let Ok(Some(message)) = timeout(limit, answers.next()).await {
            match taken_by(&message.payload) {
                Ok(account) => {
                    taken.insert(account);
                }
                Err(description) => refused = Some(SystemError::Rejected { description }),
            }
            if taken.len() >= some.len() {
                match heard {
                    Heard::ByOne => break,
                    Heard::ByAll => limit = REST_LIMIT,
                }
            }
        }
        // One that takes it says nothing for those that do not.
        if taken.len() < some.len() || heard == Heard::ByAll {
            refused.map_or(Ok(()), Err)?;
        }
        if taken.len() < some.len() {
            return Err(silent());
        }
    }
    Ok(())
}

/// The account that a server took, or why it did not.
fn taken_by(answer: &[u8]) -> Result<String, String> {
    match serde_json::from_slice::<Answer>(answer) {
        Ok(Answer { error: Some(Rejection { description }), .. }) => Err(description),
        Ok(Answer { data: Some(Taken { account }), .. }) => Ok(account),
        Ok(Answer { .. }) => Err("an answer that names no account".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
