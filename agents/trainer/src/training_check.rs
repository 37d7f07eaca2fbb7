//! Checks that a training has trained, before what it saved is published. The checks apply to every
//! engine. Each engine itself checks that the loss of every step is finite.

use std::path::Path;

use agent::JobError;
use anyhow::Context;

use crate::{
    messages::TrainStep,
    weight_delta::{self, InitialWeights, WeightDelta},
};

/// The smallest relative change of the weights that f32 can represent: half its epsilon.
const WEIGHT_CHANGE_MIN: f64 = f32::EPSILON as f64 / 2.0;

/// Statistics of a training's progress messages, besides its last step.
#[derive(Debug, Clone)]
pub(crate) struct StepStats {
    /// The engine that trains, with its versions.
    pub engine: String,
    /// The number of examples left out because they are too long.
    pub skipped: u32,
    lowest_rate: f64,
    largest_gradient: f64,
    /// Tokens and seconds at the first step and at the last one.
    first: Option<(u64, f64)>,
    last: (u64, f64),
}

impl StepStats {
    pub(crate) fn new(engine: String, skipped: u32) -> Self {
        let (lowest_rate, largest_gradient) = (f64::INFINITY, 0.0);
        Self { engine, skipped, lowest_rate, largest_gradient, first: None, last: (0, 0.0) }
    }

    pub(crate) fn record_step(&mut self, step: &TrainStep) {
        self.lowest_rate = self.lowest_rate.min(step.learning_rate);
        self.largest_gradient = self.largest_gradient.max(step.grad_norm_max);
        self.last = (step.tokens, step.wall_s);
        self.first.get_or_insert(self.last);
    }

    /// Returns the tokens per second between the first step and the last one, without what was spent
    /// on loading; `None` if there were no two steps.
    pub(crate) fn tokens_per_s(&self) -> Option<f64> {
        let (first_tokens, first_s) = self.first?;
        let (last_tokens, last_s) = self.last;
        let speed = last_tokens.saturating_sub(first_tokens) as f64 / (last_s - first_s);
        Some(speed).filter(|speed| speed.is_finite() && *speed > 0.0)
    }
}

/// The reason why a training has not trained. Its message names the check, the value and the
/// remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
enum UntrainedReason {
    #[error(
        "check learning-rate: it was {rate:e} at a step up to {step}; set training.learning_rate above 0 (R113)"
    )]
    Rate { step: u32, rate: f64 },
    #[error(
        "check trained-tokens: of {tokens} tokens up to step {step} none was scored; give the dataset completions (R113)"
    )]
    NoneScored { step: u32, tokens: u64 },
    #[error(
        "check weights-finite: `{tensor}` holds {value} after step {step}; lower training.learning_rate, or train in f32 (R113)"
    )]
    NotFinite { step: u32, tensor: String, value: f32 },
    #[error(
        "check weights-changed: {steps} steps changed them by {change:e} of their norm, less than f32 can tell ({WEIGHT_CHANGE_MIN:e}); raise training.learning_rate (it was {rate:e} at the last step) (R113)"
    )]
    Unchanged { steps: u32, change: f64, rate: f64 },
    #[error(
        "check gradient: it was 0 in all of {steps} steps; start from a model or another seed, for this one cannot learn (R113)"
    )]
    NoGradient { steps: u32 },
}

/// Checks a saved step. Returns the relative change of its weights, if it is known.
///
/// # Errors
/// Fatal if it did not train, because no other attempt would. Retryable if its files cannot be
/// read.
pub(crate) async fn check_saved_step(
    checkpoint: &Path,
    start: &InitialWeights,
    step: &TrainStep,
    stats: &StepStats,
) -> Result<Option<f64>, JobError> {
    let weights = compare_weights(checkpoint, start).await?;
    check_trained(&weights, step, stats).map_err(JobError::fatal_failure)?;
    Ok(weights.change)
}

/// Returns the relative change of merged weights since the start of their training, if it is known.
///
/// # Errors
/// Fatal if a value is not finite. Retryable if the files cannot be read.
pub(crate) async fn measure_change(
    merged: &Path,
    start: &InitialWeights,
) -> Result<Option<f64>, JobError> {
    let weights = compare_weights(merged, start).await?;
    match weights.non_finite {
        Some((tensor, value)) => Err(JobError::fatal_failure(anyhow::anyhow!(
            "the merge gave `{tensor}` the value {value}; lower training.across.outer.rate (R113)"
        ))),
        None => Ok(weights.change),
    }
}

