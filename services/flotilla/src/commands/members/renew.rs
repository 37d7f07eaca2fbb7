//! Staying a member: at the half of its time a kit that ends is made to last again, by the key in
//! it; also when it ended long ago, but not when its member was cut off.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use authority::{Fingerprint, Held, Identity, KitFiles, Purpose, Statement};
use bus::Bus;
use gateway::client::{Client, ClientError};
use tokio::time::{Instant, sleep};
use wire::{AgentId, v1};

use crate::fleet::{FleetArgs, FleetFile};

use super::{join::now_ms, target};

/// How often the clock is looked at: a laptop's stands still while it sleeps.
const LOOK: Duration = Duration::from_secs(2);
/// After a renewal that did not work.
const RETRY: Duration = Duration::from_secs(20);
/// A bus that is away for so long may have cut us off: the gateway knows.
const AWAY: Duration = Duration::from_secs(10);
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// A kit that ends.
pub(crate) struct Renewal {
    directory: PathBuf,
    file: FleetFile,
    identity: Identity,
    name: AgentId,
    /// Which part of its time has to be over, in thousandths; not the same for all, lest a fleet
    /// that joined at once renews at once.
    due_at: u64,
}

/// What the kit says of itself.
struct Time {
    issued_s: u64,
    expires_s: u64,
}

impl Renewal {
    /// Of the kit in `--dir`, unless it lasts for ever or there is none.
    pub(crate) fn of(fleet: &FleetArgs) -> anyhow::Result<Option<Self>> {
        let Some(directory) = &fleet.dir else { return Ok(None) };
        let Some(file) = FleetFile::read(directory)? else { return Ok(None) };
        let Some(identity) = fleet.identity()? else { return Ok(None) };
        let name = AgentId::new(identity.name.as_str())?;
        // Any part of the key that does not change.
        let spread = identity
            .public_key()?
            .bytes()
            .fold(0_u64, |sum, byte| sum * 31 % 997 + u64::from(byte));
        let renewal =
            Self { directory: directory.clone(), file, identity, name, due_at: 450 + spread % 100 };
        Ok(renewal.time()?.map(|_| renewal))
    }

    fn time(&self) -> anyhow::Result<Option<Time>> {
        let held = Held::read(&self.identity.read_jwt()?)
            .with_context(|| format!("read {}", self.identity.jwt.display()))?;
        Ok(held.expires_at.map(|expires_s| Time { issued_s: held.issued_at, expires_s }))
    }

    /// Before anything is done with it: a kit that ended would not get in.
    ///
    /// # Errors
    /// When it ended and cannot be renewed.
    pub(crate) async fn now_if_due(&self) -> anyhow::Result<()> {
        if !self.is_due()? {
            return Ok(());
        }
        match self.renew().await {
            Ok(()) => Ok(()),
            Err(error) if self.has_ended()? || is_final(&error) => {
                Err(error.context(format!("renew the membership of {}", self.name)))
            }
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "cannot renew yet; trying again later"
                );
                Ok(())
            }
        }
    }

    fn is_due(&self) -> anyhow::Result<bool> {
        Ok(self.time()?.is_some_and(|time| {
            let whole = time.expires_s.saturating_sub(time.issued_s);
            now_ms() >= (time.issued_s * 1000).saturating_add(whole * self.due_at)
        }))
    }

    fn has_ended(&self) -> anyhow::Result<bool> {
        Ok(self.time()?.is_some_and(|time| now_ms() / 1000 >= time.expires_s))
    }

    /// Renews whenever it is time, for ever. Only a member that was cut off makes it end.
    pub(crate) async fn keep(self, bus: Bus) -> anyhow::Error {
        let mut away: Option<Instant> = None;
        let mut asked: Option<Instant> = None;
        loop {
            sleep(LOOK).await;
            away = if bus.is_connected() { None } else { away.or_else(|| Some(Instant::now())) };
            let locked_out = away.is_some_and(|since| since.elapsed() >= AWAY);
            let pause = if locked_out { ASK_AGAIN } else { RETRY };
            if asked.is_some_and(|last| last.elapsed() < pause) {
                continue;
            }
            let due = self.is_due().unwrap_or_else(|error| {
                tracing::error!(error = format!("{error:#}"), "reading the kit");
                false
            });
            if !due && !locked_out {
                continue;
            }
            asked = Some(Instant::now());
            match self.renew().await {
                Ok(()) => tracing::info!(name = %self.name, "the membership was renewed"),
                Err(error) if is_final(&error) => return error,
                // Whoever let it in without a record looks after its kit, as `up` does.
                Err(error) if is(&error, ClientError::is_unknown) => {
                    tracing::debug!(error = format!("{error:#}"), "not renewed");
                }
                Err(error) => tracing::warn!(
                    error = format!("{error:#}"),
                    "cannot renew the membership; trying again in {} s",
                    pause.as_secs()
                ),
            }
        }
    }

    async fn renew(&self) -> anyhow::Result<()> {
        let mut target = target(&self.file, &self.identity)?;
        // It may have ended; the key is what counts.
        target.bearer = None;
        let at_ms = now_ms();
        let fleet = Fingerprint::of_pem(&target.ca_pem)?;
        let statement = Statement { purpose: Purpose::Renew, fleet, name: &self.name, at_ms };
        let request = v1::RenewRequest {
            name: self.name.to_string(),
            proof: Some(v1::KeyProof { at_ms, signature: statement.sign(&self.identity)? }),
        };
        let membership = Client::connect(&target).await?.renew(request).await?;
        let files = KitFiles {
            jwt: &membership.user_jwt,
            bearer: &membership.bearer,
            ca: &membership.ca_pem,
        };
        self.identity
            .write(&files)
            .with_context(|| format!("write the kit {}", self.directory.display()))
    }
}

fn is_final(error: &anyhow::Error) -> bool {
    is(error, ClientError::is_final)
}

fn is(error: &anyhow::Error, what: impl Fn(&ClientError) -> bool) -> bool {
    error.chain().any(|cause| cause.downcast_ref::<ClientError>().is_some_and(&what))
}

/// What an agent's kit says that it may do.
pub(crate) fn granted(directory: &Path) -> anyhow::Result<Option<authority::Shown>> {
    let Some(FleetFile { identity: Some(identity), .. }) = FleetFile::read(directory)? else {
        return Ok(None);
    };
    let bearer = identity.within(directory).read_bearer()?;
    let shown = authority::Shown::read(&bearer)
        .with_context(|| format!("read the kit {}", directory.display()))?;
    Ok(Some(shown))
}
