//! Immutable files: published once, found by digest, verified on every read. Knows
//! object storage and the local cache; knows nothing of runs' meaning or of the bus.
//!
//! A *blob* is one file under `blobs/<aa>/<hex>`. A *tree* is a plain directory that
//! Hugging Face tools can load, with a `manifest.json` that was written last: until it
//! is there the tree does not exist, and its digest is the tree's identity.

mod base;
mod cache;
mod digests;
mod door;
mod download;
mod error;
mod examine;
mod files;
mod location;
mod manifest;
mod objects;
mod parts;
mod path;
mod peers;
mod remove;
mod scan;
mod store;
mod tree;
mod upload;

pub use authority::Fingerprint;
pub use base::{AdoptError, Directory, Upload};
pub use cache::{Cache, CachedBlob, CachedTree, Elsewhere};
pub use digests::Digests;
pub use door::{Door, Refusal, protocol as door_protocol};
pub use error::{CacheError, CheckError, Fault, GetError, OpenError, PutError, RemoveError};
pub use examine::{Examined, Flaw, Seen};
pub use manifest::{About, Manifest, ManifestError, TreeFile};
pub use objects::{
    LISTED_MAX, OBJECT_BYTES_MAX, Objects, PARTS_MAX, PIECE_BYTES_MAX, Part, Pieces, ReceiveError,
    Signed,
};
pub use path::{PathError, RelativePath, TreePlace};
pub use peers::{Exchanged, Peer, Peers, Roll};
pub use store::Store;
pub use tree::ByteStream;
