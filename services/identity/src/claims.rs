//! JSON web tokens in the form of a nats-server: operator, account and user claims, version 2,
//! signed with Ed25519 (github.com/nats-io/jwt, `doc`).

use std::collections::BTreeMap;

use data_encoding::{BASE32_NOPAD, BASE64URL_NOPAD};
use nkeys::KeyPair;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::SubjectPermissions;

const JWT_HEADER: &str = r#"{"typ":"JWT","alg":"ed25519-nkey"}"#;
const UNLIMITED: i64 = -1;
/// The end of the year 9999, in seconds since 1970.
const FOREVER_S: u64 = 253_402_300_799;

/// The reason why a token cannot be read, verified or signed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimsError {
    #[error("not a token: it does not have three base64 parts (K115)")]
    Shape,
    #[error("the token's claims cannot be read (K115)")]
    Json(#[from] serde_json::Error),
    #[error("the token is not signed by this fleet (K115)")]
    Signature,
    #[error("sign the token (K115)")]
    Sign(#[source] nkeys::error::Error),
}

#[derive(Debug, Clone)]
pub(crate) struct UserClaims<'a> {
    pub(crate) name: &'a str,
    /// The user's nkey, `U…`.
    pub(crate) public_key: &'a str,
    pub(crate) issued_at: u64,
    pub(crate) expires_at: Option<u64>,
    pub(crate) permissions: &'a SubjectPermissions,
}

/// The content of a user JWT for the bus, read by its holder without verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserJwtInfo {
    pub name: String,
    pub issued_at: u64,
    pub expires_at: Option<u64>,
    pub unlimited: bool,
}

impl UserJwtInfo {
    /// Reads the content of a user JWT without verifying its signature.
    pub fn read_unverified(jwt: &str) -> Result<Self, ClaimsError> {
        #[derive(Deserialize)]
        struct Claims {
            #[serde(flatten)]
            head: StandardClaims,
            nats: Value,
        }
        let Claims { head, nats } = decode_unverified(jwt)?;
        let allowed = nats["pub"]["allow"].as_array();
        let unlimited = allowed.is_none_or(|all| all.iter().any(|subject| subject == ">"));
        Ok(Self { name: head.name, issued_at: head.iat, expires_at: head.exp, unlimited })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StandardClaims {
    pub(crate) iss: String,
    pub(crate) sub: String,
    pub(crate) name: String,
    pub(crate) iat: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) exp: Option<u64>,
}

pub(crate) fn sign_operator(
    key: &KeyPair,
    system: &str,
    name: &str,
    now: u64,
) -> Result<String, ClaimsError> {
    let nats = json!({ "system_account": system, "type": "operator", "version": 2 });
    sign_claims(key, &key.public_key(), name, now, None, nats)
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct AccountClaims<'a> {
    /// The account's nkey, `A…`.
    pub(crate) account: &'a str,
    pub(crate) name: &'a str,
    pub(crate) signing_keys: &'a [String],
    pub(crate) revoked: &'a [&'a str],
    pub(crate) purpose: AccountPurpose<'a>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum AccountPurpose<'a> {
    /// The account on which servers receive account tokens.
    System,
    /// The account that owns the log.
    Fleet,
    /// The account of one member. It imports exactly the subjects that the member may publish and
    /// receive; answers reach only this account.
    Member {
        fleet: &'a str,
        permissions: &'a SubjectPermissions,
    },
    Revoked,
}

/// Subjects that the fleet's account exports as services. Only accounts signed by this fleet can
/// import them. API requests with several answers are listed separately, because a server remembers
/// the requester for as long as answers may arrive.
const EXPORTED_SERVICES: [(&str, ResponseType); 9] = [
    ("$JS.API.INFO", ResponseType::One),
    ("$JS.API.STREAM.>", ResponseType::One),
    ("$JS.API.CONSUMER.INFO.>", ResponseType::One),
    ("$JS.API.CONSUMER.MSG.NEXT.>", ResponseType::Many),
    ("$JS.API.DIRECT.GET.>", ResponseType::Many),
    ("$JS.ACK.>", ResponseType::One),
    ("$KV.>", ResponseType::One),
    ("flotilla.>", ResponseType::One),
    ("flotilla-serving.answer.>", ResponseType::One),
];
const EXPORTED_STREAMS: [&str; 2] = ["flotilla.>", "flotilla-serving.request.*"];

#[derive(Clone, Copy)]
enum ResponseType {
    One,
    Many,
}

impl ResponseType {
    fn as_str(self) -> &'static str {
        match self {
            Self::One => "Singleton",
            Self::Many => "Stream",
        }
    }
}

/// The connections of a member to all servers together, for its agents and scripts.
const MEMBER_CONNECTIONS_MAX: i64 = 256;
const MEMBER_SUBSCRIPTIONS_MAX: i64 = 10_000;

