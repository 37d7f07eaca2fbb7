//! Why so little was kept of a cycle, and what would help.

use std::collections::BTreeMap;

use serde::Serialize;
use wire::v1::{self, samples::Finish, verdicts::Outcome};

use crate::state::Run;

/// What became of a cycle's samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Yield {
    pub cycle: u32,
    pub considered: u32,
    pub kept: u32,
    /// Of the judged samples, and what they had to reach.
    pub judged: u32,
    pub passed: u32,
    pub min_reward: f64,
    /// Prompts of which all, some or no judged samples passed.
    pub all_right: u32,
    pub mixed: u32,
    pub all_wrong: u32,
    /// Judged samples that were cut at `max_new_tokens`, and those of them that failed.
    pub cut: u32,
    pub cut_failed: u32,
    /// How many were not kept, by why.
    pub dropped: BTreeMap<String, u32>,
    /// What verifiers said most of failures, and how often.
    pub failures: Vec<(String, u32)>,
    /// And of their own errors.
    pub errors: Vec<(String, u32)>,
    /// What would have more kept, the most promising first.
    pub advice: Vec<String>,
}

/// Sayings of verifiers that are told.
const SAYINGS_MAX: usize = 5;

/// Of what matters, as a share.
const MUCH: f64 = 0.25;

/// Looks at a cycle that is about to select, and at what it selected. `None` for a run that
/// selects nothing, and for a cycle that has not.
pub fn yields(before: &Run, selected: &v1::Selected) -> Option<Yield> {
    let raft = before.raft()?;
    let cycle = before.cycles.get(&selected.cycle)?;
    let mut found = Yield {
        cycle: selected.cycle,
        considered: selected.considered,
        kept: selected.kept,
        min_reward: selected.min_reward,
        dropped: selected.dropped.clone(),
        ..Yield::default()
    };
    for (judged, passed) in selected.judged.iter().zip(&selected.passed) {
        found.judged = found.judged.saturating_add(*judged);
        found.passed = found.passed.saturating_add(*passed);
        match (*judged, *passed) {
            (0, _) => {}
            (_, 0) => found.all_wrong += 1,
            (judged, passed) if passed == judged => found.all_right += 1,
            _ => found.mixed += 1,
        }
    }
    let mut failures = BTreeMap::new();
    let mut errors = BTreeMap::new();
    for (_, job) in cycle.jobs_for(v1::Purpose::Train) {
        let verdicts = job.verdicts_by_sample();
        for sample in job.samples.iter().flat_map(|samples| &samples.samples) {
            let Some(verdict) = verdicts.get(&(sample.prompt_id.as_str(), sample.index)) else {
                continue;
            };
            let failed = verdict.reward < selected.min_reward;
            let cut = sample.finish() == Finish::Length;
            found.cut += u32::from(cut);
            found.cut_failed += u32::from(cut && failed);
            match verdict.outcome() {
                Outcome::Error => *errors.entry(saying(&verdict.detail)).or_default() += 1,
                Outcome::Fail if failed => {
                    *failures.entry(saying(&verdict.detail)).or_default() += 1;
                }
                _ => {}
            }
        }
    }
    found.failures = most(failures);
    found.errors = most(errors);
    found.advice = advise(&found, raft);
    Some(found)
}

/// The first line of a detail without its numbers, which differ from sample to sample.
fn saying(detail: &str) -> String {
    let line = detail.lines().next().unwrap_or_default();
    let mut said = String::new();
    for sign in line.chars() {
        match sign {
            '0'..='9' if said.ends_with('#') => {}
            '0'..='9' => said.push('#'),
            other => said.push(other),
        }
    }
    said
}

fn most(said: BTreeMap<String, u32>) -> Vec<(String, u32)> {
    let mut said: Vec<(String, u32)> = said.into_iter().collect();
    said.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    said.truncate(SAYINGS_MAX);
    said
}

fn advise(found: &Yield, raft: &v1::spec::Raft) -> Vec<String> {
    let of = |why: &str| found.dropped.get(why).copied().unwrap_or_default();
    let all = |part: u32| f64::from(part) / f64::from(found.considered.max(1));
    let failed = found.judged.saturating_sub(found.passed);
    let prompts = found.all_right + found.mixed + found.all_wrong;
    let of_prompts = |part: u32| f64::from(part) / f64::from(prompts.max(1));
    let rules = raft.selection.unwrap_or_default();
    let cut = f64::from(found.cut_failed) / f64::from(failed.max(1));
    let limit = raft.sampling.map_or(0, |sampling| sampling.max_new_tokens);
    let cases = [
        (
            all(of("error")) >= MUCH,
            "the verifier failed at many samples: see its errors".to_owned(),
        ),
        (all(of("void")) > 0.0, "boxes generated with another policy: `flotilla audit`".to_owned()),
        (all(of("set aside")) > 0.0, "jobs were given up: `flotilla run show`".to_owned()),
        (
            failed > 0 && cut >= MUCH,
            format!("many failures were cut at {limit} tokens: raise sampling.max_new_tokens"),
        ),
        (
            of_prompts(found.all_wrong) >= 0.5,
            "most prompts never passed: more samples_per_prompt, easier prompts \
             (curriculum.difficulty) or a lower selection.min_reward"
                .to_owned(),
        ),
        (
            of_prompts(found.all_right) >= 0.5,
            "most prompts always passed and teach little: harder ones (curriculum.difficulty with \
             a lower target)"
                .to_owned(),
        ),
        (
            all(of("duplicate") + of("near duplicate")) >= MUCH,
            "many samples say the same: raise sampling.temperature".to_owned(),
        ),
        (
            rules.keep_per_prompt > 0 && all(of("outranked")) >= MUCH,
            format!(
                "many good samples were outranked: raise selection.keep_per_prompt above {}",
                rules.keep_per_prompt
            ),
        ),
        (
            all(of("short") + of("long") + of("unfinished")) >= MUCH,
            "many samples were refused for their length: selection.min_tokens, max_tokens, \
             finished"
                .to_owned(),
        ),
    ];
    cases.into_iter().filter(|(holds, _)| *holds).map(|(_, advice)| advice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sayings_differ_in_words_not_in_numbers() {
        assert_eq!(saying("found 132, expected 1330\nmore"), "found #, expected #");
        let said = BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 9), ("c".to_owned(), 1)]);
        let found: Vec<String> = most(said).into_iter().map(|(what, _)| what).collect();
        assert_eq!(found, ["b", "a", "c"]);
    }

    #[test]
    fn what_is_said_follows_from_what_was_lost() {
        let raft = v1::spec::Raft {
            sampling: Some(v1::Sampling { max_new_tokens: 64, ..Default::default() }),
            selection: Some(v1::Selection { keep_per_prompt: 1, ..Default::default() }),
            ..Default::default()
        };
        let some = |change: fn(&mut Yield)| {
            let mut found =
                Yield { considered: 100, judged: 100, passed: 90, mixed: 9, ..Yield::default() };
            change(&mut found);
            advise(&found, &raft)
        };
        assert_eq!(some(|_| {}), Vec::<String>::new());
        let found = some(|found| found.cut_failed = 9);
        assert!(found[0].contains("cut at 64 tokens"), "{found:?}");
        let found = some(|found| found.dropped = [("outranked".into(), 80)].into());
        assert!(found[0].contains("keep_per_prompt above 1"), "{found:?}");
        let found = some(|found| found.all_wrong = 20);
        assert!(found[0].contains("never passed"), "{found:?}");
    }
}
