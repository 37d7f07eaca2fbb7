//! Cutting a member off: first written down, then told to the bus, which ends its connections.

use authority::{Authority, Member};
use wire::{AgentId, Timestamp};

use super::{Members, MembersError, Refusal, at, join::key, now_ms, records::MemberRecord};

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
        self.cut_off(name, &record).await?;
        tracing::info!(%name, by, "revoked");
        Ok(at(record.revoked_ms.unwrap_or(now)))
    }

    /// Has the bus refuse every token made for this key, for good.
    pub(super) async fn cut_off(
        &self,
        name: &AgentId,
        record: &MemberRecord,
    ) -> Result<(), MembersError> {
        let member = Member { name: name.clone(), standing: record.standing.clone() };
        if member.standing.runs_the_fleet() {
            return self.tell_of_the_fleet(Some((name, &record.key))).await;
        }
        self.tell_over(&self.authority()?, &member, record).await
    }

    /// Writes down with the keys here which admins other coordinators have cut off, who may have
    /// another copy of the keys.
    pub(super) async fn learn(&self, authority: &mut Authority) -> Result<(), MembersError> {
        for (member, record) in self.everybody().await? {
            if let Some(at_ms) = record.revoked_ms
                && member.standing.runs_the_fleet()
                && authority.revoked_at(&record.key).is_none()
            {
                tracing::debug!(name = %member.name, "cut off by another coordinator");
                authority.revoke(&record.key, at_ms.max(record.renewed_ms) / 1000)?;
            }
        }
        Ok(())
    }
}
