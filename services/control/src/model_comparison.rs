//! Compares two checkpoints by the held-out samples that their cycles drew.

use std::collections::BTreeMap;

use comparison::{AlphaError, Comparison, Pair, PairedTest};
use serde::Serialize;
use wire::{RunId, derive_seed, v1};

use v1::samples_page::{Prompt, Sample};

use crate::{CheckpointError, FleetControl, HistoryError};

/// Most probability of a wrong decision, unless the user names another.
pub const DEFAULT_ALPHA: f64 = 0.05;
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
        "{name} has no judged samples of {prompts}; compare cycles of RAFT runs that evaluate them \
         (R117)"
    )]
    NoSamples { name: String, prompts: String },
    #[error(
        "{a} and {b} were measured with different settings: {field}; compare runs in which it is \
         equal (R117)"
    )]
    OtherSettings { a: String, b: String, field: &'static str },
    #[error(
        "{name} is not the last checkpoint of its cycle, which drew the held-out samples; leave out \
         the step (R117)"
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
    /// Over all pairs, from 0 to 1.
    pub pass_rate: f64,
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
    /// The test of the prompts' pass rates, in an order that depends only on their texts.
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
    /// By the prompts' field `category`, over all pairs; empty if no prompt has one.
    pub categories: Vec<CategoryComparison>,
}

/// The held-out samples of a side.
struct Side {
    run: RunId,
    cycle: u32,
    perplexities: BTreeMap<String, f64>,
    prompts: Vec<Prompt>,
    categories: BTreeMap<String, String>,
    /// The cycles among which it was chosen by its held-out pass rate; 1 if it was named.
    candidates: u32,
    settings: Option<(Option<v1::Verifier>, Option<v1::Sampling>)>,
}

/// The judged samples of a prompt that both sides have, by index.
struct PromptPair<'a> {
    prompt_id: &'a str,
    a: Vec<&'a Sample>,
    b: Vec<&'a Sample>,
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
        PairedTest::new(alpha)?;
        let a = self.read_side(a, suite).await?;
        let b = self.read_side(b, suite).await?;
        require_equal_settings(&a, &b)?;
        let alpha = (alpha / f64::from(a.candidates * b.candidates)).max(ALPHA_MIN);
        let mut test = PairedTest::new(alpha)?;
        let (pairs, unpaired) = pair_samples(&a.prompts, &b.prompts);
        if pairs.is_empty() {
            return Err(CompareError::NothingInCommon { a: a.name(), b: b.name() });
        }
        for pair in &pairs {
            test.add_pair(pair.scores());
        }
        let categories = compare_categories(&pairs, &a.categories);
        let (all, test) = (test.overall(), test.comparison());
        let tokens_a = mean_tokens(pairs.iter().map(|it| &it.a));
        let tokens_b = mean_tokens(pairs.iter().map(|it| &it.b));
        Ok(ModelComparison {
            test,
            pairs: to_count(pairs.len()),
            alpha,
            unpaired,
            a: a.to_compared(all.mean_a, tokens_a),
            b: b.to_compared(all.mean_b, tokens_b),
            categories,
        })
    }

    async fn read_side(
        &self,
        reference: &v1::CheckpointRef,
        suite: &str,
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
        let categories = self.load_prompts(file).await.unwrap_or_default();
        let categories = categories.into_iter().filter_map(|prompt| {
            let category = prompt.fields.get(CATEGORY_FIELD)?.as_str()?.to_owned();
            Some((prompt.id, category))
        });
        let categories = categories.collect();
        let side = Side { run, cycle, perplexities, prompts, categories, candidates, settings };
        let is_judged = |prompt: &Prompt| prompt.samples.iter().any(|it| score_of(it).is_some());
        if side.prompts.iter().any(is_judged) {
            Ok(side)
        } else {
            let prompts = match suite {
                "" => "the run's held-out prompts".to_owned(),
                suite => format!("the suite {suite}"),
            };
            Err(CompareError::NoSamples { name: side.name(), prompts })
        }
    }
}

impl Side {
    fn name(&self) -> String {
        format!("{}/{}", self.run, self.cycle)
    }

    fn to_compared(&self, pass_rate: f64, mean_tokens: f64) -> ComparedCheckpoint {
        ComparedCheckpoint {
            run: self.run.clone(),
            cycle: self.cycle,
            pass_rate,
            mean_tokens,
            perplexities: self.perplexities.clone(),
        }
    }
}

impl PromptPair<'_> {
    /// Returns the pass rates of both sides.
    fn scores(&self) -> Pair {
        let mean = |samples: &[&Sample]| {
            let passed: f64 = samples.iter().filter_map(|it| score_of(it)).sum();
            passed / samples.len().max(1) as f64
        };
        Pair { a: mean(&self.a), b: mean(&self.b) }
    }
}

