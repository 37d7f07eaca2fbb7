//! What the bus must know of members: their accounts, and the queues of their roles. It is told when
//! somebody comes, and of everybody when it may have forgotten.

use std::{collections::BTreeMap, time::Duration};

use authority::{Access, Authority, Member, Standing};
use bus::system::{Heard, SystemError, SystemUser, push_accounts};
use tokio::{sync::watch, time::interval};
use wire::{AgentId, Pool, WorkKind};

use super::{
    MEMBER, Members, MembersError, Refusal, View, chain, join::key, now_ms, records::MemberRecord,
};

/// How often queues are looked after: somebody may have removed one.
const QUEUES_EVERY: Duration = Duration::from_secs(10);
/// A member whose time is over may renew; after so long its account is of no use until it does.
const RENEWS_MS: u64 = 24 * 3_600_000;

impl Members {
    /// Lets a member connect and find its work.
    pub(super) async fn admit(
        &self,
        authority: &Authority,
        member: &Member,
        record: &MemberRecord,
    ) -> Result<(), MembersError> {
        // Those who run the fleet are in its account, which its servers know.
        if !member.standing.runs_the_fleet() {
            let account = authority.member_account(member, &record.key, granted(record))?;
            let name = || member.name.to_string();
            let told = self.tell(authority, &[account], Heard::ByOne).await?;
            told.map_err(|source| MembersError::NotAdmitted { name: name(), source })?;
            // Whoever was cut off meanwhile was let in again by this; that is in its record.
            let (_, now) = self.read::<MemberRecord>(&key(&member.name)).await?;
            if !now.is_some_and(|now| is_still(&now, record)) {
                self.tell_over(authority, &[(member.clone(), record.clone())]).await?;
                return Err(Refusal::Revoked { name: name() }.into());
            }
        }
        self.prepare(queues([&member.standing])).await;
        Ok(())
    }

    /// Has all servers know that these are members no more.
    pub(super) async fn tell_over(
        &self,
        authority: &Authority,
        gone: &[(Member, MemberRecord)],
    ) -> Result<(), MembersError> {
        let over = gone
            .iter()
            .map(|(member, record)| authority.member_account(member, &record.key, over(record)));
        let accounts: Vec<String> = over.collect::<Result<_, _>>()?;
        let names = || gone.iter().map(|(member, _)| member.name.as_str()).collect::<Vec<_>>();
        let told = self.tell(authority, &accounts, Heard::ByAll).await?;
        told.map_err(|source| MembersError::NotTold { name: names().join(", "), source })
    }

    /// Has the servers know accounts as they are now. The outer error is ours.
    pub(super) async fn tell(
        &self,
        authority: &Authority,
        accounts: &[String],
        heard: Heard,
    ) -> Result<Result<(), SystemError>, MembersError> {
        let (seed, jwt) = authority.system_user(now_s())?;
        let tls = authority::client_config(authority.ca_pem().as_bytes())?;
        let user = SystemUser { seed, jwt };
        Ok(push_accounts(&self.shared.terms.servers, tls, &user, accounts, heard).await)
    }

    /// Tells the servers of everybody, at first and whenever they or the keys are other ones; and
    /// sees that there are queues.
    pub(super) async fn keep_servers_told(&self, mut view: watch::Receiver<View>) {
        let mut connections = self.shared.bus.connections();
        let mut look = interval(QUEUES_EVERY);
        let mut told: Option<(u64, Vec<String>)> = None;
        loop {
            let wanted =
                (*connections.borrow_and_update(), view.borrow_and_update().issuers.clone());
            if told.as_ref() != Some(&wanted) && !wanted.1.is_empty() {
                match self.tell_of_all().await {
                    Ok(()) => told = Some(wanted),
                    Err(error) => {
                        tracing::warn!(error = %chain(&error), "cannot tell the bus of the members");
                    }
                }
            }
            tokio::select! {
                _ = look.tick() => {}
                _ = connections.changed() => continue,
                changed = view.wait_for(|view| told.as_ref().is_some_and(|told| told.1 != view.issuers)) => {
                    match changed {
                        Ok(_) => continue,
                        Err(_) => return,
                    }
                }
            }
            if let Err(error) = self.prepare_all().await {
                tracing::warn!(error = %chain(&error), "cannot prepare the queues of work");
            }
        }
    }

