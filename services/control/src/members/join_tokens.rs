//! Join tokens: creation, listing and revocation.

use bytes::Bytes;
use identity::{JoinToken, MemberRole, join_token};
use wire::{Pool, clock, v1};

use super::{
    MemberRegistry, MembershipError, MembershipRefusal, TOKEN, parse_duration_ms, parse_roles,
    records::{TokenRecord, TokenUse},
    timestamp_from_ms,
};

/// More than the machines of one rack.
const USES_MAX: u32 = 1000;
/// A forgotten token may be found by a stranger.
const TOKEN_S_MAX: f64 = 30.0 * 24.0 * 3600.0;
/// Includes expired tokens.
const TOKENS_MAX: usize = 1000;
const DAY_MS: u64 = 24 * 3_600_000;
/// An expired token is still listed for this time.
const RETENTION_MS: u64 = 30 * DAY_MS;
const DEFAULT_POOL: &str = "default";

impl MemberRegistry {
    /// Creates a join token. `by` is the caller's name.
    pub async fn create_token(
        &self,
        by: &str,
        request: &v1::CreateTokenRequest,
    ) -> Result<v1::CreateTokenResponse, MembershipError> {
        let now = clock::unix_millis();
        self.remove_old_tokens(now).await?;
        let (id, secret) = join_token::generate_id_and_secret()?;
        let record = build_record(by, &secret, request, now)?;
        let gateways = match &request.gateways[..] {
            [] => self.shared.config.advertised_gateways.clone(),
            gateways => gateways.to_vec(),
        };
        let line = JoinToken {
            gateways,
            ca: self.fleet_fingerprint()?,
            id: id.clone(),
            secret,
            expires_at: record.expires_ms / 1000,
        }
        .encode_token();
        self.rewrite_record(&token_key(&id), |_| Ok(Some(record.clone()))).await?;
        tracing::info!(token = id, by, uses = record.uses, "a join token was made");
        Ok(v1::CreateTokenResponse { line, token: Some(token_info(id, record)) })
    }

    /// Removes the tokens that expired more than [`RETENTION_MS`] ago. Refuses if [`TOKENS_MAX`]
    /// remain.
    async fn remove_old_tokens(&self, now: u64) -> Result<(), MembershipError> {
        let mut kept = 0;
        for (key, value) in self.shared.bus.list_member_entries(TOKEN).await? {
            let record = serde_json::from_slice::<TokenRecord>(&value);
            if !record.is_ok_and(|record| now.saturating_sub(record.expires_ms) > RETENTION_MS) {
                kept += 1;
                continue;
            }
            let slot = self.shared.bus.get_member_entry(&key).await?;
            // If another process has written the slot since, it has removed the token too.
            self.shared.bus.put_member_entry(&key, Bytes::new(), slot.revision).await?;
        }
        if kept >= TOKENS_MAX {
            let problem = format!(
                "there are {TOKENS_MAX} already, including expired ones; tokens are removed {} \
                 days after they expire",
                RETENTION_MS / DAY_MS
            );
            return Err(field_refusal("tokens", problem).into());
        }
        Ok(())
    }

    /// Returns every stored token, without its secret, which is not stored.
    pub async fn list_tokens(&self) -> Result<Vec<v1::JoinTokenInfo>, MembershipError> {
        let slots = self.shared.bus.list_member_entries(TOKEN).await?;
        let read = |(key, value): (String, Bytes)| {
            let id = key.strip_prefix(TOKEN)?.to_owned();
            let record = serde_json::from_slice::<TokenRecord>(&value);
            record
                .inspect_err(|error| tracing::warn!(key, %error, "a record cannot be read"))
                .ok()
                .map(|record| token_info(id, record))
        };
        Ok(slots.into_iter().filter_map(read).collect())
    }

    /// Revokes a join token. Members that joined with it stay.
    pub async fn revoke_token(&self, by: &str, id: &str) -> Result<(), MembershipError> {
        let unknown = || MembershipRefusal::UnknownToken { id: id.chars().take(64).collect() };
        if !join_token::is_token_id(id) {
            return Err(unknown().into());
        }
        let now = clock::unix_millis();
        self.rewrite_record(&token_key(id), |record: Option<&TokenRecord>| {
            let record = record.ok_or_else(unknown)?;
            let revoked = TokenRecord { revoked_ms: Some(now), ..record.clone() };
            Ok(record.revoked_ms.is_none().then_some(revoked))
        })
        .await?;
        tracing::info!(token = id, by, "a join token was revoked");
        Ok(())
    }
}

pub(super) fn token_key(id: &str) -> String {
    format!("{TOKEN}{id}")
}

fn build_record(
    by: &str,
    secret: &str,
    request: &v1::CreateTokenRequest,
    now: u64,
) -> Result<TokenRecord, MembershipRefusal> {
    let roles = parse_roles(&request.roles)?;
    if roles.is_empty() {
        let all = MemberRole::ALL.map(MemberRole::as_str).join(", ");
        return Err(field_refusal("roles", format!("name at least one of {all}")));
    }
    if !(1..=USES_MAX).contains(&request.uses) {
        return Err(field_refusal("uses", format!("{} is not from 1 to {USES_MAX}", request.uses)));
    }
    if request.gateways.len() > 16 || request.gateways.iter().any(|one| one.len() > 255) {
        return Err(field_refusal("gateways", "name at most 16, as host:port".into()));
    }
    let pool = if request.pool.is_empty() { DEFAULT_POOL } else { &request.pool };
    Ok(TokenRecord {
        secret_hash: join_token::hash_secret(secret),
        roles,
        pool: Pool::new(pool)?,
        uses: request.uses,
        used_by: Vec::new(),
        created_ms: now,
        created_by: by.to_owned(),
        expires_ms: now + parse_duration_ms("expires", request.expires_in_s, TOKEN_S_MAX)?,
        revoked_ms: None,
    })
}

fn field_refusal(field: &'static str, problem: String) -> MembershipRefusal {
    MembershipRefusal::Field { field, problem }
}

fn token_info(id: String, record: TokenRecord) -> v1::JoinTokenInfo {
    v1::JoinTokenInfo {
        id,
        roles: record.roles.iter().map(ToString::to_string).collect(),
        pool: record.pool.to_string(),
        uses: record.uses,
        uses_left: record.uses_left(),
        created_at: Some(timestamp_from_ms(record.created_ms)),
        created_by: record.created_by,
        expires_at: Some(timestamp_from_ms(record.expires_ms)),
        revoked_at: record.revoked_ms.map(timestamp_from_ms),
        used_by: record.used_by.into_iter().map(|TokenUse { name, .. }| name.to_string()).collect(),
    }
}
