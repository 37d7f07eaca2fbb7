//! What a cycle drew, sample by sample: what was thought of each, and what became of it.

use std::collections::{BTreeMap, BTreeSet};

use cycle::Run;
use prost::Message;
use wire::{Body, JobId, Place, Record, RunId, v1};

use crate::{Control, HistoryError};

use v1::samples_request::Which;

/// Prompts of a page.
const PROMPTS_MAX: u32 = 100;
const PROMPTS: u32 = 20;
/// Samples of a prompt that are shown.
const SAMPLES_MAX: usize = 256;
/// What of a prompt's samples is shown in all, and of the one that is shown least.
const PROMPT_BYTES_MAX: usize = 256 << 10;
const TEXT_BYTES_MIN: usize = 512;
/// Of a page, but for its first prompt.
const PAGE_BYTES_MAX: usize = 2 << 20;

/// Sought for by a prompt's id and a sample's index.
type Fates = BTreeMap<(String, u32), &'static str>;

/// What is known of a job's samples.
#[derive(Default)]
struct Job {
    requests: Vec<v1::generate_order::Request>,
    samples: Option<v1::Samples>,
    verdicts: Option<v1::Verdicts>,
}

impl Control {
    /// A page of a cycle's samples, wherever they are by now.
    ///
    /// # Errors
    /// When there is no such run, or its samples cannot be read.
    pub async fn samples(
        &self,
        id: &RunId,
        request: &v1::SamplesRequest,
    ) -> Result<v1::SamplesPage, HistoryError> {
        let records = self.run_without_samples(id).await?;
        let spec = records.first().and_then(Run::start);
        let spec = spec.ok_or_else(|| HistoryError::Unknown(id.clone()))?.spec;
        let number = request.cycle;
        let archived = records.iter().find_map(|record| match &record.fact.body {
            Body::Archived(archived) if archived.cycle == number => Some(archived.clone()),
            _ => None,
        });
        let bulky = self.bulky(id, number, archived).await?;
        let void = quarantined(&records, number);
        let fates = match request.which() {
            Which::HeldoutSamples => Some(Fates::new()),
            Which::TrainSamples | Which::Unspecified => self.fates(id, number, records).await?,
        };
        let jobs = jobs(bulky, request, &void);
        let suites = match spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => raft.prompt_suites,
            _ => Vec::new(),
        };
        let suites = suites.into_iter().map(|suite| suite.name).collect();
        // Many texts are looked through.
        let request = request.clone();
        let page =
            tokio::task::spawn_blocking(move || page(&request, jobs, fates.as_ref(), suites));
        page.await.map_err(|error| HistoryError::Page(error.to_string()))
    }

    /// `None`: the cycle has not selected yet.
    async fn fates(
        &self,
        id: &RunId,
        number: u32,
        records: Vec<Record>,
    ) -> Result<Option<Fates>, HistoryError> {
        match self.before_selection(id, number, records).await {
            Ok(run) => Ok(cycle::fates(&run, number)),
            Err(HistoryError::NotYet { .. } | HistoryError::SelectsNothing(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Jobs of a cycle that were drawn again, as what drew them was not what was ordered.
fn quarantined(records: &[Record], cycle: u32) -> BTreeSet<String> {
    let quarantines = records.iter().filter_map(|record| match &record.fact.body {
        Body::Quarantine(quarantine) => Some(quarantine),
        _ => None,
    });
    quarantines.flat_map(|quarantine| quarantine.jobs_of(cycle)).map(str::to_owned).collect()
}

/// Those that are asked for, by their id.
fn jobs(
    records: Vec<Record>,
    request: &v1::SamplesRequest,
    void: &BTreeSet<String>,
) -> BTreeMap<JobId, Job> {
    let purpose = match request.which() {
        Which::HeldoutSamples => v1::Purpose::Heldout,
        Which::TrainSamples | Which::Unspecified => v1::Purpose::Train,
    };
    let asked = |of: v1::Purpose, suite: &str| of == purpose && suite == request.suite;
    let mut jobs: BTreeMap<JobId, Job> = BTreeMap::new();
    for record in records {
        match (record.fact.subject.place, record.fact.body) {
            (Place::GenerateOrder { job, .. }, Body::GenerateOrder(order))
                if asked(order.purpose(), &order.suite) =>
            {
                jobs.entry(job).or_default().requests = order.requests;
            }
            (Place::Samples { job, .. }, Body::Samples(samples))
                if asked(samples.purpose(), &samples.suite) =>
            {
                jobs.entry(job).or_default().samples = Some(samples);
            }
            (Place::Verdicts { job, .. }, Body::Verdicts(verdicts))
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

fn page(
    request: &v1::SamplesRequest,
    jobs: BTreeMap<JobId, Job>,
    fates: Option<&Fates>,
    suites: Vec<String>,
) -> v1::SamplesPage {
    let prompts = prompts(jobs, fates);
    let mut page = v1::SamplesPage { suites, ..Default::default() };
    for sample in prompts.iter().flat_map(|prompt| &prompt.samples) {
        let words = [(&sample.outcome, &mut page.outcomes), (&sample.fate, &mut page.fates)];
        for (word, counts) in words.into_iter().filter(|(word, _)| !word.is_empty()) {
            *counts.entry(word.clone()).or_default() += 1;
        }
    }
    let text = request.text.to_lowercase();
    let limit = if request.limit == 0 { PROMPTS } else { request.limit.min(PROMPTS_MAX) };
    let mut bytes = 0;
    for mut prompt in prompts {
        if !fits(&prompt, &request.fate, &text) {
            continue;
        }
        let place = page.prompts_in_all;
        page.prompts_in_all += 1;
        let shown = u32::try_from(page.prompts.len()).unwrap_or(u32::MAX);
        if place < request.offset || shown >= limit || bytes >= PAGE_BYTES_MAX {
            continue;
        }
        bytes += cut(&mut prompt);
        page.prompts.push(prompt);
    }
    page
}

/// In the order of the jobs, and each with all of its samples, by index.
fn prompts(jobs: BTreeMap<JobId, Job>, fates: Option<&Fates>) -> Vec<v1::samples_page::Prompt> {
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
            prompts[*place].samples.push(told(sample, verdict, fate, &samples.agent));
        }
    }
    prompts.iter_mut().for_each(|prompt| prompt.samples.sort_by_key(|sample| sample.index));
    prompts
}

fn told(
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
    }
}

/// `text` is in lower case.
fn fits(prompt: &v1::samples_page::Prompt, fate: &str, text: &str) -> bool {
    let came_to = |sample: &v1::samples_page::Sample| sample.outcome == fate || sample.fate == fate;
    let has = |other: &str| other.to_lowercase().contains(text);
    let says = || has(&prompt.text) || prompt.samples.iter().any(|sample| has(&sample.text));
    (fate.is_empty() || prompt.samples.iter().any(came_to)) && (text.is_empty() || says())
}

/// So that neither a long sample nor many of them are more than can be answered. Returns how many
/// bytes are left.
fn cut(prompt: &mut v1::samples_page::Prompt) -> usize {
    prompt.samples_in_all = u32::try_from(prompt.samples.len()).unwrap_or(u32::MAX);
    prompt.samples.truncate(SAMPLES_MAX);
    // Prompt, texts and details.
    let parts = 2 * prompt.samples.len() + 1;
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
    }
    prompt.encoded_len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(prompts: &[&str], texts: &[&str]) -> Job {
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
        Job {
            requests: prompts.iter().map(request).collect(),
            // As they may come: the last first.
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

    fn shown(request: &v1::SamplesRequest, fates: Option<&Fates>) -> v1::SamplesPage {
        let jobs =
            [("j1", job(&["a", "b"], &["four", "Five"])), ("j2", job(&["c"], &["six", "x"]))];
        let jobs = jobs.into_iter().map(|(id, job)| (JobId::new(id).unwrap(), job)).collect();
        page(request, jobs, fates, Vec::new())
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
            prompts([(JobId::new("j1").unwrap(), job(&["a"], &[&long, "4"]))].into(), None);
        let bytes = cut(&mut prompt[0]);
        assert!(bytes <= PROMPT_BYTES_MAX + 1024);
        let samples = &prompt[0].samples;
        assert!(samples[0].cut && samples[0].text.ends_with('é') && !samples[1].cut);
        let many: Vec<&str> = vec![&long; 4096];
        let mut prompt = prompts([(JobId::new("j1").unwrap(), job(&["a"], &many))].into(), None);
        assert!(cut(&mut prompt[0]) < 2 * PROMPT_BYTES_MAX);
        assert_eq!((prompt[0].samples.len(), prompt[0].samples_in_all), (SAMPLES_MAX, 4096));
    }
}
