//! Reward-ranked selection: the best samples of a cycle become training data
//! (RAFT, arXiv:2304.06767).
//!
//! `candidates` says what there is to choose from, `rules` chooses, and nothing else is known of
//! the run; so the same rules can be tried again on samples that were kept.

mod candidates;
mod rules;
mod similar;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use wire::{Digest, derive, v1};

use self::{
    candidates::Found,
    rules::{Candidate, choose},
};
use crate::{
    schedule,
    state::{Cycle, Run},
};

/// What a cycle trains on, and why the rest is left out.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    pub fact: v1::Selected,
    /// JSON lines whose digest the fact carries.
    pub dataset: Vec<u8>,
}

/// What some rules keep of a cycle's samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// All that were planned.
    pub considered: u32,
    /// By prompt and then from the best.
    pub kept: Vec<Kept>,
    /// How many others there are, by why they are not kept.
    pub dropped: BTreeMap<String, u32>,
    /// JSON lines.
    pub dataset: Vec<u8>,
}

/// A sample that is trained on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kept {
    pub prompt_id: String,
    pub index: u32,
    pub reward: f64,
    pub tokens: u32,
}

/// One line of the dataset.
#[derive(Serialize)]
struct Line<'a> {
    prompt: &'a str,
    completion: &'a str,
    prompt_id: &'a str,
    index: u32,
    reward: f64,
}

/// Ranks the judged training samples of a cycle, prompt by prompt in plan order.
pub(crate) fn select(run: &Run, raft: &v1::spec::Raft, number: u32, cycle: &Cycle) -> Selection {
    let rules = rules_of(run, raft, number);
    let found = candidates::of(cycle, tie_seed(run.spec.seed, number));
    let tallies = Tallies::of(&found.candidates, rules.min_reward);
    let (entropy, entropy_samples) = entropy(&found.candidates);
    let outcome = found.under(&rules);
    let digest = Digest::of(&outcome.dataset).to_string();
    let fact = v1::Selected {
        cycle: number,
        considered: outcome.considered,
        kept: count(outcome.kept.len()),
        dropped: outcome.dropped,
        dataset: Some(v1::Blob { digest, bytes: outcome.dataset.len() as u64 }),
        min_reward: rules.min_reward,
        prompts: tallies.prompts,
        judged: tallies.judged,
        passed: tallies.passed,
        diversity: tallies.diversity,
        entropy,
        entropy_samples,
    };
    Selection { fact, dataset: outcome.dataset }
}

/// What the run's own rules keep of a cycle, or what others would. The run is as it was before
/// the selection, whose samples it forgets. `None` where there is nothing to select from.
pub fn select_again(run: &Run, number: u32, rules: Option<&v1::Selection>) -> Option<Outcome> {
    let (raft, cycle) = (run.raft()?, run.cycles.get(&number)?);
    let own = || rules_of(run, raft, number);
    let found = candidates::of(cycle, tie_seed(run.spec.seed, number));
    Some(found.under(&rules.copied().unwrap_or_else(own)))
}

/// What became of each judged training sample of a cycle, by its prompt and index: `kept`, or why
/// not. The run is as it was before the selection. `None` where there is nothing to select from.
pub fn fates(run: &Run, number: u32) -> Option<BTreeMap<(String, u32), &'static str>> {
    let (raft, cycle) = (run.raft()?, run.cycles.get(&number)?);
    let found = candidates::of(cycle, tie_seed(run.spec.seed, number));
    let chosen = choose(&found.candidates, &rules_of(run, raft, number));
    let kept = chosen.kept.iter().map(|place| (*place, "kept"));
    let refused = chosen.refused.iter().map(|(place, why)| (*place, why.as_str()));
    let fates = kept.chain(refused).map(|(place, fate)| {
        let candidate = &found.candidates[place];
        ((candidate.prompt_id.to_owned(), candidate.index), fate)
    });
    Some(fates.collect())
}

impl Found<'_> {
    fn under(self, rules: &v1::Selection) -> Outcome {
        let chosen = choose(&self.candidates, rules);
        let mut dropped = self.unusable;
        for (why, count) in chosen.dropped() {
            *dropped.entry(why.as_str().to_owned()).or_default() += count;
        }
        let mut dataset = Vec::new();
        let kept = chosen.kept.into_iter().map(|place| {
            let Candidate { prompt_id, index, reward, tokens, .. } = self.candidates[place];
            self.candidates[place].write(&mut dataset);
            Kept { prompt_id: prompt_id.to_owned(), index, reward, tokens }
        });
        let kept = kept.collect();
        Outcome { considered: self.considered, kept, dropped, dataset }
    }
}