pub(crate) fn sign_account(
    operator: &KeyPair,
    claims: &AccountClaims<'_>,
    now: u64,
) -> Result<String, ClaimsError> {
    let AccountClaims { account, name, signing_keys: signing, revoked, purpose: part } = *claims;
    let mut nats = json!({
        "limits": {
            "subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED, "imports": UNLIMITED,
            "exports": UNLIMITED, "wildcards": true, "conn": UNLIMITED, "leaf": UNLIMITED,
        },
        "default_permissions": { "pub": {}, "sub": {} },
        "type": "account",
        "version": 2,
    });
    match part {
        // A revoked user is refused with that reason; a limit of no connections would give another
        // one.
        AccountPurpose::System | AccountPurpose::Revoked => {}
        AccountPurpose::Fleet => {
            // Only for this account: a server refuses a system account that may have streams.
            for limit in ["mem_storage", "disk_storage", "streams", "consumer"] {
                nats["limits"][limit] = UNLIMITED.into();
            }
            nats["exports"] = build_exports();
        }
        AccountPurpose::Member { fleet, permissions } => {
            nats["limits"]["conn"] = MEMBER_CONNECTIONS_MAX.into();
            nats["limits"]["subs"] = MEMBER_SUBSCRIPTIONS_MAX.into();
            nats["limits"]["leaf"] = 0.into();
            nats["limits"]["exports"] = 0.into();
            nats["imports"] = build_imports(fleet, permissions);
        }
    }
    if !signing.is_empty() {
        nats["signing_keys"] = json!(signing);
    }
    if !revoked.is_empty() {
        // Revoke all their tokens, whenever and by whichever clock they were issued.
        let all: BTreeMap<&str, u64> = revoked.iter().map(|key| (*key, FOREVER_S)).collect();
        nats["revocations"] = json!(all);
    }
    sign_claims(operator, account, name, now, None, nats)
}

fn build_exports() -> Value {
    let service = |(subject, answers): (&str, ResponseType)| {
        json!({ "name": subject, "subject": subject, "type": "service",
                "response_type": answers.as_str() })
    };
    let mut exports: Vec<Value> = EXPORTED_SERVICES.into_iter().map(service).collect();
    let stream = |subject| json!({ "name": subject, "subject": subject, "type": "stream" });
    exports.extend(EXPORTED_STREAMS.map(stream));
    exports.into()
}

fn build_imports(fleet: &str, permissions: &SubjectPermissions) -> Value {
    let import = |kind: &'static str| move |subject: &String| json!({ "name": subject, "subject": subject, "account": fleet, "type": kind });
    let said = permissions.publish.iter().map(import("service"));
    said.chain(permissions.fleet_subscriptions().map(import("stream"))).collect()
}

/// Signs a user with the account's own key or one of its signing keys.
pub(crate) fn sign_user(
    signer: &KeyPair,
    account: &str,
    claims: &UserClaims<'_>,
) -> Result<String, ClaimsError> {
    let SubjectPermissions { publish, subscribe } = claims.permissions;
    let mut nats = json!({
        "pub": allow_list(publish),
        "sub": allow_list(subscribe),
        "subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED,
        "type": "user",
        "version": 2,
    });
    if signer.public_key() != account {
        nats["issuer_account"] = account.into();
    }
    sign_claims(signer, claims.public_key, claims.name, claims.issued_at, claims.expires_at, nats)
}

fn allow_list(subjects: &[String]) -> Value {
    json!({ "allow": subjects })
}

fn sign_claims(
    key: &KeyPair,
    subject: &str,
    name: &str,
    iat: u64,
    exp: Option<u64>,
    nats: Value,
) -> Result<String, ClaimsError> {
    let head = StandardClaims {
        iss: key.public_key(),
        sub: subject.to_owned(),
        name: name.to_owned(),
        iat,
        exp,
    };
    let mut claims = serde_json::to_value(head)?;
    claims["nats"] = nats;
    // A hash of the content: a server ignores a token that it already has.
    let identifier = digest(&SHA256, &serde_json::to_vec(&claims)?);
    claims["jti"] = BASE32_NOPAD.encode(identifier.as_ref()).into();
    encode_token(key, &claims)
}

pub(crate) fn encode_token(key: &KeyPair, claims: &impl Serialize) -> Result<String, ClaimsError> {
    let body = BASE64URL_NOPAD.encode(&serde_json::to_vec(claims)?);
    let text = format!("{}.{body}", BASE64URL_NOPAD.encode(JWT_HEADER.as_bytes()));
    let signature = key.sign(text.as_bytes()).map_err(ClaimsError::Sign)?;
    Ok(format!("{text}.{}", BASE64URL_NOPAD.encode(&signature)))
}

/// Returns the claims without verifying the signature, for a holder that needs its expiry.
pub(crate) fn decode_unverified<T: for<'a> Deserialize<'a>>(token: &str) -> Result<T, ClaimsError> {
    let (_, claims, _) = split_token(token)?;
    Ok(serde_json::from_slice(&claims)?)
}

/// Returns the claims of a token that one of `keys` signed.
pub(crate) fn decode_verified<T: for<'a> Deserialize<'a>>(
    token: &str,
    keys: &[String],
) -> Result<T, ClaimsError> {
    let (text, claims, signature) = split_token(token)?;
    let is_by = |key: &String| {
        KeyPair::from_public_key(key)
            .is_ok_and(|key| key.verify(text.as_bytes(), &signature).is_ok())
    };
    if !keys.iter().any(is_by) {
        return Err(ClaimsError::Signature);
    }
    Ok(serde_json::from_slice(&claims)?)
}

fn split_token(token: &str) -> Result<(&str, Vec<u8>, Vec<u8>), ClaimsError> {
    let (text, signature) = token.rsplit_once('.').ok_or(ClaimsError::Shape)?;
    let (_, claims) = text.split_once('.').ok_or(ClaimsError::Shape)?;
    let decode =
        |part: &str| BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| ClaimsError::Shape);
    Ok((text, decode(claims)?, decode(signature)?))
}
