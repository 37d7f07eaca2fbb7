//! The canary vote: detects agents that sample with other weights than ordered.
//!
//! With its samples, each agent reports the log-probabilities that its loaded weights assign to the
//! last tokens of a fixed text, the canary. Agents with the same weights report nearly the same
//! numbers; an agent that differs has loaded something else.
//!
//! Rules, for each policy:
//!
//! 1. each agent has one vote, its newest report; reports that cannot be verified do not count, and
//!    the trainer of the policy votes as well if it reported;
//! 2. a value that more than half of the votes agree with is the reference;
//! 3. on a tie, the trainer's value is the reference if at least half agree with it;
//! 4. otherwise the vote is undecided: an audit reports it and no agent is quarantined.
//!
//! Two votes agree if the mean absolute difference of their log-probabilities is at most
//! `tolerance` nats per token. An agent that contradicts the reference is quarantined by a
//! `quarantine` fact, and its samples that may still count are drawn again.

mod canary_text;
mod logprobs;

use std::collections::BTreeMap;

use wire::{
    AgentId, Fact, FactBody, FactKey, JobId, PromptEntry, Subject, mean_logprob,
    mean_logprob_distance, v1,
};

pub(crate) use self::canary_text::text_from_dataset;
use self::logprobs::{CanaryVote, select_reference};
use crate::{
    command::WriteCommand,
    state::{
        PolicyWeights, Run,
        canary_votes::{CanaryReading, PolicyManifests},
    },
};

/// Orders of a job, including replacements. Wrong samples after that are void without replacement.
const REPLACEMENTS_MAX: u32 = 100;

/// Each quarantine requires a restart of the agent by a person.
const QUARANTINES_PER_AGENT_MAX: u32 = 1000;

/// The canary vote on one policy, for display.
#[derive(Debug, Clone, PartialEq)]
pub struct CanaryAgreement {
    /// The trainer's first.
    pub values: Vec<CanaryValue>,
    /// The vote has a reference.
    pub decided: bool,
}

/// The canary log-probability of one voter.
#[derive(Debug, Clone, PartialEq)]
pub struct CanaryValue {
    /// Name of the agent, or `trainer of <cycle>`.
    pub voter: String,
    /// Mean in nats per token.
    pub mean: f64,
    /// From the reference, in nats per token; `None` without a reference or with another number of
    /// tokens.
    pub distance: Option<f64>,
}

/// Returns `None` if the spec does not enable canaries.
pub(crate) fn canary_settings(run: &Run) -> Option<v1::spec::Proof> {
    let proof = run.raft_spec().and_then(|raft| raft.proof.clone());
    proof.filter(|proof| proof.canary)
}

/// Returns an empty text if the spec does not enable canaries.
pub(crate) fn canary_text_for(
    run: &Run,
    cycle: u32,
    purpose: v1::Purpose,
    prompts: &[PromptEntry],
) -> String {
    if canary_settings(run).is_none() {
        return String::new();
    }
    let made = run.sampling_checkpoint(cycle, purpose).and_then(|made| run.cycles.get(&made.cycle));
    match made.map(|cycle| &cycle.canary_text).filter(|text| !text.is_empty()) {
        Some(text) => text.clone(),
        None => canary_text::text_from_prompts(prompts),
    }
}

/// Returns the reason why samples lack a valid canary, independent of the vote: another tokenizer,
/// no canary, or too many tokens.
pub(crate) fn unproven_reason(run: &Run, samples: &v1::Samples) -> Option<String> {
    let proof = run.raft_spec()?.proof.as_ref()?;
    let other = !proof.tokenizer.is_empty()
        && !samples.tokenizer.is_empty()
        && proof.tokenizer != samples.tokenizer;
    if other {
        return Some("made with another tokenizer".into());
    }
    if !proof.canary {
        return None;
    }
    match samples.canary.len() {
        // Some endpoints do not report log-probabilities; their samples carry a caveat.
        0 if samples.caveat.is_empty() => Some("they have no canary log-probs".into()),
        tokens if tokens > wire::CANARY_TOKENS_MAX => Some(format!(
            "their canary has {tokens} tokens, the most is {}",
            wire::CANARY_TOKENS_MAX
        )),
        _ => None,
    }
}

pub(crate) fn next_quarantine(run: &Run) -> Option<WriteCommand> {
    let proof = canary_settings(run)?;
    let accused = run.canary_votes.reports.keys().find_map(|key| {
        let right = find_reference(run, key, proof.tolerance)?;
        find_outlier(run, key, &right, proof.tolerance)
    })?;
    let agent = AgentId::new(accused.agent.as_str()).ok()?;
    let number = run.canary_votes.quarantine_count(&accused.agent).count.saturating_add(1);
    let subject = Subject::new(&run.id, FactKey::Quarantine { agent, number });
    let fact = Fact { subject, body: FactBody::Quarantine(accused) };
    (number <= QUARANTINES_PER_AGENT_MAX).then_some(WriteCommand { fact, blob: None })
}

