//! Revokes a member: first the record is written, then the servers are updated and end the member's
//! connections.

use identity::{FleetAuthority, Member};
use wire::{AgentId, Timestamp, clock};

use super::{
    MemberRegistry, MembershipError, MembershipRefusal, join::member_key, records::MemberRecord,
    timestamp_from_ms,
};

impl MemberRegistry {
    /// Revokes a member and returns the time of the revocation. A repeated call updates the servers
    /// again. Fails if the member does not exist, or a server could not be updated.
    pub async fn revoke_member(
        &self,
        by: &str,
        name: &AgentId,
    ) -> Result<Timestamp, MembershipError> {
        let now = clock::unix_millis();
        let unknown = || MembershipRefusal::NoMember { name: name.to_string() };
        let record = self
            .rewrite_record(&member_key(name), |record: Option<&MemberRecord>| {
                let record = record.ok_or_else(unknown)?;
                let revoked = MemberRecord { revoked_ms: Some(now), ..record.clone() };
                Ok(record.revoked_ms.is_none().then_some(revoked))
            })
            .await?;
        let record = record.ok_or_else(unknown)?;
        self.revoke_access(name, &record).await?;
        tracing::info!(%name, by, "revoked");
        Ok(timestamp_from_ms(record.revoked_ms.unwrap_or(now)))
    }

    /// Makes the servers refuse every credential of this key, for good.
    pub(super) async fn revoke_access(
        &self,
        name: &AgentId,
        record: &MemberRecord,
    ) -> Result<(), MembershipError> {
        let member = Member { name: name.clone(), standing: record.standing.clone() };
        if member.standing.uses_fleet_account() {
            return self.push_fleet_account(Some((name, &record.key))).await;
        }
        self.push_revocation(&self.open_authority()?, &member, record).await
    }

    /// Adds the administrators that other coordinators revoked to the keys of this machine, which
    /// may be another copy of the fleet's keys.
    pub(super) async fn import_revocations(
        &self,
        authority: &mut FleetAuthority,
    ) -> Result<(), MembershipError> {
        for (member, record) in self.read_members().await? {
            if let Some(at_ms) = record.revoked_ms
                && member.standing.uses_fleet_account()
                && authority.revoked_at(&record.key).is_none()
            {
                tracing::debug!(name = %member.name, "revoked by another coordinator");
                authority.revoke_key(&record.key, at_ms.max(record.renewed_ms) / 1000)?;
            }
        }
        Ok(())
    }
}
