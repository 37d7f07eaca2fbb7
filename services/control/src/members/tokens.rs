//! Join tokens: made, listed, taken back.

use authority::{JoinToken, Role, join_token};
use bytes::Bytes;
use wire::{Pool, v1};

use super::{
    Members, MembersError, Refusal, TOKEN, at, milliseconds, now_ms,
    records::{TokenRecord, Use},
    roles,
};

/// More than a rack holds.
const USES_MAX: u32 = 1000;
/// A token that lies about for longer is found by somebody.
const TOKEN_S_MAX: f64 = 30.0 * 24.0 * 3600.0;
const TOKENS_MAX: usize = 1000;
const DAY_MS: u64 = 24 * 3_600_000;
/// For how long a token that is over can be looked up.
const KEPT_MS: u64 = 30 * DAY_MS;
/// The pool of whoever names none.
const POOL: &str = "default";

impl Members {
    /// A new join token, by whoever is called `by`.
    ///
    /// # Errors
    /// When a field cannot work, or it cannot be written down.
    pub async fn create_token(
        &self,
        by: &str,
        request: &v1::CreateTokenRequest,
    ) -> Result<v1::CreateTokenResponse, MembersError> {
        let now = now_ms();
        self.forget(now).await?;
        let (id, secret) = join_token::fresh()?;
        let record = new(by, &secret, request, now)?;
        let gateways = match &request.gateways[..] {
            [] => self.shared.terms.gateways.clone(),
            gateways => gateways.to_vec(),
        };
        let line = JoinToken {
            gateways,
            ca: self.fleet()?,
            id: id.clone(),
            secret,
            expires_at: record.expires_ms / 1000,
        }
        .encode();
        self.rewrite(&key(&id), |_| Ok(Some(record.clone()))).await?;
        tracing::info!(token = id, by, uses = record.uses, "a join token was made");
        Ok(v1::CreateTokenResponse { line, token: Some(info(id, record)) })
    }

    /// Lets go of tokens that have been over for long, and of a new one when there are too many.
    async fn forget(&self, now: u64) -> Result<(), MembersError> {
        let mut kept = 0;
        for (key, value) in self.shared.bus.member_slots(TOKEN).await? {
            let record = serde_json::from_slice::<TokenRecord>(&value);
            if !record.is_ok_and(|record| now.saturating_sub(record.expires_ms) > KEPT_MS) {
                kept += 1;
                continue;
            }
            let slot = self.shared.bus.member_slot(&key).await?;
            // Whoever came between has seen to it.
            self.shared.bus.set_member_slot(&key, Bytes::new(), slot.revision).await?;
        }
        if kept >= TOKENS_MAX {
            let problem = format!(
                "there are {TOKENS_MAX} already, the old ones included; those that expired {} days ago are let go",
                KEPT_MS / DAY_MS
            );
            return Err(field("tokens", problem).into());
        }
        Ok(())
    }

    /// Every token there was of late, without its secret, which is kept nowhere.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub async fn tokens(&self) -> Result<Vec<v1::JoinTokenInfo>, MembersError> {
        let slots = self.shared.bus.member_slots(TOKEN).await?;
        let read = |(key, value): (String, Bytes)| {
            let id = key.strip_prefix(TOKEN)?.to_owned();
            let record = serde_json::from_slice::<TokenRecord>(&value);
            record
                .inspect_err(|error| tracing::warn!(key, %error, "a record cannot be read"))
                .ok()
                .map(|record| info(id, record))
        };
        Ok(slots.into_iter().filter_map(read).collect())
    }

    /// Lets nobody in with it from now on.
    ///
    /// # Errors
    /// When there is none, or it cannot be written down.
    pub async fn revoke_token(&self, by: &str, id: &str) -> Result<(), MembersError> {
        let unknown = || Refusal::UnknownToken { id: id.chars().take(64).collect() };
        if !join_token::is_id(id) {
            return Err(unknown().into());
        }
        let now = now_ms();
        self.rewrite(&key(id), |record: Option<&TokenRecord>| {
            let record = record.ok_or_else(unknown)?;
            let revoked = TokenRecord { revoked_ms: Some(now), ..record.clone() };
            Ok(record.revoked_ms.is_none().then_some(revoked))
        })
        .await?;
        tracing::info!(token = id, by, "a join token was revoked");
        Ok(())
    }
}

pub(super) fn key(id: &str) -> String {
    format!("{TOKEN}{id}")
}

fn new(
    by: &str,
    secret: &str,
    request: &v1::CreateTokenRequest,
    now: u64,
) -> Result<TokenRecord, Refusal> {
    let roles = roles(&request.roles)?;
    if roles.is_empty() {
        let all = Role::ALL.map(Role::as_str).join(", ");
        return Err(field("roles", format!("name at least one of {all}")));
    }
    if !(1..=USES_MAX).contains(&request.uses) {
        return Err(field("uses", format!("{} is not from 1 to {USES_MAX}", request.uses)));
    }
    if request.gateways.len() > 16 || request.gateways.iter().any(|one| one.len() > 255) {
        return Err(field("gateways", "name at most 16, as host:port".into()));
    }
    let pool = if request.pool.is_empty() { POOL } else { &request.pool };
    Ok(TokenRecord {
        secret_hash: join_token::hash(secret),
        roles,
        pool: Pool::new(pool)?,
        uses: request.uses,
        used_by: Vec::new(),
        created_ms: now,
        created_by: by.to_owned(),
        expires_ms: now + milliseconds("expires", request.expires_in_s, TOKEN_S_MAX)?,
        revoked_ms: None,
    })
}

fn field(field: &'static str, problem: String) -> Refusal {
    Refusal::Field { field, problem }
}

fn info(id: String, record: TokenRecord) -> v1::JoinTokenInfo {
    v1::JoinTokenInfo {
        id,
        roles: record.roles.iter().map(ToString::to_string).collect(),
        pool: record.pool.to_string(),
        uses: record.uses,
        uses_left: record.uses_left(),
        created_at: Some(at(record.created_ms)),
        created_by: record.created_by,
        expires_at: Some(at(record.expires_ms)),
        revoked_at: record.revoked_ms.map(at),
        used_by: record.used_by.into_iter().map(|Use { name, .. }| name.to_string()).collect(),
    }
}
