//! The selection of halo-forge, which ranks rewards over the whole cycle.

use serde_json::{Value, json};

use crate::{setting::Setting, spec_draft::SpecDraft};

const SELECTION: &str = "raft.selection";
/// The least reward and the share with which reward shaping starts.
const EASY_REWARD: f64 = 0.1;
const EASY_SHARE: f64 = 0.8;

/// Sets the selection. Reward shaping changes both the least reward and the share from cycle to
/// cycle.
pub(crate) fn add_selection(draft: &mut SpecDraft<'_>) {
    let reward = draft.settings.number_of(Setting::MinReward).unwrap_or(0.5);
    let share = draft.settings.number_of(Setting::KeepShare).unwrap_or(0.5);
    let shaping = draft.settings.word_of(Setting::RewardShaping).unwrap_or_default();
    let [easy_reward, easy_share] = [reward.min(EASY_REWARD), share.max(EASY_SHARE)];
    let (reward_is, share_is): (Value, Value) = match shaping.as_str() {
        "annealing" => {
            (json!({ "linear": [easy_reward, reward] }), json!({ "linear": [easy_share, share] }))
        }
        "warmup" => (json!([easy_reward, reward]), json!([easy_share, share])),
        "adaptive" => (json!(easy_reward), json!(share)),
        _ => (json!(reward), json!(share)),
    };
    draft.tree.set_value("raft.selection.policy", "top_percent");
    draft.set_field(Setting::MinReward, "raft.selection.min_reward", reward_is);
    draft.set_field(Setting::KeepShare, "raft.selection.keep_share", share_is);
    if shaping == "adaptive" {
        let high = reward.max(EASY_REWARD);
        let rule = json!({ "target": 0.3, "step": 0.1, "low": 0.1, "high": high });
        draft.tree.set_value("raft.selection.adaptive", rule);
    }
    if ["", "fixed", "annealing", "warmup", "adaptive"].contains(&shaping.as_str()) {
        draft.settings.note_used(Setting::RewardShaping, SELECTION, &shaping);
    } else {
        draft.settings.note_differs(Setting::RewardShaping, "it is not a strategy; fixed is used");
    }
    let least = draft.settings.number_of(Setting::KeptMin);
    if let Some(least) = least.filter(|least| *least > 0.0) {
        let explanation = "samples below min_reward are never added, unlike in halo-forge";
        draft.set_with_advice(Setting::KeptMin, "raft.selection.at_least", least, explanation);
        draft.tree.set_value("raft.selection.floor", reward);
    }
    note_curriculum(draft);
}

/// Notes the setting of a spec that is closest to halo-forge's curriculum.
fn note_curriculum(draft: &mut SpecDraft<'_>) {
    let explanation = match draft.settings.word_of(Setting::Curriculum).as_deref() {
        None | Some("none") => return,
        Some("adaptive" | "historical") => {
            "choose by pass rate among more prompts than a cycle takes: set raft.prompts_per_cycle, \
             and raft.curriculum: { difficulty: {} } (docs/RAFT.md)"
        }
        Some(_) => {
            "prompts are ordered by how they turn out, not by how they look: see raft.curriculum"
        }
    };
    draft.settings.note_differs(Setting::Curriculum, explanation);
}
