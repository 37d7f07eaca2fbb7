//! Compares two checkpoints by the held-out samples that their cycles drew: by the verdicts of their
//! runs' verifiers, or by the scores that a judge of the caller gives to their answers.

use std::{collections::BTreeMap, iter};

use comparison::{AlphaError, Comparison, JudgeReport, Pair, PairedTest, PromptAnswers};
use serde::Serialize;
use wire::{PromptEntry, RunId, derive_seed, v1};

use v1::samples_page::{Prompt, Sample};

use crate::{CheckpointError, FleetControl, HistoryError, data::PLAIN_PROMPT};

/// However many cycles there are.
const ALPHA_MIN: f64 = 1e-6;
/// Field of a prompt that names its category.
pub(crate) const CATEGORY_FIELD: &str = "category";
/// Further categories are left out.
pub(crate) const CATEGORIES_MAX: usize = 1000;

/// The reason why two checkpoints cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    #[error(transparent)]
    Alpha(#[from] AlphaError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(
        "{name} has no {kind}samples of {prompts}; compare cycles of RAFT runs that evaluate them. \
         Those of other models, such as an SFT run's, are drawn by `flotilla compare` with --prompts \
         (R117)"
    )]
    NoSamples { name: String, kind: &'static str, prompts: String },
    #[error(
        "{a} and {b} were measured with different settings: {field}; compare runs in which it is \
         equal (R117)"
    )]
    OtherSettings { a: String, b: String, field: &'static str },
    #[error(
        "{name} is not the last checkpoint of its cycle, which drew the held-out samples; leave out \
         the step, or draw samples of it by `flotilla compare` with --prompts (R117)"
    )]
    NotLast { name: String },
    #[error(
        "{a} and {b} drew no held-out samples of the same prompts; runs can be compared if their \
         `heldout` files and chat templates are equal (R117)"
    )]
    NothingInCommon { a: String, b: String },
}

/// One side of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedCheckpoint {
    pub run: RunId,
    pub cycle: u32,
    /// The model that the run measured for this comparison; `None` for a cycle of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// By the verifier, over all pairs, from 0 to 1; `None` without verdicts.
    pub pass_rate: Option<f64>,
    /// Mean length of the paired samples, in tokens.
    pub mean_tokens: f64,
    /// Of the cycle's last checkpoint, by suite.
    pub perplexities: BTreeMap<String, f64>,
}

/// The scores of both sides on the prompts of a category.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CategoryComparison {
    pub category: String,
    pub pairs: u32,
    pub mean_a: f64,
    pub mean_b: f64,
}

/// Two checkpoints, compared by the samples that both drew of the same held-out prompts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelComparison {
    /// The test of the prompts' scores, in an order that depends only on their texts: pass rates, or
    /// what the judge prefers.
    #[serde(flatten)]
    pub test: Comparison,
    /// Prompts with samples of both; the test may decide before the last.
    pub pairs: u32,
    /// Probability of a wrong decision: `alpha` divided by the number of cycles among which the
    /// compared ones were chosen by these samples.
    pub alpha: f64,
    /// Samples without a partner, or whose verifier failed.
    pub unpaired: u32,
    pub a: ComparedCheckpoint,
    pub b: ComparedCheckpoint,
    /// By the prompts' field `category`, over all prompts with scores; empty if no prompt has one.
    pub categories: Vec<CategoryComparison>,
    /// The counts of the judge, if one gave the scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judge: Option<JudgeReport>,
}

/// Two checkpoints with their samples of the same held-out prompts, before a test.
#[derive(Debug)]
pub struct PairedCheckpoints {
    a: Side,
    b: Side,
    alpha: f64,
    /// Without scores.
    test: PairedTest,
    pairs: Vec<PromptPair>,
    unpaired: u32,
}

