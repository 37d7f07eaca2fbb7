//! The sections `training` and `lora`.

use serde_json::{Value, json};
use spec::LoraAdapterSpec;

use crate::{report::KeyStatus, setting::Setting, spec_draft::SpecDraft, task::TrainingTask};

/// The share of warm-up steps if the configuration has their number, but not that of all steps.
const WARMUP_RATIO: f64 = 0.1;
/// A limit of the gradient norm that clips nothing.
const NO_CLIPPING: f64 = 1e9;
/// Before the name of AdamW in another library, or with states in other memory.
const ADAMW_PREFIXES: [&str; 5] = ["paged_", "bnb_", "ao_", "optimi_", "flash_"];

/// Ends the name of a copy in 4 bits that Unsloth publishes beside the original.
pub(crate) const COPY_IN_4_BITS: &str = "-bnb-4bit";

/// Adds the sections `training` and `lora`.
pub(crate) fn add_training(draft: &mut SpecDraft<'_>) {
    add_steps(draft);
    add_batch(draft);
    add_rate(draft);
    add_warmup(draft);
    add_optimizer(draft);
    if draft.task == TrainingTask::Sft {
        draft.copy_max_tokens("sft.training.max_tokens");
        note_loss(draft);
    }
    add_packing(draft);
    add_lora(draft);
}

fn add_steps(draft: &mut SpecDraft<'_>) {
    let (epochs, steps) =
        (draft.field_path("training.epochs"), draft.field_path("training.max_steps"));
    if draft.task == TrainingTask::Grpo {
        draft.copy_number(Setting::SamplePasses, &epochs);
    } else {
        if let Some(number) = draft.settings.number_of(Setting::Epochs) {
            let rounded = if number.fract() == 0.0 { "" } else { "rounded up to whole passes" };
            draft.set_with_advice(Setting::Epochs, &epochs, number.ceil(), rounded);
        }
        match draft.settings.number_of(Setting::MaxSteps) {
            Some(number) if number > 0.0 => draft.set_field(Setting::MaxSteps, &steps, number),
            _ => draft.settings.note_ignored(Setting::MaxSteps, "it sets no limit"),
        }
    }
    let field = draft.field_path("training.save_every");
    match draft.settings.number_of(Setting::SaveSteps) {
        Some(number) if number >= 1.0 => {
            draft.set_field(Setting::SaveSteps, &field, number.floor());
        }
        _ => draft.settings.note_ignored(Setting::SaveSteps, "the trainer chooses when to save"),
    }
}

/// Sets the batch size: the product of the sequences of a pass and the passes of a step.
fn add_batch(draft: &mut SpecDraft<'_>) {
    let field = draft.field_path("training.batch_size");
    if let Some(total) = draft.settings.number_of(Setting::TotalBatch) {
        draft.set_field(Setting::TotalBatch, &field, total);
        for setting in [Setting::PassBatch, Setting::Accumulation] {
            draft.settings.note_ignored(setting, "the batch size is given as a whole");
        }
        return;
    }
    let [pass, passes] = [Setting::PassBatch, Setting::Accumulation]
        .map(|setting| draft.settings.number_of(setting));
    if pass.is_none() && passes.is_none() {
        return;
    }
    let (pass, passes) = (pass.unwrap_or(1.0), passes.unwrap_or(1.0));
    let batch = pass * passes;
    draft.tree.set_value(&field, batch);
    let explanation =
        format!("{batch}, {pass} x {passes} of one GPU; multiply by the number of GPUs");
    draft.settings.note_used(Setting::PassBatch, &field, &explanation);
    draft.settings.note_used(Setting::Accumulation, &field, &explanation);
}

fn add_rate(draft: &mut SpecDraft<'_>) {
    let field = draft.field_path("training.learning_rate");
    let Some(rate) = draft.settings.number_of(Setting::LearningRate) else { return };
    let numbers = [Setting::RateDecay, Setting::RateFloor];
    let [decay, floor] = numbers.map(|setting| draft.settings.number_of(setting));
    let Some(decay) = decay else {
        draft.set_field(Setting::LearningRate, &field, rate);
        return;
    };
    let value = json!({ "decay": { "from": rate, "factor": decay, "floor": floor.unwrap_or(0.0) }});
    draft.set_field(Setting::LearningRate, &field, value);
    draft.settings.note_used(Setting::RateDecay, &field, &format!("decay.factor: {decay}"));
    let floor = floor.unwrap_or_default();
    draft.settings.note_used(Setting::RateFloor, &field, &format!("decay.floor: {floor}"));
}

