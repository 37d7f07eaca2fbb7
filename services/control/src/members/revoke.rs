//! Cutting a member off: first written down, then told to the bus, which ends its connections.

use std::time::Duration;

use authority::Authority;
use bus::system::{SystemUser, push_account};
use wire::{AgentId, Timestamp};

use super::{
    MEMBER, Members, MembersError, Refusal, at, chain, join::key, now_ms, records::MemberRecord,
};

impl Members {
    /// Doing it again tells the bus again.
    ///
    /// # Errors
    /// When there is no such member, or somebody could not be told.
    pub async fn revoke(&self, by: &str, name: &AgentId) -> Result<Timestamp, MembersError> {
        let now = now_ms();
        let unknown = || Refusal::NoMember { name: name.to_string() };
        let record = self
            .rewrite(&key(name), |record: Option<&MemberRecord>| {
                let record = record.ok_or_else(unknown)?;
                let revoked = MemberRecord { revoked_ms: Some(now), ..record.clone() };
                Ok(record.revoked_ms.is_none().then_some(revoked))
            })
            .await?;
        let record = record.ok_or_else(unknown)?;
        self.tell(name, &record.key).await?;
        tracing::info!(%name, by, "revoked");
        Ok(at(record.revoked_ms.unwrap_or(now)))
    }

    /// Has the bus refuse every token made for this key until now, and for those that other
    /// coordinators cut off, who may have another copy of the keys.
    async fn tell(&self, name: &AgentId, public_key: &str) -> Result<(), MembersError> {
        let _one_at_a_time = self.shared.revoking.lock().await;
        let now = Duration::from_millis(now_ms()).as_secs();
        let mut authority = self.authority()?;
        if let Err(error) = self.learn(&mut authority).await {
            // Nobody stays in because of it.
            tracing::warn!(error = %chain(&error), "cannot read whom others have cut off");
        }
        authority.revoke(public_key, now)?;
        let account = authority.account_jwt(now)?;
        let (seed, jwt) = authority.system_user(now)?;
        let tls = authority::client_config(authority.ca_pem().as_bytes())?;
        let user = SystemUser { seed, jwt };
        push_account(&self.shared.terms.nats, tls, &user, &account)
            .await
            .map(|_| ())
            .map_err(|source| MembersError::NotTold { name: name.to_string(), source })
    }

    /// Writes down with the keys here whom other coordinators have cut off.
    async fn learn(&self, authority: &mut Authority) -> Result<(), MembersError> {
        for (key, value) in self.shared.bus.member_slots(MEMBER).await? {
            let Ok(record) = serde_json::from_slice::<MemberRecord>(&value) else { continue };
            if let Some(at_ms) = record.revoked_ms
                && authority.revoked_at(&record.key).is_none()
            {
                tracing::debug!(key, "cut off by another coordinator");
                authority.revoke(&record.key, at_ms.max(record.renewed_ms) / 1000)?;
            }
        }
        Ok(())
    }
}