    async fn tell_of_all(&self) -> Result<(), MembersError> {
        let authority = self.authority()?;
        let now = now_ms();
        // Their own first, with the keys that count.
        let mut accounts =
            vec![authority.account_jwt(now / 1000)?, authority.system_jwt(now / 1000)?];
        let everybody = self.everybody().await?;
        let others = || everybody.iter().filter(|(member, _)| !member.standing.runs_the_fleet());
        let is_in = |record: &MemberRecord| {
            record.revoked_ms.is_none() && now < record.expires_ms.saturating_add(RENEWS_MS)
        };
        for (member, record) in others() {
            let access = if is_in(record) { granted(record) } else { over(record) };
            accounts.push(authority.member_account(member, &record.key, access)?);
        }
        let members = accounts.len() - 2;
        let told = self.tell(&authority, &accounts, Heard::ByOne).await?;
        told.map_err(|source| MembersError::NotAdmitted { name: "its members".into(), source })?;
        // Whoever was cut off meanwhile.
        let after = self.everybody().await?;
        let still = |member: &Member, record: &MemberRecord| {
            let found = after.iter().find(|(one, _)| one.name == member.name);
            found.is_some_and(|(_, now)| is_still(now, record))
        };
        let gone = others().filter(|(member, record)| is_in(record) && !still(member, record));
        let gone: Vec<_> = gone.cloned().collect();
        if !gone.is_empty() {
            self.tell_over(&authority, &gone).await?;
        }
        tracing::debug!(members, "the bus knows the members");
        Ok(())
    }

    async fn prepare_all(&self) -> Result<(), MembersError> {
        let everybody = self.everybody().await?;
        let there = everybody.iter().filter(|(_, record)| record.revoked_ms.is_none());
        self.prepare(queues(there.map(|(member, _)| &member.standing))).await;
        Ok(())
    }

    /// What cannot be prepared now is when the queues are looked after next; agents wait for it.
    async fn prepare(&self, queues: BTreeMap<String, (WorkKind, Pool)>) {
        for (kind, pool) in queues.into_values() {
            let prepared = self.shared.bus.prepare_work(kind, &pool, self.shared.terms.lease).await;
            if let Err(error) = prepared {
                tracing::warn!(error = %chain(&error), "cannot prepare a queue of work");
            }
        }
    }

    /// Every member whose record can be read, those that were cut off too.
    pub(super) async fn everybody(&self) -> Result<Vec<(Member, MemberRecord)>, MembersError> {
        let mut everybody = Vec::new();
        for (key, value) in self.shared.bus.member_slots(MEMBER).await? {
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

/// Whether whoever had this record is a member by a later one.
fn is_still(now: &MemberRecord, then: &MemberRecord) -> bool {
    now.key == then.key && now.revoked_ms.is_none()
}

fn granted(record: &MemberRecord) -> Access {
    Access::Granted { at: record.renewed_ms / 1000 }
}

fn over(record: &MemberRecord) -> Access {
    Access::Over { granted_at: record.renewed_ms / 1000 }
}

/// The queues that members of these standings take work from, by name.
fn queues<'a>(
    standings: impl IntoIterator<Item = &'a Standing>,
) -> BTreeMap<String, (WorkKind, Pool)> {
    let mut queues = BTreeMap::new();
    for standing in standings {
        let Standing::Agent { roles, pool } = standing else { continue };
        for kind in roles.iter().filter_map(|role| role.work()) {
            queues.insert(kind.queue(pool), (kind, pool.clone()));
        }
    }
    queues
}

fn now_s() -> u64 {
    now_ms() / 1000
}
