//! A trial of an objective: a run of one cycle that trains on the samples of another run's cycle.
//! Pure.

use objective::{Objective, ObjectiveName, SettingError, SettingKey};
use wire::{Digest, v1};

use crate::{
    schedule,
    select::{SelectionOutcome, preview_selection},
    state::{PolicyWeights, Run},
};

/// A trial, without the name and seed of its run.
#[derive(Debug, Clone)]
pub struct ObjectiveTrial {
    pub spec: v1::Spec,
    /// The training data, which the store must have before the run starts.
    pub selection: SelectionOutcome,
}

/// Returns the trial of an objective on a cycle's training samples: the same start, training
/// settings and held-out prompts, and the data that the objective selects. The run must be in its
/// state before the selection, which drops the texts. `None` if it is no RAFT run or has no such
/// cycle.
///
/// # Errors
/// When a setting of the objective is missing, or excludes another.
pub fn prepare_trial(
    run: &Run,
    number: u32,
    objective: &Objective,
) -> Result<Option<ObjectiveTrial>, SettingError> {
    let mut objective = objective.clone();
    let made = run.raft_spec().and_then(|raft| raft.sampling).map(|it| it.max_new_tokens);
    if objective.settings().any(|it| it == (SettingKey::MaxTokens, None))
        && let Some(made) = made
    {
        objective.set(SettingKey::MaxTokens.as_str(), f64::from(made))?;
    }
    objective.check_settings()?;
    Ok(build_trial(run, number, objective))
}

fn build_trial(run: &Run, number: u32, mut objective: Objective) -> Option<ObjectiveTrial> {
    let raft = run.raft_spec()?;
    let PolicyWeights { base, adapter } = run.training_policy(number)?;
    objective.set_off_policy(raft.staleness > 0 || raft.from_base);
    let message = (objective.name() != ObjectiveName::Raft).then(|| objective.to_message());
    let training = schedule::training_settings(raft, number)?;
    let training = v1::Training { objective: message, ..training };
    let selection = preview_selection(&with_training(run, &training), number, None)?;
    let dataset = v1::spec::Dataset {
        lines: Some(v1::Blob {
            digest: Digest::hash_bytes(&selection.dataset).to_string(),
            bytes: selection.dataset.len() as u64,
        }),
        examples: u32::try_from(selection.kept.len()).unwrap_or(u32::MAX),
        run: run.id.to_string(),
        cycle: number,
    };
    let trial = v1::spec::Raft {
        prompts: raft.prompts.clone(),
        prompt_count: raft.prompt_count,
        heldout: raft.heldout.clone(),
        heldout_count: raft.heldout_count,
        cycles: 1,
        samples_per_prompt: raft.samples_per_prompt,
        heldout_samples_per_prompt: raft.heldout_samples_per_prompt,
        sampling: raft.sampling,
        verifier: raft.verifier.clone(),
        selection: Some(v1::Selection { replay: None, adaptive: None, ..raft.selection? }),
        training: Some(training),
        accept_unverified_policy: raft.accept_unverified_policy,
        pass_at: raft.pass_at.clone(),
        dataset: Some(dataset),
        ..v1::spec::Raft::default()
    };
    let spec = v1::Spec {
        base: Some(v1::Base { tree: Some(base), random_init: false, adapter }),
        pool: run.spec.pool.clone(),
        other_model_type: run.spec.other_model_type.clone(),
        kind: Some(v1::spec::Kind::Raft(trial)),
        ..v1::Spec::default()
    };
    Some(ObjectiveTrial { spec, selection })
}

fn with_training(run: &Run, training: &v1::Training) -> Run {
    let mut run = run.clone();
    if let Some(v1::spec::Kind::Raft(raft)) = &mut run.spec.kind {
        raft.training = Some(training.clone());
    }
    run
}
