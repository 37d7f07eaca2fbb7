//! Whether what generated is what was ordered, as far as boxes can show each other: each says
//! with its samples what the tokens of one text are worth to the weights it has loaded, and who
//! differs from the others has loaded something else.
//!
//! One agent has one vote a policy, its newest; what nobody could verify has none. More than half
//! of the votes are right. Where no more than half agree, those are right who agree with whoever
//! trained the policy, if they are half; else nobody knows, and nothing is done but told.

mod figures;
mod text;

use std::collections::BTreeMap;

use wire::{AgentId, Body, Fact, JobId, Place, Prompt, Subject, v1};

use self::figures::{Vote, distance, mean, reference};
pub(crate) use self::text::of_dataset;
use crate::{
    decide::Command,
    state::{Policy, Run},
};

/// So often is a job ordered again; what is found wrong after that is void, and not made good.
const AGAIN_MAX: u32 = 100;

/// So often is an agent told of in one run. Somebody has started it anew each time.
const QUARANTINES_MAX: u32 = 1000;

/// A policy, by the manifest digests of base and adapter.
type Key = (String, String);

/// What agents showed of each policy, and who was put in quarantine.
#[derive(Debug, Clone, Default)]
pub struct Proofs {
    shown: BTreeMap<Key, BTreeMap<String, Shown>>,
    quarantined: BTreeMap<String, Quarantined>,
}

/// What an agent showed last.
#[derive(Debug, Clone)]
struct Shown {
    cycle: u32,
    sequence: u64,
    verified: bool,
    canary: Vec<f32>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Quarantined {
    times: u32,
    /// Of the last time.
    sequence: u64,
}

/// What was shown of one policy, for people.
#[derive(Debug, Clone, PartialEq)]
pub struct Agreement {
    pub shown: Vec<Figure>,
    /// Whether it is known who is right.
    pub decided: bool,
}

/// What one of them showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// An agent, or `trainer of <cycle>`.
    pub who: String,
    /// Nats a token.
    pub mean: f64,
    /// From those who are right, where that is known and the tokens are as many.
    pub distance: Option<f64>,
}

impl Proofs {
    pub(crate) fn show(&mut self, cycle: u32, sequence: u64, samples: &v1::Samples) {
        let key = (samples.base.clone(), samples.adapter.clone());
        let shown = Shown {
            cycle,
            sequence,
            verified: samples.caveat.is_empty(),
            canary: samples.canary.clone(),
        };
        self.shown.entry(key).or_default().insert(samples.agent.clone(), shown);
    }

    /// What was shown for cycles before this one: the log may let go of it.
    pub(crate) fn forget_before(&mut self, cycle: u32) {
        for agents in self.shown.values_mut() {
            agents.retain(|_, shown| shown.cycle >= cycle);
        }
        self.shown.retain(|_, agents| !agents.is_empty());
    }

    /// Notes a quarantine; the error is that it is not the agent's next.
    pub(crate) fn note(&mut self, agent: &str, number: u32, sequence: u64) -> Result<(), String> {
        let known = self.quarantined.entry(agent.to_owned()).or_default();
        let next = known.times.saturating_add(1);
        *known = Quarantined { times: known.times.max(number), sequence };
        if number == next { Ok(()) } else { Err(format!("the agent's next would be {next}")) }
    }

    fn times(&self, agent: &str) -> Quarantined {
        self.quarantined.get(agent).copied().unwrap_or_default()
    }
}

/// The spec's settings, where it asks for canaries.
pub(crate) fn asked(run: &Run) -> Option<v1::spec::Proof> {
    let proof = run.raft().and_then(|raft| raft.proof.clone());
    proof.filter(|proof| proof.canary)
}

/// The text that shows a cycle's policy; empty where the spec asks for none.
pub(crate) fn text(run: &Run, cycle: u32, purpose: v1::Purpose, prompts: &[Prompt]) -> String {
    if asked(run).is_none() {
        return String::new();
    }
    let made = run.drawn_with(cycle, purpose).and_then(|made| run.cycles.get(&made.cycle));
    match made.map(|cycle| &cycle.canary).filter(|text| !text.is_empty()) {
        Some(text) => text.clone(),
        None => text::of_prompts(prompts),
    }
}

/// Why samples may not be used for what they show, whoever is right.
pub(crate) fn why_void(run: &Run, samples: &v1::Samples) -> Option<String> {
    let proof = run.raft()?.proof.as_ref()?;
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
        // Some endpoints do not tell, and say that nobody can check them.
        0 if samples.caveat.is_empty() => Some("they show nothing of what drew them".into()),
        tokens if tokens > wire::CANARY_TOKENS => {
            Some(format!("their canary has {tokens} tokens, the most is {}", wire::CANARY_TOKENS))
        }
        _ => None,
    }
}