/// The held-out samples of a side.
#[derive(Debug)]
struct Side {
    run: RunId,
    cycle: u32,
    perplexities: BTreeMap<String, f64>,
    prompts: Vec<Prompt>,
    /// Fields of the prompts, by id.
    categories: BTreeMap<String, String>,
    questions: BTreeMap<String, String>,
    /// The cycles among which it was chosen by its held-out pass rate; 1 if it was named.
    candidates: u32,
    settings: Option<(Option<v1::Verifier>, Option<v1::Sampling>)>,
}

/// The samples of a prompt that both sides have and that count, by index.
#[derive(Debug)]
struct PromptPair {
    prompt_id: String,
    text: String,
    a: Vec<Sample>,
    b: Vec<Sample>,
}

/// The origin of the scores of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScoredBy {
    /// The runs' verifiers: only samples with a verdict count.
    Verifier,
    /// A judge of the caller, which reads all samples.
    Judge,
}

impl FleetControl {
    /// Compares two checkpoints of RAFT runs by their samples of the suite's held-out prompts
    /// (`""`: of the runs' own ones), paired by prompt and sample index. Cycles of one run, and runs
    /// with the same seed, drew these with the same random numbers.
    ///
    /// The best checkpoint of a run was chosen by the same samples. `alpha` is then divided by the
    /// number of cycles that it was chosen among, so that the error rate holds (Bonferroni).
    ///
    /// # Errors
    /// A checkpoint does not exist or has no judged samples, they have no prompts or other settings
    /// in common, or `alpha` is no probability.
    pub async fn compare_checkpoints(
        &self,
        a: &v1::CheckpointRef,
        b: &v1::CheckpointRef,
        suite: &str,
        alpha: f64,
    ) -> Result<ModelComparison, CompareError> {
        let paired = self.pair_samples_of([a, b], suite, alpha, ScoredBy::Verifier).await?;
        let scores: Vec<Option<Pair>> = paired.pairs.iter().map(PromptPair::pass_rates).collect();
        Ok(paired.compare_scores(&scores, None))
    }

    /// Pairs the samples of two checkpoints as [`FleetControl::compare_checkpoints`] does, with or
    /// without verdicts, for a judge that gives the scores.
    ///
    /// # Errors
    /// As of [`FleetControl::compare_checkpoints`].
    pub async fn pair_checkpoints(
        &self,
        a: &v1::CheckpointRef,
        b: &v1::CheckpointRef,
        suite: &str,
        alpha: f64,
    ) -> Result<PairedCheckpoints, CompareError> {
        self.pair_samples_of([a, b], suite, alpha, ScoredBy::Judge).await
    }

    async fn pair_samples_of(
        &self,
        [a, b]: [&v1::CheckpointRef; 2],
        suite: &str,
        alpha: f64,
        scored_by: ScoredBy,
    ) -> Result<PairedCheckpoints, CompareError> {
        PairedTest::new(alpha)?;
        let mut a = self.read_side(a, suite, scored_by).await?;
        let mut b = self.read_side(b, suite, scored_by).await?;
        require_equal_settings(&a, &b, scored_by)?;
        let alpha = (alpha / f64::from(a.candidates * b.candidates)).max(ALPHA_MIN);
        let test = PairedTest::new(alpha)?;
        let prompts = [&mut a, &mut b].map(|side| std::mem::take(&mut side.prompts));
        let (pairs, unpaired) = pair_samples(prompts, scored_by);
        if pairs.is_empty() {
            return Err(CompareError::NothingInCommon { a: a.name(), b: b.name() });
        }
        Ok(PairedCheckpoints { a, b, alpha, test, pairs, unpaired })
    }

