//! Letting somebody in, and letting him stay.

use authority::{Member, Purpose, Scope, Standing, Statement, join_token};
use wire::{AgentId, v1};

use super::{
    MEMBER, Members, MembersError, Refusal, milliseconds, now_ms,
    records::{Admission, MemberRecord, TokenRecord, Use, is_fresh, may_have},
    roles, shortened, tokens,
};

/// A kit that lies about for longer is nobody's any more.
const USER_S_MAX: f64 = 5.0 * 366.0 * 24.0 * 3600.0;

impl Members {
    /// Lets an agent in that knows a token's secret and has a key. The token's use is spent first,
    /// and given back when the name turns out to be another's.
    ///
    /// # Errors
    /// When it is refused, or cannot be written down.
    pub async fn join(&self, request: &v1::JoinRequest) -> Result<v1::Membership, MembersError> {
        let now = now_ms();
        let name = AgentId::new(request.name.as_str()).map_err(Refusal::from)?;
        if !join_token::is_id(&request.id) {
            return Err(Refusal::NoToken.into());
        }
        let proof = request.proof.clone().unwrap_or_default();
        self.check(Purpose::Join { token: &request.id }, &name, &request.public_key, &proof, now)?;
        let wanted = roles(&request.roles)?;
        let (_, before) = self.read::<MemberRecord>(&key(&name)).await?;
        let token = self.spend(&name, request, before.as_ref(), now).await?;
        let granted = Granted {
            standing: Standing::Agent { roles: token.roles(&wanted)?, pool: token.pool.clone() },
            key: &request.public_key,
            proved_ms: proof.at_ms,
            token: Some(&request.id),
            host: &request.host,
            version: &request.version,
            now,
            ttl_ms: self.ttl_ms(),
        };
        let enlisted = self.enlist(&name, &granted).await;
        if let Err(MembersError::Refused(Refusal::NameTaken { .. })) = &enlisted {
            self.give_back(&request.id, &name, &request.public_key).await?;
        }
        let record = enlisted?;
        tracing::info!(%name, token = request.id, host = ?record.host, "joined");
        self.membership(&name, &record).await
    }

    /// Spends a use of the token, once for each member however often it asks.
    async fn spend(
        &self,
        name: &AgentId,
        request: &v1::JoinRequest,
        before: Option<&MemberRecord>,
        now: u64,
    ) -> Result<TokenRecord, MembersError> {
        let who = Use { name: name.clone(), key: request.public_key.clone() };
        let hash = join_token::hash(&request.secret);
        let wanted = roles(&request.roles)?;
        let spent = self
            .rewrite(&tokens::key(&request.id), |token: Option<&TokenRecord>| {
                let token = token.ok_or(Refusal::NoToken)?;
                let admission = token.admit(&request.id, &hash, &who, now)?;
                // Whatever else is wrong costs nothing.
                token.roles(&wanted)?;
                may_have(name, &who.key, before)?;
                Ok((admission == Admission::New).then(|| {
                    let mut token = token.clone();
                    token.used_by.push(who.clone());
                    token
                }))
            })
            .await?;
        Ok(spent.ok_or(Refusal::NoToken)?)
    }

    async fn give_back(
        &self,
        id: &str,
        name: &AgentId,
        public_key: &str,
    ) -> Result<(), MembersError> {
        let who = Use { name: name.clone(), key: public_key.to_owned() };
        self.rewrite(&tokens::key(id), |token: Option<&TokenRecord>| {
            let Some(token) = token.filter(|token| token.used_by.contains(&who)) else {
                return Ok(None);
            };
            let mut token = token.clone();
            token.used_by.retain(|one| *one != who);
            Ok(Some(token))
        })
        .await
        .map(|_| ())
    }

