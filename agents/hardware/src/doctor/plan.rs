//! Whether a box can do a training as it is planned: does it fit, is anything of it ever saved,
//! does it ask for what the card computes wrongly. Pure.

mod job;
mod room;
#[cfg(test)]
mod tests;

use super::{Finding, sorted};
use crate::{
    Dtype, Profile,
    estimate::{Shape, Training},
    snapshot::Snapshot,
};

/// Of a training, what is known of it; what is not is not judged.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Optimizer steps of the whole training.
    pub steps: Option<u64>,
    /// Steps from one checkpoint to the next; 0: none is saved.
    pub save_every: Option<u64>,
    pub seconds_per_step: Option<f64>,
    /// Steps are saved by time too, and the last one always: ours are.
    pub saves_by_time: bool,
    /// What is computed in.
    pub dtype: Option<Dtype>,
    /// Of quantised weights; 0 where they are not.
    pub quantised_bits: u32,
    /// What decides the peak of its memory.
    pub memory: Option<(Shape, Training)>,
    pub checkpointing: Option<bool>,
    pub dataloader_workers: Option<u32>,
    pub pin_memory: Option<bool>,
    /// Settings by which the trainer would evaluate in its own process.
    pub evals: Vec<String>,
    /// Settings that transformers refuses, and why.
    pub refused: Vec<(String, &'static str)>,
    /// Every example is padded to the longest allowed.
    pub pads_to_max: bool,
    /// Bytes where checkpoints are written; without, what was seen of the box.
    pub disk_free: Option<u64>,
}

impl Plan {
    /// Steps of a training over so many examples, as transformers counts them.
    pub fn steps(examples: u64, batch: u64, accumulate: u64, epochs: f64) -> u64 {
        let batches = examples.div_ceil(batch.max(1));
        let an_epoch = batches.div_ceil(accumulate.max(1)).max(1);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a cast saturates, and no training has 2^53 steps"
        )]
        let steps = (epochs.max(0.0) * an_epoch as f64).ceil() as u64;
        steps
    }
}

/// Everything wrong with a training on this box, the worst first.
pub fn for_plan(box_: &Snapshot, profile: &Profile, plan: &Plan) -> Vec<Finding> {
    let mut findings = job::check(box_, profile, plan);
    findings.extend(room::check(box_, profile, plan));
    sorted(findings)
}
