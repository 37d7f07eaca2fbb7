//! Reward-ranked selection: the best samples of each prompt become training data
//! (RAFT, arXiv:2304.06767).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use wire::{Digest, derive, v1};

use crate::state::{Cycle, Job};

/// What a cycle trains on, and why the rest is left out.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    pub fact: v1::Selected,
    /// JSON lines whose digest the fact carries.
    pub dataset: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate<'a> {
    prompt_id: &'a str,
    prompt: &'a str,
    index: u32,
    completion: &'a str,
    reward: f64,
    tie: u64,
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
pub(crate) fn select(seed: u64, raft: &v1::spec::Raft, number: u32, cycle: &Cycle) -> Selection {
    let policy = raft.selection.unwrap_or_default();
    let seed = derive(seed, &["select", &number.to_string()]);
    let mut dropped: BTreeMap<String, u32> = BTreeMap::new();
    let mut drop = |why: &str, count: u32| {
        if count > 0 {
            let dropped = dropped.entry(why.to_owned()).or_default();
            *dropped = dropped.saturating_add(count);
        }
    };
    let mut considered: u32 = 0;
    let mut groups: BTreeMap<u32, Vec<Candidate<'_>>> = BTreeMap::new();
    for (_, job) in cycle.jobs_for(v1::Purpose::Train) {
        considered = considered.saturating_add(job.planned());
        if job.set_aside.is_some() {
            drop("set aside", job.planned());
            continue;
        }
        let Some(samples) = &job.samples else { continue };
        if samples.void.is_some() {
            drop("void", job.planned());
            continue;
        }
        gather(seed, &policy, job, &mut groups, &mut drop);
    }
    let mut dataset = Vec::new();
    let mut kept = 0;
    for mut group in groups.into_values() {
        group.sort_by(|a, b| b.reward.total_cmp(&a.reward).then(a.tie.cmp(&b.tie)));
        let found = group.len();
        let mut seen = BTreeSet::new();
        group.retain(|candidate| seen.insert(candidate.completion));
        let distinct = group.len();
        group.truncate(policy.keep_per_prompt as usize);
        drop("duplicate", count(found - distinct));
        drop("outranked", count(distinct - group.len()));
        kept += count(group.len());
        group.iter().for_each(|candidate| candidate.write(&mut dataset));
    }
    let blob = v1::Blob { digest: Digest::of(&dataset).to_string(), bytes: dataset.len() as u64 };
    let fact = v1::Selected { cycle: number, considered, kept, dropped, dataset: Some(blob) };
    Selection { fact, dataset }
}

/// Sorts a job's samples into prompts, leaving out what may not be kept.
fn gather<'a>(
    seed: u64,
    policy: &v1::Selection,
    job: &'a Job,
    groups: &mut BTreeMap<u32, Vec<Candidate<'a>>>,
    drop: &mut impl FnMut(&str, u32),
) {
    let verdicts: BTreeMap<(&str, u32), &v1::verdicts::Verdict> = job
        .verdicts
        .iter()
        .flat_map(|verdicts| &verdicts.verdicts)
        .map(|verdict| ((verdict.prompt_id.as_str(), verdict.index), verdict))
        .collect();
    let prompts: BTreeMap<&str, (u32, &str)> = job
        .requests
        .iter()
        .zip(&job.draws)
        .map(|(request, draw)| (request.prompt_id.as_str(), (draw.prompt, request.text.as_str())))
        .collect();
    for sample in job.samples.iter().flat_map(|samples| &samples.samples) {
        let verdict = verdicts.get(&(sample.prompt_id.as_str(), sample.index));
        let prompt = prompts.get(sample.prompt_id.as_str());
        let (Some(verdict), Some((line, prompt))) = (verdict, prompt) else {
            drop("unjudged", 1);
            continue;
        };
        match verdict.outcome() {
            v1::verdicts::Outcome::Error | v1::verdicts::Outcome::Unspecified => drop("error", 1),
            _ if !verdict.reward.is_finite() => drop("error", 1),
            // There is nothing in it to train on.
            _ if sample.text.is_empty() => drop("empty", 1),
            _ if verdict.reward < policy.min_reward => drop("failed", 1),
            v1::verdicts::Outcome::Pass | v1::verdicts::Outcome::Fail => {
                let index = sample.index;
                groups.entry(*line).or_default().push(Candidate {
                    prompt_id: &sample.prompt_id,
                    prompt,
                    index,
                    completion: &sample.text,
                    reward: verdict.reward,
                    tie: derive(seed, &[&sample.prompt_id, &index.to_string()]),
                });
            }
        }
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
