//! What the agent asks of its generating worker, and what comes back.

use serde::{Deserialize, Serialize};
use wire::v1;

/// Generate these samples. A sample's seed follows from `seed`, its prompt and its index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Generate {
    pub sampling: v1::Sampling,
    pub seed: u64,
    pub requests: Vec<v1::generate_order::Request>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Done {
    pub samples: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Generated {
    pub samples: Vec<v1::samples::Sample>,
}
