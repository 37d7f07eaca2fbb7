//! The sets of prompts a RAFT run samples: those it trains on, its held-out ones, and its suites.

use crate::v1::{self, Purpose};

/// The prompts of one file, and how a run samples and judges them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptSet<'a> {
    pub purpose: Purpose,
    /// Empty but for those of a suite.
    pub suite: &'a str,
    pub file: Option<&'a v1::Blob>,
    pub count: u32,
    /// Of prompts that are trained on, the average.
    pub samples_per_prompt: u32,
    /// Of prompts that are trained on, that of the first cycle.
    pub sampling: Option<v1::Sampling>,
    pub verifier: Option<&'a v1::Verifier>,
    pub pass_at: &'a [u32],
}

impl v1::spec::Raft {
    /// All of them: those that are trained on, the run's own held-out ones, and the suites.
    pub fn prompt_sets(&self) -> impl Iterator<Item = PromptSet<'_>> {
        let train = PromptSet {
            purpose: Purpose::Train,
            suite: "",
            file: self.prompts.as_ref(),
            count: self.prompt_count,
            samples_per_prompt: self.samples_per_prompt,
            sampling: self.sampling,
            verifier: self.verifier.as_ref(),
            pass_at: &[],
        };
        let heldout = PromptSet {
            purpose: Purpose::Heldout,
            file: self.heldout.as_ref(),
            count: self.heldout_count,
            samples_per_prompt: self.heldout_samples_per_prompt,
            pass_at: &self.pass_at,
            ..train
        };
        let suites = self.prompt_suites.iter().map(v1::PromptSuite::prompts_of);
        [train, heldout].into_iter().chain(suites)
    }

    /// The one that a job of this purpose and suite draws from. `None`: there is none of the name.
    pub fn prompt_set(&self, purpose: Purpose, suite: &str) -> Option<PromptSet<'_>> {
        let heldout = purpose == Purpose::Heldout;
        self.prompt_sets()
            .find(|set| (set.purpose == Purpose::Heldout, set.suite) == (heldout, suite))
    }
}

impl v1::PromptSuite {
    fn prompts_of(&self) -> PromptSet<'_> {
        PromptSet {
            purpose: Purpose::Heldout,
            suite: &self.name,
            file: self.prompts.as_ref(),
            count: self.count,
            samples_per_prompt: self.samples_per_prompt,
            sampling: self.sampling,
            verifier: self.verifier.as_ref(),
            pass_at: &self.pass_at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_is_found_by_its_name_and_is_never_trained_on() {
        let suite = |name: &str, count| v1::PromptSuite {
            name: name.into(),
            count,
            ..v1::PromptSuite::default()
        };
        let raft = v1::spec::Raft {
            prompt_count: 9,
            heldout_count: 5,
            prompt_suites: vec![suite("sums", 3), suite("code", 4)],
            ..v1::spec::Raft::default()
        };
        let count = |purpose, suite: &str| raft.prompt_set(purpose, suite).map(|set| set.count);
        assert_eq!(count(Purpose::Train, ""), Some(9));
        assert_eq!(count(Purpose::Heldout, ""), Some(5));
        assert_eq!(count(Purpose::Heldout, "code"), Some(4));
        assert_eq!(count(Purpose::Heldout, "other"), None);
        assert_eq!(count(Purpose::Train, "code"), None);
    }
}
