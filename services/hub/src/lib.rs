//! Models of Hugging Face's hub: found in the cache that its tools share on a machine, and
//! downloaded where the network allows. Only this crate knows hf-hub.

mod client;
mod id;

pub use client::{Bytes, Hub, HubError, Seen, cache_dir};
pub use id::{IdError, ModelId, Revision};
