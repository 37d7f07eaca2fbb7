//! Diagnoses a selection: why samples were dropped, and what would help.

use std::collections::BTreeMap;

use serde::Serialize;
use wire::v1::{self, samples::Finish, verdicts::Outcome};

use crate::state::Run;

/// The outcome of a cycle's samples, with advice.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SelectionReport {
    pub cycle: u32,
    /// Planned samples.
    pub considered: u32,
    /// Kept samples.
    pub kept: u32,
    /// Judged samples.
    pub judged: u32,
    /// Judged samples that reached the minimum reward.
    pub passed: u32,
    pub min_reward: f64,
    /// Prompts of which all judged samples passed.
    pub all_right: u32,
    /// Prompts of which some judged samples passed.
    pub mixed: u32,
    /// Prompts of which no judged sample passed.
    pub all_wrong: u32,
    /// Judged samples that were cut off at `max_new_tokens`.
    pub cut: u32,
    /// Samples that were cut off and failed.
    pub cut_failed: u32,
    /// Samples that failed because the verifier found no answer in them.
    pub unanswered: u32,
    pub dropped: BTreeMap<String, u32>,
    /// Failed samples, grouped by the verifier's message; the most frequent groups.
    pub failures: Vec<MessageGroup>,
    /// Samples on which the verifier itself failed, likewise.
    pub errors: Vec<MessageGroup>,
    /// Mean over prompts of distinct completions per sample.
    pub diversity: f64,
    /// Entropy of the policy in nats per token, if the samples report log-probabilities.
    pub entropy: Option<f64>,
    /// Changes that would keep more samples, most promising first.
    pub advice: Vec<String>,
}

/// Samples whose verdicts have the same message apart from numbers, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct MessageGroup {
    pub count: u32,
    /// The first line of the verifier's message, which may be empty.
    pub message: String,
    pub prompt_id: String,
    /// The completion, in part.
    pub completion: String,
}

const MESSAGES_MAX: usize = 5;

/// In characters.
const COMPLETION_MAX: usize = 60;

/// Minimum share of samples affected by a problem for which the report gives advice.
const ADVICE_SHARE_MIN: f64 = 0.25;

/// Analyses a cycle's training samples and its selection `selected`; `before` is the run in its
/// state before the selection. `None` if the run is no RAFT run or has no such cycle.
pub fn report_selection(before: &Run, selected: &v1::Selected) -> Option<SelectionReport> {
    let raft = before.raft_spec()?;
    let cycle = before.cycles.get(&selected.cycle)?;
    let mut found = SelectionReport {
        cycle: selected.cycle,
        considered: selected.considered,
        kept: selected.kept,
        min_reward: selected.min_reward,
        dropped: selected.dropped.clone(),
        diversity: selected.diversity,
        entropy: selected.entropy,
        ..SelectionReport::default()
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
            found.unanswered += u32::from(failed && verdict.found_no_answer());
            match verdict.outcome() {
                Outcome::Error => add_to_group(&mut errors, sample, &verdict.detail),
                Outcome::Fail if failed => add_to_group(&mut failures, sample, &verdict.detail),
                _ => {}
            }
        }
    }
    found.failures = most_frequent(failures);
    found.errors = most_frequent(errors);
    found.advice = build_advice(&found, raft);
    let first = before.cycles.values().find_map(|cycle| cycle.selected.as_ref());
    found.advice.extend(first.and_then(|first| check_collapse(first, selected)));
    Some(found)
}

/// Warns if the policy has collapsed since the first cycle: less than half the entropy, and lower
/// diversity.
fn check_collapse(first: &v1::Selected, now: &v1::Selected) -> Option<String> {
    let (before, after) = (first.entropy?, now.entropy?);
    let collapsed = after < 0.5 * before && now.diversity < first.diversity;
    let percent = |share: f64| share * 100.0;
    collapsed.then(|| {
        format!(
            "samples are getting more alike: {:.0} % of a prompt's samples differ from each other, \
             {:.0} % did in cycle {}; the model doubts less which token comes next (entropy \
             {after:.3} nats, then {before:.3}): raise sampling.temperature, or train from_base or \
             with a lower learning_rate",
            percent(now.diversity),
            percent(first.diversity),
            first.cycle
        )
    })
}

type MessageGroups = BTreeMap<String, MessageGroup>;

fn add_to_group(groups: &mut MessageGroups, sample: &v1::samples::Sample, detail: &str) {
    let message = detail.lines().next().unwrap_or_default();
    let group = groups.entry(mask_numbers(message)).or_insert_with(|| {
        let mut completion: String = sample.text.chars().take(COMPLETION_MAX).collect();
        if completion.len() < sample.text.len() {
            completion.push('…');
        }
        let (message, prompt_id) = (message.to_owned(), sample.prompt_id.clone());
        MessageGroup { count: 0, message, prompt_id, completion }
    });
    group.count = group.count.saturating_add(1);
}

/// Replaces numbers by `#`, because they differ from sample to sample.
fn mask_numbers(line: &str) -> String {
    let mut masked = String::new();
    for sign in line.chars() {
        match sign {
            '0'..='9' if masked.ends_with('#') => {}
            '0'..='9' => masked.push('#'),
            other => masked.push(other),
        }
    }
    masked
}

fn most_frequent(groups: MessageGroups) -> Vec<MessageGroup> {
    let mut groups: Vec<MessageGroup> = groups.into_values().collect();
    groups.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.message.cmp(&b.message)));
    groups.truncate(MESSAGES_MAX);
    groups
}

