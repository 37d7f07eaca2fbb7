//! Renewal of memberships: credentials that expire are renewed at about half of their lifetime,
//! with their key. Expired credentials can be renewed too, unless the member was revoked.

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use bus::Bus;
use identity::{
    CredentialFiles, Fingerprint, MemberIdentity, ProofPurpose, ProofStatement, UserJwtInfo,
};
use tokio::time::{Instant, sleep};
use wire::{
    AgentId,
    clock::{unix_millis, unix_seconds},
    v1,
};

use super::{ClientError, GatewayTarget, MembershipClient};

/// Between two checks of the clock. A timer would stand still while a laptop sleeps.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_secs(20);
/// Time without a bus connection after which the member may have been locked out, which the gateway
/// can answer.
const LOCKED_OUT_AFTER: Duration = Duration::from_secs(10);
const LOCKED_OUT_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The renewal of a member's credentials.
///
/// It is due when 45 to 55 % of the lifetime has passed; the exact share is derived from the key,
/// so that a fleet that joined at once does not renew at once. It also runs when the bus has been
/// disconnected for 10 s, because expired or revoked credentials have that effect. A failed attempt
/// is repeated after 20 s (60 s while disconnected). Only a final refusal by the gateway ends the
/// task.
///
/// ```text
/// wait 2 s → due or disconnected? → renew → ok | transient error → wait
///                                         → final refusal → end
/// ```
pub struct MembershipRenewal {
    directory: PathBuf,
    addresses: Vec<String>,
    identity: MemberIdentity,
    name: AgentId,
    /// Share of the lifetime after which a renewal is due, in thousandths (450 to 549), different
    /// for each key.
    due_permille: u64,
}

struct CredentialLifetime {
    issued_s: u64,
    expires_s: u64,
}

impl MembershipRenewal {
    /// Returns the renewal of a member's credentials in a directory, by a gateway at one of the
    /// addresses; `None` if the credentials do not expire.
    pub fn new(
        directory: PathBuf,
        addresses: Vec<String>,
        identity: MemberIdentity,
    ) -> anyhow::Result<Option<Self>> {
        let name = AgentId::new(identity.name.as_str())?;
        // Any stable part of the key will do.
        let spread = identity
            .ensure_public_key()?
            .bytes()
            .fold(0_u64, |sum, byte| sum * 31 % 997 + u64::from(byte));
        let renewal =
            Self { directory, addresses, identity, name, due_permille: 450 + spread % 100 };
        Ok(renewal.read_lifetime()?.map(|_| renewal))
    }

    fn read_lifetime(&self) -> anyhow::Result<Option<CredentialLifetime>> {
        let held = UserJwtInfo::read_unverified(&self.identity.read_jwt()?)
            .with_context(|| format!("read {}", self.identity.jwt.display()))?;
        Ok(held
            .expires_at
            .map(|expires_s| CredentialLifetime { issued_s: held.issued_at, expires_s }))
    }

    /// Renews the credentials if they are due. Call it before they are used: expired credentials
    /// cannot connect. Fails if they have expired and cannot be renewed, or on a final refusal.
    pub async fn renew_if_due(&self) -> anyhow::Result<()> {
        if !self.is_due()? {
            return Ok(());
        }
        match self.renew_credentials().await {
            Ok(()) => Ok(()),
            Err(error) if self.has_expired()? || is_revoked_error(&error) => {
                Err(error.context(format!("renew the membership of {}", self.name)))
            }
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "cannot renew yet; will retry");
                Ok(())
            }
        }
    }

    fn is_due(&self) -> anyhow::Result<bool> {
        Ok(self.read_lifetime()?.is_some_and(|time| {
            let whole = time.expires_s.saturating_sub(time.issued_s);
            unix_millis() >= (time.issued_s * 1000).saturating_add(whole * self.due_permille)
        }))
    }

    fn has_expired(&self) -> anyhow::Result<bool> {
        Ok(self.read_lifetime()?.is_some_and(|time| unix_seconds() >= time.expires_s))
    }

    /// Renews the credentials whenever they are due, and returns only if the gateway refuses for
    /// good.
    pub async fn run_until_revoked(self, bus: Bus) -> anyhow::Error {
        let mut away: Option<Instant> = None;
        let mut asked: Option<Instant> = None;
        loop {
            sleep(CHECK_INTERVAL).await;
            away = if bus.is_connected() { None } else { away.or_else(|| Some(Instant::now())) };
            let locked_out = away.is_some_and(|since| since.elapsed() >= LOCKED_OUT_AFTER);
            let pause = if locked_out { LOCKED_OUT_RETRY_INTERVAL } else { RETRY_INTERVAL };
            if asked.is_some_and(|last| last.elapsed() < pause) {
                continue;
            }
            let due = self.is_due().unwrap_or_else(|error| {
                tracing::error!(error = format!("{error:#}"), "reading the credentials");
                false
            });
            if !due && !locked_out {
                continue;
            }
            asked = Some(Instant::now());
            match self.renew_credentials().await {
                Ok(()) => tracing::info!(name = %self.name, "membership renewed"),
                Err(error) if is_revoked_error(&error) => return error,
                // `up` admits its own agents without a record and renews their credentials itself.
                Err(error) if has_client_error(&error, ClientError::is_not_found) => {
                    tracing::debug!(error = format!("{error:#}"), "not renewed");
                }
                Err(error) => tracing::warn!(
                    error = format!("{error:#}"),
                    "cannot renew the membership; retrying in {} s",
                    pause.as_secs()
                ),
            }
        }
    }

    async fn renew_credentials(&self) -> anyhow::Result<()> {
        let target = GatewayTarget {
            addresses: self.addresses.clone(),
            ca_pem: self.identity.read_ca()?,
            // The bearer token may have expired; the signature proves the key.
            bearer: None,
        };
        let at_ms = unix_millis();
        let fleet = Fingerprint::from_pem(&target.ca_pem)?;
        let statement =
            ProofStatement { purpose: ProofPurpose::Renew, fleet, name: &self.name, at_ms };
        let request = v1::RenewRequest {
            name: self.name.to_string(),
            proof: Some(v1::KeyProof { at_ms, signature: statement.sign_with(&self.identity)? }),
        };
        let membership =
            MembershipClient::connect_first(&target).await?.renew_membership(request).await?;
        let files = CredentialFiles {
            jwt: &membership.user_jwt,
            bearer: &membership.bearer,
            ca: &membership.ca_pem,
        };
        self.identity
            .write_files(&files)
            .with_context(|| format!("write the credentials {}", self.directory.display()))
    }
}

fn is_revoked_error(error: &anyhow::Error) -> bool {
    has_client_error(error, ClientError::is_revoked)
}

fn has_client_error(error: &anyhow::Error, what: impl Fn(&ClientError) -> bool) -> bool {
    error.chain().any(|cause| cause.downcast_ref::<ClientError>().is_some_and(&what))
}
