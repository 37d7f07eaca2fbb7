//! The judged samples of a cycle, as candidates for training.

use std::collections::BTreeMap;

use wire::{
    decode_logprobs, derive_seed,
    v1::{self, samples::Finish, verdicts::Outcome},
};

use super::SampleCandidate;
use crate::state::{Cycle, PlannedJob};

/// The candidates of a cycle, and the number of samples that cannot be candidates.
#[derive(Default)]
pub(super) struct CandidateSet<'a> {
    pub(super) considered: u32,
    pub(super) candidates: Vec<SampleCandidate<'a>>,
    pub(super) unusable: BTreeMap<String, u32>,
}

pub(super) fn collect_candidates(cycle: &Cycle, seed: u64) -> CandidateSet<'_> {
    let mut found = CandidateSet::default();
    for (_, job) in cycle.jobs_for(v1::Purpose::Train) {
        found.considered = found.considered.saturating_add(job.planned_samples());
        if job.set_aside.is_some() {
            found.count_unusable("set aside", job.planned_samples());
            continue;
        }
        let Some(samples) = &job.samples else { continue };
        if samples.void_reason.is_some() {
            found.count_unusable("void", job.planned_samples());
            continue;
        }
        found.add_job(seed, job);
    }
    found
}

impl<'a> CandidateSet<'a> {
    fn count_unusable(&mut self, why: &str, count: u32) {
        if count > 0 {
            let dropped = self.unusable.entry(why.to_owned()).or_default();
            *dropped = dropped.saturating_add(count);
        }
    }

    fn add_job(&mut self, seed: u64, job: &'a PlannedJob) {
        let verdicts = job.verdicts_by_sample();
        let scores = job.scores.as_ref().map_or(&[][..], |scores| &scores.scores);
        let mut scores = scores.iter();
        let prompts: BTreeMap<&str, (u32, &str)> = job
            .requests
            .iter()
            .zip(&job.draws)
            .map(|(request, draw)| {
                (request.prompt_id.as_str(), (draw.prompt, request.text.as_str()))
            })
            .collect();
        for sample in job.samples.iter().flat_map(|samples| &samples.samples) {
            let score = scores.next();
            let verdict = verdicts.get(&(sample.prompt_id.as_str(), sample.index));
            let is_missing = job.needs.verdicts && verdict.is_none();
            let prompt = prompts.get(sample.prompt_id.as_str()).filter(|_| !is_missing);
            let Some((line, prompt)) = prompt else {
                self.count_unusable("unjudged", 1);
                continue;
            };
            let judged = |verdict: &v1::verdicts::Verdict| {
                let is_told = matches!(verdict.outcome(), Outcome::Pass | Outcome::Fail);
                is_told && verdict.reward.is_finite()
            };
            if verdict.is_some_and(|verdict| !judged(verdict)) {
                self.count_unusable("error", 1);
                continue;
            }
            let valid = |bytes: &&[u8]| {
                let found = decode_logprobs(bytes, sample.tokens as usize);
                found.is_some_and(|logprobs| !logprobs.is_empty())
            };
            self.candidates.push(SampleCandidate {
                line: *line,
                prompt_id: &sample.prompt_id,
                prompt,
                index: sample.index,
                completion: &sample.text,
                tokens: sample.tokens,
                logprob: sample.logprob.filter(|sum| sum.is_finite() && *sum <= 0.0),
                token_logprobs: Some(&*sample.token_logprobs).filter(valid),
                teacher_logprobs: score.map(|score| &*score.token_logprobs).filter(valid),
                token_ids: match sample.token_ids.len() == sample.tokens as usize {
                    true => &sample.token_ids,
                    false => &[],
                },
                turns: &sample.turns,
                is_finished: sample.finish() == Finish::Stop,
                reward: verdict.map_or(0.0, |verdict| verdict.reward),
                is_judged: verdict.is_some(),
                tie_break: derive_seed(seed, &[&sample.prompt_id, &sample.index.to_string()]),
            });
        }
    }
}
