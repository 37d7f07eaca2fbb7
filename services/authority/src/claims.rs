//! JSON web tokens as a nats-server reads them: operator, account and user claims, version 2,
//! signed with Ed25519 (github.com/nats-io/jwt, `doc`).

use std::collections::BTreeMap;

use data_encoding::{BASE32_NOPAD, BASE64URL_NOPAD};
use nkeys::KeyPair;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Permissions;

/// The only header there is.
const HEADER: &str = r#"{"typ":"JWT","alg":"ed25519-nkey"}"#;
const UNLIMITED: i64 = -1;
/// The end of the year 9999.
const FOREVER_S: u64 = 253_402_300_799;

#[derive(Debug, thiserror::Error)]
pub enum ClaimsError {
    #[error("not a token: it has no three parts of base64 (K115)")]
    Shape,
    #[error("the token's claims cannot be read (K115)")]
    Json(#[from] serde_json::Error),
    #[error("the token is not signed by this fleet (K115)")]
    Signature,
    #[error("sign the token (K115)")]
    Sign(#[source] nkeys::error::Error),
}

/// What a bus user may do, and until when.
#[derive(Debug, Clone)]
pub(crate) struct UserClaims<'a> {
    pub(crate) name: &'a str,
    /// Of its nkey: `U…`.
    pub(crate) public_key: &'a str,
    /// In seconds since 1970.
    pub(crate) issued_at: u64,
    pub(crate) expires_at: Option<u64>,
    pub(crate) permissions: &'a Permissions,
}

/// What a token for the bus says to its holder, who cannot check it and need not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub name: String,
    /// In seconds since 1970.
    pub issued_at: u64,
    pub expires_at: Option<u64>,
    /// Whether everything is allowed.
    pub unlimited: bool,
}

impl Held {
    /// # Errors
    /// When that is no token.
    pub fn read(jwt: &str) -> Result<Self, ClaimsError> {
        #[derive(Deserialize)]
        struct Claims {
            #[serde(flatten)]
            head: Head,
            nats: Value,
        }
        let Claims { head, nats } = decode(jwt)?;
        let allowed = nats["pub"]["allow"].as_array();
        let unlimited = allowed.is_none_or(|all| all.iter().any(|subject| subject == ">"));
        Ok(Self { name: head.name, issued_at: head.iat, expires_at: head.exp, unlimited })
    }
}

/// What every token of ours says besides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) iss: String,
    pub(crate) sub: String,
    pub(crate) name: String,
    pub(crate) iat: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) exp: Option<u64>,
}

pub(crate) fn operator(
    key: &KeyPair,
    system: &str,
    name: &str,
    now: u64,
) -> Result<String, ClaimsError> {
    let nats = json!({ "system_account": system, "type": "operator", "version": 2 });
    sign(key, &key.public_key(), name, now, None, nats)
}

/// What an account is to a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccountClaims<'a> {
    /// The public key that it goes by: `A…`.
    pub(crate) account: &'a str,
    pub(crate) name: &'a str,
    /// Keys that may make its users.
    pub(crate) signing: &'a [String],
    /// Users of these keys are cut off.
    pub(crate) revoked: &'a [&'a str],
    pub(crate) part: Part<'a>,
}

/// What an account is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part<'a> {
    /// Where servers hear of accounts.
    System,
    /// Where the log is.
    Fleet,
    /// One member's: what it says and hears is that account's, by import, and nothing else. Its
    /// answers come to it alone, wherever it wants them.
    Member { fleet: &'a str, permissions: &'a Permissions },
    /// A member's that is one no more.
    Over,
}

/// What the fleet's account lets accounts import that name it; only ours do. Of the API, what has
/// more than one answer is told apart: a server remembers who asked for as long as answers may come.
const SERVICES: [(&str, Answers); 8] = [
    ("$JS.API.INFO", Answers::One),
    ("$JS.API.STREAM.>", Answers::One),
    ("$JS.API.CONSUMER.INFO.>", Answers::One),
    ("$JS.API.CONSUMER.MSG.NEXT.>", Answers::Many),
    ("$JS.API.DIRECT.GET.>", Answers::Many),
    ("$JS.ACK.>", Answers::One),
    ("$KV.>", Answers::One),
    ("flotilla.>", Answers::One),
];
const STREAM: &str = "flotilla.>";

#[derive(Clone, Copy)]
enum Answers {
    One,
    Many,
}

impl Answers {
    fn as_str(self) -> &'static str {
        match self {
            Self::One => "Singleton",
            Self::Many => "Stream",
        }
    }
}

/// Connections a member may have, at all servers together: its agents' and its scripts'.
const MEMBER_CONNECTIONS: i64 = 256;
const MEMBER_SUBSCRIPTIONS: i64 = 10_000;

