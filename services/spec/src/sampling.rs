//! The `sampling` section of a spec.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::{
    cycle_schedule::CycleSchedule,
    field_checks::{FieldResult, check_count, check_range},
};

/// The settings with which samples are drawn.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSpec {
    /// 0: greedy decoding.
    #[schemars(extend("minimum" = 0.0, "maximum" = 10.0))]
    pub temperature: CycleSchedule,
    /// Number of the most likely tokens to draw from. 0: no limit.
    pub top_k: u32,
    /// Least total probability of the tokens to draw from. 1: no limit.
    #[schemars(range(min = 1e-6, max = 1.0))]
    pub top_p: f64,
    /// Longest completion, in tokens. `training.max_tokens` must be above it.
    #[schemars(range(min = 1, max = 32_768))]
    pub max_new_tokens: u32,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self {
            temperature: CycleSchedule::Constant(0.8),
            top_k: 0,
            top_p: 1.0,
            max_new_tokens: 256,
        }
    }
}

impl From<&SamplingSpec> for v1::Sampling {
    fn from(spec: &SamplingSpec) -> Self {
        let SamplingSpec { ref temperature, top_k, top_p, max_new_tokens } = *spec;
        Self { temperature: temperature.first_value(), top_k, top_p, max_new_tokens }
    }
}

impl SamplingSpec {
    pub(crate) fn check_fields(&self, cycles: u32) -> FieldResult {
        self.temperature.check_range("raft.sampling.temperature", cycles, 0.0, 10.0)?;
        check_range("raft.sampling.top_p", self.top_p, 1e-6, 1.0)?;
        check_count("raft.sampling.max_new_tokens", self.max_new_tokens, 1, 32_768)
    }
}
