//! Reward-ranked selection: the best samples of a cycle become training data (RAFT,
//! arXiv:2304.06767). `candidates` collects the judged samples and `rules` chooses among them
//! without knowing the run, so the same rules can be tried again on stored samples.

mod candidates;
mod near_duplicates;
mod rules;
mod signals;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use objective::{Objective, ObjectiveName};
use serde::Serialize;
use wire::{Digest, EpisodeTokens, decode_logprobs, derive_seed, v1};

pub use self::near_duplicates::jaccard_similarity;
use self::{
    candidates::CandidateSet,
    rules::{SampleCandidate, choose_samples},
    signals::{ObjectiveSignals, derive_signals},
};
use crate::{
    schedule,
    state::{Cycle, Run},
};

/// The training data of a cycle, and the reasons why other samples were dropped.
#[derive(Debug, Clone)]
pub(crate) struct CycleSelection {
    pub fact: v1::Selected,
    /// JSON lines; the fact contains their digest. `None` if the spec names the training data.
    pub dataset: Option<Vec<u8>>,
}

/// The result of applying selection rules to the samples of a cycle.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SelectionOutcome {
    /// Number of planned samples.
    pub considered: u32,
    /// Kept samples by prompt, then by descending rank.
    pub kept: Vec<KeptSample>,
    /// Number of dropped samples by reason.
    pub dropped: BTreeMap<String, u32>,
    /// The kept samples as JSON lines.
    pub dataset: Vec<u8>,
}

/// A sample that is trained on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KeptSample {
    pub prompt_id: String,
    pub index: u32,
    pub reward: f64,
    pub tokens: u32,
}

/// A training example, as a line of the dataset.
#[derive(Serialize)]
struct DatasetLine<'a> {
    prompt: &'a str,
    completion: &'a str,
    prompt_id: &'a str,
    index: u32,
    reward: f64,
    /// The sample's advantage, if the objective uses advantages.
    #[serde(skip_serializing_if = "Option::is_none")]
    advantage: Option<f64>,
    /// True if the completion was cut before its end; always false for RAFT.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unfinished: bool,
    /// The log-probability of each token when it was drawn, in nats, if the objective uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    behaviour: Option<Vec<f64>>,
    /// The log-probability of each token by the teacher, in nats, for distillation.
    #[serde(skip_serializing_if = "Option::is_none")]
    teacher: Option<Vec<f64>>,
    /// The tokens of an episode, or, for an objective, the drawn tokens if tokenizing the text again
    /// gives others.
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    token_ids: Cow<'a, [u32]>,
    /// Ranges of an episode's tokens that were not drawn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    masked: Vec<[u32; 2]>,
}

/// Ranks the judged training samples prompt by prompt in plan order, and keeps the best.
pub(crate) fn select_samples(
    run: &Run,
    raft: &v1::spec::Raft,
    number: u32,
    cycle: &Cycle,
) -> CycleSelection {
    if let Some(v1::spec::Dataset { lines, examples, .. }) = &raft.dataset {
        let fact = v1::Selected {
            cycle: number,
            considered: *examples,
            kept: *examples,
            dataset: lines.clone(),
            ..v1::Selected::default()
        };
        return CycleSelection { fact, dataset: None };
    }
    let rules = cycle_rules(run, raft, number);
    let found = candidates::collect_candidates(cycle, tie_break_seed(run.spec.seed, number));
    let tallies = PromptTallies::from_candidates(&found.candidates, rules.min_reward);
    let (entropy, entropy_samples) = sample_entropy(&found.candidates);
    let retokenized =
        found.candidates.iter().filter(|candidate| !candidate.token_ids.is_empty()).count();
    let outcome = found.apply_rules(&rules, run_objective(raft).as_ref());
    let digest = Digest::hash_bytes(&outcome.dataset).to_string();
    let fact = v1::Selected {
        cycle: number,
        considered: outcome.considered,
        kept: to_u32(outcome.kept.len()),
        dropped: outcome.dropped,
        dataset: Some(v1::Blob { digest, bytes: outcome.dataset.len() as u64 }),
        min_reward: rules.min_reward,
        prompts: tallies.prompts,
        judged: tallies.judged,
        passed: tallies.passed,
        diversity: tallies.diversity,
        entropy,
        entropy_samples,
        retokenized: to_u32(retokenized),
    };
    CycleSelection { fact, dataset: Some(outcome.dataset) }
}

/// Returns what selection rules (`None`: the run's own) would keep of a cycle's training samples;
/// writes nothing. The run must be in its state before the selection, which drops the texts. `None`
/// if the run is no RAFT run or has no such cycle.
pub fn preview_selection(
    run: &Run,
    number: u32,
    rules: Option<&v1::Selection>,
) -> Option<SelectionOutcome> {
    let (raft, cycle) = (run.raft_spec()?, run.cycles.get(&number)?);
    let own = || cycle_rules(run, raft, number);
    let found = candidates::collect_candidates(cycle, tie_break_seed(run.spec.seed, number));
    // Other rules compare selection strategies, which an objective does not have.
    let objective = run_objective(raft).filter(|_| rules.is_none());
    Some(found.apply_rules(&rules.copied().unwrap_or_else(own), objective.as_ref()))
}

