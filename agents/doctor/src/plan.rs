//! Checks of a planned training on a host: memory, checkpoints, and operations that the card
//! computes wrongly. Pure.

mod job;
mod memory_and_disk;
#[cfg(test)]
mod tests;

use std::path::Path;

use super::{DoctorFinding, format_gb, sort_findings};
use crate::estimate::{ModelShape, PlannedTraining};
use formats::FloatDtype;
use hardware::{HardwareProfile, host_snapshot::HostSnapshot};

/// The known facts of a planned training; unknown ones are not checked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TrainingPlan {
    /// The optimizer steps of the whole training.
    pub steps: Option<u64>,
    /// The steps between two checkpoints; 0 if none is saved.
    pub save_every: Option<u64>,
    pub seconds_per_step: Option<f64>,
    /// True if checkpoints are also saved by time and after the last step, as Flotilla's trainer
    /// does.
    pub saves_by_time: bool,
    /// The type in which the training computes.
    pub dtype: Option<FloatDtype>,
    /// 0 if the weights are not quantised.
    pub quantised_bits: u32,
    pub memory: Option<(ModelShape, PlannedTraining)>,
    pub checkpointing: Option<bool>,
    pub dataloader_workers: Option<u32>,
    pub pin_memory: Option<bool>,
    /// Settings with which the trainer would evaluate in its own process.
    pub evals: Vec<String>,
    /// Settings that transformers refuses, with reasons.
    pub refused: Vec<(String, &'static str)>,
    /// True if every example is padded to the maximum length.
    pub pads_to_max: bool,
    /// The free bytes where checkpoints are written; the snapshot's value if missing.
    pub disk_free: Option<u64>,
}

impl TrainingPlan {
    /// Returns the number of optimizer steps for these examples, as transformers counts them.
    pub fn count_steps(examples: u64, batch: u64, accumulate: u64, epochs: f64) -> u64 {
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

    /// Returns one line about the training of a settings file: its steps, its saves and its memory,
    /// as far as they are known.
    pub fn describe_plan(&self, file: &Path) -> String {
        let mut parts = Vec::new();
        parts.extend(self.steps.map(|steps| format!("at most {steps} steps")));
        parts.extend(self.save_every.map(|every| match (every, self.saves_by_time) {
            (0, true) => "saved by time".to_owned(),
            (0, false) => "not saved before its end".to_owned(),
            (every, true) => format!("saved every {every} steps and by time"),
            (every, false) => format!("saved every {every} steps"),
        }));
        parts.extend(self.dtype.map(|dtype| format!("in {}", dtype.name())));
        parts.push(match &self.memory {
            Some((shape, training)) => {
                let peak = shape.estimate_training(training).peak_bytes;
                format!("about {} at its peak", format_gb(peak))
            }
            None => "memory unknown, because no model on this machine is named; pass --model DIR \
                     or --model org/name"
                .to_owned(),
        });
        format!("training of {}: {}", file.display(), parts.join(", "))
    }
}

/// Returns all findings about a training on this host, the worst first.
pub fn check_plan(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
    plan: &TrainingPlan,
) -> Vec<DoctorFinding> {
    let mut findings = job::check_settings(box_, profile, plan);
    findings.extend(memory_and_disk::check_resources(box_, profile, plan));
    sort_findings(findings)
}
