//! Methods of protobuf messages that derive a value from several of their fields.

use crate::v1;

/// The ability of a role to work with models outside of the table of architectures: a trainer by
/// PyTorch, a generator, scorer or evaluator by llama.cpp and its converters.
pub const ANY_MODEL_ABILITY: &str = "any-model";

impl v1::AgentStatus {
    /// Returns true if a role of the agent works with models outside of the table of architectures.
    pub fn takes_any_model(&self, role: &str) -> bool {
        let tag = format!("{role}:{ANY_MODEL_ABILITY}");
        self.abilities.contains(&tag)
    }
}

impl v1::Spec {
    /// Returns the kind of run as users write it in a spec: `raft`, `watched` or `sft`.
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            Some(v1::spec::Kind::Raft(_)) => "raft",
            Some(v1::spec::Kind::Watched(_)) => "watched",
            Some(v1::spec::Kind::Sft(_)) | None => "sft",
        }
    }

    /// Returns true for a RAFT run without cycles of training, which only measures its base.
    pub fn only_measures(&self) -> bool {
        matches!(&self.kind, Some(v1::spec::Kind::Raft(raft)) if raft.cycles == 0)
    }

    /// Removes what a fork takes over, which may be large, and returns it. The run and the cycle that
    /// the spec forks stay in it.
    pub fn take_forked_cycles(&mut self) -> v1::spec::Fork {
        let Some(fork) = &mut self.fork else { return v1::spec::Fork::default() };
        let rest =
            v1::spec::Fork { run: fork.run.clone(), cycle: fork.cycle, ..Default::default() };
        std::mem::replace(fork, rest)
    }

    /// Returns `RUN@CYCLE`, the cycle that a fork continues; empty for other runs.
    pub fn forked_from(&self) -> String {
        self.fork.as_ref().map_or(String::new(), |fork| format!("{}@{}", fork.run, fork.cycle))
    }

    /// Returns `RUN@CYCLE`, whose samples a trial of an objective is trained on; empty for other
    /// runs, and for trials of older versions.
    pub fn trial_of(&self) -> String {
        let Some(v1::spec::Kind::Raft(raft)) = &self.kind else { return String::new() };
        let tried = raft.dataset.as_ref().filter(|dataset| !dataset.run.is_empty());
        tried.map_or(String::new(), |dataset| format!("{}@{}", dataset.run, dataset.cycle))
    }
}

impl v1::Verifier {
    /// Returns the name in the spec.
    pub fn kind_name(&self) -> &'static str {
        use v1::verifier::How;
        match self.how {
            Some(How::Exact(_)) => "exact",
            Some(How::Numeric(_)) => "numeric",
            Some(How::Regex(_)) => "regex",
            Some(How::Command(_)) => "command",
            Some(How::JsonSchema(_)) => "json_schema",
            Some(How::ToolCall(_)) => "tool_call",
            Some(How::Python(_)) => "python",
            Some(How::Pytest(_)) => "pytest",
            Some(How::Stdio(_)) => "stdio",
            Some(How::Compile(_)) => "compile",
            Some(How::Chain(_)) => "chain",
            Some(How::LlmJudge(_)) => "llm_judge",
            Some(How::Http(_)) => "http",
            Some(How::Environment(_)) => "environment",
            None => "none",
        }
    }
}

impl v1::ChannelMove {
    /// Returns true if the channel has a model; false once it was forgotten.
    pub fn names_model(&self) -> bool {
        self.base.is_some()
    }

    /// Returns true if both moves name the same weights.
    pub fn has_model_of(&self, other: &Self) -> bool {
        self.base == other.base && self.adapter == other.adapter
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

impl v1::verdicts::Verdict {
    /// The detail of a completion in which a verifier finds no answer.
    pub const NO_ANSWER: &str = "no answer found";
    /// The detail of a completion in which a verifier finds no number.
    pub const NO_NUMBER: &str = "no number found";

    /// Returns true if the verifier, or the stage of a chain that failed first, found nothing to
    /// compare with the answer.
    pub fn found_no_answer(&self) -> bool {
        [Self::NO_ANSWER, Self::NO_NUMBER].iter().any(|detail| self.detail.ends_with(detail))
    }
}

impl v1::Failure {
    /// Begins the part of a message that names the agents that can do the job.
    pub const LEFT_TO: &str = "; left to ";

    /// Returns true if other agents can do the job that the failed agent could not do.
    pub fn is_left_to_others(&self) -> bool {
        self.message.contains(Self::LEFT_TO)
    }
}

impl v1::Quarantine {
    /// Returns the ids of the jobs of one cycle whose samples this quarantine makes void.
    pub fn jobs_in_cycle(&self, cycle: u32) -> impl Iterator<Item = &str> {
        self.jobs.iter().filter(move |job| job.cycle == cycle).map(|job| job.job.as_str())
    }
}

impl v1::data_file::Lengths {
    /// Returns the minimum, median, 95th percentile and maximum, or `None` without values.
    pub fn measure(values: impl Iterator<Item = usize>) -> Option<Self> {
        let mut values: Vec<u64> = values.map(|value| value as u64).collect();
        values.sort_unstable();
        let last = values.len().checked_sub(1)?;
        // The smallest value that at least `percent` per cent of all values do not exceed.
        let at = |percent: usize| values[(values.len() * percent).div_ceil(100).saturating_sub(1)];
        Some(Self { min: values[0], median: at(50), p95: at(95), max: values[last] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_s_verdict_tells_that_no_answer_was_found() {
        let found_none = |detail: &str| {
            let detail = detail.to_owned();
            v1::verdicts::Verdict { detail, ..Default::default() }.found_no_answer()
        };
        assert!(found_none("no answer found") && found_none("stage 2: no number found"));
        assert!(!found_none("found 3, expected 4") && !found_none(""));
    }

    #[test]
    fn lengths_are_those_of_values_that_are_there() {
        use v1::data_file::Lengths;
        let all = Lengths::measure(1..=100).unwrap();
        assert_eq!((all.min, all.median, all.p95, all.max), (1, 50, 95, 100));
        let one = Lengths::measure([7].into_iter()).unwrap();
        assert_eq!((one.min, one.median, one.p95, one.max), (7, 7, 7, 7));
        assert_eq!(Lengths::measure([].into_iter()), None);
    }
}
