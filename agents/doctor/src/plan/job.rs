//! Checks of the settings of a training.

use super::{DoctorFinding, TrainingPlan};
use crate::{Severity, parse_major_minor};
use hardware::{HardwareProfile, SupportLevel, host_snapshot::HostSnapshot};

pub(super) fn check_settings(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
    plan: &TrainingPlan,
) -> Vec<DoctorFinding> {
    let mut findings = check_saving(plan);
    findings.extend(check_precision(profile, plan));
    findings.extend(check_quantisation(box_, profile, plan));
    findings.extend(check_data_loader(profile, plan));
    findings.extend(check_evaluations(box_, profile, plan));
    findings.extend(check_refused_settings(plan));
    findings.extend(check_gradient_checkpointing(profile, plan));
    findings.extend(check_padding(plan));
    findings
}

/// The longest acceptable time between two checkpoints.
const SAVE_WITHIN_S: f64 = 900.0;

/// The recommended time between two checkpoints.
const SAVE_EVERY_S: f64 = 600.0;

const POST_MORTEM: &str = "an R9700's post-mortem: 57 steps, save_steps 100, nothing left";

fn check_saving(plan: &TrainingPlan) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    let Some(every) = plan.save_every else { return findings };
    let mut found = |severity, seen: String, why| {
        let remedy = saving_remedy(plan);
        findings.push(DoctorFinding {
            id: "C-60",
            severity,
            seen,
            why,
            remedy,
            source: POST_MORTEM,
        });
    };
    let lost = "any interruption loses all of it";
    if every == 0 {
        if !plan.saves_by_time {
            found(Severity::Fail, "no checkpoint is saved".into(), lost);
        }
        return findings;
    }
    let Some(steps) = plan.steps else {
        if !plan.saves_by_time {
            let seen = format!("a checkpoint every {every} steps, of how many is not known");
            found(Severity::Info, seen, "one that comes after the last step saves nothing");
        }
        return findings;
    };
    let seen = format!("a checkpoint every {every} steps of {steps}");
    if every > steps && plan.saves_by_time {
        let why = "it is never saved; the agent saves after a third of the steps instead, and by \
                   time";
        found(Severity::Warn, seen, why);
    } else if every > steps {
        found(Severity::Fail, seen, lost);
    } else if plan.saves_by_time {
        // Checkpoints by time are frequent enough.
    } else if let Some(seconds) =
        plan.seconds_per_step.map(|step| step * every as f64).filter(|it| *it > SAVE_WITHIN_S)
    {
        let seen = format!("{seen}, {:.0} minutes apart", seconds / 60.0);
        found(Severity::Warn, seen, "any interruption loses as much");
    } else if every > steps.div_ceil(3) {
        found(Severity::Warn, seen, "any interruption loses more than a third of it");
    }
    findings
}

/// Recommends an interval of ten minutes, and at least three checkpoints.
fn saving_remedy(plan: &TrainingPlan) -> String {
    let Some(steps) = plan.steps else {
        return "name the examples (--examples N), and save at least three times".into();
    };
    let third = (steps / 3).max(1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast saturates, and the result is clamped"
    )]
    let by_time = plan.seconds_per_step.map(|step| (SAVE_EVERY_S / step).round() as u64);
    let every = by_time.map_or(third, |steps| steps.clamp(1, third));
    format!("save every {every} steps, with the optimizer's state, and keep three")
}

fn check_precision(profile: &HardwareProfile, plan: &TrainingPlan) -> Option<DoctorFinding> {
    let dtype = plan.dtype?;
    let (severity, why) = match profile.precision.support_for(dtype) {
        SupportLevel::Allow => return None,
        SupportLevel::Warn => {
            (Severity::Warn, "its range is small: losses overflow to NaN without a scaler")
        }
        SupportLevel::Refuse => (
            Severity::Fail,
            "the card does not have it: it faults, or computes it slowly in f32, even if \
             torch.cuda.is_bf16_supported() returns true",
        ),
    };
    Some(DoctorFinding {
        id: "C-51",
        severity,
        seen: format!("training in {} on {}", dtype.name(), profile.name),
        why,
        remedy: format!("train in {}", profile.training.dtype.name()),
        source: "unsloth #7682, PR 7354",
    })
}

/// The first version of bitsandbytes whose wheels have kernels for RDNA.
const BITSANDBYTES_SINCE: (u64, u64) = (0, 49);

