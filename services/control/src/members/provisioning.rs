//! The state that the bus needs of members: their accounts and the queues of their roles. An
//! account is pushed when its member joins; all accounts are pushed when the servers may have lost
//! them.

use std::{collections::BTreeMap, time::Duration};

use bus::system_account::{PushAccountsError, PushScope, SystemAccountUser, push_accounts};
use identity::{FleetAuthority, Member, MemberAccess, MemberKind};
use tokio::{sync::watch, time::interval};
use wire::{AgentId, Pool, WorkKind, clock, format_error_chain};

use super::{
    MEMBER, MemberRegistry, MembershipError, MembershipRefusal, MembershipView, join::member_key,
    records::MemberRecord,
};

/// A user may have removed a queue.
const QUEUE_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Rounds in which changes that happened during a push are pushed again.
const PUSH_ROUNDS_MAX: u32 = 8;
/// An expired member keeps its account for one day, so that it can renew. After that, the account
/// is disabled until the renewal.
const RENEWAL_GRACE_MS: u64 = 24 * 3_600_000;

impl MemberRegistry {
    /// Makes the NATS servers accept a member, and creates the queues of its roles. Runs to
    /// completion even if the caller is cancelled. If the push fails, a push of all accounts
    /// follows.
    pub(super) async fn provision_member(
        &self,
        member: &Member,
        record: &MemberRecord,
    ) -> Result<(), MembershipError> {
        let (this, member, record) = (self.clone(), member.clone(), record.clone());
        let admitting = tokio::spawn(async move {
            let admitted = this.push_member(&member, &record).await;
            if admitted.is_err() {
                this.shared.resync_request.notify_one();
            }
            this.prepare_queues(work_queues([&member.standing])).await;
            admitted
        });
        match admitting.await {
            Ok(admitted) => admitted,
            // The task is cancelled only when the runtime shuts down, which drops this future too.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Withdraws the account again if the member was revoked meanwhile.
    async fn push_member(
        &self,
        member: &Member,
        record: &MemberRecord,
    ) -> Result<(), MembershipError> {
        // Administrators and coordinators use the fleet's own account, which the servers know.
        if member.standing.uses_fleet_account() {
            return Ok(());
        }
        let authority = self.open_authority()?;
        let name = || member.name.to_string();
        let account = authority.member_account_jwt(member, &record.key, granted_access(record))?;
        let pushed = self.push_accounts(&authority, &[account], PushScope::AnyServer).await?;
        pushed.map_err(|source| MembershipError::NotAdmitted { name: name(), source })?;
        // A member that was revoked meanwhile got its account back by this push. Its record shows
        // the revocation.
        let (_, now) = self.read_record::<MemberRecord>(&member_key(&member.name)).await?;
        let same = now.filter(|now| now.key == record.key);
        if same.as_ref().is_some_and(|now| now.revoked_ms.is_none()) {
            return Ok(());
        }
        self.push_revocation(&authority, member, &same.unwrap_or_else(|| record.clone())).await?;
        Err(MembershipRefusal::Revoked { name: name() }.into())
    }

    pub(super) async fn push_revocation(
        &self,
        authority: &FleetAuthority,
        member: &Member,
        record: &MemberRecord,
    ) -> Result<(), MembershipError> {
        let account = authority.member_account_jwt(member, &record.key, ended_access(record))?;
        let pushed = self.push_accounts(authority, &[account], PushScope::AllServers).await?;
        pushed.map_err(|source| MembershipError::NotRevokedEverywhere {
            name: member.name.to_string(),
            source,
        })
    }

    /// The outer error is a failure of this process, the inner one a failure of the servers.
    pub(super) async fn push_accounts(
        &self,
        authority: &FleetAuthority,
        accounts: &[String],
        scope: PushScope,
    ) -> Result<Result<(), PushAccountsError>, MembershipError> {
        let (seed, jwt) = authority.create_system_user(clock::unix_seconds())?;
        let tls = identity::fleet_client_config(authority.ca_pem().as_bytes())?;
        let user = SystemAccountUser { seed, jwt };
        Ok(push_accounts(&self.shared.config.nats_servers, tls, &user, accounts, scope).await)
    }

    /// Pushes all accounts at the start, and whenever the connection, the keys or the certainty
    /// about the servers' state changes. Creates missing queues at [`QUEUE_CHECK_INTERVAL`].
    pub(super) async fn sync_servers(&self, mut view: watch::Receiver<MembershipView>) {
        let mut connections = self.shared.bus.watch_connections();
        let (mut look, members) = (interval(QUEUE_CHECK_INTERVAL), view.clone());
        if view.wait_for(|view| view.revocations.is_complete()).await.is_err() {
            return;
        }
        // Connection and issuers of the last push.
        let mut tried: Option<(u64, Vec<String>)> = None;
        let mut is_pushed = false;
        loop {
            let wanted =
                (*connections.borrow_and_update(), view.borrow_and_update().issuers.clone());
            let is_current = is_pushed && tried.as_ref() == Some(&wanted);
            if !is_current && !wanted.1.is_empty() {
                let outcome = self.push_all_accounts().await;
                if let Err(error) = &outcome {
                    tracing::warn!(error = %format_error_chain(error), "cannot update the members \
                                                                        on the bus");
                }
                (tried, is_pushed) = (Some(wanted), outcome.is_ok());
            }
            let has_other_keys = |view: &MembershipView| match &tried {
                Some((_, issuers)) => view.issuers != *issuers,
                None => !view.issuers.is_empty(),
            };
            let (is_time, is_over) = tokio::select! {
                _ = look.tick() => (true, false),
                () = self.shared.resync_request.notified() => {
                    is_pushed = false;
                    (false, false)
                }
                changed = connections.changed() => (false, changed.is_err()),
                changed = view.wait_for(has_other_keys) => (false, changed.is_err()),
            };
            if is_over {
                return;
            }
            if is_time {
                let queues = work_queues(members.borrow().revocations.active_standings());
                self.prepare_queues(queues).await;
            }
        }
    }

    /// Pushes the accounts of the fleet and all members, in rounds, until nothing has changed
    /// during a round. Fails with [`MembershipError::Busy`] after [`PUSH_ROUNDS_MAX`] rounds.
    async fn push_all_accounts(&self) -> Result<(), MembershipError> {
        self.push_fleet_account(None).await?;
        let authority = self.open_authority()?;
        // Keyed by public key, because a name may get another key.
        let mut pushed: BTreeMap<String, (Member, MemberAccess)> = BTreeMap::new();
        for round in 0..PUSH_ROUNDS_MAX {
            let now = clock::unix_millis();
            let mut wanted: BTreeMap<String, (Member, MemberAccess)> = BTreeMap::new();
            for (member, record) in self.read_members().await? {
                if !member.standing.uses_fleet_account() {
                    wanted.insert(record.key.clone(), (member, record_access(&record, now)));
                }
            }
            for (key, (member, access)) in &pushed {
                let over = MemberAccess::Ended { granted_at: access.granted_at() };
                wanted.entry(key.clone()).or_insert_with(|| (member.clone(), over));
            }
            let is_news = |key: &String, access: MemberAccess| {
                pushed.get(key).is_none_or(|(_, before)| before.has_ended() != access.has_ended())
            };
            wanted.retain(|key, (_, access)| is_news(key, *access));
            if wanted.is_empty() {
                tracing::debug!(members = pushed.len(), "updated the members on the bus");
                return Ok(());
            }
            let account = |(key, (member, access)): (&String, &(Member, MemberAccess))| {
                authority.member_account_jwt(member, key, *access)
            };
            let accounts: Vec<String> = wanted.iter().map(account).collect::<Result<_, _>>()?;
            let scope = if round == 0 { PushScope::AnyServer } else { PushScope::AllServers };
            let outcome = self.push_accounts(&authority, &accounts, scope).await?;
            let name = || "its members".to_owned();
            outcome.map_err(|source| MembershipError::NotAdmitted { name: name(), source })?;
            pushed.extend(wanted);
        }
        Err(MembershipError::Busy("members".to_owned()))
    }

    /// Pushes the fleet's own account, without administrators that were revoked here or by other
    /// coordinators. Revokes the administrator `cut_off` too.
    pub(super) async fn push_fleet_account(
        &self,
        cut_off: Option<(&AgentId, &str)>,
    ) -> Result<(), MembershipError> {
        let _one_at_a_time = self.shared.revocation_lock.lock().await;
        let mut authority = self.open_authority()?;
        if let Some((_, public_key)) = cut_off {
            authority.revoke_key(public_key, clock::unix_seconds())?;
        }
        let mut before = None;
        for _ in 0..PUSH_ROUNDS_MAX {
            if let Err(error) = self.import_revocations(&mut authority).await {
                // This error does not let a revoked member stay.
                tracing::warn!(error = %format_error_chain(&error), "cannot read the revocations \
                                                                     of other coordinators");
            }
            let account = authority.fleet_account_jwt()?;
            if before.as_ref() == Some(&account) {
                return Ok(());
            }
            let pushed = self
                .push_accounts(&authority, std::slice::from_ref(&account), PushScope::AllServers)
                .await?;
            pushed.map_err(|source| match cut_off {
                Some((name, _)) => {
                    MembershipError::NotRevokedEverywhere { name: name.to_string(), source }
                }
                None => MembershipError::NotAdmitted { name: "its members".to_owned(), source },
            })?;
            before = Some(account);
        }
        Err(MembershipError::Busy("members".to_owned()))
    }

    /// Logs failures; the next check tries again, and agents wait for their queues.
    async fn prepare_queues(&self, queues: BTreeMap<String, (WorkKind, Pool)>) {
        for (kind, pool) in queues.into_values() {
            let prepared =
                self.shared.bus.prepare_work_queue(kind, &pool, self.shared.config.lease).await;
            if let Err(error) = prepared {
                tracing::warn!(error = %format_error_chain(&error), "cannot prepare a queue of work");
            }
        }
    }

    /// Includes revoked members. Skips records that cannot be read.
    pub(super) async fn read_members(
        &self,
    ) -> Result<Vec<(Member, MemberRecord)>, MembershipError> {
        let mut everybody = Vec::new();
        for (key, value) in self.shared.bus.list_member_entries(MEMBER).await? {
            let name = key.strip_prefix(MEMBER).and_then(|name| AgentId::new(name).ok());
            match (name, serde_json::from_slice::<MemberRecord>(&value)) {
                (Some(name), Ok(record)) => {
                    let standing = record.standing.clone();
                    everybody.push((Member { name, standing }, record));
                }
                (_, Err(error)) => tracing::warn!(key, %error, "a record cannot be read"),
                (None, _) => tracing::warn!(key, "a record has no member's name"),
            }
        }
        Ok(everybody)
    }
}

fn record_access(record: &MemberRecord, now_ms: u64) -> MemberAccess {
    let ends = record.expires_ms.saturating_add(RENEWAL_GRACE_MS);
    if record.revoked_ms.is_none() && now_ms < ends {
        granted_access(record)
    } else {
        ended_access(record)
    }
}

fn granted_access(record: &MemberRecord) -> MemberAccess {
    MemberAccess::Granted { at: record.renewed_ms / 1000 }
}

fn ended_access(record: &MemberRecord) -> MemberAccess {
    MemberAccess::Ended { granted_at: record.renewed_ms / 1000 }
}

fn work_queues<'a>(
    standings: impl IntoIterator<Item = &'a MemberKind>,
) -> BTreeMap<String, (WorkKind, Pool)> {
    let mut queues = BTreeMap::new();
    for standing in standings {
        let MemberKind::Agent { roles, pool } = standing else { continue };
        for kind in roles.iter().filter_map(|role| role.work_kind()) {
            queues.insert(kind.queue_name(pool), (kind, pool.clone()));
        }
    }
    queues
}