/// Returns an audit finding if the quarantine does not follow from the reports before it.
pub(crate) fn check_quarantine(run: &Run, quarantine: &v1::Quarantine) -> Option<String> {
    let Some(proof) = canary_settings(run) else {
        return Some("the spec asks for no canaries".into());
    };
    let key = (quarantine.base.clone(), quarantine.adapter.clone());
    let votes = collect_votes(run, &key);
    let jobs = quarantine.jobs.iter().filter_map(|job| {
        let id: JobId = job.job.parse().ok()?;
        run.cycles.get(&job.cycle)?.jobs.get(&id)?.samples.as_ref()
    });
    let wrong = |reported: &[f32]| {
        quarantine.agreed.iter().any(|name| {
            let vote = votes.iter().find(|vote| vote.voter == *name && *name != quarantine.agent);
            vote.is_some_and(|vote| !is_within_tolerance(reported, vote.canary, proof.tolerance))
        })
    };
    let reported: Vec<&[f32]> = jobs.map(|samples| &samples.canary[..]).collect();
    let founded = match reported.is_empty() {
        // The agent's earlier values count too: by the time the quarantine was written, it may have
        // reported a correct one. So does its newest, whose cycle may have been archived.
        true => {
            let newest = run.canary_votes.reports.get(&key).and_then(|r| r.get(&quarantine.agent));
            let newest = newest.map(|shown| &shown.canary[..]);
            agent_readings(run, &key, &quarantine.agent).into_iter().chain(newest).any(wrong)
        }
        false => reported.into_iter().all(wrong),
    };
    (!founded).then(|| "it does not follow from the canary log-probs".into())
}

/// Summarises, for display, how far the agents that sampled with a cycle's policy agree on its
/// canary (see `canary_vote`). Returns `None` if the spec enables no canary, the policy does not
/// exist yet, or no voter has reported.
pub fn canary_agreement(run: &Run, cycle: u32, purpose: v1::Purpose) -> Option<CanaryAgreement> {
    let proof = canary_settings(run)?;
    let policy = run.sampling_policy(cycle, purpose)?;
    let key = (policy.base.manifest.clone(), policy.adapter_manifest().to_owned());
    if collect_votes(run, &key).is_empty() {
        return None;
    }
    let reference = find_reference(run, &key, proof.tolerance);
    let figure = |who: String, canary: &[f32]| CanaryValue {
        voter: who,
        mean: mean_logprob(canary),
        distance: reference.as_ref().and_then(|right| mean_logprob_distance(canary, &right.canary)),
    };
    let agents = run.canary_votes.reports.get(&key).into_iter().flatten();
    let agents = agents.map(|(agent, shown)| figure(agent.clone(), &shown.canary));
    let trainer = trainer_vote(run, &key).map(|vote| figure(vote.voter, vote.canary));
    let shown: Vec<CanaryValue> = trainer.into_iter().chain(agents).collect();
    Some(CanaryAgreement { values: shown, decided: reference.is_some() })
}

/// Returns an audit finding if the agents of a cycle disagree and the vote is undecided.
pub(crate) fn undecided_vote(run: &Run, cycle: u32) -> Option<String> {
    let found = canary_agreement(run, cycle, v1::Purpose::Train).filter(|found| !found.decided)?;
    let describe = |figure: &CanaryValue| format!("{} {:.4}", figure.voter, figure.mean);
    let reported: Vec<String> = found.values.iter().map(describe).collect();
    Some(format!(
        "weights differ between boxes in cycle {cycle}, and no majority shows which are right \
         (mean log-prob per token: {})",
        reported.join(", ")
    ))
}

/// Returns `<job>-2`, `<job>-3`, …; `None` after [`REPLACEMENTS_MAX`].
fn replacement_id(job: &JobId) -> Option<JobId> {
    let name = job.as_str();
    let numbered = name.rsplit_once('-').and_then(|(stem, n)| Some((stem, n.parse().ok()?)));
    let (stem, times): (&str, u32) = numbered.unwrap_or((name, 1));
    if times >= REPLACEMENTS_MAX {
        return None;
    }
    JobId::new(format!("{stem}-{}", times + 1)).ok()
}

/// The value that the vote accepts as correct, and the voters that agree with it.
struct CanaryReference {
    canary: Vec<f32>,
    agreed: Vec<String>,
}

fn is_within_tolerance(a: &[f32], b: &[f32], tolerance: f64) -> bool {
    mean_logprob_distance(a, b).is_some_and(|distance| distance <= tolerance)
}

fn find_reference(run: &Run, key: &PolicyManifests, tolerance: f64) -> Option<CanaryReference> {
    let votes = collect_votes(run, key);
    let right = select_reference(&votes, tolerance)?;
    let agreed = votes.iter().filter(|vote| is_within_tolerance(vote.canary, right, tolerance));
    Some(CanaryReference {
        canary: right.to_vec(),
        agreed: agreed.map(|vote| vote.voter.clone()).collect(),
    })
}

