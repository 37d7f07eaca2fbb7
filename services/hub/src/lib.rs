//! Models of the Hugging Face hub: found in the cache that its tools share on a machine, and
//! downloaded where the network permits. Only this crate depends on hf-hub.

mod client;
mod model_id;

pub use client::{BytesCallback, HubByteStream, HubClient, HubError, hub_cache_dir};
pub use model_id::{ModelId, ModelIdError, ModelRevision};
