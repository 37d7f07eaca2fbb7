//! Decides what an objective other than RAFT learns from a cycle's judged samples: all samples of a
//! prompt with their advantages, or pairs of a better and a worse one. Pure.

use std::collections::BTreeMap;

use objective::{Advantage, Objective, SettingKey};
use wire::v1;

use super::rules::{DropReason, KeepDecisions, SampleCandidate, find_defect};

/// The samples that the training learns from, with their advantages.
#[derive(Debug, Default)]
pub(super) struct ObjectiveSignals {
    pub(super) decisions: KeepDecisions,
    /// The advantage of each kept sample, by its index among the candidates; empty for pairs.
    pub(super) advantages: BTreeMap<usize, f64>,
}

/// Groups the candidates by prompt. Advantages compare all judged samples of a prompt, also those
/// that the rules leave out.
pub(super) fn derive_signals(
    candidates: &[SampleCandidate<'_>],
    rules: &v1::Selection,
    objective: &Objective,
) -> ObjectiveSignals {
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (place, candidate) in candidates.iter().enumerate() {
        groups.entry(candidate.line).or_default().push(place);
    }
    let grouping = SampleGrouping {
        candidates,
        rules,
        keeps_equal: objective.value(SettingKey::Kl) > 0.0,
        needs_logprobs: objective.uses_drawn_logprobs(),
        needs_teacher: objective.uses_teacher(),
    };
    let mut signals = ObjectiveSignals::default();
    for mut group in groups.into_values() {
        group.sort_by_key(|place| candidates[*place].index);
        match objective.loss().advantage() {
            Some(advantage) => grouping.weigh_group(&group, advantage, &mut signals),
            None => grouping.pair_group(&group, &mut signals),
        }
    }
    signals
}

/// The samples of a cycle, and what makes one fit for training.
struct SampleGrouping<'a> {
    candidates: &'a [SampleCandidate<'a>],
    rules: &'a v1::Selection,
    /// Samples without an advantage are kept: they count for a divergence from the reference.
    keeps_equal: bool,
    needs_logprobs: bool,
    needs_teacher: bool,
}

impl SampleGrouping<'_> {
    fn find_defect(&self, place: usize) -> Option<DropReason> {
        let candidate = &self.candidates[place];
        let lacks = [
            (self.needs_logprobs && candidate.token_logprobs.is_none(), DropReason::NoLogprobs),
            (self.needs_teacher && candidate.teacher_logprobs.is_none(), DropReason::NotScored),
        ];
        let lacking = lacks.into_iter().find(|(lacks, _)| *lacks).map(|(_, why)| why);
        find_defect(candidate, self.rules).or(lacking)
    }

    fn weigh_group(&self, group: &[usize], advantage: Advantage, signals: &mut ObjectiveSignals) {
        let rewards: Vec<f64> = group.iter().map(|place| self.candidates[*place].reward).collect();
        let advantages = if group.len() < advantage.group_min() {
            vec![0.0; group.len()]
        } else {
            advantage.compute_advantages(&rewards)
        };
        for (place, advantage) in group.iter().zip(advantages) {
            match self.find_defect(*place) {
                Some(why) => signals.refuse(*place, why),
                None if advantage == 0.0 && !self.keeps_equal => {
                    signals.refuse(*place, DropReason::NoAdvantage);
                }
                None => {
                    signals.decisions.kept.push(*place);
                    signals.advantages.insert(*place, advantage);
                }
            }
        }
    }

    /// Pairs the samples of the highest reward with those of the lowest, each at most once.
    fn pair_group(&self, group: &[usize], signals: &mut ObjectiveSignals) {
        let mut fit = Vec::new();
        for place in group {
            match self.find_defect(*place) {
                Some(why) => signals.refuse(*place, why),
                None => fit.push(*place),
            }
        }
        let reward = |place: &usize| self.candidates[*place].reward;
        let highest = fit.iter().map(reward).fold(f64::NEG_INFINITY, f64::max);
        let lowest = fit.iter().map(reward).fold(f64::INFINITY, f64::min);
        let with = |wanted: f64| fit.iter().copied().filter(move |place| reward(place) == wanted);
        let mut paired = Vec::new();
        if highest > lowest {
            paired.extend(with(highest).zip(with(lowest)).flat_map(<[usize; 2]>::from));
        }
        let why = if highest > lowest { DropReason::Unpaired } else { DropReason::NoAdvantage };
        for place in fit.into_iter().filter(|place| !paired.contains(place)) {
            signals.refuse(place, why);
        }
        signals.decisions.kept.extend(paired);
    }
}

