//! Joining a fleet, renewal of memberships, and the creation of users.

use identity::{Member, MemberKind, ProofPurpose, ProofStatement, UserScope, join_token};
use wire::{AgentId, IdError, clock, v1};

use super::{
    MEMBER, MemberRegistry, MembershipError, MembershipRefusal, join_tokens, parse_duration_ms,
    parse_roles,
    records::{
        MemberRecord, TokenAdmission, TokenRecord, TokenUse, check_name_owner, check_proof_fresh,
    },
    sanitise_text,
};

/// Credentials kept for longer than five years often have no known owner any more.
const USER_S_MAX: f64 = 5.0 * 366.0 * 24.0 * 3600.0;

impl MemberRegistry {
    /// Admits an agent that knows a join token's secret and proves that it has a key. The use of
    /// the token is spent first, and returned if the name belongs to another member.
    pub async fn join_agent(
        &self,
        request: &v1::JoinRequest,
    ) -> Result<v1::Membership, MembershipError> {
        let now = clock::unix_millis();
        let name = AgentId::new(request.name.as_str()).map_err(MembershipRefusal::from)?;
        if !join_token::is_token_id(&request.id) {
            return Err(MembershipRefusal::NoToken.into());
        }
        let proof = request.proof.clone().unwrap_or_default();
        self.check_proof(
            ProofPurpose::Join { token: &request.id },
            &name,
            &request.public_key,
            &proof,
            now,
        )?;
        let wanted = parse_roles(&request.roles)?;
        let (_, before) = self.read_record::<MemberRecord>(&member_key(&name)).await?;
        let token = self.spend_token_use(&name, request, before.as_ref(), now).await?;
        let granted = MemberGrant {
            standing: MemberKind::Agent {
                roles: token.select_roles(&wanted)?,
                pool: token.pool.clone(),
            },
            key: &request.public_key,
            proved_ms: proof.at_ms,
            token: Some(&request.id),
            host: &request.host,
            version: &request.version,
            granted_ms: now,
            ttl_ms: self.member_ttl_ms(),
        };
        let enlisted = self.write_member(&name, &granted).await;
        if let Err(MembershipError::Refused(MembershipRefusal::NameTaken { .. })) = &enlisted {
            self.return_token_use(&request.id, &name, &request.public_key).await?;
        }
        let record = enlisted?;
        tracing::info!(%name, token = request.id, host = ?record.host, "joined");
        self.issue_membership(&name, &record).await
    }

    /// Counts repeated requests of the same member once.
    async fn spend_token_use(
        &self,
        name: &AgentId,
        request: &v1::JoinRequest,
        before: Option<&MemberRecord>,
        now: u64,
    ) -> Result<TokenRecord, MembershipError> {
        let who = TokenUse { name: name.clone(), key: request.public_key.clone() };
        let hash = join_token::hash_secret(&request.secret);
        let wanted = parse_roles(&request.roles)?;
        let spent = self
            .rewrite_record(&join_tokens::token_key(&request.id), |token: Option<&TokenRecord>| {
                let token = token.ok_or(MembershipRefusal::NoToken)?;
                let admission = token.check_admission(&request.id, &hash, &who, now)?;
                // A request that is refused for another reason costs no use of the token.
                token.select_roles(&wanted)?;
                check_name_owner(name, &who.key, before)?;
                Ok((admission == TokenAdmission::New).then(|| {
                    let mut token = token.clone();
                    token.used_by.push(who.clone());
                    token
                }))
            })
            .await?;
        Ok(spent.ok_or(MembershipRefusal::NoToken)?)
    }