/// A better and a worse completion of one prompt, with the names that TRL reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PreferencePair {
    pub prompt: String,
    pub chosen: String,
    pub rejected: String,
}

/// Pairs the training samples of a cycle: those with a prompt's highest reward with those with its
/// lowest, each at most once. The run must be in its state before the selection. `None` if the run
/// is no RAFT run or has no such cycle.
pub fn pair_samples(run: &Run, number: u32) -> Option<Vec<PreferencePair>> {
    let (raft, cycle) = (run.raft_spec()?, run.cycles.get(&number)?);
    let found = candidates::collect_candidates(cycle, tie_break_seed(run.spec.seed, number));
    let rules = cycle_rules(run, raft, number);
    let objective = Objective::new(ObjectiveName::Dpo);
    let paired = found.choose_training_data(&rules, Some(&objective)).decisions.kept;
    let pair = |places: &[usize; 2]| {
        let [chosen, rejected] = places.map(|place| &found.candidates[place]);
        PreferencePair {
            prompt: chosen.prompt.to_owned(),
            chosen: chosen.completion.to_owned(),
            rejected: rejected.completion.to_owned(),
        }
    };
    Some(paired.as_chunks::<2>().0.iter().map(pair).collect())
}

/// Returns the outcome of each judged training sample of a cycle, by prompt id and index: `kept`,
/// or the drop reason. The run must be in its state before the selection. `None` if the run is no
/// RAFT run or has no such cycle.
pub fn sample_outcomes(run: &Run, number: u32) -> Option<BTreeMap<(String, u32), &'static str>> {
    let (raft, cycle) = (run.raft_spec()?, run.cycles.get(&number)?);
    let found = candidates::collect_candidates(cycle, tie_break_seed(run.spec.seed, number));
    let rules = cycle_rules(run, raft, number);
    let chosen = found.choose_training_data(&rules, run_objective(raft).as_ref()).decisions;
    let kept = chosen.kept.iter().map(|place| (*place, "kept"));
    let refused = chosen.refused.iter().map(|(place, why)| (*place, why.as_str()));
    let fates = kept.chain(refused).map(|(place, fate)| {
        let candidate = &found.candidates[place];
        ((candidate.prompt_id.to_owned(), candidate.index), fate)
    });
    Some(fates.collect())
}

impl CandidateSet<'_> {
    /// Keeps the best samples, or what another objective learns from.
    fn choose_training_data(
        &self,
        rules: &v1::Selection,
        objective: Option<&Objective>,
    ) -> ObjectiveSignals {
        let Some(objective) = objective else {
            let decisions = choose_samples(&self.candidates, rules);
            return ObjectiveSignals { decisions, ..ObjectiveSignals::default() };
        };
        derive_signals(&self.candidates, rules, objective)
    }

    fn apply_rules(self, rules: &v1::Selection, objective: Option<&Objective>) -> SelectionOutcome {
        let ObjectiveSignals { decisions: chosen, advantages } =
            self.choose_training_data(rules, objective);
        let mut dropped = self.unusable;
        for (why, count) in chosen.count_reasons() {
            *dropped.entry(why.as_str().to_owned()).or_default() += count;
        }
        let mut dataset = Vec::new();
        let kept = chosen.kept.into_iter().map(|place| {
            let SampleCandidate { prompt_id, index, reward, tokens, .. } = self.candidates[place];
            let advantage = advantages.get(&place).copied();
            self.candidates[place].write_line(objective, advantage, &mut dataset);
            KeptSample { prompt_id: prompt_id.to_owned(), index, reward, tokens }
        });
        let kept = kept.collect();
        SelectionOutcome { considered: self.considered, kept, dropped, dataset }
    }
}

/// Returns the run's objective; `None` for RAFT. Facts with an unknown objective are refused before.
pub(crate) fn run_objective(raft: &v1::spec::Raft) -> Option<Objective> {
    let message = raft.training.as_ref()?.objective.as_ref()?;
    Objective::from_message(message).ok()
}

fn tie_break_seed(seed: u64, cycle: u32) -> u64 {
    derive_seed(seed, &["select", &cycle.to_string()])
}

/// Applies the schedules of this cycle to the spec's rules.
pub(crate) fn cycle_rules(run: &Run, raft: &v1::spec::Raft, number: u32) -> v1::Selection {
    let rules = raft.selection.unwrap_or_default();
    let schedules = raft.schedules.as_ref();
    let of = |list: fn(&v1::Schedules) -> &Vec<f64>, plain: f64| {
        schedule::scheduled_value(schedules.map(list).map_or(&[], Vec::as_slice), number)
            .unwrap_or(plain)
    };
    v1::Selection {
        min_reward: match &rules.adaptive {
            Some(adaptive) => {
                schedule::adaptive_min_reward(run, number, adaptive, rules.min_reward)
            }
            None => of(|all| &all.min_reward, rules.min_reward),
        },
        keep_share: of(|all| &all.keep_share, rules.keep_share),
        ..rules
    }
}

