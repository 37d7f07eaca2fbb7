//! Models and data sets of the Hugging Face hub: found in the cache that its tools share on a
//! machine, downloaded where the network permits; models are also uploaded. Only this crate knows
//! the hub's protocol and the layout of that cache.

mod client;
mod dataset_files;
mod dataset_name;
mod datasets;
mod error;
mod git_lfs;
mod hub_http;
mod model_id;
mod model_info;
mod partial_blob;
mod push;
mod repo_cache;
mod repo_kind;
mod retry;
mod settings;
mod upload;

pub use client::{BytesCallback, HubByteStream, HubClient};
pub use dataset_files::DatasetSplitError;
pub use dataset_name::{DatasetName, DatasetNameError};
pub use datasets::{DatasetError, DatasetSplit};
pub use error::{HubAnswerError, HubError};
pub use git_lfs::SentCallback;
pub use model_id::{ModelId, ModelIdError, ModelRevision};
pub use model_info::ModelLicense;
pub use push::{PushOutcome, PushRequest, PushTarget};
pub use upload::UploadFile;
