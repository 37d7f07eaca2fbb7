//! A plan covers each sample of each prompt its cycle draws, once, and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use wire::{JobId, PromptSet, v1};

use crate::{curriculum, state::Run};

/// More than a file of prompts can hold.
const PROMPTS_MAX: u32 = 1 << 24;

pub(super) fn plan(run: &Run, number: u32, plan: &v1::Plan) -> Vec<String> {
    let Some(raft) = run.raft() else {
        return vec!["a plan in a run that samples nothing".into()];
    };
    let mut found = Vec::new();
    if number > run.last_cycle() {
        found.push(format!("the run has {} cycles", run.last_cycle()));
    }
    let before = number.checked_sub(1).and_then(|before| run.cycles.get(&before));
    let over = before.is_some_and(|cycle| {
        let stale = raft.staleness > 0 && cycle.selected.is_some();
        cycle.done.is_some() || stale || cycle.is_passed_on(raft)
    });
    if number > 0 && !over {
        found.push("planned before the cycle before it was done".into());
    }
    found.extend(jobs(plan));
    let strange = |job: &&v1::plan::Job| raft.prompt_set(job.purpose(), &job.suite).is_none();
    found.extend(plan.jobs.iter().find(strange).map(|job| {
        format!("job {:?} draws from suite {:?}, which the spec does not have", job.job, job.suite)
    }));
    let wanted = match (number, raft.prompts_per_cycle) {
        (0, _) => 0,
        (_, 0) => raft.prompt_count,
        (_, some) => some.min(raft.prompt_count),
    };
    // The spec is not believed: what it says is written out only where the plan is as long.
    let sane = raft.prompt_count <= PROMPTS_MAX;
    if !sane {
        found.push(format!("the spec counts {} prompts; no file has so many", raft.prompt_count));
    }
    for set in raft.prompt_sets() {
        let drawn = lines(plan, &set);
        let heldout = set.purpose == v1::Purpose::Heldout;
        let (wanted, count) = (if heldout { set.count } else { wanted }, set.samples_per_prompt);
        if drawn != wanted as usize && count > 0 {
            let name = name(&set);
            found.push(format!("draws from {drawn} {name} prompts, but there are {wanted}"));
        }
        let draws = match set.purpose {
            _ if !sane || drawn < wanted as usize => continue,
            v1::Purpose::Heldout => (0..wanted).map(|line| (line, count)).collect(),
            v1::Purpose::Train | v1::Purpose::Unspecified if number == 0 => Vec::new(),
            v1::Purpose::Train | v1::Purpose::Unspecified => {
                curriculum::draws(run, raft, number, raft.prompt_count)
            }
        };
        found.extend(coverage(plan, &set, &draws));
    }
    found
}

/// What a plan draws of a set of prompts.
fn draws<'a>(plan: &'a v1::Plan, set: &PromptSet<'_>) -> impl Iterator<Item = &'a v1::plan::Draw> {
    let (purpose, suite) = (set.purpose, set.suite);
    let jobs = plan.jobs.iter().filter(move |job| job.purpose() == purpose && job.suite == suite);
    jobs.flat_map(|job| &job.draws)
}

/// How many different prompts a plan draws from.
fn lines(plan: &v1::Plan, set: &PromptSet<'_>) -> usize {
    draws(plan, set).map(|draw| draw.prompt).collect::<BTreeSet<u32>>().len()
}

fn name(set: &PromptSet<'_>) -> String {
    let purpose = set.purpose.as_str_name().to_lowercase();
    if set.suite.is_empty() { purpose } else { format!("{purpose} ({})", set.suite) }
}

fn jobs(plan: &v1::Plan) -> Vec<String> {
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

/// One sentence for each way in which the draws are not those `wanted` (lines, and how many samples
/// of each), with how often and the first case.
fn coverage(plan: &v1::Plan, set: &PromptSet<'_>, wanted: &[(u32, u32)]) -> Vec<String> {
    // Samples of a line as ranges: a plan may draw more than could be listed one by one.
    let mut drawn: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for draw in draws(plan, set) {
        let first = u64::from(draw.first);
        drawn.entry(draw.prompt).or_default().push((first, first + u64::from(draw.count)));
    }
    let mut twice = Complaint::new("planned twice");
    let mut missing = Complaint::new("not planned");
    let mut extra = Complaint::new("planned, but not to be drawn");
    for (line, count) in wanted {
        let mut ranges = drawn.remove(line).unwrap_or_default();
        ranges.sort_unstable();
        let mut next = 0;
        for (first, end) in ranges {
            missing.add(*line, next, first.max(next).min(u64::from(*count)));
            twice.add(*line, first, end.min(next));
            extra.add(*line, first.max(next).max(u64::from(*count)), end);
            next = next.max(end);
        }
        missing.add(*line, next, u64::from(*count));
    }
    for (line, ranges) in drawn {
        ranges.into_iter().for_each(|(first, end)| extra.add(line, first, end));
    }
    let name = name(set);
    [twice, missing, extra].into_iter().filter_map(|complaint| complaint.say(&name)).collect()
}

struct Complaint {
    what: &'static str,
    samples: u64,
    first: Option<(u32, u64)>,
}

impl Complaint {
    fn new(what: &'static str) -> Self {
        Self { what, samples: 0, first: None }
    }

    /// Samples `from..to` of a line; nothing when there are none.
    fn add(&mut self, line: u32, from: u64, to: u64) {
        if from < to {
            self.samples += to - from;
            self.first.get_or_insert((line, from));
        }
    }

    fn say(self, purpose: &str) -> Option<String> {
        let Self { what, samples, first } = self;
        let (line, index) = first?;
        Some(format!(
            "{samples} {purpose} samples are {what}, the first of them sample {index} of the \
             prompt in line {line} (counted from 0)"
        ))
    }
}