impl ObjectiveSignals {
    fn refuse(&mut self, place: usize, why: DropReason) {
        self.decisions.refused.insert(place, why);
    }
}

#[cfg(test)]
mod tests {
    use objective::ObjectiveName;

    use super::*;

    fn candidate(line: u32, index: u32, reward: f64) -> SampleCandidate<'static> {
        SampleCandidate {
            line,
            prompt_id: "p",
            prompt: "2+2=",
            index,
            completion: "4",
            tokens: 1,
            logprob: None,
            token_logprobs: None,
            teacher_logprobs: None,
            token_ids: &[],
            turns: &[],
            is_finished: true,
            reward,
            is_judged: true,
            tie_break: 0,
        }
    }

    fn derive(name: ObjectiveName, candidates: &[SampleCandidate<'_>]) -> ObjectiveSignals {
        let rules = v1::Selection { finished: true, min_reward: 1.0, ..Default::default() };
        derive_signals(candidates, &rules, &Objective::new(name))
    }

    #[test]
    fn failures_are_kept_with_their_advantage() {
        let mut all = vec![
            candidate(0, 1, 0.0),
            candidate(0, 0, 1.0),
            candidate(1, 0, 1.0),
            candidate(1, 1, 1.0),
            candidate(2, 0, 1.0),
        ];
        all[0].is_finished = false;
        all.push(candidate(0, 2, 0.0));
        let signals = derive(ObjectiveName::Rloo, &all);
        assert_eq!(signals.decisions.kept, [1, 5]);
        assert_eq!(signals.advantages, [(1, 1.0), (5, -0.5)].into());
        let why = |place: usize| signals.decisions.refused[&place];
        assert_eq!(why(0), DropReason::Unfinished);
        assert_eq!([2, 3, 4].map(why), [DropReason::NoAdvantage; 3]);
        let mut with_kl = Objective::new(ObjectiveName::Rloo);
        with_kl.set("kl", 0.1).unwrap();
        let kept = derive_signals(&all, &v1::Selection::default(), &with_kl);
        assert_eq!(kept.decisions.kept.len(), all.len());
    }

    #[test]
    fn samples_without_the_needed_logprobs_are_left_out() {
        let mut all = vec![candidate(0, 0, 1.0), candidate(0, 1, 0.0)];
        all[0].token_logprobs = Some(&[0, 0xb8]);
        let mut corrected = Objective::new(ObjectiveName::Rloo);
        corrected.set("truncate_tokens", 2.0).unwrap();
        let signals = derive_signals(&all, &v1::Selection::default(), &corrected);
        assert_eq!(signals.decisions.kept, [0]);
        assert_eq!(signals.decisions.refused, [(1, DropReason::NoLogprobs)].into());
    }

    #[test]
    fn samples_that_the_teacher_did_not_score_are_left_out() {
        let mut all = vec![candidate(0, 0, 0.0), candidate(0, 1, 1.0)];
        all[0].teacher_logprobs = Some(&[0, 0xb8]);
        let signals = derive(ObjectiveName::Distillation, &all);
        assert_eq!(signals.decisions.kept, [0]);
        assert_eq!(signals.advantages, [(0, 1.0)].into());
        assert_eq!(signals.decisions.refused, [(1, DropReason::NotScored)].into());
    }

    #[test]
    fn each_sample_is_in_one_pair_at_most() {
        let all: Vec<SampleCandidate<'_>> = [1.0, 0.0, 1.0, 0.5, 1.0, 0.0]
            .iter()
            .zip(0..)
            .map(|(reward, index)| candidate(0, index, *reward))
            .chain([candidate(1, 0, 0.0), candidate(1, 1, 0.0)])
            .collect();
        let signals = derive(ObjectiveName::Dpo, &all);
        assert_eq!(signals.decisions.kept, [0, 1, 2, 5]);
        let why = |place: usize| signals.decisions.refused[&place];
        assert_eq!([3, 4].map(why), [DropReason::Unpaired; 2]);
        assert_eq!([6, 7].map(why), [DropReason::NoAdvantage; 2]);
    }
}