    async fn return_token_use(
        &self,
        id: &str,
        name: &AgentId,
        public_key: &str,
    ) -> Result<(), MembershipError> {
        let who = TokenUse { name: name.clone(), key: public_key.to_owned() };
        self.rewrite_record(&join_tokens::token_key(id), |token: Option<&TokenRecord>| {
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

    /// Fails if the name or the key belongs to another member. Revokes the previous key of the name
    /// first.
    async fn write_member(
        &self,
        name: &AgentId,
        granted: &MemberGrant<'_>,
    ) -> Result<MemberRecord, MembershipError> {
        self.check_key_unused(name, granted.key).await?;
        self.revoke_previous_key(name, granted.key, |before| {
            check_name_owner(name, granted.key, Some(before)).is_ok()
        })
        .await?;
        let enlisted = self
            .rewrite_record(&member_key(name), |before: Option<&MemberRecord>| {
                check_name_owner(name, granted.key, before)?;
                let same = before.filter(|before| before.key == granted.key);
                if same.is_some_and(|before| before.standing != granted.standing) {
                    return Err(MembershipRefusal::RightsChanged { name: name.to_string() });
                }
                if granted.proved_ms > 0
                    && let Some(before) = same
                {
                    check_proof_fresh(before, granted.key, granted.proved_ms)?;
                }
                Ok(Some(granted.to_record(same)))
            })
            .await?;
        enlisted.ok_or_else(|| MembershipError::Busy(member_key(name)))
    }

    /// Admits an agent on the machine with the fleet's keys, without a join token. Repeatable for
    /// the same agent. Fails if the key was revoked or the name belongs to another member.
    pub async fn admit_local_agent(
        &self,
        member: &Member,
        public_key: &str,
        (host, version): (&str, &str),
    ) -> Result<v1::Membership, MembershipError> {
        let granted = MemberGrant {
            standing: member.standing.clone(),
            key: public_key,
            proved_ms: 0,
            token: None,
            host,
            version,
            granted_ms: clock::unix_millis(),
            ttl_ms: self.member_ttl_ms(),
        };
        // A caller with the fleet's keys may give such an agent another key: a restored fleet has
        // the records but not the credentials of its agents.
        let is_here = |record: &MemberRecord| {
            record.token.is_none() && matches!(record.standing, MemberKind::Agent { .. })
        };
        self.check_key_unused(&member.name, public_key).await?;
        let old = self.revoke_previous_key(&member.name, public_key, is_here).await?;
        let name = || member.name.to_string();
        let enlisted = self
            .rewrite_record(&member_key(&member.name), |before: Option<&MemberRecord>| match before
            {
                Some(record) if !is_here(record) => {
                    Err(MembershipRefusal::NameTaken { name: name() })
                }
                Some(record) if record.key == public_key && record.revoked_ms.is_some() => {
                    Err(MembershipRefusal::Revoked { name: name() })
                }
                before => {
                    Ok(Some(granted.to_record(before.filter(|record| record.key == public_key))))
                }
            })
            .await?;
        let record = enlisted.ok_or_else(|| MembershipError::Busy(member_key(&member.name)))?;
        if let Some(old) = old {
            // The old key was valid until now, and may have been renewed after the first
            // revocation.
            self.revoke_access(&member.name, &old).await?;
        }
        self.issue_membership(&member.name, &record).await
    }

    /// The key determines the account.
    async fn check_key_unused(
        &self,
        name: &AgentId,
        public_key: &str,
    ) -> Result<(), MembershipError> {
        let is_it = |(member, record): &(Member, MemberRecord)| {
            member.name != *name && record.key == public_key
        };
        match self.read_members().await?.into_iter().find(is_it) {
            Some((other, _)) => {
                let (name, other) = (name.to_string(), other.name.to_string());
                Err(MembershipRefusal::KeyTaken { name, other }.into())
            }
            None => Ok(()),
        }
    }

    /// Revokes the previous key of a name before the name gets a new one, if `goes` accepts the
    /// record. The record, which the new one replaces, is the only place where the old key is
    /// known. Returns the previous record if its key was revoked.
    async fn revoke_previous_key(
        &self,
        name: &AgentId,
        new: &str,
        goes: impl Fn(&MemberRecord) -> bool,
    ) -> Result<Option<MemberRecord>, MembershipError> {
        match self.read_record::<MemberRecord>(&member_key(name)).await? {
            (_, Some(before)) if before.key != new && goes(&before) => {
                self.revoke_access(name, &before).await?;
                Ok(Some(before))
            }
            _ => Ok(None),
        }
    }

    fn member_ttl_ms(&self) -> u64 {
        u64::try_from(self.shared.config.member_ttl.as_millis()).unwrap_or(u64::MAX)
    }

    /// Issues new credentials for an agent that proves that it has its key. Refuses users, former
    /// members, and proofs that were used before.
    pub async fn renew_membership(
        &self,
        request: &v1::RenewRequest,
    ) -> Result<v1::Membership, MembershipError> {
        let now = clock::unix_millis();
        let name = AgentId::new(request.name.as_str()).map_err(MembershipRefusal::from)?;
        let proof = request.proof.clone().unwrap_or_default();
        let no_member = || MembershipRefusal::NoMember { name: name.to_string() };
        let (_, record) = self.read_record::<MemberRecord>(&member_key(&name)).await?;
        let public_key = record.ok_or_else(no_member)?.key;
        self.check_proof(ProofPurpose::Renew, &name, &public_key, &proof, now)?;
        let ttl = self.member_ttl_ms();
        let renewed = self
            .rewrite_record(&member_key(&name), |record: Option<&MemberRecord>| {
                let record = record.ok_or_else(no_member)?;
                if record.revoked_ms.is_some() || record.key != public_key {
                    return Err(MembershipRefusal::Revoked { name: name.to_string() });
                }
                let MemberKind::Agent { .. } = record.standing else {
                    return Err(MembershipRefusal::NotRenewed { name: name.to_string() });
                };
                check_proof_fresh(record, &public_key, proof.at_ms)?;
                Ok(Some(MemberRecord {
                    renewed_ms: now,
                    expires_ms: now.saturating_add(ttl),
                    proved_ms: proof.at_ms,
                    ..record.clone()
                }))
            })
            .await?;
        tracing::info!(%name, "renewed");
        self.issue_membership(&name, &renewed.ok_or_else(no_member)?).await
    }

    /// Creates a user whose key pair was generated on the user's machine. `by` is the caller's name
    /// for the log.
    pub async fn create_user(
        &self,
        by: &str,
        request: &v1::CreateUserRequest,
    ) -> Result<v1::Membership, MembershipError> {
        let of_user = |error| MembershipRefusal::from(IdError { what: "user", ..error });
        let name = AgentId::new(request.name.as_str()).map_err(of_user)?;
        let scope: UserScope = request.scope.parse().map_err(MembershipRefusal::from)?;
        identity::check_user_key(&request.public_key).map_err(MembershipRefusal::from)?;
        let granted = MemberGrant {
            standing: MemberKind::User { scope },
            key: &request.public_key,
            proved_ms: 0,
            token: None,
            host: "",
            version: "",
            granted_ms: clock::unix_millis(),
            ttl_ms: parse_duration_ms("expires", request.expires_in_s, USER_S_MAX)?,
        };
        let record = self.write_member(&name, &granted).await?;
        tracing::info!(%name, %scope, by, "a user was made");
        self.issue_membership(&name, &record).await
    }

    fn check_proof(
        &self,
        purpose: ProofPurpose<'_>,
        name: &AgentId,
        public_key: &str,
        proof: &v1::KeyProof,
        now_ms: u64,
    ) -> Result<(), MembershipError> {
        let statement =
            ProofStatement { purpose, fleet: self.fleet_fingerprint()?, name, at_ms: proof.at_ms };
        statement
            .check_signature(public_key, &proof.signature, now_ms)
            .map_err(MembershipRefusal::from)?;
        Ok(())
    }
}

pub(super) fn member_key(name: &AgentId) -> String {
    format!("{MEMBER}{name}")
}

struct MemberGrant<'a> {
    standing: MemberKind,
    key: &'a str,
    proved_ms: u64,
    token: Option<&'a str>,
    host: &'a str,
    version: &'a str,
    granted_ms: u64,
    ttl_ms: u64,
}

impl MemberGrant<'_> {
    /// `before` is the previous record with the same key.
    fn to_record(&self, before: Option<&MemberRecord>) -> MemberRecord {
        MemberRecord {
            key: self.key.to_owned(),
            standing: self.standing.clone(),
            joined_ms: before.map_or(self.granted_ms, |before| before.joined_ms),
            renewed_ms: self.granted_ms,
            expires_ms: self.granted_ms.saturating_add(self.ttl_ms),
            // Keep the newest time, so that no earlier proof is accepted again.
            proved_ms: before.map_or(0, |before| before.proved_ms).max(self.proved_ms),
            token: self.token.map(str::to_owned),
            host: sanitise_text(self.host),
            version: sanitise_text(self.version),
            revoked_ms: None,
        }
    }
}
