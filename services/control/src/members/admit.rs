//! What the bus must know of members: their accounts, and the queues of their roles. It is told when
//! somebody comes, and of everybody when it may have forgotten.

use std::{collections::BTreeMap, time::Duration};

use authority::{Access, Authority, Member, Standing};
use bus::system::{Heard, SystemError, SystemUser, push_accounts};
use tokio::{sync::watch, time::interval};
use wire::{AgentId, Pool, WorkKind, chain};

use super::{
    MEMBER, Members, MembersError, Refusal, View, join::key, now_ms, records::MemberRecord,
};

/// How often queues are looked after: somebody may have removed one.
const QUEUES_EVERY: Duration = Duration::from_secs(10);
/// How often what changed while it was told is told again.
const ROUNDS: u32 = 8;
/// A member whose time is over may renew; after so long its account is of no use until it does.
const RENEWS_MS: u64 = 24 * 3_600_000;

impl Members {
    /// Lets a member connect and find its work. Seen through though whoever asked for it is gone:
    /// what was told is looked at again afterwards.
    pub(super) async fn admit(
        &self,
        member: &Member,
        record: &MemberRecord,
    ) -> Result<(), MembersError> {
        let (this, member, record) = (self.clone(), member.clone(), record.clone());
        let admitting = tokio::spawn(async move {
            let admitted = this.let_in(&member, &record).await;
            if admitted.is_err() {
                this.shared.doubt.notify_one();
            }
            this.prepare(queues([&member.standing])).await;
            admitted
        });
        match admitting.await {
            Ok(admitted) => admitted,
            // Cancelled only when the runtime shuts down, which drops this future too.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    async fn let_in(&self, member: &Member, record: &MemberRecord) -> Result<(), MembersError> {
        // Those who run the fleet are in its account, which its servers know.
        if member.standing.runs_the_fleet() {
            return Ok(());
        }
        let authority = self.authority()?;
        let name = || member.name.to_string();
        let account = authority.member_account(member, &record.key, granted(record))?;
        let told = self.tell(&authority, &[account], Heard::ByOne).await?;
        told.map_err(|source| MembersError::NotAdmitted { name: name(), source })?;
        // Whoever was cut off meanwhile was let in again by this; that is in its record.
        let (_, now) = self.read::<MemberRecord>(&key(&member.name)).await?;
        let same = now.filter(|now| now.key == record.key);
        if same.as_ref().is_some_and(|now| now.revoked_ms.is_none()) {
            return Ok(());
        }
        self.tell_over(&authority, member, &same.unwrap_or_else(|| record.clone())).await?;
        Err(Refusal::Revoked { name: name() }.into())
    }

    /// Has all servers know that it is a member no more.
    pub(super) async fn tell_over(
        &self,
        authority: &Authority,
        member: &Member,
        record: &MemberRecord,
    ) -> Result<(), MembersError> {
        let account = authority.member_account(member, &record.key, over(record))?;
        let told = self.tell(authority, &[account], Heard::ByAll).await?;
        told.map_err(|source| MembersError::NotTold { name: member.name.to_string(), source })
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
        let (mut look, members) = (interval(QUEUES_EVERY), view.clone());
        if view.wait_for(|view| view.roll.is_complete()).await.is_err() {
            return;
        }
        // Of which connection, and with which keys.
        let mut tried: Option<(u64, Vec<String>)> = None;
        let mut told = false;
        loop {
            let wanted =
                (*connections.borrow_and_update(), view.borrow_and_update().issuers.clone());
            let is_told = told && tried.as_ref() == Some(&wanted);
            if !is_told && !wanted.1.is_empty() {
                let outcome = self.tell_of_all().await;
                if let Err(error) = &outcome {
                    tracing::warn!(error = %chain(error), "cannot tell the bus of the members");
                }
                (tried, told) = (Some(wanted), outcome.is_ok());
            }
            let has_other_keys = |view: &View| match &tried {
                Some((_, issuers)) => view.issuers != *issuers,
                None => !view.issuers.is_empty(),
            };
            let (is_time, is_over) = tokio::select! {
                _ = look.tick() => (true, false),
                () = self.shared.doubt.notified() => {
                    told = false;
                    (false, false)
                }
                changed = connections.changed() => (false, changed.is_err()),
                changed = view.wait_for(has_other_keys) => (false, changed.is_err()),
            };
            if is_over {
                return;
            }
            if is_time {
                let queues = queues(members.borrow().roll.standings());
                self.prepare(queues).await;
            }
        }
    }

    /// Until nothing changed while it was told.
    async fn tell_of_all(&self) -> Result<(), MembersError> {
        self.tell_of_the_fleet(None).await?;
        let authority = self.authority()?;
        // By key, for a name may get another.
        let mut told: BTreeMap<String, (Member, Access)> = BTreeMap::new();
        for round in 0..ROUNDS {
            let now = now_ms();
            let mut wanted: BTreeMap<String, (Member, Access)> = BTreeMap::new();
            for (member, record) in self.everybody().await? {
                if !member.standing.runs_the_fleet() {
                    wanted.insert(record.key.clone(), (member, access(&record, now)));
                }
            }
            for (key, (member, access)) in &told {
                let over = Access::Over { granted_at: access.at() };
                wanted.entry(key.clone()).or_insert_with(|| (member.clone(), over));
            }
            let is_news = |key: &String, access: Access| {
                told.get(key).is_none_or(|(_, told)| told.is_over() != access.is_over())
            };
            wanted.retain(|key, (_, access)| is_news(key, *access));
            if wanted.is_empty() {
                tracing::debug!(members = told.len(), "the bus knows the members");
                return Ok(());
            }
            let account = |(key, (member, access)): (&String, &(Member, Access))| {
                authority.member_account(member, key, *access)
            };
            let accounts: Vec<String> = wanted.iter().map(account).collect::<Result<_, _>>()?;
            let heard = if round == 0 { Heard::ByOne } else { Heard::ByAll };
            let pushed = self.tell(&authority, &accounts, heard).await?;
            let name = || "its members".to_owned();
            pushed.map_err(|source| MembersError::NotAdmitted { name: name(), source })?;
            told.extend(wanted);
        }
        Err(MembersError::Busy("members".to_owned()))
    }

    /// Tells of the fleet's own account, without those who ran the fleet and were cut off, here or by
    /// other coordinators; of `cut_off`, too.
    pub(super) async fn tell_of_the_fleet(
        &self,
        cut_off: Option<(&AgentId, &str)>,
    ) -> Result<(), MembersError> {
        let _one_at_a_time = self.shared.revoking.lock().await;
        let mut authority = self.authority()?;
        if let Some((_, public_key)) = cut_off {
            authority.revoke(public_key, now_s())?;
        }
        let mut before = None;
        for _ in 0..ROUNDS {
            if let Err(error) = self.learn(&mut authority).await {
                // Nobody stays in because of it.
                tracing::warn!(error = %chain(&error), "cannot read whom others have cut off");
            }
            let account = authority.account_jwt()?;
            if before.as_ref() == Some(&account) {
                return Ok(());
            }
            let told = self.tell(&authority, std::slice::from_ref(&account), Heard::ByAll).await?;
            told.map_err(|source| match cut_off {
                Some((name, _)) => MembersError::NotTold { name: name.to_string(), source },
                None => MembersError::NotAdmitted { name: "its members".to_owned(), source },
            })?;
            before = Some(account);
        }
        Err(MembersError::Busy("members".to_owned()))
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

/// What a record lets its member do.
fn access(record: &MemberRecord, now_ms: u64) -> Access {
    let ends = record.expires_ms.saturating_add(RENEWS_MS);
    if record.revoked_ms.is_none() && now_ms < ends { granted(record) } else { over(record) }
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
