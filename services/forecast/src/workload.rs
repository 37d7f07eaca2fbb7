//! The work that a spec asks for.

use cycle::can_reject_checkpoint;
use wire::v1::{self, Purpose};

/// Maximum number of cycles of a run, as in spec files. A spec fact may contain any number.
const CYCLES_MAX: u32 = 10_000;

/// The order in which a cycle's phases may overlap with those of the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CycleOverlap {
    /// The next cycle samples as soon as the checkpoint exists.
    AtCheckpoint,
    /// A gate may reject the checkpoint: the next cycle begins when this one is done.
    WhenDone,
    /// The next cycle samples while this one trains.
    WhileTraining,
}

/// The work of a run, in samples, examples and measurements.
#[derive(Debug, Clone, PartialEq)]
pub struct RunWorkload {
    /// Cycles that train; 0 for an SFT run, which trains once.
    pub(crate) cycles: u32,
    pub(crate) train_samples: f64,
    pub(crate) heldout_samples: f64,
    pub(crate) samples_per_prompt: f64,
    /// 0: all.
    pub(crate) keep_per_prompt: f64,
    pub(crate) max_new_tokens: f64,
    pub(crate) is_verified: bool,
    pub(crate) is_taught: bool,
    /// Texts that each checkpoint is measured on.
    pub(crate) text_suites: f64,
    pub(crate) overlap: CycleOverlap,
    /// Passes over the data.
    pub(crate) epochs: f64,
    /// Sequences of all steps, if the spec limits the steps.
    pub(crate) sequences_max: Option<f64>,
    /// Maximum number of tokens of a training sequence.
    pub(crate) max_tokens: f64,
    /// Bytes of the examples of an SFT run.
    pub(crate) example_bytes: f64,
    /// Maximum number of boxes that train together: 1, or 0 for all trainers.
    pub(crate) trainers: u32,
}

impl RunWorkload {
    /// Returns the work of a run, or `None` if the fleet does not train it.
    pub fn from_spec(spec: &v1::Spec) -> Option<Self> {
        if spec.only_measures() {
            return None;
        }
        let text_suites = spec.suites.len() as f64;
        match spec.kind.as_ref()? {
            v1::spec::Kind::Raft(raft) => {
                let cycles = raft.cycles.saturating_sub(last_forked_cycle(spec)).min(CYCLES_MAX);
                Some(Self { cycles, text_suites, ..Self::from_raft(raft) })
            }
            v1::spec::Kind::Sft(sft) => {
                let training = sft.training.clone().unwrap_or_default();
                let bytes = sft.dataset.as_ref().map_or(0, |dataset| dataset.bytes);
                let example_bytes = bytes as f64;
                Some(Self { text_suites, example_bytes, ..Self::from_training(&training) })
            }
            v1::spec::Kind::Watched(_) => None,
        }
    }

    fn from_raft(raft: &v1::spec::Raft) -> Self {
        let count = |prompts: u32, samples: u32| f64::from(prompts) * f64::from(samples);
        let prompts = match raft.prompts_per_cycle {
            0 => raft.prompt_count,
            some => some.min(raft.prompt_count),
        };
        let heldout = raft.prompt_sets().filter(|set| set.purpose == Purpose::Heldout);
        let selection = raft.selection.unwrap_or_default();
        Self {
            cycles: raft.cycles,
            train_samples: if raft.dataset.is_some() {
                0.0
            } else {
                count(prompts, raft.samples_per_prompt)
            },
            heldout_samples: heldout.map(|set| count(set.count, set.samples_per_prompt)).sum(),
            samples_per_prompt: f64::from(raft.samples_per_prompt.max(1)),
            keep_per_prompt: f64::from(selection.keep_per_prompt),
            max_new_tokens: raft.sampling.as_ref().map_or(0.0, |it| f64::from(it.max_new_tokens)),
            is_verified: raft.prompt_sets().any(|set| set.verifier.is_some()),
            is_taught: raft.teacher.is_some(),
            overlap: match raft.staleness {
                0 if can_reject_checkpoint(raft) => CycleOverlap::WhenDone,
                0 => CycleOverlap::AtCheckpoint,
                _ => CycleOverlap::WhileTraining,
            },
            ..Self::from_training(&raft.training.clone().unwrap_or_default())
        }
    }

    fn from_training(training: &v1::Training) -> Self {
        let sequences = f64::from(training.max_steps) * f64::from(training.batch_size);
        Self {
            cycles: 0,
            train_samples: 0.0,
            heldout_samples: 0.0,
            samples_per_prompt: 1.0,
            keep_per_prompt: 0.0,
            max_new_tokens: 0.0,
            is_verified: false,
            is_taught: false,
            text_suites: 0.0,
            overlap: CycleOverlap::WhenDone,
            epochs: f64::from(training.epochs.max(1)),
            sequences_max: (training.max_steps > 0).then_some(sequences),
            max_tokens: f64::from(training.max_tokens.max(1)),
            example_bytes: 0.0,
            trainers: training.across.as_ref().map_or(1, |across| across.workers),
        }
    }
}

fn last_forked_cycle(spec: &v1::Spec) -> u32 {
    spec.fork.as_ref().map_or(0, |fork| fork.cycle)
}
