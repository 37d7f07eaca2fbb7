//! The judged samples of a cycle, as candidates for training.

use std::collections::BTreeMap;

use wire::{
    derive,
    v1::{self, samples::Finish, verdicts::Outcome},
};

use super::Candidate;
use crate::state::{Cycle, Job};

/// What there is to choose from, and what there is not.
#[derive(Default)]
pub(super) struct Found<'a> {
    /// All that were planned.
    pub(super) considered: u32,
    /// In the order of jobs.
    pub(super) candidates: Vec<Candidate<'a>>,
    /// Why the others are none.
    pub(super) unusable: BTreeMap<String, u32>,
}

pub(super) fn of(cycle: &Cycle, seed: u64) -> Found<'_> {
    let mut found = Found::default();
    for (_, job) in cycle.jobs_for(v1::Purpose::Train) {
        found.considered = found.considered.saturating_add(job.planned());
        if job.set_aside.is_some() {
            found.drop("set aside", job.planned());
            continue;
        }
        let Some(samples) = &job.samples else { continue };
        if samples.void.is_some() {
            found.drop("void", job.planned());
            continue;
        }
        found.gather(seed, job);
    }
    found
}

impl<'a> Found<'a> {
    fn drop(&mut self, why: &str, count: u32) {
        if count > 0 {
            let dropped = self.unusable.entry(why.to_owned()).or_default();
            *dropped = dropped.saturating_add(count);
        }
    }

    fn gather(&mut self, seed: u64, job: &'a Job) {
        let verdicts = job.verdicts_by_sample();
        let prompts: BTreeMap<&str, (u32, &str)> = job
            .requests
            .iter()
            .zip(&job.draws)
            .map(|(request, draw)| {
                (request.prompt_id.as_str(), (draw.prompt, request.text.as_str()))
            })
            .collect();
        for sample in job.samples.iter().flat_map(|samples| &samples.samples) {
            let verdict = verdicts.get(&(sample.prompt_id.as_str(), sample.index));
            let prompt = prompts.get(sample.prompt_id.as_str());
            let (Some(verdict), Some((line, prompt))) = (verdict, prompt) else {
                self.drop("unjudged", 1);
                continue;
            };
            let judged = matches!(verdict.outcome(), Outcome::Pass | Outcome::Fail);
            if !judged || !verdict.reward.is_finite() {
                self.drop("error", 1);
                continue;
            }
            self.candidates.push(Candidate {
                line: *line,
                prompt_id: &sample.prompt_id,
                prompt,
                index: sample.index,
                completion: &sample.text,
                tokens: sample.tokens,
                logprob: sample.logprob.filter(|sum| sum.is_finite() && *sum <= 0.0),
                finished: sample.finish() == Finish::Stop,
                reward: verdict.reward,
                tie: derive(seed, &[&sample.prompt_id, &sample.index.to_string()]),
            });
        }
    }
}
