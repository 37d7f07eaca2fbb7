//! The judged samples of a cycle as JSON lines, each with its prompt, verdict and seed. Pure: the
//! same facts give the same bytes.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use wire::{FactBody, FactKey, JobId, Record, decode_logprobs, derive_sample_seed, v1};

/// Kept samples by prompt id and index.
pub(super) type KeptSamples = BTreeSet<(String, u32)>;

/// One judged sample. Each line has all fields, so that the lines can be loaded as a table.
#[derive(Debug, Serialize)]
struct SampleLine<'a> {
    run: &'a str,
    cycle: u32,
    job: &'a str,
    purpose: &'static str,
    /// Empty for the run's own prompts.
    suite: &'a str,
    prompt_id: &'a str,
    prompt: &'a str,
    index: u32,
    completion: &'a str,
    /// `null` if the samples have no verifier.
    reward: Option<f64>,
    outcome: &'static str,
    detail: &'a str,
    tokens: u32,
    /// Nats; `null` if not reported.
    logprob: Option<f64>,
    /// Nats for each token; `null` if not requested.
    token_logprobs: Option<Vec<f64>>,
    /// The drawn tokens; `null` if they are those of the completion, or in `turns`.
    token_ids: Option<&'a [u32]>,
    /// Of an episode; `null` for other samples.
    turns: Option<Vec<TurnEntry<'a>>>,
    finish: &'static str,
    kept: bool,
    base: &'a str,
    /// Manifest digest; empty for the base alone.
    adapter: &'a str,
    /// Text, because many JSON readers lose precision for large integers.
    seed: String,
    agent: &'a str,
    verifier: &'a str,
}

/// A turn of the model, and what its environment answered.
#[derive(Debug, Serialize)]
struct TurnEntry<'a> {
    text: &'a str,
    token_ids: &'a [u32],
    observation: &'a str,
    observation_ids: &'a [u32],
}

impl<'a> From<&'a v1::samples::Turn> for TurnEntry<'a> {
    fn from(turn: &'a v1::samples::Turn) -> Self {
        let v1::samples::Turn { text, token_ids, observation, observation_ids } = turn;
        Self { text, token_ids, observation, observation_ids }
    }
}

/// Joins orders, samples and verdicts in log order. Stores only what is not yet judged.
#[derive(Debug, Default)]
pub(super) struct SampleJoiner {
    kept: KeptSamples,
    /// These jobs are left out.
    replaced_jobs: BTreeSet<JobId>,
    /// Training samples have no verifier.
    is_unverified: bool,
    orders: BTreeMap<JobId, BTreeMap<u32, v1::GenerateOrder>>,
    samples: BTreeMap<JobId, v1::Samples>,
}

impl SampleJoiner {
    pub(super) fn new(
        kept: KeptSamples,
        replaced_jobs: BTreeSet<JobId>,
        is_unverified: bool,
    ) -> Self {
        Self { kept, replaced_jobs, is_unverified, ..Self::default() }
    }

    /// Returns the lines that the record completes: verdicts, or samples without a verifier.
    pub(super) fn join_record(&mut self, record: Record) -> Vec<u8> {
        match (record.fact.subject.key, record.fact.body) {
            (
                FactKey::GenerateOrder { job, .. }
                | FactKey::Samples { job, .. }
                | FactKey::Verdicts { job, .. },
                _,
            ) if self.replaced_jobs.contains(&job) => Vec::new(),
            (FactKey::GenerateOrder { job, attempt, .. }, FactBody::GenerateOrder(order)) => {
                self.orders.entry(job).or_default().insert(attempt, order);
                Vec::new()
            }
            (FactKey::Samples { job, .. }, FactBody::Samples(samples))
                if self.is_unverified && samples.purpose() == v1::Purpose::Train =>
            {
                let orders = self.orders.remove(&job).unwrap_or_default();
                let order = orders.get(&samples.attempt).or_else(|| orders.values().next());
                format_lines(&self.kept, order, &samples, None)
            }
            (FactKey::Samples { job, .. }, FactBody::Samples(samples)) => {
                self.samples.insert(job, samples);
                Vec::new()
            }
            (FactKey::Verdicts { job, .. }, FactBody::Verdicts(verdicts)) => {
                let orders = self.orders.remove(&job).unwrap_or_default();
                let Some(samples) = self.samples.remove(&job) else { return Vec::new() };
                let order = orders.get(&samples.attempt).or_else(|| orders.values().next());
                format_lines(&self.kept, order, &samples, Some(&verdicts))
            }
            _ => Vec::new(),
        }
    }
}

