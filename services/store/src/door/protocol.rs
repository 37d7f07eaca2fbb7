//! What a gateway and those who use its store say to each other, over HTTP:
//!
//! | | |
//! |---|---|
//! | `HEAD /store/` | does the store answer; its name in `flotilla-store` |
//! | `GET`, `HEAD /store/KEY` | an object, or a range of it; 307 to a signed address |
//! | `GET /store/KEY?list=all`, `?list=directories` | [`Listing`] |
//! | `PUT /store/KEY` | an object of at most 64 MiB |
//! | `POST /store/KEY?begin=` | [`Begun`]: an upload in parts |
//! | `PUT /store/KEY?upload=ID&part=N&offset=O` | [`Sent`] |
//! | `POST /store/KEY?sign=BYTES`, `&upload=ID&part=N` | [`Signed`]: where to PUT instead |
//! | `POST /store/KEY?complete=BYTES&upload=ID` | with [`Completing`] |
//! | `DELETE /store/KEY?upload=ID` | abort |
//! | `DELETE /store/KEY`, `POST /store/KEY?copy=FROM` | |
//!
//! A refusal's body is a sentence. Whoever sends `flotilla-through: 1` is sent to no other address.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub const PATH: &str = "/store";
/// In every certificate of a fleet's servers, whatever address they are at.
pub const SERVER_NAME: &str = "fleet.flotilla.internal";
/// The name of the store, see [`crate::Objects::identity`].
pub const IDENTITY: &str = "flotilla-store";
pub const THROUGH: &str = "flotilla-through";
/// Below it, asking where to send costs more than sending.
pub const SIGN_BYTES_MIN: u64 = 256 << 10;
/// Names and sizes of as many files as a listing may have.
pub const ANSWER_BYTES_MAX: usize = 32 << 20;

/// `upload` is absent when the object is there already and need not be sent.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Begun {
    pub upload: Option<String>,
}

/// A part was received; `part` names it when the upload is completed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Sent {
    pub part: String,
}

/// Without an address it goes to the gateway, unless it is `there` already.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Signed {
    pub url: Option<String>,
    #[serde(default)]
    pub there: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Completing {
    /// In order.
    pub parts: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Listing {
    /// Sizes by key.
    #[serde(default)]
    pub objects: BTreeMap<String, u64>,
    #[serde(default)]
    pub directories: Vec<String>,
}
