//! Telling the servers of a closed fleet who was cut off: the account's new token goes to the
//! system account, on a connection made for it alone.

use std::time::Duration;

use async_nats::{ConnectErrorKind, rustls};
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::timeout;

use crate::connect::{addresses, shown};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Every server of a cluster answers; this long after the first the rest count as away.
const REST_LIMIT: Duration = Duration::from_millis(300);
const UPDATE: &str = "$SYS.REQ.CLAIMS.UPDATE";

/// Who may tell them.
pub struct SystemUser {
    pub seed: String,
    pub jwt: String,
}

#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    #[error("tell the nats-servers of the revocation: {0:?} is not a NATS URL")]
    Url(String),
    #[error(
        "tell the nats-server at {urls} of the revocation: it refuses the fleet's system account; was it started with another fleet's keys?"
    )]
    Refused { urls: String },
    #[error("tell the nats-server at {urls} of the revocation: cannot connect")]
    Unreachable {
        urls: String,
        #[source]
        source: async_nats::ConnectError,
    },
    #[error("tell the nats-server at {urls} of the revocation: no answer")]
    Silent { urls: String },
    #[error("the nats-server did not take the revocation: {description}")]
    Rejected { description: String },
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    error: Option<Rejection>,
}

#[derive(Deserialize)]
struct Rejection {
    #[serde(default)]
    description: String,
}

/// Hands the servers a new account token, and returns how many took it.
///
/// # Errors
/// When none can be reached, or one refuses it.
pub async fn push_account(
    urls: &[String],
    tls: rustls::ClientConfig,
    user: &SystemUser,
    account_jwt: &str,
) -> Result<usize, SystemError> {
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
    let taken = tell(&client, &urls, account_jwt).await;
    // Fails only when the connection is closed already.
    let _ = client.drain().await;
    taken
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
    account_jwt: &str,
) -> Result<usize, SystemError> {
    let silent = || SystemError::Silent { urls: urls.to_owned() };
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await.map_err(|_| silent())?;
    client
        .publish_with_reply(UPDATE, inbox, account_jwt.to_owned().into())
        .await
        .map_err(|_| silent())?;
    let mut taken = 0;
    let mut limit = CONNECT_LIMIT;
    while let Ok(Some(message)) = timeout(limit, answers.next()).await {
        match serde_json::from_slice::<Answer>(&message.payload) {
            Ok(Answer { error: None }) => taken += 1,
            Ok(Answer { error: Some(Rejection { description }) }) => {
                return Err(SystemError::Rejected { description });
            }
            Err(error) => return Err(SystemError::Rejected { description: error.to_string() }),
        }
        limit = REST_LIMIT;
    }
    if taken == 0 { Err(silent()) } else { Ok(taken) }
}