/// Sets the schedule of the learning rate, and the share of its warm-up steps.
fn add_warmup(draft: &mut SpecDraft<'_>) {
    let [schedule, last, field] = ["schedule", "final_ratio", "warmup_ratio"]
        .map(|name| draft.field_path(&format!("training.{name}")));
    let written = draft.settings.word_of(Setting::Scheduler).unwrap_or_default();
    let name = match written.as_str() {
        "constant" | "constant_with_warmup" => "constant",
        "linear" => "linear",
        _ => "cosine",
    };
    let is_known = name == "constant"
        || ["", "linear", "cosine", "cosine_with_min_lr"].contains(&written.as_str());
    if is_known {
        draft.set_field(Setting::Scheduler, &schedule, name);
    } else {
        draft.tree.set_value(&schedule, name);
        draft.settings.note_differs(Setting::Scheduler, "it is not one of the schedules: cosine");
    }
    if name != "constant" {
        let ratio = draft.settings.number_of(Setting::FinalRatio).unwrap_or(0.0);
        draft.set_field(Setting::FinalRatio, &last, ratio);
    }
    let steps = draft.settings.number_of(Setting::WarmupSteps).filter(|steps| *steps > 0.0);
    let limit = draft.settings.number_of(Setting::MaxSteps).filter(|limit| *limit > 0.0);
    let ratio = draft.settings.number_of(Setting::WarmupRatio);
    match (steps, limit) {
        _ if written == "constant" => {
            draft.tree.set_value(&field, 0);
            for setting in [Setting::WarmupRatio, Setting::WarmupSteps] {
                draft.settings.note_ignored(setting, "a constant rate has no warm-up");
            }
        }
        // A number below 1 is a share, as in transformers.
        (Some(share), _) if share < 1.0 => draft.set_field(Setting::WarmupSteps, &field, share),
        (Some(steps), Some(limit)) if draft.task != TrainingTask::Grpo => {
            draft.set_field(Setting::WarmupSteps, &field, (steps / limit).min(1.0));
        }
        (Some(_), _) => {
            draft.tree.set_value(&field, WARMUP_RATIO);
            let explanation = format!(
                "{field}: {WARMUP_RATIO}, because the number of steps follows from the data"
            );
            draft.settings.note_differs(Setting::WarmupSteps, &explanation);
        }
        (None, _) => {
            let by_steps = draft.settings.is_written(Setting::WarmupSteps);
            if by_steps && !draft.settings.is_written(Setting::WarmupRatio) {
                draft.set_field(Setting::WarmupSteps, &field, 0);
            } else {
                draft.set_field(Setting::WarmupRatio, &field, ratio.unwrap_or(0.0));
            }
        }
    }
}

fn add_optimizer(draft: &mut SpecDraft<'_>) {
    for (setting, name) in [
        (Setting::WeightDecay, "weight_decay"),
        (Setting::Beta1, "beta1"),
        (Setting::Beta2, "beta2"),
    ] {
        let field = draft.field_path(&format!("training.{name}"));
        draft.copy_number(setting, &field);
    }
    let field = draft.field_path("training.max_grad_norm");
    match draft.settings.number_of(Setting::MaxGradNorm) {
        Some(0.0) => {
            draft.set_with_advice(Setting::MaxGradNorm, &field, NO_CLIPPING, "no clipping");
        }
        _ => draft.copy_number(Setting::MaxGradNorm, &field),
    }
    match draft.settings.word_of(Setting::Optimizer) {
        Some(name) if is_adamw(&name) => {
            draft.settings.note_ignored(Setting::Optimizer, "the optimizer is AdamW");
        }
        _ => draft.settings.note_differs(Setting::Optimizer, "the optimizer is AdamW"),
    }
}

/// Returns true for AdamW, and not for other algorithms such as `schedule_free_adamw`.
fn is_adamw(name: &str) -> bool {
    let mut rest = name;
    for prefix in ADAMW_PREFIXES {
        rest = rest.strip_prefix(prefix).unwrap_or(rest);
    }
    rest.starts_with("adamw")
}