    async fn read_side(
        &self,
        reference: &v1::CheckpointRef,
        suite: &str,
        scored_by: ScoredBy,
    ) -> Result<Side, CompareError> {
        let run = RunId::new(reference.run.as_str())
            .map_err(|_| HistoryError::NoRun(reference.run.clone()))?;
        let infos = self.list_checkpoints(&run).await.map_err(HistoryError::from)?;
        let (cycle, candidates) = match reference.cycle {
            // The base has samples, but no checkpoint.
            Some(cycle) => (cycle, 1),
            None => {
                let found = self.get_checkpoint(reference).await?.checkpoint.unwrap_or_default();
                let measured = infos.iter().filter(|info| info.pass_rate.is_some()).count();
                let is_chosen = !reference.newest && suite.is_empty();
                (found.cycle, if is_chosen { to_count(measured.max(1)) } else { 1 })
            }
        };
        let (spec, prompts) = self.heldout_samples(&run, cycle, suite).await?;
        let of_cycle = |info: &v1::CheckpointInfo| {
            info.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.cycle == cycle)
        };
        let last = infos.into_iter().rfind(of_cycle);
        let step = last.as_ref().and_then(|it| it.checkpoint.as_ref()).map(|it| it.step);
        if reference.step.is_some_and(|named| step != Some(named)) {
            let name = format!("{run}/{cycle}/{}", reference.step.unwrap_or_default());
            return Err(CompareError::NotLast { name });
        }
        let perplexities = last.map(|info| info.perplexities).unwrap_or_default();
        let perplexities = perplexities.into_iter().map(|it| (it.suite, it.perplexity)).collect();
        let set = match &spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => raft.find_prompt_set(v1::Purpose::Heldout, suite),
            _ => None,
        };
        let settings = set.as_ref().map(|set| (set.verifier.cloned(), set.sampling));
        let file = set.and_then(|set| set.file);
        let entries = self.load_prompts(file).await.unwrap_or_default();
        let [categories, questions] =
            [CATEGORY_FIELD, PLAIN_PROMPT].map(|field| index_field(&entries, field));
        let side =
            Side { run, cycle, perplexities, prompts, categories, questions, candidates, settings };
        let counts = |prompt: &Prompt| prompt.samples.iter().any(|it| scored_by.counts(it));
        if side.prompts.iter().any(counts) {
            Ok(side)
        } else {
            let prompts = match suite {
                "" => "the run's held-out prompts".to_owned(),
                suite => format!("the suite {suite}"),
            };
            let kind = if scored_by == ScoredBy::Verifier { "judged " } else { "" };
            Err(CompareError::NoSamples { name: side.name(), kind, prompts })
        }
    }
}

impl Side {
    fn name(&self) -> String {
        format!("{}/{}", self.run, self.cycle)
    }

    fn to_compared<'a>(
        &self,
        samples: impl Iterator<Item = &'a Vec<Sample>>,
    ) -> ComparedCheckpoint {
        let samples: Vec<&Vec<Sample>> = samples.collect();
        ComparedCheckpoint {
            run: self.run.clone(),
            cycle: self.cycle,
            model: None,
            pass_rate: mean(samples.iter().filter_map(|it| pass_rate(it))),
            mean_tokens: mean(samples.iter().copied().flatten().map(|it| f64::from(it.tokens)))
                .unwrap_or_default(),
            perplexities: self.perplexities.clone(),
        }
    }
}

impl PairedCheckpoints {
    /// Returns a test without scores, which decides with the probability of an error that is left
    /// for these checkpoints.
    pub fn start_test(&self) -> PairedTest {
        self.test.clone()
    }

    /// Returns the prompts with their answers, in the order of the test. The text of a prompt is its
    /// field `plain_prompt`, without the chat template, if it has one.
    pub fn prompt_answers(&self) -> impl Iterator<Item = PromptAnswers> {
        self.pairs.iter().map(|pair| {
            let PromptPair { prompt_id, text, a, b } = pair;
            let answers = iter::zip(a, b).map(|(a, b)| [a.text.clone(), b.text.clone()]);
            PromptAnswers {
                prompt_id: prompt_id.clone(),
                prompt: self.a.questions.get(prompt_id).unwrap_or(text).clone(),
                answers: answers.collect(),
            }
        })
    }

