//! Which of a cycle's judged samples are kept. Pure: candidates and rules in, places out.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
};

use wire::v1;

use super::{count, similar::Similar};

/// A judged sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate<'a> {
    /// Of its prompt in the prompts file.
    pub line: u32,
    pub prompt_id: &'a str,
    pub prompt: &'a str,
    pub index: u32,
    pub completion: &'a str,
    pub tokens: u32,
    /// In nats, never above 0; where it is known.
    pub logprob: Option<f64>,
    /// Ended by itself, before `max_new_tokens`.
    pub finished: bool,
    pub reward: f64,
    /// Of two with the same reward the smaller one is better.
    pub tie: u64,
}

/// Why a judged sample was not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Why {
    /// There is nothing in it to train on.
    Empty,
    Unfinished,
    Short,
    Long,
    /// Its reward is below the least.
    Failed,
    /// All of its prompt's samples reached the least reward.
    AllRight,
    /// None of them did, but for `at_least` it would count.
    AllWrong,
    Duplicate,
    NearDuplicate,
    /// Others of its prompt are better.
    Outranked,
    /// Others of its cycle are better.
    BelowShare,
}

impl Why {
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
        }
    }
}

/// What the rules make of some candidates: each is kept or refused, by its place among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Chosen {
    /// By prompt and then from the best.
    pub kept: Vec<usize>,
    pub refused: BTreeMap<usize, Why>,
}

impl Chosen {
    /// How many were refused, by why.
    pub(super) fn dropped(&self) -> BTreeMap<Why, u32> {
        let mut dropped = BTreeMap::new();
        for why in self.refused.values() {
            *dropped.entry(*why).or_default() += 1;
        }
        dropped
    }
}

/// Applies the rules to all judged samples of a cycle.
pub(super) fn choose(candidates: &[Candidate<'_>], rules: &v1::Selection) -> Chosen {
    let mut desk = Desk { candidates, rules, refused: BTreeMap::new() };
    let mut kept: Vec<usize> = Vec::new();
    for group in desk.groups().into_values() {
        kept.extend(desk.of_prompt(group));
    }
    desk.keep_share(&mut kept);
    desk.fill(&mut kept);
    kept.sort_by(|a, b| candidates[*a].line.cmp(&candidates[*b].line).then(desk.better(*a, *b)));
    Chosen { kept, refused: desk.refused }
}

struct Desk<'a> {
    candidates: &'a [Candidate<'a>],
    rules: &'a v1::Selection,
    refused: BTreeMap<usize, Why>,
}

impl<'a> Desk<'a> {
    fn better(&self, a: usize, b: usize) -> Ordering {
        let (a, b) = (&self.candidates[a], &self.candidates[b]);
        b.reward.total_cmp(&a.reward).then(a.tie.cmp(&b.tie)).then(a.index.cmp(&b.index))
    }

    /// Places of each prompt's candidates.
    fn groups(&self) -> BTreeMap<u32, Vec<usize>> {
        let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, candidate) in self.candidates.iter().enumerate() {
            groups.entry(candidate.line).or_default().push(place);
        }
        groups
    }

    fn refuse(&mut self, places: impl IntoIterator<Item = usize>, why: Why) {
        self.refused.extend(places.into_iter().map(|place| (place, why)));
    }

    /// The best of one prompt, from the best.
    fn of_prompt(&mut self, group: Vec<usize>) -> Vec<usize> {
        let passes = |place: &usize| self.candidates[*place].reward >= self.rules.min_reward;
        let passed = group.iter().filter(|place| passes(place)).count();
        if self.rules.mixed && (passed == 0 || passed == group.len()) {
            self.refuse(group, if passed == 0 { Why::AllWrong } else { Why::AllRight });
            return Vec::new();
        }
        let mut fit = Vec::new();
        for place in group {
            match self.unfit(place) {
                Some(why) => self.refuse([place], why),
                None => fit.push(place),
            }
        }
        fit.sort_by(|a, b| self.better(*a, *b));
        if !self.rules.keep_duplicates {
            fit = self.distinct(fit);
        }
        if self.rules.keep_per_prompt > 0 {
            let kept = fit.len().min(self.rules.keep_per_prompt as usize);
            let outranked = fit.split_off(kept);
            self.refuse(outranked, Why::Outranked);
        }
        fit
    }

    /// Why a sample cannot be kept whatever the others are.
    fn unfit(&self, place: usize) -> Option<Why> {
        let (candidate, rules) = (&self.candidates[place], self.rules);
        let reasons = [
            (candidate.completion.is_empty(), Why::Empty),
            (rules.finished && !candidate.finished, Why::Unfinished),
            (candidate.tokens < rules.min_tokens, Why::Short),
            (rules.max_tokens > 0 && candidate.tokens > rules.max_tokens, Why::Long),
            (candidate.reward < rules.min_reward, Why::Failed),
        ];
        reasons.into_iter().find(|(holds, _)| *holds).map(|(_, why)| why)
    }

    /// The first of those that say the same.
    fn distinct(&mut self, ranked: Vec<usize>) -> Vec<usize> {
        let mut seen = BTreeSet::new();
        let mut similar = Similar::new(self.rules.similarity);
        let mut distinct = Vec::new();
        for place in ranked {
            let completion = self.candidates[place].completion;
            if !seen.insert(completion) {
                self.refuse([place], Why::Duplicate);
            } else if similar.is_near(completion) {
                self.refuse([place], Why::NearDuplicate);
            } else {
                distinct.push(place);
            }
        }
        distinct
    }

    fn keep_share(&mut self, kept: &mut Vec<usize>) {
        let share = self.rules.keep_share;
        if !(share > 0.0 && share < 1.0) || kept.is_empty() {
            return;
        }
        kept.sort_by(|a, b| self.better(*a, *b));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a sample count"
        )]
        let most = (f64::from(count(kept.len())) * share).floor() as usize;
        let below = kept.split_off(most.clamp(1, kept.len()));
        self.refuse(below, Why::BelowShare);
    }

    /// Where too few are left, the best of those that others of the cycle outranked, and then of
    /// those that failed, down to the floor.
    fn fill(&mut self, kept: &mut Vec<usize>) {
        let missing = (self.rules.at_least as usize).saturating_sub(kept.len());
        if missing == 0 {
            return;
        }
        let fills = |place: usize, why: Why| match why {
            Why::BelowShare => true,
            Why::Failed => self.candidates[place].reward >= self.rules.floor,
            _ => false,
        };
        let refused = self.refused.iter().map(|(place, why)| (*place, *why));
        let mut spare: Vec<usize> =
            refused.filter(|(place, why)| fills(*place, *why)).map(|(place, _)| place).collect();
        spare.sort_by(|a, b| self.better(*a, *b));
        let mut there: BTreeSet<(u32, &str)> = kept.iter().map(|place| self.says(*place)).collect();
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
            if fits && (there.insert(self.says(place)) || self.rules.keep_duplicates) {
                *count += 1;
                self.refused.remove(&place);
                kept.push(place);
                filled += 1;
            }
        }
    }

    fn says(&self, place: usize) -> (u32, &'a str) {
        (self.candidates[place].line, self.candidates[place].completion)
    }
}

#[cfg(test)]
mod tests;