fn add_packing(draft: &mut SpecDraft<'_>) {
    let field = draft.field_path("training.packing");
    if draft.settings.flag_of(Setting::Packing) == Some(true) {
        let explanation = "batch_size counts examples, not rows: raise it if examples are short";
        draft.set_with_advice(Setting::Packing, &field, true, explanation);
    } else {
        let explanation =
            "examples of a row do not see each other, so packing changes only the speed";
        draft.settings.note_ignored(Setting::Packing, explanation);
    }
}

/// Notes the keys about the tokens that are scored.
fn note_loss(draft: &mut SpecDraft<'_>) {
    draft.settings.note_used(Setting::Task, "sft", "supervised fine-tuning");
    let is_all = draft.settings.flag_of(Setting::TrainOnPrompts) == Some(true)
        || draft.settings.flag_of(Setting::TrainOnAnswersOnly) == Some(false);
    for setting in [Setting::TrainOnPrompts, Setting::TrainOnAnswersOnly] {
        if is_all {
            let explanation =
                "only answers are scored; to score all of a text, write it as {\"text\"}";
            draft.settings.note_differs(setting, explanation);
        } else {
            draft.settings.note_ignored(setting, "only answers are scored");
        }
    }
    note_conversations(draft);
    let losses = draft.settings.words_of(Setting::Loss).unwrap_or_default();
    if losses.iter().all(|loss| TrainingTask::from_word(loss) == Some(TrainingTask::Sft)) {
        draft.settings.note_ignored(Setting::Loss, "it is the likelihood of the answers");
    } else {
        let explanation = "the loss is the likelihood of the answers; others need rewards \
                    (docs/OBJECTIVES.md)";
        draft.settings.note_differs(Setting::Loss, explanation);
    }
}

/// Notes the keys about the answers of a conversation that are scored.
fn note_conversations(draft: &mut SpecDraft<'_>) {
    let explanation = "of a conversation, only the last answer is scored: neither all of it \
                       (false) nor all answers (true)";
    draft.settings.note_differs(Setting::AllAnswersOnly, explanation);
    let explanation = "of a conversation, only the last answer is scored";
    if draft.settings.flag_of(Setting::LastAnswerOnly) == Some(false) {
        draft.settings.note_differs(Setting::LastAnswerOnly, explanation);
    } else {
        draft.settings.note_ignored(Setting::LastAnswerOnly, explanation);
    }
}

/// Returns true if an adapter is trained, false for all weights; `None` if the method is unknown.
fn uses_adapter(draft: &SpecDraft<'_>) -> Option<bool> {
    let written = draft.settings.word_of(Setting::Adapter).unwrap_or_default();
    match written.as_str() {
        "" | "none" | "false" => draft.settings.flag_of(Setting::UsesPeft).or(Some(false)),
        name if name == "true" || name.contains("lora") => Some(true),
        name if name.starts_with("full") => Some(false),
        _ => None,
    }
}

fn add_lora(draft: &mut SpecDraft<'_>) {
    let section = draft.field_path("lora");
    let is_raft = draft.task != TrainingTask::Sft;
    let method = uses_adapter(draft);
    match method {
        Some(true) => {
            for setting in [Setting::Adapter, Setting::UsesPeft] {
                draft.settings.note_used(setting, &section, "a LoRA adapter is trained");
            }
        }
        Some(false) if is_raft => {
            let explanation = "a RAFT run trains a LoRA adapter";
            for setting in [Setting::Adapter, Setting::UsesPeft] {
                draft.settings.note_setting(setting, KeyStatus::Differs, explanation);
            }
        }
        Some(false) => {
            for setting in [Setting::Adapter, Setting::UsesPeft] {
                draft.settings.note_used(setting, &section, "left out: all weights are trained");
            }
            note_unquantized(draft, "the base is quantised only under a LoRA adapter");
            return;
        }
        None => draft.settings.note_differs(Setting::Adapter, "a LoRA adapter is trained"),
    }
    let rank = draft.settings.number_of(Setting::LoraRank).unwrap_or(16.0);
    draft.set_field(Setting::LoraRank, &format!("{section}.r"), rank);
    add_alpha(draft, &format!("{section}.alpha"), rank);
    draft.copy_number(Setting::LoraDropout, &format!("{section}.dropout"));
    add_modules(draft, &format!("{section}.target_modules"), method == Some(true));
    add_quantization(draft, &format!("{section}.quantize"));
}