    /// Tests the scores of the prompts, in their order; `None` for a prompt that has none. Prompts
    /// after the last score do not count.
    pub fn compare_scores(
        self,
        scores: &[Option<Pair>],
        judge: Option<JudgeReport>,
    ) -> ModelComparison {
        let Self { a, b, alpha, mut test, pairs, unpaired } = self;
        for scores in scores.iter().flatten() {
            test.add_pair(*scores);
        }
        ModelComparison {
            test: test.comparison(),
            pairs: to_count(pairs.len()),
            alpha,
            unpaired,
            a: a.to_compared(pairs.iter().map(|it| &it.a)),
            b: b.to_compared(pairs.iter().map(|it| &it.b)),
            categories: compare_categories(&pairs, scores, &a.categories),
            judge,
        }
    }
}

impl ModelComparison {
    /// Returns the names of both sides, such as `raft-1/0`.
    pub fn names(&self) -> [String; 2] {
        [&self.a, &self.b].map(|side| match &side.model {
            Some(model) => model.clone(),
            None => format!("{}/{}", side.run, side.cycle),
        })
    }

    /// Returns a table of the figures of both sides: a heading and two figures in each row.
    pub fn table_rows(&self) -> Vec<[String; 3]> {
        let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
        let row = |heading: &str, of: &dyn Fn(&ComparedCheckpoint) -> String| {
            [heading.to_owned(), of(&self.a), of(&self.b)]
        };
        let mut rows = vec![
            row("pass rate", &|it| it.pass_rate.map_or("-".to_owned(), percent)),
            row("tokens per sample", &|it| format!("{:.1}", it.mean_tokens)),
        ];
        if self.judge.is_some() {
            let [a, b] = [self.test.mean_a, self.test.mean_b].map(percent);
            rows.insert(0, ["preferred by the judge".to_owned(), a, b]);
        }
        for suite in self.a.perplexities.keys().filter(|it| self.b.perplexities.contains_key(*it)) {
            let of = |it: &ComparedCheckpoint| format!("{:.4}", it.perplexities[suite]);
            rows.push(row(&format!("perplexity of {suite}"), &of));
        }
        let categories = self.categories.iter().map(|it| {
            let heading = format!("{} ({} pairs)", it.category, it.pairs);
            [heading, percent(it.mean_a), percent(it.mean_b)]
        });
        rows.extend(categories);
        rows
    }
}

impl PromptPair {
    /// Returns the pass rates of both sides; `None` without verdicts.
    fn pass_rates(&self) -> Option<Pair> {
        Some(Pair { a: pass_rate(&self.a)?, b: pass_rate(&self.b)? })
    }
}

impl ScoredBy {
    /// Returns true for a sample that may have a score.
    fn counts(self, sample: &Sample) -> bool {
        self == Self::Judge || score_of(sample).is_some()
    }
}

/// Returns a text field of the prompts, by their ids.
fn index_field(prompts: &[PromptEntry], field: &str) -> BTreeMap<String, String> {
    let value = |prompt: &PromptEntry| {
        let text = prompt.fields.get(field)?.as_str().filter(|text| !text.is_empty())?;
        Some((prompt.id.clone(), text.to_owned()))
    };
    prompts.iter().filter_map(value).collect()
}

/// Refuses sides whose samples were drawn, or judged by their verifiers, in different ways.
fn require_equal_settings(a: &Side, b: &Side, scored_by: ScoredBy) -> Result<(), CompareError> {
    let (Some((verifier_a, sampling_a)), Some((verifier_b, sampling_b))) =
        (&a.settings, &b.settings)
    else {
        return Ok(());
    };
    let field = if scored_by == ScoredBy::Verifier && verifier_a != verifier_b {
        "verifier"
    } else if sampling_a != sampling_b {
        "sampling"
    } else {
        return Ok(());
    };
    Err(CompareError::OtherSettings { a: a.name(), b: b.name(), field })
}

/// Returns 1 for a sample that passed and 0 for one that failed; `None` without a verdict.
fn score_of(sample: &Sample) -> Option<f64> {
    match sample.outcome.as_str() {
        "pass" => Some(1.0),
        "fail" => Some(0.0),
        _ => None,
    }
}

