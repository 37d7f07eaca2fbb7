//! Compares two checkpoints by the held-out samples that their cycles drew.

use std::collections::BTreeMap;

use comparison::{AlphaError, Comparison, Pair, PairedTest};
use serde::Serialize;
use wire::{RunId, v1};

use v1::samples_page::{Prompt, Sample};

use crate::{CheckpointError, FleetControl, HistoryError};

/// Most probability of a wrong decision, unless the user names another.
pub const DEFAULT_ALPHA: f64 = 0.05;
/// Field of a prompt that names its category.
const CATEGORY_FIELD: &str = "category";
/// Further categories are left out.
const CATEGORIES_MAX: usize = 1000;

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
        "{0} has no judged held-out samples; compare cycles of RAFT runs with `heldout` (R117)"
    )]
    NoSamples(String),
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
    /// The test of the pass marks (1 or 0), in the order of prompts and samples. Means, interval and
    /// p-value are those of all pairs.
    #[serde(flatten)]
    pub test: Comparison,
    /// All pairs; the test may decide before the last.
    pub pairs: u32,
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
}

/// Two judged samples of the same prompt with the same index.
struct SamplePair<'a> {
    prompt_id: &'a str,
    a: &'a Sample,
    b: &'a Sample,
}

impl FleetControl {
    /// Compares two checkpoints of RAFT runs by their samples of the suite's held-out prompts
    /// (`""`: of the runs' own ones), paired by prompt and sample index. Cycles of one run, and runs
    /// with the same seed, drew these with the same random numbers.
    ///
    /// # Errors
    /// A checkpoint does not exist or has no judged samples, they have no prompts in common, or
    /// `alpha` is no probability.
    pub async fn compare_checkpoints(
        &self,
        a: &v1::CheckpointRef,
        b: &v1::CheckpointRef,
        suite: &str,
        alpha: f64,
    ) -> Result<ModelComparison, CompareError> {
        let mut test = PairedTest::new(alpha)?;
        let a = self.read_side(a, suite).await?;
        let b = self.read_side(b, suite).await?;
        let (pairs, unpaired) = pair_samples(&a.prompts, &b.prompts);
        if pairs.is_empty() {
            return Err(CompareError::NothingInCommon { a: a.name(), b: b.name() });
        }
        for pair in &pairs {
            test.add_pair(pair.scores());
        }
        let categories = compare_categories(&pairs, &a.categories);
        let count = to_count(pairs.len());
        let mean_tokens = |of: fn(&SamplePair<'_>) -> u32| {
            pairs.iter().map(|pair| f64::from(of(pair))).sum::<f64>() / f64::from(count)
        };
        let tokens_a = mean_tokens(|pair| pair.a.tokens);
        let tokens_b = mean_tokens(|pair| pair.b.tokens);
        Ok(ModelComparison {
            test: test.overall(),
            pairs: count,
            unpaired,
            a: a.to_compared(tokens_a),
            b: b.to_compared(tokens_b),
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
        let cycle = match reference.cycle {
            // The base has samples, but no checkpoint.
            Some(cycle) => cycle,
            None => self.get_checkpoint(reference).await?.checkpoint.unwrap_or_default().cycle,
        };
        let (spec, prompts) = self.heldout_samples(&run, cycle, suite).await?;
        let infos = self.list_checkpoints(&run).await.map_err(HistoryError::from)?;
        let of_cycle = |info: &v1::CheckpointInfo| {
            info.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.cycle == cycle)
        };
        let last = infos.into_iter().rfind(of_cycle);
        let perplexities = last.map(|info| info.perplexities).unwrap_or_default();
        let perplexities = perplexities.into_iter().map(|it| (it.suite, it.perplexity)).collect();
        let heldout = match &spec.kind {
            Some(v1::spec::Kind::Raft(raft)) => {
                raft.find_prompt_set(v1::Purpose::Heldout, suite).and_then(|set| set.file)
            }
            _ => None,
        };
        let categories = self.load_prompts(heldout).await.unwrap_or_default();
        let categories = categories.into_iter().filter_map(|prompt| {
            let category = prompt.fields.get(CATEGORY_FIELD)?.as_str()?.to_owned();
            Some((prompt.id, category))
        });
        let side = Side { run, cycle, perplexities, prompts, categories: categories.collect() };
        let is_judged = |prompt: &Prompt| prompt.samples.iter().any(|it| score_of(it).is_some());
        if side.prompts.iter().any(is_judged) {
            Ok(side)
        } else {
            Err(CompareError::NoSamples(side.name()))
        }
    }
}

impl Side {
    fn name(&self) -> String {
        format!("{}/{}", self.run, self.cycle)
    }

    fn to_compared(&self, mean_tokens: f64) -> ComparedCheckpoint {
        ComparedCheckpoint {
            run: self.run.clone(),
            cycle: self.cycle,
            mean_tokens,
            perplexities: self.perplexities.clone(),
        }
    }
}

impl SamplePair<'_> {
    fn scores(&self) -> Pair {
        let score = |sample| score_of(sample).unwrap_or_default();
        Pair { a: score(self.a), b: score(self.b) }
    }
}

/// Returns 1 for a sample that passed and 0 for one that failed; `None` without a verdict.
fn score_of(sample: &Sample) -> Option<f64> {
    match sample.outcome.as_str() {
        "pass" => Some(1.0),
        "fail" => Some(0.0),
        _ => None,
    }
}

/// Returns the judged pairs in the order of `a`'s prompts, and the number of other samples. Prompts
/// with the same id are the same only if their texts are.
fn pair_samples<'a>(a: &'a [Prompt], b: &'a [Prompt]) -> (Vec<SamplePair<'a>>, u32) {
    let others: BTreeMap<(&str, &str, u32), &Sample> = b
        .iter()
        .flat_map(|prompt| {
            let key =
                |sample: &Sample| (prompt.prompt_id.as_str(), prompt.text.as_str(), sample.index);
            prompt.samples.iter().map(move |sample| (key(sample), sample))
        })
        .filter(|(_, sample)| score_of(sample).is_some())
        .collect();
    let mut pairs = Vec::new();
    for prompt in a {
        for sample in prompt.samples.iter().filter(|it| score_of(it).is_some()) {
            let key = (prompt.prompt_id.as_str(), prompt.text.as_str(), sample.index);
            if let Some(other) = others.get(&key) {
                pairs.push(SamplePair { prompt_id: &prompt.prompt_id, a: sample, b: other });
            }
        }
    }
    let samples: usize = a.iter().chain(b).map(|prompt| prompt.samples.len()).sum();
    let unpaired = to_count(samples - 2 * pairs.len());
    (pairs, unpaired)
}

fn compare_categories(
    pairs: &[SamplePair<'_>],
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