/// An account's token.
pub(crate) fn account(
    operator: &KeyPair,
    claims: &AccountClaims<'_>,
    now: u64,
) -> Result<String, ClaimsError> {
    let AccountClaims { account, name, signing, revoked, part } = *claims;
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
        // Who is cut off is told so; no connections allowed would be another reason.
        Part::System | Part::Over => {}
        Part::Fleet => {
            // Only here: a server refuses a system account that may have streams.
            for limit in ["mem_storage", "disk_storage", "streams", "consumer"] {
                nats["limits"][limit] = UNLIMITED.into();
            }
            nats["exports"] = exports();
        }
        Part::Member { fleet, permissions } => {
            nats["limits"]["conn"] = MEMBER_CONNECTIONS.into();
            nats["limits"]["subs"] = MEMBER_SUBSCRIPTIONS.into();
            nats["limits"]["leaf"] = 0.into();
            nats["limits"]["exports"] = 0.into();
            nats["imports"] = imports(fleet, permissions);
        }
    }
    if !signing.is_empty() {
        nats["signing_keys"] = json!(signing);
    }
    if !revoked.is_empty() {
        // Whenever their tokens were made, by whichever clock.
        let all: BTreeMap<&str, u64> = revoked.iter().map(|key| (*key, FOREVER_S)).collect();
        nats["revocations"] = json!(all);
    }
    sign(operator, account, name, now, None, nats)
}

fn exports() -> Value {
    let service = |(subject, answers): (&str, Answers)| {
        json!({ "name": subject, "subject": subject, "type": "service",
                "response_type": answers.as_str() })
    };
    let mut exports: Vec<Value> = SERVICES.into_iter().map(service).collect();
    exports.push(json!({ "name": STREAM, "subject": STREAM, "type": "stream" }));
    exports.into()
}

fn imports(fleet: &str, permissions: &Permissions) -> Value {
    let import = |kind: &'static str| move |subject: &String| json!({ "name": subject, "subject": subject, "account": fleet, "type": kind });
    let said = permissions.publish.iter().map(import("service"));
    said.chain(permissions.heard_of_fleet().map(import("stream"))).collect()
}

/// Of `account`, made by its key or its signing key.
pub(crate) fn user(
    signer: &KeyPair,
    account: &str,
    claims: &UserClaims<'_>,
) -> Result<String, ClaimsError> {
    let Permissions { publish, subscribe } = claims.permissions;
    let mut nats = json!({
        "pub": allowed(publish),
        "sub": allowed(subscribe),
        "subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED,
        "type": "user",
        "version": 2,
    });
    if signer.public_key() != account {
        nats["issuer_account"] = account.into();
    }
    sign(signer, claims.public_key, claims.name, claims.issued_at, claims.expires_at, nats)
}

fn allowed(subjects: &[String]) -> Value {
    json!({ "allow": subjects })
}

fn sign(
    key: &KeyPair,
    subject: &str,
    name: &str,
    iat: u64,
    exp: Option<u64>,
    nats: Value,
) -> Result<String, ClaimsError> {
    let head =
        Head { iss: key.public_key(), sub: subject.to_owned(), name: name.to_owned(), iat, exp };
    let mut claims = serde_json::to_value(head)?;
    claims["nats"] = nats;
    // Of what it says: a server does nothing about a token that it has.
    let identifier = digest(&SHA256, &serde_json::to_vec(&claims)?);
    claims["jti"] = BASE32_NOPAD.encode(identifier.as_ref()).into();
    encode(key, &claims)
}

/// Any claims, signed.
pub(crate) fn encode(key: &KeyPair, claims: &impl Serialize) -> Result<String, ClaimsError> {
    let body = BASE64URL_NOPAD.encode(&serde_json::to_vec(claims)?);
    let text = format!("{}.{body}", BASE64URL_NOPAD.encode(HEADER.as_bytes()));
    let signature = key.sign(text.as_bytes()).map_err(ClaimsError::Sign)?;
    Ok(format!("{text}.{}", BASE64URL_NOPAD.encode(&signature)))
}

/// The claims of a token whoever signed it: its holder may ask when it ends.
pub(crate) fn decode<T: for<'a> Deserialize<'a>>(token: &str) -> Result<T, ClaimsError> {
    let (_, claims, _) = parts(token)?;
    Ok(serde_json::from_slice(&claims)?)
}

/// The claims of a token that one of `keys` signed.
pub(crate) fn verified<T: for<'a> Deserialize<'a>>(
    token: &str,
    keys: &[String],
) -> Result<T, ClaimsError> {
    let (text, claims, signature) = parts(token)?;
    let is_by = |key: &String| {
        KeyPair::from_public_key(key)
            .is_ok_and(|key| key.verify(text.as_bytes(), &signature).is_ok())
    };
    if !keys.iter().any(is_by) {
        return Err(ClaimsError::Signature);
    }
    Ok(serde_json::from_slice(&claims)?)
}

/// What is signed, the claims in it, and the signature.
fn parts(token: &str) -> Result<(&str, Vec<u8>, Vec<u8>), ClaimsError> {
    let (text, signature) = token.rsplit_once('.').ok_or(ClaimsError::Shape)?;
    let (_, claims) = text.split_once('.').ok_or(ClaimsError::Shape)?;
    let decode =
        |part: &str| BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| ClaimsError::Shape);
    Ok((text, decode(claims)?, decode(signature)?))
}
