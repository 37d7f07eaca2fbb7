//! Decides what an objective other than RAFT learns from a cycle's judged samples: all samples of a
//! prompt with their advantages, or pairs of a better and a worse one. Pure.

use std::collections::BTreeMap;

use objective::{Advantage, Objective};
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
/// that the rules leave out. With `keeps_equal`, samples without an advantage are kept: they count
/// for a divergence from the reference.
pub(super) fn derive_signals(
    candidates: &[SampleCandidate<'_>],
    rules: &v1::Selection,
    objective: &Objective,
    keeps_equal: bool,
) -> ObjectiveSignals {
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (place, candidate) in candidates.iter().enumerate() {
        groups.entry(candidate.line).or_default().push(place);
    }
    let mut signals = ObjectiveSignals::default();
    for mut group in groups.into_values() {
        group.sort_by_key(|place| candidates[*place].index);
        match objective.recipe().advantage() {
            Some(advantage) => {
                signals.add_group(candidates, rules, &group, advantage, keeps_equal);
            }
            None => signals.add_pairs(candidates, rules, &group),
        }
    }
    signals
}

impl ObjectiveSignals {
    fn refuse(&mut self, place: usize, why: DropReason) {
        self.decisions.refused.insert(place, why);
    }

    fn add_group(
        &mut self,
        candidates: &[SampleCandidate<'_>],
        rules: &v1::Selection,
        group: &[usize],
        advantage: Advantage,
        keeps_equal: bool,
    ) {
        let rewards: Vec<f64> = group.iter().map(|place| candidates[*place].reward).collect();
        let advantages = if group.len() < advantage.group_min() {
            vec![0.0; group.len()]
        } else {
            advantage.compute_advantages(&rewards)
        };
        for (place, advantage) in group.iter().zip(advantages) {
            match find_defect(&candidates[*place], rules) {
                Some(why) => self.refuse(*place, why),
                None if advantage == 0.0 && !keeps_equal => {
                    self.refuse(*place, DropReason::NoAdvantage);
                }
                None => {
                    self.decisions.kept.push(*place);
                    self.advantages.insert(*place, advantage);
                }
            }
        }
    }

    /// Pairs the samples of the highest reward with those of the lowest, each at most once.
    fn add_pairs(
        &mut self,
        candidates: &[SampleCandidate<'_>],
        rules: &v1::Selection,
        group: &[usize],
    ) {
        let mut fit = Vec::new();
        for place in group {
            match find_defect(&candidates[*place], rules) {
                Some(why) => self.refuse(*place, why),
                None => fit.push(*place),
            }
        }
        let reward = |place: &usize| candidates[*place].reward;
        let highest = fit.iter().map(reward).fold(f64::NEG_INFINITY, f64::max);
        let lowest = fit.iter().map(reward).fold(f64::INFINITY, f64::min);
        let with = |wanted: f64| fit.iter().copied().filter(move |place| reward(place) == wanted);
        let mut paired = Vec::new();
        if highest > lowest {
            paired.extend(with(highest).zip(with(lowest)).flat_map(<[usize; 2]>::from));
        }
        let why = if highest > lowest { DropReason::Unpaired } else { DropReason::NoAdvantage };
        for place in fit.into_iter().filter(|place| !paired.contains(place)) {
            self.refuse(place, why);
        }
        self.decisions.kept.extend(paired);
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
            is_finished: true,
            reward,
            tie_break: 0,
        }
    }

    fn derive(name: ObjectiveName, candidates: &[SampleCandidate<'_>]) -> ObjectiveSignals {
        let rules = v1::Selection { finished: true, min_reward: 1.0, ..Default::default() };
        derive_signals(candidates, &rules, &Objective::new(name), false)
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
        let kept = derive_signals(
            &all,
            &v1::Selection::default(),
            &Objective::new(ObjectiveName::Rloo),
            true,
        );
        assert_eq!(kept.decisions.kept.len(), all.len());
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
