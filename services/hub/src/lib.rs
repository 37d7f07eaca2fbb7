//! Models of the Hugging Face hub: found in the cache that its tools share on a machine,
//! downloaded where the network permits, and uploaded. Only this crate knows the hub's protocol
//! and the layout of that cache.

mod client;
mod error;
mod git_lfs;
mod hub_http;
mod model_id;
mod partial_blob;
mod repo_cache;
mod settings;
mod upload;

pub use client::{BytesCallback, HubByteStream, HubClient};
pub use error::{HubAnswerError, HubError};
pub use model_id::{ModelId, ModelIdError, ModelRevision};
pub use settings::hub_cache_dir;
pub use upload::UploadFile;