/// Refuses sides whose samples were drawn or judged in different ways.
fn require_equal_settings(a: &Side, b: &Side) -> Result<(), CompareError> {
    let (Some((verifier_a, sampling_a)), Some((verifier_b, sampling_b))) =
        (&a.settings, &b.settings)
    else {
        return Ok(());
    };
    let field = match (verifier_a == verifier_b, sampling_a == sampling_b) {
        (true, true) => return Ok(()),
        (false, _) => "verifier",
        (true, false) => "sampling",
    };
    Err(CompareError::OtherSettings { a: a.name(), b: b.name(), field })
}

/// Returns the mean length of samples, in tokens.
fn mean_tokens<'a>(samples: impl Iterator<Item = &'a Vec<&'a Sample>>) -> f64 {
    let tokens: Vec<u32> = samples.flatten().map(|it| it.tokens).collect();
    tokens.iter().copied().map(f64::from).sum::<f64>() / tokens.len().max(1) as f64
}

/// Returns 1 for a sample that passed and 0 for one that failed; `None` without a verdict.
fn score_of(sample: &Sample) -> Option<f64> {
    match sample.outcome.as_str() {
        "pass" => Some(1.0),
        "fail" => Some(0.0),
        _ => None,
    }
}

/// Returns the prompts with judged samples of both sides, in an order that depends only on their ids
/// and texts, and the number of other samples. Prompts with the same id are the same only if their
/// texts are.
fn pair_samples<'a>(a: &'a [Prompt], b: &'a [Prompt]) -> (Vec<PromptPair<'a>>, u32) {
    let key = |prompt: &'a Prompt| (prompt.prompt_id.as_str(), prompt.text.as_str());
    let others: BTreeMap<(&str, &str), &Prompt> = b.iter().map(|it| (key(it), it)).collect();
    let mut pairs: Vec<PromptPair<'a>> = Vec::new();
    for prompt in a {
        let Some(other) = others.get(&key(prompt)) else { continue };
        let judged = |sample: &&Sample| score_of(sample).is_some();
        let theirs: BTreeMap<u32, &Sample> =
            other.samples.iter().filter(judged).map(|it| (it.index, it)).collect();
        let ours = prompt.samples.iter().filter(judged);
        let (a, b): (Vec<_>, Vec<_>) =
            ours.filter_map(|it| Some((it, *theirs.get(&it.index)?))).unzip();
        if !a.is_empty() {
            pairs.push(PromptPair { prompt_id: &prompt.prompt_id, a, b });
        }
    }
    let texts: BTreeMap<&str, &str> =
        a.iter().map(|it| (it.prompt_id.as_str(), it.text.as_str())).collect();
    // A file may be sorted by difficulty or category.
    pairs.sort_by_cached_key(|pair| {
        let text = texts.get(pair.prompt_id).copied().unwrap_or_default();
        derive_seed(0, &["compare", pair.prompt_id, text])
    });
    let samples: usize = a.iter().chain(b).map(|prompt| prompt.samples.len()).sum();
    let paired: usize = pairs.iter().map(|pair| 2 * pair.a.len()).sum();
    (pairs, to_count(samples - paired))
}

fn compare_categories(
    pairs: &[PromptPair<'_>],
    categories: &BTreeMap<String, String>,
) -> Vec<CategoryComparison> {
    let mut sums: BTreeMap<&str, (u32, f64, f64)> = BTreeMap::new();
    for pair in pairs {
        let Some(category) = categories.get(pair.prompt_id) else { continue };
        let Pair { a, b } = pair.scores();
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

    #[test]
    fn samples_are_paired_by_prompt_text_and_index() {
        let a = [prompt("1", "1+1=", &["pass", "fail"]), prompt("2", "2+2=", &["pass", "error"])];
        let b = [prompt("2", "2+2=", &["fail", "pass"]), prompt("1", "other", &["pass", "pass"])];
        let (pairs, unpaired) = pair_samples(&a, &b);
        let found: Vec<_> = pairs.iter().map(|it| (it.prompt_id, it.scores())).collect();
        assert_eq!(found, [("2", Pair { a: 1.0, b: 0.0 })]);
        assert_eq!(unpaired, 6);
    }

    #[test]
    fn categories_have_the_means_of_their_pairs() {
        let a = [prompt("1", "x", &["pass"]), prompt("2", "y", &["fail"])];
        let b = [prompt("1", "x", &["fail"]), prompt("2", "y", &["fail"])];
        let (pairs, _) = pair_samples(&a, &b);
        let categories = [("1", "sums"), ("2", "sums")];
        let categories = categories.map(|(id, name)| (id.to_owned(), name.to_owned())).into();
        let found = compare_categories(&pairs, &categories);
        let expected =
            CategoryComparison { category: "sums".into(), pairs: 2, mean_a: 0.5, mean_b: 0.0 };
        assert_eq!(found, [expected]);
        assert_eq!(compare_categories(&pairs, &BTreeMap::new()), []);
    }
}
