//! Pages of a cycle's samples, each with its verdict and its outcome in the selection.

use std::collections::{BTreeMap, BTreeSet};

use cycle::Run;
use prost::Message;
use wire::{FactBody, FactKey, JobId, Record, RunId, v1};

use crate::{FleetControl, HistoryError, run_history::check_cycle};

use v1::samples_request::Which;

const PAGE_PROMPTS_MAX: u32 = 100;
const PAGE_PROMPTS_DEFAULT: u32 = 20;
/// Further samples of the prompt are not shown.
const PROMPT_SAMPLES_MAX: usize = 256;
/// Text of one prompt and its samples.
const PROMPT_BYTES_MAX: usize = 256 << 10;
/// Shown at least of each text.
const TEXT_BYTES_MIN: usize = 512;
/// The last prompt of a page may exceed it.
const PAGE_BYTES_MAX: usize = 2 << 20;

/// Outcome by prompt id and sample index.
type SampleOutcomes = BTreeMap<(String, u32), &'static str>;

#[derive(Default)]
struct JobSamples {
    requests: Vec<v1::generate_order::Request>,
    samples: Option<v1::Samples>,
    verdicts: Option<v1::Verdicts>,
}

impl FleetControl {
    /// Returns a page of a cycle's samples, from the log or the cycle's archive.
    pub async fn get_samples_page(
        &self,
        id: &RunId,
        request: &v1::SamplesRequest,
    ) -> Result<v1::SamplesPage, HistoryError> {
        let id = &self.cycle_owner(id, request.cycle).await?;
        let records = self.records_without_samples(id).await?;
        let (spec, jobs) = self.read_jobs(id, &records, request).await?;
        let fates = match request.which() {
            Which::HeldoutSamples => Some(SampleOutcomes::new()),
            Which::TrainSamples | Which::Unspecified => {
                self.sample_outcomes(id, request.cycle, records).await?
            }
        };
        let suites = match spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => raft.prompt_suites,
            _ => return Err(HistoryError::SelectsNothing(id.clone())),
        };
        let suites = suites.into_iter().map(|suite| suite.name).collect();
        // This searches many texts.
        let request = request.clone();
        let page =
            tokio::task::spawn_blocking(move || build_page(&request, jobs, fates.as_ref(), suites));
        page.await.map_err(|error| HistoryError::Page(error.to_string()))
    }

    /// Returns the spec of a run, and a cycle's held-out samples of a suite (`""`: of the run's own
    /// prompts) with their verdicts, by prompt.
    pub(crate) async fn heldout_samples(
        &self,
        id: &RunId,
        cycle: u32,
        suite: &str,
    ) -> Result<(v1::Spec, Vec<v1::samples_page::Prompt>), HistoryError> {
        let id = &self.cycle_owner(id, cycle).await?;
        let records = self.records_without_samples(id).await?;
        let which = Which::HeldoutSamples.into();
        let suite = suite.to_owned();
        let request = v1::SamplesRequest { cycle, which, suite, ..Default::default() };
        let (spec, jobs) = self.read_jobs(id, &records, &request).await?;
        Ok((spec, group_by_prompt(jobs, None)))
    }

    /// Returns the spec of a run, and the jobs of a cycle that the request asks for.
    async fn read_jobs(
        &self,
        id: &RunId,
        records: &[Record],
        request: &v1::SamplesRequest,
    ) -> Result<(v1::Spec, BTreeMap<JobId, JobSamples>), HistoryError> {
        let spec = records.first().and_then(Run::start);
        let spec = spec.ok_or_else(|| HistoryError::Unknown(id.clone()))?.spec;
        let number = request.cycle;
        if let Some(v1::spec::Kind::Raft(raft)) = &spec.kind {
            check_cycle(id, number, raft)?;
        }
        let archived = records.iter().find_map(|record| match &record.fact.body {
            FactBody::Archived(archived) if archived.cycle == number => Some(archived.clone()),
            _ => None,
        });
        let bulky = self.read_bulky_facts(id, number, archived).await?;
        let jobs = collect_jobs(bulky, request, &quarantined_jobs(records, number));
        Ok((spec, jobs))
    }

    async fn sample_outcomes(
        &self,
        id: &RunId,
        number: u32,
        records: Vec<Record>,
    ) -> Result<Option<SampleOutcomes>, HistoryError> {
        match self.run_before_selection(id, number, records).await {
            Ok(run) => Ok(cycle::sample_outcomes(&run, number)),
            Err(HistoryError::NotYet { .. } | HistoryError::SelectsNothing(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn quarantined_jobs(records: &[Record], cycle: u32) -> BTreeSet<String> {
    let quarantines = records.iter().filter_map(|record| match &record.fact.body {
        FactBody::Quarantine(quarantine) => Some(quarantine),
        _ => None,
    });
    quarantines.flat_map(|quarantine| quarantine.jobs_in_cycle(cycle)).map(str::to_owned).collect()
}

/// Returns the requested jobs by id, without those in `void`.
fn collect_jobs(
    records: Vec<Record>,
    request: &v1::SamplesRequest,
    void: &BTreeSet<String>,
) -> BTreeMap<JobId, JobSamples> {
    let purpose = match request.which() {
        Which::HeldoutSamples => v1::Purpose::Heldout,
        Which::TrainSamples | Which::Unspecified => v1::Purpose::Train,
    };
    let asked = |of: v1::Purpose, suite: &str| of == purpose && suite == request.suite;
    let mut jobs: BTreeMap<JobId, JobSamples> = BTreeMap::new();
    for record in records {
        match (record.fact.subject.key, record.fact.body) {
            (FactKey::GenerateOrder { job, .. }, FactBody::GenerateOrder(order))
                if asked(order.purpose(), &order.suite) =>
            {
                jobs.entry(job).or_default().requests = order.requests;
            }
            (FactKey::Samples { job, .. }, FactBody::Samples(samples))
                if asked(samples.purpose(), &samples.suite) =>
            {
                jobs.entry(job).or_default().samples = Some(samples);
            }
            (FactKey::Verdicts { job, .. }, FactBody::Verdicts(verdicts))
                if asked(verdicts.purpose(), &verdicts.suite) =>
            {
                jobs.entry(job).or_default().verdicts = Some(verdicts);
            }
            _ => {}
        }
    }
    jobs.retain(|job, _| !void.contains(job.as_str()));
    jobs
}

/// Counts outcomes over all samples, not only those on the page.
fn build_page(
    request: &v1::SamplesRequest,
    jobs: BTreeMap<JobId, JobSamples>,
    fates: Option<&SampleOutcomes>,
    suites: Vec<String>,
) -> v1::SamplesPage {
    let prompts = group_by_prompt(jobs, fates);
    let mut page = v1::SamplesPage { suites, ..Default::default() };
    for sample in prompts.iter().flat_map(|prompt| &prompt.samples) {
        let words = [(&sample.outcome, &mut page.outcomes), (&sample.fate, &mut page.fates)];
        for (word, counts) in words.into_iter().filter(|(word, _)| !word.is_empty()) {
            *counts.entry(word.clone()).or_default() += 1;
        }
    }
    let text = request.text.to_lowercase();
    let limit =
        if request.limit == 0 { PAGE_PROMPTS_DEFAULT } else { request.limit.min(PAGE_PROMPTS_MAX) };
    let mut bytes = 0;
    for mut prompt in prompts {
        if !matches_request(&prompt, &request.fate, &text) {
            continue;
        }
        let place = page.prompts_in_all;
        page.prompts_in_all += 1;
        let shown = u32::try_from(page.prompts.len()).unwrap_or(u32::MAX);
        if place < request.offset || shown >= limit || bytes >= PAGE_BYTES_MAX {
            continue;
        }
        bytes += truncate_prompt(&mut prompt);
        page.prompts.push(prompt);
    }
    page
}

/// Keeps prompts in the order of the jobs, and sorts the samples of a prompt by index.
fn group_by_prompt(
    jobs: BTreeMap<JobId, JobSamples>,
    fates: Option<&SampleOutcomes>,
) -> Vec<v1::samples_page::Prompt> {
    let mut prompts: Vec<v1::samples_page::Prompt> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for job in jobs.into_values() {
        for request in job.requests {
            let place = *places.entry(request.prompt_id.clone()).or_insert(prompts.len());
            if place == prompts.len() {
                let (prompt_id, text) = (request.prompt_id, request.text);
                prompts.push(v1::samples_page::Prompt { prompt_id, text, ..Default::default() });
            }
        }
        let Some(samples) = job.samples else { continue };
        let verdicts = job.verdicts.map_or(vec![], |verdicts| verdicts.verdicts);
        let mut verdicts: BTreeMap<(String, u32), v1::verdicts::Verdict> =
            verdicts.into_iter().map(|it| ((it.prompt_id.clone(), it.index), it)).collect();
        for sample in samples.samples {
            let Some(place) = places.get(&sample.prompt_id) else { continue };
            let name = (sample.prompt_id.clone(), sample.index);
            let verdict = verdicts.remove(&name);
            let fate = fates.map_or("", |fates| fates.get(&name).copied().unwrap_or_default());
            prompts[*place].samples.push(sample_to_proto(sample, verdict, fate, &samples.agent));
        }
    }
    prompts.iter_mut().for_each(|prompt| prompt.samples.sort_by_key(|sample| sample.index));
    prompts
}

fn sample_to_proto(
    sample: v1::samples::Sample,
    verdict: Option<v1::verdicts::Verdict>,
    fate: &str,
    agent: &str,
) -> v1::samples_page::Sample {
    use v1::{samples::Finish, verdicts::Outcome};
    let finish = match sample.finish() {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Unspecified => "",
    };
    let outcome = match verdict.as_ref().map(v1::verdicts::Verdict::outcome) {
        Some(Outcome::Pass) => "pass",
        Some(Outcome::Fail) => "fail",
        Some(Outcome::Error) => "error",
        Some(Outcome::Unspecified) | None => "",
    };
    v1::samples_page::Sample {
        index: sample.index,
        text: sample.text,
        cut: false,
        tokens: sample.tokens,
        finish: finish.into(),
        logprob: sample.logprob,
        outcome: outcome.into(),
        reward: verdict.as_ref().map_or(0.0, |verdict| verdict.reward),
        detail: verdict.map_or(String::new(), |verdict| verdict.detail),
        fate: fate.into(),
        agent: agent.into(),
        turns: sample.turns.into_iter().map(turn_to_proto).collect(),
    }
}

fn turn_to_proto(turn: v1::samples::Turn) -> v1::samples_page::Turn {
    v1::samples_page::Turn { text: turn.text, observation: turn.observation }
}

/// Requires a sample with the outcome `fate`, and `text` (in lower case) in the prompt or one of
/// its samples. An empty value matches all.
fn matches_request(prompt: &v1::samples_page::Prompt, fate: &str, text: &str) -> bool {
    let came_to = |sample: &v1::samples_page::Sample| sample.outcome == fate || sample.fate == fate;
    let has = |other: &str| other.to_lowercase().contains(text);
    let says = || has(&prompt.text) || prompt.samples.iter().any(|sample| has(&sample.text));
    (fate.is_empty() || prompt.samples.iter().any(came_to)) && (text.is_empty() || says())
}

/// Shortens texts to the limits of a page, and returns the encoded size in bytes.
fn truncate_prompt(prompt: &mut v1::samples_page::Prompt) -> usize {
    prompt.samples_in_all = u32::try_from(prompt.samples.len()).unwrap_or(u32::MAX);
    prompt.samples.truncate(PROMPT_SAMPLES_MAX);
    // One prompt, and for each sample a text, a detail and two texts a turn.
    let turns: usize = prompt.samples.iter().map(|sample| sample.turns.len()).sum();
    let parts = 2 * (prompt.samples.len() + turns) + 1;
    let most = (PROMPT_BYTES_MAX / parts).max(TEXT_BYTES_MIN);
    let shorten = |text: &mut String| {
        let cut = text.len() > most;
        text.truncate(text.floor_char_boundary(most));
        cut
    };
    shorten(&mut prompt.text);
    for sample in &mut prompt.samples {
        sample.cut = shorten(&mut sample.text);
        shorten(&mut sample.detail);
        for turn in &mut sample.turns {
            sample.cut |= shorten(&mut turn.text);
            sample.cut |= shorten(&mut turn.observation);
        }
    }
    prompt.encoded_len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(prompts: &[&str], texts: &[&str]) -> JobSamples {
        let request = |id: &&str| v1::generate_order::Request {
            prompt_id: (*id).into(),
            text: format!("What is {id}?"),
            first: 0,
            count: 2,
        };
        let sample = |id: &str, index: usize| v1::samples::Sample {
            prompt_id: id.into(),
            index: u32::try_from(index).unwrap(),
            text: texts[index].into(),
            ..Default::default()
        };
        let verdict = |id: &str, index: usize| v1::verdicts::Verdict {
            prompt_id: id.into(),
            index: u32::try_from(index).unwrap(),
            outcome: [v1::verdicts::Outcome::Fail, v1::verdicts::Outcome::Pass][index % 2].into(),
            ..Default::default()
        };
        let each = || prompts.iter().flat_map(|id| (0..texts.len()).map(move |index| (id, index)));
        JobSamples {
            requests: prompts.iter().map(request).collect(),
            // Jobs may arrive in any order: the last first.
            samples: Some(v1::Samples {
                samples: each().rev().map(|(id, index)| sample(id, index)).collect(),
                ..Default::default()
            }),
            verdicts: Some(v1::Verdicts {
                verdicts: each().map(|(id, index)| verdict(id, index)).collect(),
                ..Default::default()
            }),
        }
    }

    fn shown(request: &v1::SamplesRequest, fates: Option<&SampleOutcomes>) -> v1::SamplesPage {
        let jobs =
            [("j1", job(&["a", "b"], &["four", "Five"])), ("j2", job(&["c"], &["six", "x"]))];
        let jobs = jobs.into_iter().map(|(id, job)| (JobId::new(id).unwrap(), job)).collect();
        build_page(request, jobs, fates, Vec::new())
    }

    fn ids(page: &v1::SamplesPage) -> Vec<&str> {
        page.prompts.iter().map(|prompt| prompt.prompt_id.as_str()).collect()
    }

    #[test]
    fn prompts_come_with_all_their_samples_in_order() {
        let fates = [(("a".to_owned(), 1), "kept"), (("a".to_owned(), 0), "failed")].into();
        let page = shown(&v1::SamplesRequest::default(), Some(&fates));
        assert_eq!(ids(&page), ["a", "b", "c"]);
        let samples: Vec<_> = page.prompts[0]
            .samples
            .iter()
            .map(|it| (it.text.as_str(), it.outcome.as_str(), it.fate.as_str()))
            .collect();
        assert_eq!(samples, [("four", "fail", "failed"), ("Five", "pass", "kept")]);
        let counts = |counts: [(&str, u32); 2]| counts.map(|(word, n)| (word.to_owned(), n)).into();
        assert_eq!(page.outcomes, counts([("fail", 3), ("pass", 3)]));
        assert_eq!(page.fates, counts([("failed", 1), ("kept", 1)]));
    }

    #[test]
    fn a_page_is_what_was_asked_for_and_says_how_much_there_is() {
        let request = v1::SamplesRequest { offset: 1, limit: 1, ..Default::default() };
        let page = shown(&request, None);
        assert_eq!((ids(&page), page.prompts_in_all), (vec!["b"], 3));
        let request = v1::SamplesRequest { text: "FIVE".into(), ..Default::default() };
        assert_eq!(ids(&shown(&request, None)), ["a", "b"]);
        let fates = [(("b".to_owned(), 0), "duplicate")].into();
        let request = v1::SamplesRequest { fate: "duplicate".into(), ..Default::default() };
        let page = shown(&request, Some(&fates));
        assert_eq!((ids(&page), page.prompts_in_all), (vec!["b"], 1));
        let request = v1::SamplesRequest { offset: 9, ..Default::default() };
        let page = shown(&request, None);
        assert_eq!((page.prompts.len(), page.prompts_in_all), (0, 3));
    }

    #[test]
    fn long_texts_are_cut_where_a_character_ends_and_say_so() {
        let long = "é".repeat(PROMPT_BYTES_MAX);
        let mut prompt =
            group_by_prompt([(JobId::new("j1").unwrap(), job(&["a"], &[&long, "4"]))].into(), None);
        let bytes = truncate_prompt(&mut prompt[0]);
        assert!(bytes <= PROMPT_BYTES_MAX + 1024);
        let samples = &prompt[0].samples;
        assert!(samples[0].cut && samples[0].text.ends_with('é') && !samples[1].cut);
        let mut episode = job(&["a"], &["4"]);
        let turn = v1::samples::Turn {
            text: long.clone(),
            observation: long.clone(),
            ..Default::default()
        };
        episode.samples.as_mut().unwrap().samples[0].turns = vec![turn; 3];
        let mut prompt = group_by_prompt([(JobId::new("j1").unwrap(), episode)].into(), None);
        assert!(truncate_prompt(&mut prompt[0]) <= PROMPT_BYTES_MAX + 1024);
        let sample = &prompt[0].samples[0];
        assert!(sample.cut && sample.text == "4" && sample.turns.len() == 3);
        let many: Vec<&str> = vec![&long; 4096];
        let mut prompt =
            group_by_prompt([(JobId::new("j1").unwrap(), job(&["a"], &many))].into(), None);
        assert!(truncate_prompt(&mut prompt[0]) < 2 * PROMPT_BYTES_MAX);
        assert_eq!((prompt[0].samples.len(), prompt[0].samples_in_all), (PROMPT_SAMPLES_MAX, 4096));
    }
}
