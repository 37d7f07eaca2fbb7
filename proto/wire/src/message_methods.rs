//! Methods of protobuf messages that derive a value from several of their fields.

use crate::v1;

impl v1::Spec {
    /// Returns the kind of run as users write it in a spec: `raft`, `watched` or `sft`.
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            Some(v1::spec::Kind::Raft(_)) => "raft",
            Some(v1::spec::Kind::Watched(_)) => "watched",
            Some(v1::spec::Kind::Sft(_)) | None => "sft",
        }
    }
}

/// A longer reason can only come from a client that does not use the gateway.
const REASON_BYTES_MAX: usize = 4096;

impl v1::Control {
    /// Returns the user's reason, cut to 4 KiB.
    pub fn short_reason(&self) -> &str {
        &self.reason[..self.reason.floor_char_boundary(REASON_BYTES_MAX)]
    }
}

impl v1::checkpoint::Weighting {
    /// Returns the share of the weighted tokens that `tokens` of them are.
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens are far below 2^52")]
    pub fn token_share(&self, tokens: u64) -> f64 {
        tokens as f64 / self.tokens.max(1) as f64
    }

    /// Returns the share of tokens of weight 0, because their ratio is out of bounds.
    pub fn dropped_share(&self) -> f64 {
        self.token_share(self.dropped)
    }
}

impl v1::Quarantine {
    /// Returns the ids of the jobs of one cycle whose samples this quarantine makes void.
    pub fn jobs_in_cycle(&self, cycle: u32) -> impl Iterator<Item = &str> {
        self.jobs.iter().filter(move |job| job.cycle == cycle).map(|job| job.job.as_str())
    }
}
