//! The objective of a run with preferences or rewards.

use serde_json::{Map, Value};

use crate::{report::KeyStatus, setting::Setting, spec_draft::SpecDraft, task::TrainingTask};

const FIELD: &str = "raft.objective";
/// Values with which programs do not divide rewards by their deviation.
const UNSCALED: [&str; 2] = ["false", "none"];

/// Sets the objective with its settings.
pub(crate) fn add_objective(draft: &mut SpecDraft<'_>) {
    let name = if draft.task == TrainingTask::Grpo {
        choose_policy_loss(draft)
    } else {
        check_preference_loss(draft);
        draft.task.as_str()
    };
    draft.settings.note_used(Setting::Task, FIELD, name);
    let mut values = Map::new();
    for (setting, key) in list_settings(draft.task, name) {
        let Some(number) = draft.settings.number_of(*setting) else { continue };
        // Two settings of programs can have one meaning here.
        if !values.contains_key(*key) {
            values.insert((*key).to_owned(), Value::from(number));
            let explanation = format!("{name}.{key}: {number}");
            draft.settings.note_used(*setting, FIELD, &explanation);
        }
    }
    // The programs clip both sides alike if only one is given.
    if let (Some(low), false) = (values.get("clip_low").cloned(), values.contains_key("clip_high"))
    {
        values.insert("clip_high".to_owned(), low);
    }
    let objective = if values.is_empty() {
        Value::from(name)
    } else {
        Value::from(Map::from_iter([(name.to_owned(), Value::from(values))]))
    };
    draft.tree.set_value(FIELD, objective);
}

/// Returns the settings of an objective, each with its key in a spec.
fn list_settings(task: TrainingTask, name: &str) -> &'static [(Setting, &'static str)] {
    const BETA: (Setting, &str) = (Setting::Beta, "beta");
    const KL: (Setting, &str) = (Setting::Beta, "kl");
    match task {
        // TRL's upper bound is that of the ratio itself, and by default the lower one's value.
        TrainingTask::Grpo if name == "cispo" => {
            &[KL, (Setting::ClipHigh, "max_ratio"), (Setting::ClipLow, "max_ratio")]
        }
        TrainingTask::Grpo => {
            &[KL, (Setting::ClipLow, "clip_low"), (Setting::ClipHigh, "clip_high")]
        }
        TrainingTask::Dpo => &[BETA, (Setting::LikelihoodWeight, "nll")],
        TrainingTask::Simpo => &[BETA, (Setting::Gamma, "gamma")],
        TrainingTask::Orpo => &[(Setting::OddsWeight, "lambda"), (Setting::Beta, "lambda")],
        TrainingTask::Kto => &[
            BETA,
            (Setting::DesirableWeight, "desirable"),
            (Setting::UndesirableWeight, "undesirable"),
        ],
        TrainingTask::Sft | TrainingTask::Raft => &[],
    }
}

/// Returns the objective for TRL's `loss_type` of GRPO, and notes what it depends on.
fn choose_policy_loss(draft: &mut SpecDraft<'_>) -> &'static str {
    let losses = draft.settings.words_of(Setting::Loss).unwrap_or_default();
    let loss = losses.first().map_or("dapo", String::as_str);
    let by_sequence = draft.settings.word_of(Setting::RatioLevel);
    let scale = draft.settings.word_of(Setting::RewardScale).unwrap_or_default();
    let is_unscaled = UNSCALED.contains(&scale.as_str());
    let name = match loss {
        _ if by_sequence.as_deref().is_some_and(|level| level.starts_with("sequence")) => "gspo",
        "grpo" if is_unscaled => "dr_grpo",
        "grpo" => "grpo",
        "dr_grpo" => "dr_grpo",
        "cispo" => "cispo",
        "dapo" | "bnpo" => "dapo",
        _ => "grpo",
    };
    let is_known = ["grpo", "dr_grpo", "cispo", "dapo", "bnpo"].contains(&loss);
    if is_known {
        draft.settings.note_used(Setting::Loss, FIELD, name);
    } else {
        let explanation =
            format!("there is no objective {loss}; {name} is used (docs/OBJECTIVES.md)");
        draft.settings.note_differs(Setting::Loss, &explanation);
    }
    draft.settings.note_used(Setting::RatioLevel, FIELD, name);
    note_reward_scale(draft, name, &scale);
    name
}

/// Notes whether rewards are divided as `scale` says. A default that differs is noted too.
fn note_reward_scale(draft: &mut SpecDraft<'_>, name: &str, scale: &str) {
    let is_unscaled = UNSCALED.contains(&scale);
    if is_unscaled == (name == "dr_grpo") && scale != "batch" {
        draft.settings.note_used(Setting::RewardScale, FIELD, name);
        return;
    }
    let explanation = if name == "dr_grpo" {
        "dr_grpo does not divide rewards by their deviation; the program does, unless scaling is \
         off (docs/OBJECTIVES.md)"
            .to_owned()
    } else {
        format!("{name} scales rewards as its paper does (docs/OBJECTIVES.md)")
    };
    draft.settings.note_setting(Setting::RewardScale, KeyStatus::Differs, &explanation);
}

/// Notes a preference loss that differs from the objective's.
fn check_preference_loss(draft: &mut SpecDraft<'_>) {
    let losses = draft.settings.words_of(Setting::Loss).unwrap_or_default();
    let name = draft.task.as_str();
    let fits = |loss: &String| TrainingTask::from_word(loss) == Some(draft.task);
    if losses.iter().all(fits) {
        draft.settings.note_used(Setting::Loss, FIELD, name);
    } else {
        let explanation = format!("the loss is that of {name} (docs/OBJECTIVES.md)");
        draft.settings.note_differs(Setting::Loss, &explanation);
    }
}
