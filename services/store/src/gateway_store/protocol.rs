//! The HTTP protocol between a gateway and the clients of its store:
//!
//! | request | answer |
//! |---|---|
//! | `HEAD /store/` | checks that the store answers; its identity in `flotilla-store` |
//! | `GET`, `HEAD /store/KEY` | an object, or a range of it; 307 to a signed URL |
//! | `GET /store/KEY?list=all`, `?list=directories` | [`ListObjectsReply`] |
//! | `PUT /store/KEY` | receives an object of at most 64 MiB |
//! | `POST /store/KEY?begin=` | [`BeginUploadReply`]: an upload in parts |
//! | `PUT /store/KEY?upload=ID&part=N&offset=O` | [`PutPartReply`] |
//! | `POST /store/KEY?sign=BYTES`, `&upload=ID&part=N` | [`SignUrlReply`]: a URL to PUT to instead |
//! | `POST /store/KEY?complete=BYTES&upload=ID` | takes a [`CompleteUploadRequest`] |
//! | `DELETE /store/KEY?upload=ID` | aborts an upload |
//! | `DELETE /store/KEY`, `POST /store/KEY?copy=FROM` | removes or copies an object |
//!
//! The body of a refusal is a message for the user. A client that sends `flotilla-through: 1` is
//! not redirected to another address.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The path of the store at a gateway.
pub const STORE_PATH: &str = "/store";
/// The host name in the certificates of all servers of a fleet, independent of their address.
pub const SERVER_NAME: &str = "fleet.flotilla.internal";
/// The response header with the identity of the store, see [`crate::StoreObjects::store_identity`].
pub const IDENTITY_HEADER: &str = "flotilla-store";
/// The request header that asks the gateway to relay the bytes itself.
pub const RELAY_HEADER: &str = "flotilla-through";
/// The smallest body for which a signed URL is requested; for less, the request costs more.
pub const SIGN_BYTES_MIN: u64 = 256 << 10;
/// The largest JSON reply in bytes: names and sizes of the largest listing.
pub const REPLY_BYTES_MAX: usize = 32 << 20;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct BeginUploadReply {
    /// The upload's name; absent when the object exists already and need not be sent.
    pub upload: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PutPartReply {
    pub part: String,
}

/// The reply to a request for a signed URL. Without a URL the client sends the bytes to the
/// gateway, unless the object exists already.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SignUrlReply {
    pub url: Option<String>,
    #[serde(default)]
    pub there: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CompleteUploadRequest {
    pub parts: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ListObjectsReply {
    /// Sizes in bytes by key.
    #[serde(default)]
    pub objects: BTreeMap<String, u64>,
    #[serde(default)]
    pub directories: Vec<String>,
}