/// Collects the trainer's vote, if any, and those of the verified agents.
fn collect_votes<'a>(run: &'a Run, key: &PolicyManifests) -> Vec<CanaryVote<'a>> {
    let agents = run.canary_votes.reports.get(key).into_iter().flatten();
    let verified = agents.filter(|(_, shown)| shown.verified && !shown.canary.is_empty());
    let vote = |(agent, shown): (&String, &'a CanaryReading)| CanaryVote {
        voter: agent.clone(),
        canary: &shown.canary,
        is_trainer: false,
    };
    trainer_vote(run, key).into_iter().chain(verified.map(vote)).collect()
}

/// Returns `None` if the policy's checkpoint has no canary.
fn trainer_vote<'a>(run: &'a Run, key: &PolicyManifests) -> Option<CanaryVote<'a>> {
    let checkpoints = run.cycles.values().filter_map(|cycle| cycle.final_checkpoint());
    let is_it = |made: &&v1::Checkpoint| {
        PolicyWeights::from_checkpoint(made).is_some_and(|policy| has_manifests(&policy, key))
    };
    let made = checkpoints.filter(|made| !made.canary.is_empty()).find(is_it)?;
    Some(CanaryVote {
        voter: format!("trainer of {}", made.cycle),
        canary: &made.canary,
        is_trainer: true,
    })
}

/// Cycle, job and canary, by agent.
type WrongSamples<'a> = BTreeMap<&'a str, Vec<(u32, &'a JobId, &'a [f32])>>;

fn find_wrong_samples<'a>(
    run: &'a Run,
    key: &PolicyManifests,
    right: &CanaryReference,
    tolerance: f64,
) -> WrongSamples<'a> {
    let mut wrong = WrongSamples::new();
    for (number, cycle) in run.cycles.iter().filter(|(_, cycle)| cycle.done.is_none()) {
        for purpose in [v1::Purpose::Train, v1::Purpose::Heldout] {
            let policy = run.sampling_policy(*number, purpose);
            if cycle.is_closed_for(purpose)
                || !policy.is_some_and(|policy| has_manifests(&policy, key))
            {
                continue;
            }
            for (id, job) in cycle.jobs_for(purpose) {
                let Some(samples) = &job.samples else { continue };
                let canary = &samples.canary[..];
                if samples.void_reason.is_none() && right.rejects_value(canary, tolerance) {
                    let found = wrong.entry(samples.agent.as_str()).or_default();
                    found.push((*number, id, canary));
                }
            }
        }
    }
    wrong
}

/// Includes all samples that the run still contains.
fn agent_readings<'a>(run: &'a Run, key: &PolicyManifests, agent: &str) -> Vec<&'a [f32]> {
    let mut figures = Vec::new();
    for (number, cycle) in &run.cycles {
        for purpose in [v1::Purpose::Train, v1::Purpose::Heldout] {
            if run
                .sampling_policy(*number, purpose)
                .is_some_and(|policy| has_manifests(&policy, key))
            {
                let samples = cycle.jobs_for(purpose).filter_map(|(_, job)| job.samples.as_ref());
                let own = samples.filter(|samples| samples.agent == agent);
                figures.extend(own.map(|samples| &samples.canary[..]));
            }
        }
    }
    figures
}

fn has_manifests(policy: &PolicyWeights, (base, adapter): &PolicyManifests) -> bool {
    policy.base.manifest == *base && policy.adapter_manifest() == adapter
}

impl CanaryReference {
    fn rejects_value(&self, canary: &[f32], tolerance: f64) -> bool {
        !canary.is_empty() && !is_within_tolerance(canary, &self.canary, tolerance)
    }
}

/// Returns the first agent that contradicts the reference and has not been quarantined for it.
fn find_outlier(
    run: &Run,
    key: &PolicyManifests,
    right: &CanaryReference,
    tolerance: f64,
) -> Option<v1::Quarantine> {
    let wrong = find_wrong_samples(run, key, right, tolerance);
    let agents = run.canary_votes.reports.get(key)?;
    // An agent cannot confirm its own values: at least one other voter must agree with the
    // reference.
    let accused = |agent: &String| right.agreed.iter().any(|other| other != agent);
    let mut agents = agents.iter().filter(|(agent, _)| accused(agent));
    let (agent, reported, jobs) = agents.find_map(|(agent, shown)| {
        let jobs = wrong.get(agent.as_str()).map_or(&[][..], Vec::as_slice);
        let newly = shown.sequence > run.canary_votes.quarantine_count(agent).last_sequence;
        let last =
            (newly && right.rejects_value(&shown.canary, tolerance)).then_some(&*shown.canary);
        let reported = jobs.first().map(|(.., canary)| *canary).or(last)?;
        Some((agent, reported, jobs))
    })?;
    let named = |(cycle, id, _): &(u32, &JobId, &[f32])| v1::quarantine::Job {
        cycle: *cycle,
        job: id.to_string(),
        again: replacement_id(id).map(|id| id.to_string()).unwrap_or_default(),
    };
    Some(v1::Quarantine {
        agent: agent.clone(),
        base: key.0.clone(),
        adapter: key.1.clone(),
        said: mean_logprob(reported),
        reference: mean_logprob(&right.canary),
        distance: mean_logprob_distance(reported, &right.canary),
        tolerance,
        agreed: right.agreed.clone(),
        jobs: jobs.iter().map(named).collect(),
    })
}

#[cfg(test)]
mod tests;