    /// Writes a member down, unless the name is another's.
    async fn enlist(
        &self,
        name: &AgentId,
        granted: &Granted<'_>,
    ) -> Result<MemberRecord, MembersError> {
        self.check_the_key(name, granted.key).await?;
        self.let_go_of_the_old_key(name, granted.key, |before| {
            may_have(name, granted.key, Some(before)).is_ok()
        })
        .await?;
        let enlisted = self
            .rewrite(&key(name), |before: Option<&MemberRecord>| {
                may_have(name, granted.key, before)?;
                let same = before.filter(|before| before.key == granted.key);
                if same.is_some_and(|before| before.standing != granted.standing) {
                    return Err(Refusal::Changed { name: name.to_string() });
                }
                if granted.proved_ms > 0
                    && let Some(before) = same
                {
                    is_fresh(before, granted.key, granted.proved_ms)?;
                }
                Ok(Some(granted.record(same)))
            })
            .await?;
        enlisted.ok_or_else(|| MembersError::Busy(key(name)))
    }

    /// Lets an agent in that works where the fleet's keys are, without a token; however often.
    ///
    /// # Errors
    /// When its key was revoked or its name is another's, or it cannot be written down.
    pub async fn enlist_here(
        &self,
        member: &Member,
        public_key: &str,
        (host, version): (&str, &str),
    ) -> Result<v1::Membership, MembersError> {
        let granted = Granted {
            standing: member.standing.clone(),
            key: public_key,
            proved_ms: 0,
            token: None,
            host,
            version,
            now: now_ms(),
            ttl_ms: self.ttl_ms(),
        };
        // Whoever has the fleet's keys may give such an agent another key: a restored fleet has
        // its records, and not its agents' kits.
        let is_here = |record: &MemberRecord| {
            record.token.is_none() && matches!(record.standing, Standing::Agent { .. })
        };
        self.check_the_key(&member.name, public_key).await?;
        let old = self.let_go_of_the_old_key(&member.name, public_key, is_here).await?;
        let name = || member.name.to_string();
        let enlisted = self
            .rewrite(&key(&member.name), |before: Option<&MemberRecord>| match before {
                Some(record) if !is_here(record) => Err(Refusal::NameTaken { name: name() }),
                Some(record) if record.key == public_key && record.revoked_ms.is_some() => {
                    Err(Refusal::Revoked { name: name() })
                }
                before => {
                    Ok(Some(granted.record(before.filter(|record| record.key == public_key))))
                }
            })
            .await?;
        let record = enlisted.ok_or_else(|| MembersError::Busy(key(&member.name)))?;
        if let Some(old) = old {
            // It was a member until now, and may have renewed since it was cut off.
            self.cut_off(&member.name, &old).await?;
        }
        self.membership(&member.name, &record).await
    }

    /// A key is one member's: its account follows from it.
    async fn check_the_key(&self, name: &AgentId, public_key: &str) -> Result<(), MembersError> {
        let is_it = |(member, record): &(Member, MemberRecord)| {
            member.name != *name && record.key == public_key
        };
        match self.everybody().await?.into_iter().find(is_it) {
            Some((other, _)) => {
                let (name, other) = (name.to_string(), other.name.to_string());
                Err(Refusal::KeyTaken { name, other }.into())
            }
            None => Ok(()),
        }
    }

    /// Before a name gets a new key: with its record goes what is known of the old one, which the
    /// bus may not have been told is over.
    async fn let_go_of_the_old_key(
        &self,
        name: &AgentId,
        new: &str,
        goes: impl Fn(&MemberRecord) -> bool,
    ) -> Result<Option<MemberRecord>, MembersError> {
        match self.read::<MemberRecord>(&key(name)).await? {
            (_, Some(before)) if before.key != new && goes(&before) => {
                self.cut_off(name, &before).await?;
                Ok(Some(before))
            }
            _ => Ok(None),
        }
    }

    /// What an agent is let in for.
    fn ttl_ms(&self) -> u64 {
        u64::try_from(self.shared.terms.member_ttl.as_millis()).unwrap_or(u64::MAX)
    }

