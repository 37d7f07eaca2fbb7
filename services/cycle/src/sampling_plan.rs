//! Plans the jobs of a cycle: the samples to draw from each set of prompts.

use std::borrow::Cow;

use wire::{PromptSet, v1};

use crate::{
    command::PlannerInputs,
    curriculum,
    job_sizing::{self, JobTemplate, PromptDraw},
    schedule,
    state::Run,
};

/// The fact of a larger plan would exceed 8 MiB.
const PLAN_JOBS_MAX: u64 = 1 << 17;

/// Fails if the plan has more jobs than one fact can hold.
pub(crate) fn plan_jobs(
    run: &Run,
    raft: &v1::spec::Raft,
    number: u32,
    inputs: &PlannerInputs<'_>,
) -> Result<Vec<v1::plan::Job>, String> {
    let (mut samples, mut least) = (0_u64, 0_u64);
    for set in raft.prompt_sets() {
        let drawn = u64::from(set.samples_per_prompt) * u64::from(available_prompts(&set, inputs));
        samples = samples.saturating_add(drawn);
        least += job_sizing::job_count_min(drawn, sample_bytes(raft, &set), inputs.sizing);
    }
    if least > PLAN_JOBS_MAX {
        return Err(format!("{samples} samples are more than a plan can hold"));
    }
    let mut jobs = Vec::new();
    let has_data = raft.dataset.is_some();
    for (place, set) in raft.prompt_sets().enumerate() {
        let prompt_count = available_prompts(&set, inputs);
        let (prefix, draws): (Cow<'_, str>, Vec<(u32, u32)>) = match set.purpose {
            // The start of a trial was measured by the run that it belongs to.
            _ if number == 0 && has_data => continue,
            v1::Purpose::Heldout => {
                let draws = (0..prompt_count).map(|line| (line, set.samples_per_prompt)).collect();
                // Prompt suites follow the two sets (train and held-out) that each run has.
                let own = set.suite.is_empty();
                (if own { "h".into() } else { format!("s{:02}_", place - 1).into() }, draws)
            }
            // Cycle 0 evaluates the base model and trains on nothing.
            _ if number == 0 || has_data => continue,
            _ => ("t".into(), curriculum::select_prompts(run, raft, number, prompt_count)),
        };
        let kind = JobTemplate { prefix: &prefix, purpose: set.purpose, suite: set.suite };
        let wanted = prompt_draws(&draws, &set, inputs);
        jobs.extend(job_sizing::split_into_jobs(
            kind,
            &wanted,
            sample_bytes(raft, &set),
            inputs.fleet,
            inputs.sizing,
        ));
    }
    Ok(jobs)
}

/// Limits the count in the spec to the prompts in the file.
fn available_prompts(set: &PromptSet<'_>, inputs: &PlannerInputs<'_>) -> u32 {
    let prompts = inputs.prompts_for(set.purpose, set.suite).len();
    set.count.min(u32::try_from(prompts).unwrap_or(u32::MAX))
}

fn sample_bytes(raft: &v1::spec::Raft, set: &PromptSet<'_>) -> u64 {
    let max_new_tokens = set.sampling.unwrap_or_default().max_new_tokens;
    let token_logprobs = schedule::needs_token_logprobs(raft, set.purpose);
    let episodes = schedule::plays_episodes(raft, set.purpose, set.suite);
    job_sizing::estimate_sample_bytes(max_new_tokens, token_logprobs, episodes)
}

/// Combines each draw (line and sample count) with the size of its prompt. Lines without a prompt
/// are left out.
fn prompt_draws(
    draws: &[(u32, u32)],
    set: &PromptSet<'_>,
    inputs: &PlannerInputs<'_>,
) -> Vec<PromptDraw> {
    let prompts = inputs.prompts_for(set.purpose, set.suite);
    let wanted = |(line, count): &(u32, u32)| {
        let bytes = prompts.get(*line as usize)?.prompt.len();
        Some(PromptDraw { line: *line, prompt_bytes: bytes, count: *count })
    };
    draws.iter().filter_map(wanted).collect()
}
