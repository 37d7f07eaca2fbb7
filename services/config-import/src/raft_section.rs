//! The section `raft`, but for its training: cycles, samples, verifier, selection and objective.

use serde_json::json;

use crate::{
    objective_section, report::ImportError, selection_section, setting::Setting,
    spec_draft::SpecDraft, task::TrainingTask, verifier_section,
};

/// Tokens allowed for the prompt if the configuration limits only the answer.
const PROMPT_TOKENS: f64 = 512.0;
/// The spec's default of `max_new_tokens`.
const NEW_TOKENS: f64 = 256.0;

/// Adds the section, but for training and adapter.
pub(crate) fn add_raft(draft: &mut SpecDraft<'_>) -> Result<(), ImportError> {
    add_cycles(draft);
    add_sampling(draft);
    verifier_section::add_verifier(draft)?;
    if draft.task == TrainingTask::Raft {
        selection_section::add_selection(draft);
    } else {
        objective_section::add_objective(draft);
    }
    if draft.settings.flag_of(Setting::DropsUnfinished) == Some(true) {
        draft.set_field(Setting::DropsUnfinished, "raft.selection.finished", true);
    }
    Ok(())
}

fn add_cycles(draft: &mut SpecDraft<'_>) {
    const FIELD: &str = "raft.cycles";
    match draft.task {
        TrainingTask::Raft => draft.copy_number(Setting::Cycles, FIELD),
        // A pass of GRPO samples every prompt once, with the weights so far.
        TrainingTask::Grpo => {
            if let Some(epochs) = draft.settings.number_of(Setting::Epochs) {
                let explanation = "a cycle samples all prompts, or raft.prompts_per_cycle of them";
                draft.set_with_advice(Setting::Epochs, FIELD, epochs.ceil().max(1.0), explanation);
            }
            let explanation =
                "a run ends after raft.cycles, each of raft.prompts_per_cycle prompts";
            match draft.settings.number_of(Setting::MaxSteps) {
                Some(steps) if steps > 0.0 => {
                    draft.settings.note_differs(Setting::MaxSteps, explanation);
                }
                _ => draft.settings.note_ignored(Setting::MaxSteps, "it sets no limit"),
            }
        }
        // One pass over given pairs becomes one cycle of the run's own pairs.
        TrainingTask::Sft
        | TrainingTask::Dpo
        | TrainingTask::Simpo
        | TrainingTask::Orpo
        | TrainingTask::Kto => draft.tree.set_value(FIELD, 1),
    }
    draft.copy_number(Setting::SamplesPerPrompt, "raft.samples_per_prompt");
}

fn add_sampling(draft: &mut SpecDraft<'_>) {
    draft.copy_number(Setting::Temperature, "raft.sampling.temperature");
    draft.copy_number(Setting::TopP, "raft.sampling.top_p");
    if let Some(top_k) = draft.settings.number_of(Setting::TopK) {
        draft.set_field(Setting::TopK, "raft.sampling.top_k", top_k.max(0.0));
    }
    draft.copy_number(Setting::MaxNewTokens, "raft.sampling.max_new_tokens");
    add_lengths(draft);
}

/// Leaves room for the prompt beside the longest answer.
fn add_lengths(draft: &mut SpecDraft<'_>) {
    const FIELD: &str = "raft.training.max_tokens";
    let written = draft.settings.number_of(Setting::MaxTokens);
    let prompt = draft.settings.number_of(Setting::MaxPromptTokens);
    let new_tokens = match (draft.settings.number_of(Setting::MaxNewTokens), written) {
        (Some(new_tokens), _) => new_tokens,
        (None, Some(all)) if all <= NEW_TOKENS => {
            let half = (all / 2.0).floor();
            draft.tree.set_value("raft.sampling.max_new_tokens", json!(half));
            half
        }
        (None, _) => NEW_TOKENS,
    };
    match (written, prompt) {
        (Some(all), _) if all > new_tokens => draft.copy_max_tokens(FIELD),
        (_, prompt) => {
            let all = prompt.unwrap_or(PROMPT_TOKENS) + new_tokens;
            draft.tree.set_value(FIELD, all);
            let explanation = format!("{all}, for the prompt and the answer");
            draft.settings.note_used(Setting::MaxTokens, FIELD, &explanation);
            draft.settings.note_used(Setting::MaxPromptTokens, FIELD, &explanation);
        }
    }
}