/// Sets the form of the frozen base. A key that gives it counts more than the adapter's name, or a
/// copy of the model in 4 bits.
fn add_quantization(draft: &mut SpecDraft<'_>, field: &str) {
    const NF4: &str = "nf4";
    const ADVICE: &str = "needs trainers with PyTorch and bitsandbytes";
    let written = draft.settings.word_of(Setting::Quantization);
    let base = draft.settings.text_of(Setting::BaseModel);
    match written.as_deref() {
        Some("true" | "4") => draft.set_with_advice(Setting::Quantization, field, NF4, ADVICE),
        Some(_) => {
            let explanation = "the base is trained on unquantised, or in 4 bits as nf4";
            note_unquantized(draft, explanation);
        }
        None if draft.settings.word_of(Setting::Adapter).as_deref() == Some("qlora") => {
            draft.set_with_advice(Setting::Adapter, field, NF4, ADVICE);
        }
        None if base.as_deref().is_some_and(|it| it.ends_with(COPY_IN_4_BITS)) => {
            draft.tree.set_value(field, NF4);
        }
        None => {}
    }
}

/// Notes the form of the base if it is not quantised.
fn note_unquantized(draft: &mut SpecDraft<'_>, explanation: &str) {
    let written = draft.settings.word_of(Setting::Quantization);
    if let Some("" | "0" | "false" | "no" | "none" | "off") = written.as_deref() {
        draft.settings.note_ignored(Setting::Quantization, "the base is not quantised");
    } else {
        draft.settings.note_differs(Setting::Quantization, explanation);
    }
}

/// Sets alpha. Rank-stabilised LoRA divides it by the square root of the rank, not by the rank.
fn add_alpha(draft: &mut SpecDraft<'_>, field: &str, rank: f64) {
    let is_stabilized = draft.settings.flag_of(Setting::UsesRslora) == Some(true);
    let alpha = draft.settings.number_of(Setting::LoraAlpha).unwrap_or_else(|| {
        // LLaMA-Factory's default; the tables of the other programs have one.
        let explanation = format!("{field}: {}, twice the rank", 2.0 * rank);
        draft.settings.add_note("lora_alpha", KeyStatus::Default, explanation);
        2.0 * rank
    });
    if !is_stabilized {
        draft.settings.note_ignored(Setting::UsesRslora, "alpha is divided by the rank");
        draft.set_field(Setting::LoraAlpha, field, alpha);
        return;
    }
    let scaled = (alpha * rank.sqrt() * 1e6).round() / 1e6;
    let explanation = "alpha times the square root of the rank, which scales as rsLoRA does";
    draft.set_with_advice(Setting::LoraAlpha, field, scaled, explanation);
    draft.settings.note_used(Setting::UsesRslora, field, &format!("{scaled}; {explanation}"));
}

/// Sets the modules that get adapters. A program's default is for adapters that the configuration
/// asks for. One that replaces a training of all weights is on all modules.
fn add_modules(draft: &mut SpecDraft<'_>, field: &str, is_asked: bool) {
    const ALL: [&str; 3] = ["all-linear", "all_linear", "all"];
    let known = LoraAdapterSpec::default().target_modules;
    let explanation = "all linear modules";
    let is_all = draft.settings.flag_of(Setting::LoraAllLinear) == Some(true);
    if is_all {
        draft.settings.note_used(Setting::LoraAllLinear, field, explanation);
    }
    if !is_asked && !draft.settings.is_written(Setting::LoraModules) {
        return;
    }
    let written = draft.settings.words_of(Setting::LoraModules).unwrap_or_default();
    if is_all || written.is_empty() || written.iter().any(|it| ALL.contains(&it.as_str())) {
        draft.settings.note_used(Setting::LoraModules, field, explanation);
        return;
    }
    let (kept, others): (Vec<String>, Vec<String>) =
        written.into_iter().partition(|module| known.contains(module));
    let modules = if kept.is_empty() { Value::from(known) } else { Value::from(kept) };
    draft.set_field(Setting::LoraModules, field, modules);
    if !others.is_empty() {
        let explanation = format!("adapters are not possible on {}", others.join(", "));
        draft.settings.note_differs(Setting::LoraModules, &explanation);
    }
}