fn format_lines(
    kept: &KeptSamples,
    order: Option<&v1::GenerateOrder>,
    samples: &v1::Samples,
    verdicts: Option<&v1::Verdicts>,
) -> Vec<u8> {
    let judged: BTreeMap<(&str, u32), &v1::verdicts::Verdict> = verdicts
        .iter()
        .flat_map(|verdicts| &verdicts.verdicts)
        .map(|verdict| ((verdict.prompt_id.as_str(), verdict.index), verdict))
        .collect();
    let requests = order.iter().flat_map(|order| &order.requests);
    let prompts: BTreeMap<&str, &str> =
        requests.map(|request| (request.prompt_id.as_str(), request.text.as_str())).collect();
    let trains = samples.purpose() == v1::Purpose::Train;
    let mut bytes = Vec::new();
    for sample in &samples.samples {
        let id = sample.prompt_id.as_str();
        let verdict = judged.get(&(id, sample.index));
        if verdict.is_none() && verdicts.is_some() {
            continue;
        }
        let line = SampleLine {
            run: &samples.run,
            cycle: samples.cycle,
            job: &samples.job,
            purpose: if trains { "train" } else { "heldout" },
            suite: &samples.suite,
            prompt_id: id,
            prompt: prompts.get(id).copied().unwrap_or_default(),
            index: sample.index,
            completion: &sample.text,
            reward: verdict.map(|verdict| verdict.reward),
            outcome: verdict.map_or("unjudged", |verdict| outcome_name(verdict.outcome())),
            detail: verdict.map_or("", |verdict| &verdict.detail),
            tokens: sample.tokens,
            logprob: sample.logprob,
            token_logprobs: decode_logprobs(&sample.token_logprobs, sample.tokens as usize)
                .filter(|logprobs| !logprobs.is_empty()),
            token_ids: Some(&*sample.token_ids).filter(|ids| !ids.is_empty()),
            turns: Some(sample.turns.iter().map(TurnEntry::from).collect::<Vec<_>>())
                .filter(|turns| !turns.is_empty()),
            finish: finish_name(sample.finish()),
            kept: trains && kept.contains(&(sample.prompt_id.clone(), sample.index)),
            base: &samples.base,
            adapter: &samples.adapter,
            seed: order.map_or(String::new(), |order| {
                derive_sample_seed(order.seed, id, sample.index).to_string()
            }),
            agent: &samples.agent,
            verifier: verdicts.map_or("", |verdicts| &verdicts.verifier),
        };
        serde_json::to_writer(&mut bytes, &line).expect("strings and finite numbers are JSON");
        bytes.push(b'\n');
    }
    bytes
}

fn outcome_name(outcome: v1::verdicts::Outcome) -> &'static str {
    use v1::verdicts::Outcome;
    match outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "fail",
        Outcome::Error | Outcome::Unspecified => "error",
    }
}

fn finish_name(finish: v1::samples::Finish) -> &'static str {
    use v1::samples::Finish;
    match finish {
        Finish::Length => "length",
        Finish::Stop | Finish::Unspecified => "stop",
    }
}

