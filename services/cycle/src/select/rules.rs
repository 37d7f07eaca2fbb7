//! Decides which of a cycle's judged samples are kept. Pure: takes candidates and rules, returns
//! indices.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
};

use wire::v1;

use super::{near_duplicates::NearDuplicates, to_u32};

/// A judged sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SampleCandidate<'a> {
    /// Line of its prompt in the prompts file.
    pub line: u32,
    pub prompt_id: &'a str,
    pub prompt: &'a str,
    pub index: u32,
    pub completion: &'a str,
    pub tokens: u32,
    /// Log-probability of the completion in nats, never above 0; `None` if unknown.
    pub logprob: Option<f64>,
    /// Log-probability of each token, as in the samples fact; `None` if unknown or not valid.
    pub token_logprobs: Option<&'a [u8]>,
    /// Log-probability of each token by the run's teacher; `None` if unknown or not valid.
    pub teacher_logprobs: Option<&'a [u8]>,
    /// The drawn tokens; empty if they are those of the completion.
    pub token_ids: &'a [u32],
    /// The turns of an episode, whose `token_ids` are empty; empty for other samples.
    pub turns: &'a [v1::samples::Turn],
    /// The completion ended by itself, before `max_new_tokens`.
    pub is_finished: bool,
    /// 0 if it was not judged.
    pub reward: f64,
    /// False in a run without a verifier.
    pub is_judged: bool,
    /// Between equal rewards, the smaller value ranks higher.
    pub tie_break: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DropReason {
    Empty,
    Unfinished,
    Short,
    Long,
    Failed,
    /// All samples of the prompt reached the minimum reward.
    AllRight,
    /// No sample of the prompt reached the minimum reward, and the rules keep mixed prompts only.
    AllWrong,
    /// A sample of the same prompt with the same completion ranks higher.
    Duplicate,
    /// A sample of the same prompt with a nearly equal completion ranks higher.
    NearDuplicate,
    /// Enough samples of the same prompt rank higher.
    Outranked,
    /// Enough samples of the cycle rank higher.
    BelowShare,
    /// The objective learns nothing from it: the samples of its prompt have equal rewards.
    NoAdvantage,
    /// No sample of the prompt is left to pair it with.
    Unpaired,
    /// The objective needs the log-probabilities with which it was drawn.
    NoLogprobs,
    /// The objective needs the log-probabilities by the teacher.
    NotScored,
}

impl DropReason {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Unfinished => "unfinished",
            Self::Short => "short",
            Self::Long => "long",
            Self::Failed => "failed",
            Self::AllRight => "all right",
            Self::AllWrong => "all wrong",
            Self::Duplicate => "duplicate",
            Self::NearDuplicate => "near duplicate",
            Self::Outranked => "outranked",
            Self::BelowShare => "below the share",
            Self::NoAdvantage => "no advantage",
            Self::Unpaired => "unpaired",
            Self::NoLogprobs => "no log-probabilities",
            Self::NotScored => "not scored",
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct KeepDecisions {
    /// Indices of candidates, by prompt and then by descending rank; in pairs of a better and a
    /// worse one for a loss of pairs.
    pub kept: Vec<usize>,
    pub refused: BTreeMap<usize, DropReason>,
}

impl KeepDecisions {
    pub(super) fn count_reasons(&self) -> BTreeMap<DropReason, u32> {
        let mut dropped = BTreeMap::new();
        for why in self.refused.values() {
            *dropped.entry(*why).or_default() += 1;
        }
        dropped
    }
}

/// Returns the reason why a sample cannot be trained on, whatever its reward.
pub(super) fn find_defect(
    candidate: &SampleCandidate<'_>,
    rules: &v1::Selection,
) -> Option<DropReason> {
    let reasons = [
        (candidate.completion.is_empty(), DropReason::Empty),
        (rules.finished && !candidate.is_finished, DropReason::Unfinished),
        (candidate.tokens < rules.min_tokens, DropReason::Short),
        (rules.max_tokens > 0 && candidate.tokens > rules.max_tokens, DropReason::Long),
    ];
    reasons.into_iter().find(|(holds, _)| *holds).map(|(_, why)| why)
}

pub(super) fn choose_samples(
    candidates: &[SampleCandidate<'_>],
    rules: &v1::Selection,
) -> KeepDecisions {
    let mut selector = CandidateSelector { candidates, rules, refused: BTreeMap::new() };
    let mut kept: Vec<usize> = Vec::new();
    for group in selector.group_by_prompt().into_values() {
        kept.extend(selector.select_for_prompt(group));
    }
    selector.keep_best_share(&mut kept);
    selector.fill_to_minimum(&mut kept);
    kept.sort_by(|a, b| {
        candidates[*a].line.cmp(&candidates[*b].line).then(selector.compare_rank(*a, *b))
    });
    KeepDecisions { kept, refused: selector.refused }
}

/// One application of the rules. Per prompt: refuse unfit samples, rank the others, remove
/// duplicates, keep the best. Then over the cycle: keep the best share, and fill up to the minimum
/// number.
struct CandidateSelector<'a> {
    candidates: &'a [SampleCandidate<'a>],
    rules: &'a v1::Selection,
    refused: BTreeMap<usize, DropReason>,
}