/// Returns the share of passed samples; `None` without verdicts.
fn pass_rate(samples: &[Sample]) -> Option<f64> {
    mean(samples.iter().filter_map(score_of))
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), it| (sum + it, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Returns the prompts with samples of both sides that count, in an order that depends only on their
/// ids and texts, and the number of other samples. Prompts with the same id are the same only if
/// their texts are.
fn pair_samples([a, b]: [Vec<Prompt>; 2], scored_by: ScoredBy) -> (Vec<PromptPair>, u32) {
    let samples: usize = a.iter().chain(&b).map(|prompt| prompt.samples.len()).sum();
    let others = b.into_iter().map(|it| ((it.prompt_id, it.text), it.samples));
    let mut others: BTreeMap<(String, String), Vec<Sample>> = others.collect();
    let mut pairs: Vec<PromptPair> = Vec::new();
    for Prompt { prompt_id, text, samples, .. } in a {
        let key = (prompt_id, text);
        let Some(theirs) = others.remove(&key) else { continue };
        let counting =
            |samples: Vec<Sample>| samples.into_iter().filter(move |it| scored_by.counts(it));
        let mut theirs: BTreeMap<u32, Sample> = counting(theirs).map(|it| (it.index, it)).collect();
        let both = counting(samples).filter_map(|it| theirs.remove(&it.index).map(|its| (it, its)));
        let (a, b): (Vec<_>, Vec<_>) = both.unzip();
        let (prompt_id, text) = key;
        if !a.is_empty() {
            pairs.push(PromptPair { prompt_id, text, a, b });
        }
    }
    // A file may be sorted by difficulty or category.
    pairs.sort_by_cached_key(|it| derive_seed(0, &["compare", &it.prompt_id, &it.text]));
    let paired: usize = pairs.iter().map(|pair| 2 * pair.a.len()).sum();
    (pairs, to_count(samples - paired))
}

fn compare_categories(
    pairs: &[PromptPair],
    scores: &[Option<Pair>],
    categories: &BTreeMap<String, String>,
) -> Vec<CategoryComparison> {
    let mut sums: BTreeMap<&str, (u32, f64, f64)> = BTreeMap::new();
    for (pair, scores) in iter::zip(pairs, scores) {
        let Some((category, Pair { a, b })) = categories.get(&pair.prompt_id).zip(*scores) else {
            continue;
        };
        let (count, sum_a, sum_b) = sums.entry(category).or_default();
        (*count, *sum_a, *sum_b) = (*count + 1, *sum_a + a, *sum_b + b);
    }
    let means = sums.into_iter().take(CATEGORIES_MAX).map(|(category, (pairs, a, b))| {
        let (mean_a, mean_b) = (a / f64::from(pairs), b / f64::from(pairs));
        CategoryComparison { category: category.to_owned(), pairs, mean_a, mean_b }
    });
    means.collect()
}

fn to_count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(id: &str, text: &str, outcomes: &[&str]) -> Prompt {
        let sample = |(index, outcome): (usize, &&str)| Sample {
            index: to_count(index),
            outcome: (*outcome).into(),
            tokens: 4,
            ..Default::default()
        };
        Prompt {
            prompt_id: id.into(),
            text: text.into(),
            samples: outcomes.iter().enumerate().map(sample).collect(),
            ..Default::default()
        }
    }

    fn side() -> Side {
        Side {
            run: RunId::new("raft-1").unwrap(),
            cycle: 1,
            perplexities: BTreeMap::new(),
            prompts: Vec::new(),
            categories: [("1", "sums"), ("2", "sums")]
                .map(|(id, name)| (id.to_owned(), name.to_owned()))
                .into(),
            questions: [("1".to_owned(), "what is x?".to_owned())].into(),
            candidates: 1,
            settings: None,
        }
    }

    fn paired(a: Vec<Prompt>, b: Vec<Prompt>, scored_by: ScoredBy) -> PairedCheckpoints {
        let (pairs, unpaired) = pair_samples([a, b], scored_by);
        let test = PairedTest::new(0.05).unwrap();
        PairedCheckpoints { a: side(), b: side(), alpha: 0.05, test, pairs, unpaired }
    }

    #[test]
    fn the_checkpoint_of_an_sft_run_is_refused_with_the_option_that_measures_it() {
        let prompts = "the run's held-out prompts".to_owned();
        let error = CompareError::NoSamples { name: "sft-1/1".into(), kind: "judged ", prompts };
        let text = error.to_string();
        assert!(text.starts_with("sft-1/1 has no judged samples of the run's held-out"), "{text}");
        assert!(text.contains("`flotilla compare` with --prompts (R117)"), "{text}");
    }

    #[test]
    fn samples_are_paired_by_prompt_text_and_index() {
        let a =
            vec![prompt("1", "1+1=", &["pass", "fail"]), prompt("2", "2+2=", &["pass", "error"])];
        let b =
            vec![prompt("2", "2+2=", &["fail", "pass"]), prompt("1", "other", &["pass", "pass"])];
        let (pairs, unpaired) = pair_samples([a.clone(), b.clone()], ScoredBy::Verifier);
        let found: Vec<_> = pairs.iter().map(|it| (&*it.prompt_id, it.pass_rates())).collect();
        assert_eq!(found, [("2", Some(Pair { a: 1.0, b: 0.0 }))]);
        assert_eq!(unpaired, 6);
        let (pairs, unpaired) = pair_samples([a, b], ScoredBy::Judge);
        assert_eq!((pairs.len(), pairs[0].a.len(), unpaired), (1, 2, 4), "without verdicts, too");
    }

    #[test]
    fn categories_have_the_means_of_their_pairs() {
        let a = vec![prompt("1", "x", &["pass"]), prompt("2", "y", &["fail"])];
        let b = vec![prompt("1", "x", &["fail"]), prompt("2", "y", &["fail"])];
        let of = |a: &[Prompt], b: &[Prompt]| paired(a.to_vec(), b.to_vec(), ScoredBy::Verifier);
        let scores: Vec<_> = of(&a, &b).pairs.iter().map(PromptPair::pass_rates).collect();
        let found = of(&a, &b).compare_scores(&scores, None);
        let expected =
            CategoryComparison { category: "sums".into(), pairs: 2, mean_a: 0.5, mean_b: 0.0 };
        assert_eq!(found.categories, [expected]);
        assert_eq!((found.a.pass_rate, found.b.pass_rate), (Some(0.5), Some(0.0)));
        assert_eq!(found.table_rows()[2], ["sums (2 pairs)", "50.0 %", "0.0 %"]);
        let mut bare = of(&a, &b);
        bare.a.categories.clear();
        assert_eq!(bare.compare_scores(&scores, None).categories, []);
    }

    #[test]
    fn a_judge_reads_questions_and_answers_and_its_scores_decide() {
        let a = vec![prompt("1", "<user>what is x?", &["", ""]), prompt("2", "y", &["pass"])];
        let paired = paired(a.clone(), a, ScoredBy::Judge);
        let mut prompts: Vec<PromptAnswers> = paired.prompt_answers().collect();
        prompts.sort_by(|one, other| one.prompt_id.cmp(&other.prompt_id));
        let texts: Vec<_> = prompts.iter().map(|it| (&*it.prompt, it.answers.len())).collect();
        assert_eq!(texts, [("what is x?", 2), ("y", 1)]);
        let report = JudgeReport { judged: 2, second_won: 2, ..JudgeReport::default() };
        let found = paired.compare_scores(&[None, Some(Pair { a: 0.0, b: 1.0 })], Some(report));
        assert_eq!((found.test.at, found.pairs), (1, 2));
        assert_eq!(found.table_rows()[0], ["preferred by the judge", "0.0 %", "100.0 %"]);
        assert_eq!(found.a.pass_rate, Some(1.0), "of the one prompt with a verdict");
        assert_eq!(found.names(), ["raft-1/1", "raft-1/1"]);
        let mut measured = found;
        measured.a.model = Some("the base of sft-1".into());
        assert_eq!(measured.names(), ["the base of sft-1", "raft-1/1"]);
    }
}