async fn compare_weights(saved: &Path, start: &InitialWeights) -> Result<WeightDelta, JobError> {
    let (path, start) = (saved.to_owned(), start.clone());
    let compare = move || weight_delta::compare_weights(&path, &start);
    let compared =
        tokio::task::spawn_blocking(compare).await.map_err(JobError::retryable_failure)?;
    compared
        .with_context(|| format!("look at {}", saved.display()))
        .map_err(JobError::retryable_failure)
}

/// Checks the learning rate, the scored tokens, the weights and the gradient of a step. The change
/// of the weights and the gradient are only checked at the last step.
fn check_trained(
    weights: &WeightDelta,
    last: &TrainStep,
    stats: &StepStats,
) -> Result<(), UntrainedReason> {
    let TrainStep { step, steps, tokens, learning_rate, .. } = *last;
    let rate = stats.lowest_rate;
    if rate <= 0.0 {
        return Err(UntrainedReason::Rate { step, rate });
    }
    if last.trained_tokens == 0 {
        return Err(UntrainedReason::NoneScored { step, tokens });
    }
    if let Some((tensor, value)) = weights.non_finite.clone() {
        return Err(UntrainedReason::NotFinite { step, tensor, value });
    }
    match weights.change {
        // The first steps of a long warm-up may change almost nothing.
        _ if step < steps => Ok(()),
        Some(change) if change < WEIGHT_CHANGE_MIN => {
            Err(UntrainedReason::Unchanged { steps, change, rate: learning_rate })
        }
        None if stats.largest_gradient == 0.0 => Err(UntrainedReason::NoGradient { steps }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> TrainStep {
        TrainStep {
            step: 3,
            steps: 3,
            loss: 1.0,
            learning_rate: 1e-3,
            grad_norm: 0.5,
            grad_norm_max: 0.7,
            tokens: 90,
            trained_tokens: 30,
            packing: 1.0,
            wall_s: 1.0,
            saved: None,
            canary: Vec::new(),
            weighting: None,
            peak_memory_bytes: 0,
        }
    }

    fn judged(change: Option<f64>, step: TrainStep) -> Result<(), UntrainedReason> {
        let mut stats = StepStats::new("engine".into(), 0);
        stats.record_step(&step);
        check_trained(&WeightDelta { change, non_finite: None }, &step, &stats)
    }

    #[test]
    fn the_speed_is_that_of_the_steps_without_loading() {
        let mut stats = StepStats::new("engine".into(), 0);
        assert_eq!(stats.tokens_per_s(), None);
        stats.record_step(&TrainStep { tokens: 100, wall_s: 60.0, ..step() });
        assert_eq!(stats.tokens_per_s(), None, "its time contains loading");
        stats.record_step(&TrainStep { tokens: 300, wall_s: 64.0, ..step() });
        assert_eq!(stats.tokens_per_s(), Some(50.0));
    }

    #[test]
    fn a_training_that_trained_passes() {
        assert_eq!(judged(Some(1e-2), step()), Ok(()));
        assert_eq!(judged(None, step()), Ok(()), "from scratch there is nothing to compare with");
        let half_way = TrainStep { steps: 9, ..step() };
        assert_eq!(judged(Some(0.0), half_way), Ok(()), "it may still come to something");
    }

    #[test]
    fn each_untrained_result_names_the_check_its_value_and_the_remedy() {
        let reason = |change, step| judged(change, step).unwrap_err().to_string();
        for (found, parts) in [
            (
                reason(Some(1e-2), TrainStep { learning_rate: 0.0, ..step() }),
                ["check learning-rate", "was 0e0", "training.learning_rate"],
            ),
            (
                reason(Some(1e-2), TrainStep { trained_tokens: 0, ..step() }),
                ["check trained-tokens", "of 90 tokens", "completions"],
            ),
            (
                reason(Some(3e-9), step()),
                ["check weights-changed", "by 3e-9", "raise training.learning_rate (it was 1e-3"],
            ),
            (
                reason(None, TrainStep { grad_norm_max: 0.0, ..step() }),
                ["check gradient", "all of 3 steps", "another seed"],
            ),
        ] {
            assert!(parts.iter().all(|part| found.contains(part)), "{found}");
        }
        let weights =
            WeightDelta { change: Some(0.1), non_finite: Some(("a.lora_B".into(), f32::NAN)) };
        let half_way = TrainStep { steps: 9, ..step() };
        let found = check_trained(&weights, &half_way, &StepStats::new(String::new(), 0))
            .unwrap_err()
            .to_string();
        assert!(
            found.contains("check weights-finite: `a.lora_B` holds NaN after step 3"),
            "{found}"
        );
    }
}