fn check_quantisation(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
    plan: &TrainingPlan,
) -> Option<DoctorFinding> {
    if plan.quantised_bits == 0 {
        return None;
    }
    let packages = box_.python.as_ref().map(|python| &python.packages);
    let installed = packages.and_then(|packages| packages.get("bitsandbytes"));
    let too_old =
        installed.is_some_and(|version| parse_major_minor(version) < Some(BITSANDBYTES_SINCE));
    let (severity, why) = match profile.quantisation {
        SupportLevel::Allow => return None,
        SupportLevel::Warn if !too_old => {
            (Severity::Warn, "slower than bf16, and little tried here")
        }
        SupportLevel::Warn => (Severity::Fail, "this bitsandbytes has no kernels for the card"),
        SupportLevel::Refuse => {
            (Severity::Fail, "bitsandbytes has no build for it: Configured ROCm binary not found")
        }
    };
    let version = installed.map(|it| format!(", bitsandbytes {it}")).unwrap_or_default();
    Some(DoctorFinding {
        id: "C-52",
        severity,
        seen: format!("weights in {} bits on {}{version}", plan.quantised_bits, profile.name),
        why,
        remedy: "train without quantisation; else bitsandbytes 0.49 or newer".into(),
        source: "bitsandbytes' release notes",
    })
}

/// Loader workers and pinned memory compete with the training for memory.
fn check_data_loader(profile: &HardwareProfile, plan: &TrainingPlan) -> Vec<DoctorFinding> {
    let training = &profile.training;
    let workers = plan.dataloader_workers.filter(|it| *it > training.dataloader_workers);
    let pinned = plan.pin_memory.filter(|pinned| *pinned && !training.pin_memory);
    let seen = workers
        .map(|workers| format!("dataloader_num_workers: {workers}"))
        .into_iter()
        .chain(pinned.map(|_| "dataloader_pin_memory: true (its default)".into()));
    let finding = |seen: String| DoctorFinding {
        id: "C-53",
        severity: Severity::Warn,
        seen,
        why: "workers and pinned memory compete for the memory they are meant to feed; hangs were \
              reported",
        remedy: format!(
            "dataloader_num_workers: {}, dataloader_pin_memory: {}",
            training.dataloader_workers, training.pin_memory
        ),
        source: "halo-forge's hardware notes",
    };
    // A training on the CPU may use any setting.
    if profile.is_cpu() { Vec::new() } else { seen.map(finding).collect() }
}

fn check_evaluations(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
    plan: &TrainingPlan,
) -> Option<DoctorFinding> {
    if plan.evals.is_empty() || profile.evals_in_trainer == SupportLevel::Allow {
        return None;
    }
    let storms = box_.is_unified() && !box_.cpu.invlpgb;
    let refused = storms || profile.evals_in_trainer == SupportLevel::Refuse;
    Some(DoctorFinding {
        id: "C-54",
        severity: if refused { Severity::Fail } else { Severity::Warn },
        seen: plan.evals.join(", "),
        why: "an eval inside the training process holds its memory twice; on unified memory it \
              becomes a storm of a million interrupts a second and freezes the box",
        remedy: "eval_strategy: \"no\" and none of these; evals in a process of their own: \
                 flotilla agent --watch DIR --eval FILE"
            .into(),
        source: "ROCm legacy-rocm-build #6297",
    })
}

fn check_refused_settings(plan: &TrainingPlan) -> Vec<DoctorFinding> {
    let finding = |(setting, why): &(String, &'static str)| DoctorFinding {
        id: "C-54",
        severity: Severity::Fail,
        seen: setting.clone(),
        why,
        remedy: "eval_strategy: \"no\", and neither evaluation_strategy nor load_best_model_at_end"
            .into(),
        source: "transformers' TrainingArguments",
    };
    plan.refused.iter().map(finding).collect()
}

/// Above this size, activations do not fit beside the weights.
const LARGE_PARAMETERS: u64 = 3_000_000_000;

fn check_gradient_checkpointing(
    profile: &HardwareProfile,
    plan: &TrainingPlan,
) -> Option<DoctorFinding> {
    let (shape, training) = plan.memory?;
    let off = !plan.checkpointing.unwrap_or(training.checkpointing);
    (off && !profile.is_cpu() && shape.parameter_count() >= LARGE_PARAMETERS).then(|| {
        DoctorFinding {
            id: "C-63",
            severity: Severity::Warn,
            seen: format!("{} parameters without gradient checkpointing", shape.parameter_count()),
            why: "the activations of every layer are kept",
            remedy: "gradient_checkpointing: true, gradient_checkpointing_kwargs: \
                 {use_reentrant: false}"
                .into(),
            source: "an MI50's and an R9700's runs",
        }
    })
}

fn check_padding(plan: &TrainingPlan) -> Option<DoctorFinding> {
    plan.pads_to_max.then(|| DoctorFinding {
        id: "C-64",
        severity: Severity::Warn,
        seen: "every example is padded to the longest allowed".into(),
        why: "a model of 0.5B takes 12 GB so, most of it logits of padding",
        remedy: "pad to the longest of each batch, and group_by_length: true".into(),
        source: "halo-forge's memory logs",
    })
}