/// The next agent to be put in quarantine, and what is to be drawn again.
pub(crate) fn conviction(run: &Run) -> Option<Command> {
    let proof = asked(run)?;
    let accused = run.proofs.shown.keys().find_map(|key| {
        let right = judge(run, key, proof.tolerance)?;
        accuse(run, key, &right, proof.tolerance)
    })?;
    let agent = AgentId::new(accused.agent.as_str()).ok()?;
    let number = run.proofs.times(&accused.agent).times.saturating_add(1);
    let subject = Subject::new(&run.id, Place::Quarantine { agent, number });
    let fact = Fact { subject, body: Body::Quarantine(accused) };
    (number <= QUARANTINES_MAX).then_some(Command { fact, blob: None })
}

/// What an auditor says against a quarantine, the log being as it was before it.
pub(crate) fn unfounded(run: &Run, quarantine: &v1::Quarantine) -> Option<String> {
    let Some(proof) = asked(run) else { return Some("the spec asks for no canaries".into()) };
    let key = (quarantine.base.clone(), quarantine.adapter.clone());
    let votes = votes(run, &key);
    let jobs = quarantine.jobs.iter().filter_map(|job| {
        let id: JobId = job.job.parse().ok()?;
        run.cycles.get(&job.cycle)?.jobs.get(&id)?.samples.as_ref()
    });
    let wrong = |said: &[f32]| {
        quarantine.agreed.iter().any(|name| {
            let vote = votes.iter().find(|vote| vote.who == *name && *name != quarantine.agent);
            vote.is_some_and(|vote| !agrees(said, vote.canary, proof.tolerance))
        })
    };
    let said: Vec<&[f32]> = jobs.map(|samples| &samples.canary[..]).collect();
    let founded = match said.is_empty() {
        // What it showed once; by the time that it was written of, it may have shown better.
        true => figures(run, &key, &quarantine.agent).into_iter().any(wrong),
        false => said.into_iter().all(wrong),
    };
    (!founded).then(|| "it does not follow from what was shown".into())
}

/// What was shown of the policy of a cycle, for people; `None` where there is nothing to compare.
pub fn agreement(run: &Run, cycle: u32, purpose: v1::Purpose) -> Option<Agreement> {
    let proof = asked(run)?;
    let policy = run.policy(cycle, purpose)?;
    let key = (policy.base.manifest.clone(), policy.adapter_manifest().to_owned());
    if votes(run, &key).is_empty() {
        return None;
    }
    let reference = judge(run, &key, proof.tolerance);
    let figure = |who: String, canary: &[f32]| Figure {
        who,
        mean: mean(canary),
        distance: reference.as_ref().and_then(|right| distance(canary, &right.canary)),
    };
    let agents = run.proofs.shown.get(&key).into_iter().flatten();
    let agents = agents.map(|(agent, shown)| figure(agent.clone(), &shown.canary));
    let trainer = trainer(run, &key).map(|vote| figure(vote.who, vote.canary));
    let shown: Vec<Figure> = trainer.into_iter().chain(agents).collect();
    Some(Agreement { shown, decided: reference.is_some() })
}

/// What an auditor says of a cycle whose boxes differ though none of them is known to be wrong.
pub(crate) fn dispute(run: &Run, cycle: u32) -> Option<String> {
    let found = agreement(run, cycle, v1::Purpose::Train).filter(|found| !found.decided)?;
    let said = |figure: &Figure| format!("{} {:.4}", figure.who, figure.mean);
    let said: Vec<String> = found.shown.iter().map(said).collect();
    Some(format!(
        "what drew the samples of cycle {cycle} is not the same on all boxes, and nobody knows who \
         is right (nats a token: {})",
        said.join(", ")
    ))
}

/// The name that a job is ordered again by; `None` when that was done too often.
fn again(job: &JobId) -> Option<JobId> {
    let name = job.as_str();
    let numbered = name.rsplit_once('-').and_then(|(stem, n)| Some((stem, n.parse().ok()?)));
    let (stem, times): (&str, u32) = numbered.unwrap_or((name, 1));
    if times >= AGAIN_MAX {
        return None;
    }
    JobId::new(format!("{stem}-{}", times + 1)).ok()
}

struct Reference {
    canary: Vec<f32>,
    agreed: Vec<String>,
}

fn agrees(a: &[f32], b: &[f32], tolerance: f64) -> bool {
    distance(a, b).is_some_and(|distance| distance <= tolerance)
}

fn judge(run: &Run, key: &Key, tolerance: f64) -> Option<Reference> {
    let votes = votes(run, key);
    let right = reference(&votes, tolerance)?;
    let agreed = votes.iter().filter(|vote| agrees(vote.canary, right, tolerance));
    Some(Reference {
        canary: right.to_vec(),
        agreed: agreed.map(|vote| vote.who.clone()).collect(),
    })
}

