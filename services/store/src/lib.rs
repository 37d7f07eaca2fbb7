//! Immutable files: published once, addressed by digest, verified on every read. This crate knows
//! object storage and the local cache; it does not know what a run means, and it does not know the
//! log.
//!
//! A *blob* is one file at `blobs/<aa>/<hex>`. A *tree* is a plain directory that Hugging Face
//! tools can load, with a `manifest.json` that is written last: until the manifest exists the tree
//! does not exist. The digest of the manifest is the identity of the tree.

mod backend;
mod base_model;
mod blocking;
mod cache;
mod copy;
mod digest_cache;
mod download;
mod error;
mod file_hashing;
mod gateway_store;
mod internal_directory;
mod leftovers;
mod limits;
mod manifest;
mod objects;
mod parts;
mod path;
mod peers;
mod removal;
mod remove;
mod request_settings;
mod scan;
mod staged_file;
mod store;
mod tree;
mod upload;
mod verification;

pub use base_model::{RegisterInPlaceError, StoreDirectory, UploadMode};
pub use cache::{CachedBlob, CachedTree, ExternalSources, FileCache};
pub use digest_cache::DigestCache;
pub use download::VerifiedStream;
pub use error::{
    CacheError, CheckError, GatewayRefusal, GetError, OpenError, PutError, RemoveError,
    StorageError,
};
pub use file_hashing::ByteProgress;
pub use gateway_store::{GatewayStore, protocol as proxy_protocol};
pub use identity::Fingerprint;
pub use leftovers::{LEFTOVER_AGE, UploadLeftovers};
pub use limits::{OBJECT_BYTES_MAX, PARTS_MAX, PIECE_BYTES_MAX};
pub use manifest::{ManifestError, TreeFile, TreeManifest, TreeMetadata};
pub use objects::{
    LISTED_MAX, ObjectStream, PartPosition, ReceiveError, SignedAction, StoreObjects,
};
pub use path::{PathError, RelativePath, TreePlace};
pub use peers::{PeerAgent, PeerDirectory, PeerNode, TransferTotals};
pub use removal::{REMOVAL_FILE, TreeRemoval, TreeUsage};
pub use store::Store;
pub use verification::{ObjectDefect, VerifyReport};