pub(super) fn parse_kept(dataset: &[u8]) -> Result<KeptSamples, serde_json::Error> {
    #[derive(Deserialize)]
    struct Named {
        prompt_id: String,
        index: u32,
    }
    let lines = dataset.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| {
            serde_json::from_slice(line).map(|Named { prompt_id, index }| (prompt_id, index))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use wire::{Fact, Subject};

    use super::*;

    fn record(sequence: u64, subject: &str, payload: &str) -> Record {
        let fact = Fact::from_json(subject, payload.as_bytes()).unwrap();
        Record { sequence, time_ms: 1, author: None, fact }
    }

    fn facts() -> [Record; 3] {
        [
            record(
                5,
                "flotilla.r1.order.generate.default.2.t00000.1",
                r#"{"seed":"9","requests":[{"promptId":"p1","text":"1+1=","first":0,"count":2}]}"#,
            ),
            record(
                6,
                "flotilla.r1.samples.2.t00000",
                r#"{"run":"r1","cycle":2,"job":"t00000","attempt":1,"purpose":"TRAIN","agent":"g1",
                    "base":"b3:b","samples":[
                    {"promptId":"p1","index":0,"text":"2\n","tokens":2,"finish":"STOP",
                     "logprob":-1.5,"tokenLogprobs":"ALwAuA==","tokenIds":[7,9]},
                    {"promptId":"p1","index":1,"text":"é3","tokens":3,"finish":"LENGTH",
                     "turns":[{"text":"é","tokenIds":[4,2],"observation":"3","observationIds":[5]}]}]}"#,
            ),
            record(
                9,
                "flotilla.r1.verdicts.2.t00000",
                r#"{"verifier":"exact","verdicts":[
                    {"promptId":"p1","index":0,"outcome":"PASS","reward":1},
                    {"promptId":"p1","index":1,"outcome":"FAIL","detail":"no"}]}"#,
            ),
        ]
    }

    #[test]
    fn a_judged_sample_is_one_line_with_all_that_is_known_of_it() {
        let kept = parse_kept(b"{\"prompt\":\"1+1=\",\"completion\":\"2\",\"prompt_id\":\"p1\",\"index\":0,\"reward\":1.0}\n");
        let mut joiner = SampleJoiner::new(kept.unwrap(), BTreeSet::new(), false);
        let bytes: Vec<u8> =
            facts().into_iter().flat_map(|record| joiner.join_record(record)).collect();
        let text = String::from_utf8(bytes).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        let expected = serde_json::json!({
            "run": "r1", "cycle": 2, "job": "t00000", "purpose": "train", "suite": "",
            "prompt_id": "p1", "prompt": "1+1=", "index": 0, "completion": "2\n", "reward": 1.0, "outcome": "pass",
            "detail": "", "tokens": 2, "logprob": -1.5,
            "token_logprobs": [-1.0, -0.5], "token_ids": [7, 9], "turns": null, "finish": "stop", "kept": true,
            "base": "b3:b", "adapter": "", "seed": derive_sample_seed(9, "p1", 0).to_string(), "agent": "g1",
            "verifier": "exact",
        });
        assert_eq!(lines[0], expected);
        for unknown in ["logprob", "token_logprobs", "token_ids"] {
            assert!(lines[1][unknown].is_null(), "unknown, and not 0: {}", lines[1]);
        }
        let turn = serde_json::json!(
            [{"text": "é", "token_ids": [4, 2], "observation": "3", "observation_ids": [5]}]
        );
        assert_eq!(lines[1]["turns"], turn);
        assert_eq!((&lines[1]["outcome"], &lines[1]["kept"]), (&"fail".into(), &false.into()));
        assert!(joiner.orders.is_empty() && joiner.samples.is_empty(), "nothing is held");
    }

    #[test]
    fn samples_that_were_drawn_again_are_no_lines() {
        let redrawn = BTreeSet::from([JobId::new("t00000").unwrap()]);
        let mut joiner = SampleJoiner::new(KeptSamples::new(), redrawn, false);
        let bytes: Vec<u8> =
            facts().into_iter().flat_map(|record| joiner.join_record(record)).collect();
        assert!(bytes.is_empty());
    }

    #[test]
    fn samples_without_a_verifier_are_lines_without_a_reward() {
        let mut joiner = SampleJoiner::new(KeptSamples::new(), BTreeSet::new(), true);
        let [order, samples, _] = facts();
        assert!(joiner.join_record(order).is_empty());
        let text = String::from_utf8(joiner.join_record(samples)).unwrap();
        let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(text.lines().count(), 2);
        assert!(first["reward"].is_null());
        assert_eq!(first["outcome"], "unjudged");
        assert_eq!(first["seed"], derive_sample_seed(9, "p1", 0).to_string());
    }

    #[test]
    fn samples_that_nobody_judged_are_no_lines() {
        let mut joiner = SampleJoiner::default();
        let [order, samples, _] = facts();
        assert!(joiner.join_record(order).is_empty());
        assert!(joiner.join_record(samples).is_empty());
        let stray = "flotilla.r1.verdicts.2.t00001".parse::<Subject>().unwrap();
        let [.., mut verdicts] = facts();
        verdicts.fact.subject = stray;
        assert!(joiner.join_record(verdicts).is_empty());
    }
}