fn votes<'a>(run: &'a Run, key: &Key) -> Vec<Vote<'a>> {
    let agents = run.proofs.shown.get(key).into_iter().flatten();
    let verified = agents.filter(|(_, shown)| shown.verified && !shown.canary.is_empty());
    let vote = |(agent, shown): (&String, &'a Shown)| Vote {
        who: agent.clone(),
        canary: &shown.canary,
        trained: false,
    };
    trainer(run, key).into_iter().chain(verified.map(vote)).collect()
}

/// Whoever trained a policy, if it showed what it made.
fn trainer<'a>(run: &'a Run, key: &Key) -> Option<Vote<'a>> {
    let checkpoints = run.cycles.values().filter_map(|cycle| cycle.final_checkpoint());
    let is_it = |made: &&v1::Checkpoint| Policy::of(made).is_some_and(|policy| is(&policy, key));
    let made = checkpoints.filter(|made| !made.canary.is_empty()).find(is_it)?;
    Some(Vote { who: format!("trainer of {}", made.cycle), canary: &made.canary, trained: true })
}

/// Samples that are wrong, by their agents.
type Wrong<'a> = BTreeMap<&'a str, Vec<(u32, &'a JobId, &'a [f32])>>;

/// Those of a policy that may still count.
fn wrong_samples<'a>(run: &'a Run, key: &Key, right: &Reference, tolerance: f64) -> Wrong<'a> {
    let mut wrong = Wrong::new();
    for (number, cycle) in run.cycles.iter().filter(|(_, cycle)| cycle.done.is_none()) {
        for purpose in [v1::Purpose::Train, v1::Purpose::Heldout] {
            let policy = run.policy(*number, purpose);
            if cycle.is_past(purpose) || !policy.is_some_and(|policy| is(&policy, key)) {
                continue;
            }
            for (id, job) in cycle.jobs_for(purpose) {
                let Some(samples) = &job.samples else { continue };
                let canary = &samples.canary[..];
                if samples.void.is_none() && right.is_against(canary, tolerance) {
                    let found = wrong.entry(samples.agent.as_str()).or_default();
                    found.push((*number, id, canary));
                }
            }
        }
    }
    wrong
}

/// All that an agent showed of a policy, as far as the run is still known.
fn figures<'a>(run: &'a Run, key: &Key, agent: &str) -> Vec<&'a [f32]> {
    let mut figures = Vec::new();
    for (number, cycle) in &run.cycles {
        for purpose in [v1::Purpose::Train, v1::Purpose::Heldout] {
            if run.policy(*number, purpose).is_some_and(|policy| is(&policy, key)) {
                let samples = cycle.jobs_for(purpose).filter_map(|(_, job)| job.samples.as_ref());
                let own = samples.filter(|samples| samples.agent == agent);
                figures.extend(own.map(|samples| &samples.canary[..]));
            }
        }
    }
    figures
}

fn is(policy: &Policy, (base, adapter): &Key) -> bool {
    policy.base.manifest == *base && policy.adapter_manifest() == adapter
}

impl Reference {
    fn is_against(&self, canary: &[f32], tolerance: f64) -> bool {
        !canary.is_empty() && !agrees(canary, &self.canary, tolerance)
    }
}

/// The first agent that is wrong about a policy and was not told of it.
fn accuse(run: &Run, key: &Key, right: &Reference, tolerance: f64) -> Option<v1::Quarantine> {
    let wrong = wrong_samples(run, key, right, tolerance);
    let agents = run.proofs.shown.get(key)?;
    // What an agent says itself is no evidence of which of its figures is right.
    let accused = |agent: &String| right.agreed.iter().any(|other| other != agent);
    let mut agents = agents.iter().filter(|(agent, _)| accused(agent));
    let (agent, said, jobs) = agents.find_map(|(agent, shown)| {
        let jobs = wrong.get(agent.as_str()).map_or(&[][..], Vec::as_slice);
        let newly = shown.sequence > run.proofs.times(agent).sequence;
        let last = (newly && right.is_against(&shown.canary, tolerance)).then_some(&*shown.canary);
        let said = jobs.first().map(|(.., canary)| *canary).or(last)?;
        Some((agent, said, jobs))
    })?;
    let named = |(cycle, id, _): &(u32, &JobId, &[f32])| v1::quarantine::Job {
        cycle: *cycle,
        job: id.to_string(),
        again: again(id).map(|id| id.to_string()).unwrap_or_default(),
    };
    Some(v1::Quarantine {
        agent: agent.clone(),
        base: key.0.clone(),
        adapter: key.1.clone(),
        said: mean(said),
        reference: mean(&right.canary),
        distance: distance(said, &right.canary),
        tolerance,
        agreed: right.agreed.clone(),
        jobs: jobs.iter().map(named).collect(),
    })
}

#[cfg(test)]
mod tests;
