//! What a cycle draws of each set of prompts, as the jobs of its plan.

use std::borrow::Cow;

use wire::{PromptSet, v1};

use crate::{
    curriculum,
    decide::Inputs,
    plan::{self, Kind, Wanted},
    state::Run,
};

/// Jobs of a plan, whose fact would exceed 8 MiB with more.
const JOBS_MAX: u64 = 1 << 17;

/// The jobs of a cycle's plan.
///
/// # Errors
/// When they are more than one fact can hold.
pub(crate) fn jobs(
    run: &Run,
    raft: &v1::spec::Raft,
    number: u32,
    inputs: &Inputs<'_>,
) -> Result<Vec<v1::plan::Job>, String> {
    let (mut samples, mut least) = (0_u64, 0_u64);
    for set in raft.prompt_sets() {
        let drawn = u64::from(set.samples_per_prompt) * u64::from(there(&set, inputs));
        samples = samples.saturating_add(drawn);
        least += plan::jobs_at_least(drawn, longest(&set), inputs.sizing);
    }
    if least > JOBS_MAX {
        return Err(format!("{samples} samples are more than a plan can hold"));
    }
    let mut jobs = Vec::new();
    for (place, set) in raft.prompt_sets().enumerate() {
        let there = there(&set, inputs);
        let (prefix, draws): (Cow<'_, str>, Vec<(u32, u32)>) = match set.purpose {
            v1::Purpose::Heldout => {
                let draws = (0..there).map(|line| (line, set.samples_per_prompt)).collect();
                // Suites stand behind the two sets that every run has.
                let own = set.suite.is_empty();
                (if own { "h".into() } else { format!("s{:02}_", place - 1).into() }, draws)
            }
            // Cycle 0 measures the base and trains on nothing.
            _ if number == 0 => continue,
            _ => ("t".into(), curriculum::draws(run, raft, number, there)),
        };
        let kind = Kind { prefix: &prefix, purpose: set.purpose, suite: set.suite };
        let wanted = wanted(&draws, &set, inputs);
        jobs.extend(plan::cut(kind, &wanted, longest(&set), inputs.fleet, inputs.sizing));
    }
    Ok(jobs)
}

/// The prompts of a set: the spec says how many there are, but only those that are there can be
/// sampled.
fn there(set: &PromptSet<'_>, inputs: &Inputs<'_>) -> u32 {
    let prompts = inputs.prompts_of(set.purpose, set.suite).len();
    set.count.min(u32::try_from(prompts).unwrap_or(u32::MAX))
}

fn longest(set: &PromptSet<'_>) -> u32 {
    set.sampling.unwrap_or_default().max_new_tokens
}

fn wanted(draws: &[(u32, u32)], set: &PromptSet<'_>, inputs: &Inputs<'_>) -> Vec<Wanted> {
    let prompts = inputs.prompts_of(set.purpose, set.suite);
    let wanted = |(line, count): &(u32, u32)| {
        let bytes = prompts.get(*line as usize)?.prompt.len();
        Some(Wanted { line: *line, bytes, count: *count })
    };
    draws.iter().filter_map(wanted).collect()
}
