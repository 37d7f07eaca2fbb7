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
    /// Distinct completions a judged sample, and nats a token where samples tell it.
    pub diversity: f64,
    pub entropy: Option<f64>,
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
        diversity: selected.diversity,
        entropy: selected.entropy,
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
    let first = before.cycles.values().find_map(|cycle| cycle.selected.as_ref());
    found.advice.extend(first.and_then(|first| collapse(first, selected)));
    Some(found)
}

/// Whether a policy says ever more surely ever the same, since the first cycle.
fn collapse(first: &v1::Selected, now: &v1::Selected) -> Option<String> {
    let (before, after) = (first.entropy?, now.entropy?);
    let collapsed = after < 0.5 * before && now.diversity < first.diversity;
    let percent = |share: f64| share * 100.0;
    collapsed.then(|| {
        format!(
            "samples grow alike: entropy is {after:.3} nats a token, in cycle {} it was \
             {before:.3}; {:.0} % of a prompt's samples are distinct, then {:.0} %: raise \
             sampling.temperature, or train from_base or with a lower learning_rate",
            first.cycle,
            percent(now.diversity),
            percent(first.diversity)
        )
    })
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
    fn a_policy_collapses_when_it_is_surer_of_fewer_samples() {
        let cycle = |cycle, entropy, diversity| v1::Selected {
            cycle,
            entropy,
            diversity,
            ..v1::Selected::default()
        };
        let first = cycle(1, Some(1.0), 0.9);
        let said = collapse(&first, &cycle(4, Some(0.2), 0.5)).unwrap();
        assert!(said.contains("0.200 nats a token, in cycle 1 it was 1.000; 50 %"), "{said}");
        assert_eq!(collapse(&first, &cycle(4, Some(0.2), 0.9)), None, "sure, but of many");
        assert_eq!(collapse(&first, &cycle(4, Some(0.9), 0.5)), None);
        assert_eq!(collapse(&first, &cycle(4, None, 0.5)), None, "nobody knows");
        assert_eq!(collapse(&first, &first), None);
    }

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