/// Returns the datasets of earlier cycles that this cycle trains on again, newest first.
pub(crate) fn replayed_datasets(run: &Run, raft: &v1::spec::Raft, number: u32) -> Vec<v1::Blob> {
    let cycles = raft.selection.and_then(|rules| rules.replay).map_or(0, |replay| replay.cycles);
    let selected = run.cycles.range(..number).rev().filter_map(|(_, c)| c.selected.as_ref());
    let kept = selected.filter(|selected| selected.kept > 0);
    kept.take(cycles as usize).filter_map(|selected| selected.dataset.clone()).collect()
}

/// Returns the maximum number of replayed examples per new one.
pub(crate) fn replay_share(raft: &v1::spec::Raft) -> f64 {
    raft.selection.and_then(|rules| rules.replay).map_or(0.0, |replay| replay.share)
}

/// Estimates the policy's entropy: the mean of -ln p over the tokens of its samples, in nats per
/// token, and the number of samples that report log-probabilities.
fn sample_entropy(candidates: &[SampleCandidate<'_>]) -> (Option<f64>, u32) {
    let reported = candidates.iter().filter_map(|one| Some((one.logprob?, one.tokens)));
    let (nats, tokens, samples) = reported.fold((0.0, 0_u64, 0), |sums, (logprob, tokens)| {
        let (nats, all, samples) = sums;
        (nats - logprob, all + u64::from(tokens), samples + 1)
    });
    #[expect(clippy::cast_precision_loss, reason = "far fewer tokens than 2^52")]
    let mean = (tokens > 0).then(|| nats / tokens as f64);
    (mean, samples)
}

/// Parallel lists, one entry for each judged prompt of a cycle, and the diversity of all
/// completions.
#[derive(Default)]
struct PromptTallies {
    /// Lines of the prompts.
    prompts: Vec<u32>,
    /// Judged samples.
    judged: Vec<u32>,
    /// Judged samples that reached the minimum reward.
    passed: Vec<u32>,
    /// Mean over prompts of distinct completions per sample.
    diversity: f64,
}

impl PromptTallies {
    fn from_candidates(candidates: &[SampleCandidate<'_>], min_reward: f64) -> Self {
        #[derive(Default)]
        struct PromptGroup<'a> {
            samples: u32,
            judged: u32,
            passed: u32,
            distinct: BTreeSet<&'a str>,
        }
        let mut groups: BTreeMap<u32, PromptGroup<'_>> = BTreeMap::new();
        for candidate in candidates {
            let group = groups.entry(candidate.line).or_default();
            group.samples += 1;
            group.judged += u32::from(candidate.is_judged);
            group.passed += u32::from(candidate.is_judged && candidate.reward >= min_reward);
            group.distinct.insert(candidate.completion);
        }
        let mut tallies = Self::default();
        let count = groups.len();
        for (line, PromptGroup { samples, judged, passed, distinct }) in groups {
            if judged > 0 {
                tallies.prompts.push(line);
                tallies.judged.push(judged);
                tallies.passed.push(passed);
            }
            tallies.diversity += f64::from(to_u32(distinct.len())) / f64::from(samples);
        }
        tallies.diversity /= f64::from(to_u32(count).max(1));
        tallies
    }
}

impl SampleCandidate<'_> {
    fn write_line(
        &self,
        objective: Option<&Objective>,
        advantage: Option<f64>,
        dataset: &mut Vec<u8>,
    ) {
        let has_objective = objective.is_some();
        let distills = objective.is_some_and(Objective::uses_teacher);
        let decode = |bytes: Option<&[u8]>| {
            bytes.and_then(|bytes| decode_logprobs(bytes, self.tokens as usize))
        };
        let (token_ids, masked) = match self.turns {
            [] if has_objective => (Cow::Borrowed(self.token_ids), Vec::new()),
            [] => (Cow::Borrowed(&[][..]), Vec::new()),
            turns => {
                let EpisodeTokens { ids, masked } = EpisodeTokens::from_turns(turns);
                (Cow::Owned(ids), masked)
            }
        };
        let line = DatasetLine {
            prompt: self.prompt,
            completion: self.completion,
            prompt_id: self.prompt_id,
            index: self.index,
            reward: self.reward,
            advantage,
            unfinished: has_objective && !self.is_finished,
            behaviour: decode(self.token_logprobs.filter(|_| has_objective)),
            teacher: decode(self.teacher_logprobs.filter(|_| distills)),
            token_ids,
            masked,
        };
        serde_json::to_writer(&mut *dataset, &line).expect("strings and numbers are always JSON");
        dataset.push(b'\n');
    }
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