impl<'a> CandidateSelector<'a> {
    /// Orders by descending reward, then by tie-breaker and index.
    fn compare_rank(&self, a: usize, b: usize) -> Ordering {
        let (a, b) = (&self.candidates[a], &self.candidates[b]);
        b.reward
            .total_cmp(&a.reward)
            .then(a.tie_break.cmp(&b.tie_break))
            .then(a.index.cmp(&b.index))
    }

    fn group_by_prompt(&self) -> BTreeMap<u32, Vec<usize>> {
        let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, candidate) in self.candidates.iter().enumerate() {
            groups.entry(candidate.line).or_default().push(place);
        }
        groups
    }

    fn refuse_all(&mut self, places: impl IntoIterator<Item = usize>, why: DropReason) {
        self.refused.extend(places.into_iter().map(|place| (place, why)));
    }

    fn select_for_prompt(&mut self, group: Vec<usize>) -> Vec<usize> {
        let passes = |place: &usize| self.candidates[*place].reward >= self.rules.min_reward;
        let passed = group.iter().filter(|place| passes(place)).count();
        if self.rules.mixed && (passed == 0 || passed == group.len()) {
            self.refuse_all(
                group,
                if passed == 0 { DropReason::AllWrong } else { DropReason::AllRight },
            );
            return Vec::new();
        }
        let mut fit = Vec::new();
        for place in group {
            match self.unfit_reason(place) {
                Some(why) => self.refuse_all([place], why),
                None => fit.push(place),
            }
        }
        fit.sort_by(|a, b| self.compare_rank(*a, *b));
        if !self.rules.keep_duplicates {
            fit = self.remove_duplicates(fit);
        }
        if self.rules.keep_per_prompt > 0 {
            let kept = fit.len().min(self.rules.keep_per_prompt as usize);
            let outranked = fit.split_off(kept);
            self.refuse_all(outranked, DropReason::Outranked);
        }
        fit
    }

    /// Returns the reason why a sample cannot be kept regardless of the others.
    fn unfit_reason(&self, place: usize) -> Option<DropReason> {
        let (candidate, rules) = (&self.candidates[place], self.rules);
        find_defect(candidate, rules)
            .or((candidate.reward < rules.min_reward).then_some(DropReason::Failed))
    }

    /// Keeps the highest-ranked candidate of each group with equal or nearly equal completions.
    fn remove_duplicates(&mut self, ranked: Vec<usize>) -> Vec<usize> {
        let mut seen = BTreeSet::new();
        let mut similar = NearDuplicates::new(self.rules.similarity);
        let mut distinct = Vec::new();
        for place in ranked {
            let completion = self.candidates[place].completion;
            if !seen.insert(completion) {
                self.refuse_all([place], DropReason::Duplicate);
            } else if similar.check_and_insert(completion) {
                self.refuse_all([place], DropReason::NearDuplicate);
            } else {
                distinct.push(place);
            }
        }
        distinct
    }

    /// Keeps at least one sample.
    fn keep_best_share(&mut self, kept: &mut Vec<usize>) {
        let share = self.rules.keep_share;
        if !(share > 0.0 && share < 1.0) || kept.is_empty() {
            return;
        }
        kept.sort_by(|a, b| self.compare_rank(*a, *b));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a sample count"
        )]
        let most = (f64::from(to_u32(kept.len())) * share).floor() as usize;
        let below = kept.split_off(most.clamp(1, kept.len()));
        self.refuse_all(below, DropReason::BelowShare);
    }

    /// Fills up to `at_least` samples: first with the best that were below the share, then with
    /// failed ones whose reward is at least the floor.
    fn fill_to_minimum(&mut self, kept: &mut Vec<usize>) {
        let missing = (self.rules.at_least as usize).saturating_sub(kept.len());
        if missing == 0 {
            return;
        }
        let fills = |place: usize, why: DropReason| match why {
            DropReason::BelowShare => true,
            DropReason::Failed => self.candidates[place].reward >= self.rules.floor,
            _ => false,
        };
        let refused = self.refused.iter().map(|(place, why)| (*place, *why));
        let mut spare: Vec<usize> =
            refused.filter(|(place, why)| fills(*place, *why)).map(|(place, _)| place).collect();
        spare.sort_by(|a, b| self.compare_rank(*a, *b));
        let mut there: BTreeSet<(u32, &str)> =
            kept.iter().map(|place| self.completion_key(*place)).collect();
        let mut of_prompt: BTreeMap<u32, u32> = BTreeMap::new();
        for place in kept.iter() {
            *of_prompt.entry(self.candidates[*place].line).or_default() += 1;
        }
        let most = self.rules.keep_per_prompt;
        let mut filled = 0;
        for place in spare {
            if filled == missing {
                break;
            }
            let count = of_prompt.entry(self.candidates[place].line).or_default();
            let fits = most == 0 || *count < most;
            if fits && (there.insert(self.completion_key(place)) || self.rules.keep_duplicates) {
                *count += 1;
                self.refused.remove(&place);
                kept.push(place);
                filled += 1;
            }
        }
    }

    fn completion_key(&self, place: usize) -> (u32, &'a str) {
        (self.candidates[place].line, self.candidates[place].completion)
    }
}

#[cfg(test)]
mod tests;