    /// New tokens for an agent that shows that it still has its key.
    ///
    /// # Errors
    /// When it is no member any more, or cannot prove that it is this one.
    pub async fn renew(&self, request: &v1::RenewRequest) -> Result<v1::Membership, MembersError> {
        let now = now_ms();
        let name = AgentId::new(request.name.as_str()).map_err(Refusal::from)?;
        let proof = request.proof.clone().unwrap_or_default();
        let no_member = || Refusal::NoMember { name: name.to_string() };
        let (_, record) = self.read::<MemberRecord>(&key(&name)).await?;
        let public_key = record.ok_or_else(no_member)?.key;
        self.check(Purpose::Renew, &name, &public_key, &proof, now)?;
        let ttl = self.ttl_ms();
        let renewed = self
            .rewrite(&key(&name), |record: Option<&MemberRecord>| {
                let record = record.ok_or_else(no_member)?;
                if record.revoked_ms.is_some() || record.key != public_key {
                    return Err(Refusal::Revoked { name: name.to_string() });
                }
                let Standing::Agent { .. } = record.standing else {
                    return Err(Refusal::NotRenewed { name: name.to_string() });
                };
                is_fresh(record, &public_key, proof.at_ms)?;
                Ok(Some(MemberRecord {
                    renewed_ms: now,
                    expires_ms: now.saturating_add(ttl),
                    proved_ms: proof.at_ms,
                    ..record.clone()
                }))
            })
            .await?;
        tracing::info!(%name, "renewed");
        self.membership(&name, &renewed.ok_or_else(no_member)?).await
    }

    /// A user, whose key was made where the kit is.
    ///
    /// # Errors
    /// When the name is taken, a field cannot work, or it cannot be written down.
    pub async fn create_user(
        &self,
        by: &str,
        request: &v1::CreateUserRequest,
    ) -> Result<v1::Membership, MembersError> {
        let name = AgentId::new(request.name.as_str()).map_err(Refusal::from)?;
        let scope: Scope = request.scope.parse().map_err(Refusal::from)?;
        authority::check_user_key(&request.public_key).map_err(Refusal::from)?;
        let granted = Granted {
            standing: Standing::User { scope },
            key: &request.public_key,
            proved_ms: 0,
            token: None,
            host: "",
            version: "",
            now: now_ms(),
            ttl_ms: milliseconds("expires", request.expires_in_s, USER_S_MAX)?,
        };
        let record = self.enlist(&name, &granted).await?;
        tracing::info!(%name, %scope, by, "a user was made");
        self.membership(&name, &record).await
    }

    fn check(
        &self,
        purpose: Purpose<'_>,
        name: &AgentId,
        public_key: &str,
        proof: &v1::KeyProof,
        now_ms: u64,
    ) -> Result<(), MembersError> {
        let statement = Statement { purpose, fleet: self.fleet()?, name, at_ms: proof.at_ms };
        statement.check(public_key, &proof.signature, now_ms).map_err(Refusal::from)?;
        Ok(())
    }
}

pub(super) fn key(name: &AgentId) -> String {
    format!("{MEMBER}{name}")
}

/// What somebody was granted, to be written down.
struct Granted<'a> {
    standing: Standing,
    key: &'a str,
    proved_ms: u64,
    token: Option<&'a str>,
    host: &'a str,
    version: &'a str,
    now: u64,
    ttl_ms: u64,
}

impl Granted<'_> {
    /// `before` it had the same key.
    fn record(&self, before: Option<&MemberRecord>) -> MemberRecord {
        MemberRecord {
            key: self.key.to_owned(),
            standing: self.standing.clone(),
            joined_ms: before.map_or(self.now, |before| before.joined_ms),
            renewed_ms: self.now,
            expires_ms: self.now.saturating_add(self.ttl_ms),
            // What was shown once is not shown again.
            proved_ms: before.map_or(0, |before| before.proved_ms).max(self.proved_ms),
            token: self.token.map(str::to_owned),
            host: shortened(self.host),
            version: shortened(self.version),
            revoked_ms: None,
        }
    }
}