/// What breaks ties in a cycle.
fn tie_seed(seed: u64, cycle: u32) -> u64 {
    derive(seed, &["select", &cycle.to_string()])
}

/// The spec's rules as they are in this cycle.
pub(crate) fn rules_of(run: &Run, raft: &v1::spec::Raft, number: u32) -> v1::Selection {
    let rules = raft.selection.unwrap_or_default();
    let schedules = raft.schedules.as_ref();
    let of = |list: fn(&v1::Schedules) -> &Vec<f64>, plain: f64| {
        schedule::at(schedules.map(list).map_or(&[], Vec::as_slice), number).unwrap_or(plain)
    };
    v1::Selection {
        min_reward: match &rules.adaptive {
            Some(adaptive) => schedule::adapt(run, number, adaptive, rules.min_reward),
            None => of(|all| &all.min_reward, rules.min_reward),
        },
        keep_share: of(|all| &all.keep_share, rules.keep_share),
        ..rules
    }
}

/// What earlier cycles selected and this one trains on again, the newest first.
pub(crate) fn replay(run: &Run, raft: &v1::spec::Raft, number: u32) -> Vec<v1::Blob> {
    let cycles = raft.selection.and_then(|rules| rules.replay).map_or(0, |replay| replay.cycles);
    let selected = run.cycles.range(..number).rev().filter_map(|(_, c)| c.selected.as_ref());
    let kept = selected.filter(|selected| selected.kept > 0);
    kept.take(cycles as usize).filter_map(|selected| selected.dataset.clone()).collect()
}

/// At most so many replayed examples a new one.
pub(crate) fn replay_share(raft: &v1::spec::Raft) -> f64 {
    raft.selection.and_then(|rules| rules.replay).map_or(0.0, |replay| replay.share)
}

/// What the model found unlikely in its own samples: the mean of -ln p over their tokens, and how
/// many samples tell.
fn entropy(candidates: &[Candidate<'_>]) -> (Option<f64>, u32) {
    let told = candidates.iter().filter_map(|one| Some((one.logprob?, one.tokens)));
    let (nats, tokens, samples) = told.fold((0.0, 0_u64, 0), |sums, (logprob, tokens)| {
        let (nats, all, samples) = sums;
        (nats - logprob, all + u64::from(tokens), samples + 1)
    });
    #[expect(clippy::cast_precision_loss, reason = "far fewer tokens than 2^52")]
    let mean = (tokens > 0).then(|| nats / tokens as f64);
    (mean, samples)
}

/// What is known of each prompt after a cycle.
#[derive(Default)]
struct Tallies {
    prompts: Vec<u32>,
    judged: Vec<u32>,
    passed: Vec<u32>,
    diversity: f64,
}

impl Tallies {
    fn of(candidates: &[Candidate<'_>], min_reward: f64) -> Self {
        let mut groups: BTreeMap<u32, (u32, u32, BTreeSet<&str>)> = BTreeMap::new();
        for candidate in candidates {
            let (judged, passed, distinct) = groups.entry(candidate.line).or_default();
            *judged += 1;
            *passed += u32::from(candidate.reward >= min_reward);
            distinct.insert(candidate.completion);
        }
        let mut tallies = Self::default();
        for (line, (judged, passed, distinct)) in groups {
            tallies.prompts.push(line);
            tallies.judged.push(judged);
            tallies.passed.push(passed);
            tallies.diversity += f64::from(count(distinct.len())) / f64::from(judged);
        }
        tallies.diversity /= f64::from(count(tallies.prompts.len()).max(1));
        tallies
    }
}

impl Candidate<'_> {
    fn write(&self, dataset: &mut Vec<u8>) {
        let line = Line {
            prompt: self.prompt,
            completion: self.completion,
            prompt_id: self.prompt_id,
            index: self.index,
            reward: self.reward,
        };
        serde_json::to_writer(&mut *dataset, &line).expect("strings and numbers are always JSON");
        dataset.push(b'\n');
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