fn build_advice(found: &SelectionReport, raft: &v1::spec::Raft) -> Vec<String> {
    let of = |why: &str| found.dropped.get(why).copied().unwrap_or_default();
    let all = |part: u32| f64::from(part) / f64::from(found.considered.max(1));
    let failed = found.judged.saturating_sub(found.passed);
    let prompts = found.all_right + found.mixed + found.all_wrong;
    let of_prompts = |part: u32| f64::from(part) / f64::from(prompts.max(1));
    let rules = raft.selection.unwrap_or_default();
    let cut = f64::from(found.cut_failed) / f64::from(failed.max(1));
    let limit = raft.sampling.map_or(0, |sampling| sampling.max_new_tokens);
    let unanswered = f64::from(found.unanswered) / f64::from(failed.max(1));
    let cases = [
        (
            all(of("error")) >= ADVICE_SHARE_MIN,
            "the verifier failed on many samples: see its errors".to_owned(),
        ),
        (all(of("void")) > 0.0, "boxes generated with another policy: `flotilla audit`".to_owned()),
        (all(of("set aside")) > 0.0, "jobs were given up: `flotilla run show`".to_owned()),
        (
            failed > 0 && cut >= ADVICE_SHARE_MIN,
            format!("many failures were cut at {limit} tokens: raise sampling.max_new_tokens"),
        ),
        (
            failed > 0 && unanswered >= 0.5,
            "the verifier found no answer in most samples: compare its settings (extract) with a \
             completion: `flotilla run samples RUN`"
                .to_owned(),
        ),
        (
            of_prompts(found.all_wrong) >= 0.5 && unanswered < 0.5,
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
            all(of("no advantage")) >= 0.5,
            "most samples taught nothing, because all of their prompt earned the same: raise \
             samples_per_prompt or sampling.temperature, or choose prompts near a pass rate of 0.5 \
             (curriculum.difficulty)"
                .to_owned(),
        ),
        (
            all(of("duplicate") + of("near duplicate")) >= ADVICE_SHARE_MIN,
            "many samples are near duplicates: raise sampling.temperature".to_owned(),
        ),
        (
            rules.keep_per_prompt > 0 && all(of("outranked")) >= ADVICE_SHARE_MIN,
            format!(
                "many good samples were outranked: raise selection.keep_per_prompt above {}",
                rules.keep_per_prompt
            ),
        ),
        (
            all(of("short") + of("long") + of("unfinished")) >= ADVICE_SHARE_MIN,
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
        let said = check_collapse(&first, &cycle(4, Some(0.2), 0.5)).unwrap();
        let words = "50 % of a prompt's samples differ from each other, 90 % did in cycle 1";
        assert!(said.contains(words) && said.contains("0.200 nats, then 1.000"), "{said}");
        assert_eq!(check_collapse(&first, &cycle(4, Some(0.2), 0.9)), None, "sure, but of many");
        assert_eq!(check_collapse(&first, &cycle(4, Some(0.9), 0.5)), None);
        assert_eq!(check_collapse(&first, &cycle(4, None, 0.5)), None, "nobody knows");
        assert_eq!(check_collapse(&first, &first), None);
    }

    #[test]
    fn messages_are_grouped_without_numbers_and_shown_with_an_example() {
        let mut groups = MessageGroups::new();
        let sample = |prompt: &str, text: &str| v1::samples::Sample {
            prompt_id: prompt.into(),
            text: text.into(),
            ..Default::default()
        };
        add_to_group(&mut groups, &sample("p0", "none"), "no number");
        add_to_group(&mut groups, &sample("p1", "6+7=132"), "found 132, expected 13\nmore");
        add_to_group(&mut groups, &sample("p2", &"9".repeat(90)), "found 9, expected 4");
        let found = most_frequent(groups);
        let shown = |group: &MessageGroup| {
            let MessageGroup { count, message, prompt_id, completion } = group.clone();
            (count, message, prompt_id, completion)
        };
        let expected = [
            (2, "found 132, expected 13".into(), "p1".into(), "6+7=132".into()),
            (1, "no number".into(), "p0".into(), "none".into()),
        ];
        assert_eq!(found.iter().map(shown).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_is_said_follows_from_what_was_lost() {
        let raft = v1::spec::Raft {
            verifier: Some(v1::Verifier::default()),
            sampling: Some(v1::Sampling { max_new_tokens: 64, ..Default::default() }),
            selection: Some(v1::Selection { keep_per_prompt: 1, ..Default::default() }),
            ..Default::default()
        };
        let some = |change: fn(&mut SelectionReport)| {
            let mut found = SelectionReport {
                considered: 100,
                judged: 100,
                passed: 90,
                mixed: 9,
                ..SelectionReport::default()
            };
            change(&mut found);
            build_advice(&found, &raft)
        };
        assert_eq!(some(|_| {}), Vec::<String>::new());
        let found = some(|found| found.cut_failed = 9);
        assert!(found[0].contains("cut at 64 tokens"), "{found:?}");
        let found = some(|found| found.dropped = [("outranked".into(), 80)].into());
        assert!(found[0].contains("keep_per_prompt above 1"), "{found:?}");
        let found = some(|found| found.dropped = [("no advantage".into(), 50)].into());
        assert!(found[0].contains("taught nothing"), "{found:?}");
        let found = some(|found| found.all_wrong = 20);
        assert!(found[0].contains("never passed"), "{found:?}");
        let found = some(|found| {
            (found.all_wrong, found.passed, found.unanswered) = (20, 0, 60);
        });
        let [advice] = &found[..] else { panic!("{found:?}") };
        assert!(advice.contains("settings (extract)"), "{advice}");
    }
}
