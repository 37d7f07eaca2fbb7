//! Checks that a plan covers each sample of each prompt of its cycle exactly once, and nothing
//! else.

use std::collections::{BTreeMap, BTreeSet};

use wire::{JobId, PromptSet, v1};

use crate::{curriculum, state::Run};

/// More prompts than any prompt file can hold; a larger spec is not checked in full.
const SPEC_PROMPTS_MAX: u32 = 1 << 24;

pub(super) fn check_plan(run: &Run, number: u32, plan: &v1::Plan) -> Vec<String> {
    let Some(raft) = run.raft_spec() else {
        return vec!["a plan in a run that samples nothing".into()];
    };
    let mut found = Vec::new();
    if number > run.last_cycle() {
        found.push(format!("the run has {} cycles", run.last_cycle()));
    }
    let before = number.checked_sub(1).and_then(|before| run.cycles.get(&before));
    let over = before.is_some_and(|cycle| {
        let stale = raft.staleness > 0 && cycle.selected.is_some();
        cycle.done.is_some() || stale || cycle.allows_pipelining(raft)
    });
    if number > 0 && !over {
        found.push("planned before the cycle before it was done".into());
    }
    found.extend(check_jobs(plan));
    let strange = |job: &&v1::plan::Job| raft.find_prompt_set(job.purpose(), &job.suite).is_none();
    found.extend(plan.jobs.iter().find(strange).map(|job| {
        format!("job {:?} draws from suite {:?}, which the spec does not have", job.job, job.suite)
    }));
    let has_data = raft.dataset.is_some();
    let wanted = match (number, raft.prompts_per_cycle) {
        (0, _) => 0,
        _ if has_data => 0,
        (_, 0) => raft.prompt_count,
        (_, some) => some.min(raft.prompt_count),
    };
    // The spec is untrusted input: its draws are enumerated only if the plan is at least as long.
    let sane = raft.prompt_count <= SPEC_PROMPTS_MAX;
    if !sane {
        found.push(format!(
            "the spec counts {} prompts, more than a file can hold",
            raft.prompt_count
        ));
    }
    // Cycle 0 of a run with given data measures nothing.
    for set in raft.prompt_sets().filter(|_| number > 0 || !has_data) {
        let drawn = count_prompts(plan, &set);
        let heldout = set.purpose == v1::Purpose::Heldout;
        let (wanted, count) = (if heldout { set.count } else { wanted }, set.samples_per_prompt);
        if drawn != wanted as usize && count > 0 {
            let name = set_name(&set);
            found.push(format!("draws from {drawn} {name} prompts, but there are {wanted}"));
        }
        let draws = match set.purpose {
            _ if !sane || drawn < wanted as usize => continue,
            v1::Purpose::Heldout => (0..wanted).map(|line| (line, count)).collect(),
            v1::Purpose::Train | v1::Purpose::Unspecified if number == 0 || has_data => Vec::new(),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                curriculum::select_prompts(run, raft, number, raft.prompt_count)
            }
        };
        found.extend(check_coverage(plan, &set, &draws));
    }
    found
}

fn plan_draws<'a>(
    plan: &'a v1::Plan,
    set: &PromptSet<'_>,
) -> impl Iterator<Item = &'a v1::plan::Draw> {
    let (purpose, suite) = (set.purpose, set.suite);
    let jobs = plan.jobs.iter().filter(move |job| job.purpose() == purpose && job.suite == suite);
    jobs.flat_map(|job| &job.draws)
}

fn count_prompts(plan: &v1::Plan, set: &PromptSet<'_>) -> usize {
    plan_draws(plan, set).map(|draw| draw.prompt).collect::<BTreeSet<u32>>().len()
}

fn set_name(set: &PromptSet<'_>) -> String {
    let purpose = set.purpose.as_str_name().to_lowercase();
    if set.suite.is_empty() { purpose } else { format!("{purpose} ({})", set.suite) }
}

/// Requires unique names, valid ids and known purposes.
fn check_jobs(plan: &v1::Plan) -> Vec<String> {
    let mut found = Vec::new();
    let mut names = BTreeSet::new();
    for job in &plan.jobs {
        if !names.insert(&job.job) {
            found.push(format!("job {:?} is planned twice", job.job));
        }
        if let Err(error) = JobId::new(job.job.as_str()) {
            found.push(error.to_string());
        }
        if job.purpose() == v1::Purpose::Unspecified {
            found.push(format!("job {:?} has no purpose", job.job));
        }
    }
    found
}

/// Returns one sentence for each way in which the draws differ from `wanted` (lines with their
/// number of samples): planned twice, missing, or extra, each with its count and first case.
fn check_coverage(plan: &v1::Plan, set: &PromptSet<'_>, wanted: &[(u32, u32)]) -> Vec<String> {
    // Ranges instead of single samples, because an invalid plan may draw more than can be
    // enumerated.
    let mut drawn: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for draw in plan_draws(plan, set) {
        let first = u64::from(draw.first);
        drawn.entry(draw.prompt).or_default().push((first, first + u64::from(draw.count)));
    }
    let mut twice = CoverageProblem::new("planned twice");
    let mut missing = CoverageProblem::new("not planned");
    let mut extra = CoverageProblem::new("planned, but not to be drawn");
    for (line, count) in wanted {
        let mut ranges = drawn.remove(line).unwrap_or_default();
        ranges.sort_unstable();
        let mut next = 0;
        for (first, end) in ranges {
            missing.add_range(*line, next, first.max(next).min(u64::from(*count)));
            twice.add_range(*line, first, end.min(next));
            extra.add_range(*line, first.max(next).max(u64::from(*count)), end);
            next = next.max(end);
        }
        missing.add_range(*line, next, u64::from(*count));
    }
    for (line, ranges) in drawn {
        ranges.into_iter().for_each(|(first, end)| extra.add_range(line, first, end));
    }
    let name = set_name(set);
    [twice, missing, extra]
        .into_iter()
        .filter_map(|complaint| complaint.into_message(&name))
        .collect()
}

struct CoverageProblem {
    description: &'static str,
    samples: u64,
    /// Line and index of the first sample affected.
    first: Option<(u32, u64)>,
}

impl CoverageProblem {
    fn new(description: &'static str) -> Self {
        Self { description, samples: 0, first: None }
    }

    fn add_range(&mut self, line: u32, from: u64, to: u64) {
        if from < to {
            self.samples += to - from;
            self.first.get_or_insert((line, from));
        }
    }

    fn into_message(self, purpose: &str) -> Option<String> {
        let Self { description: what, samples, first } = self;
        let (line, index) = first?;
        Some(format!(
            "{samples} {purpose} samples are {what}, the first of them sample {index} of the \
             prompt in line {line} (counted from 0)"
        ))
    }
}
