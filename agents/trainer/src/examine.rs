//! Whether a training trained: looked at before what it saved is published, whatever engine saved
//! it. That each step's loss is a number its engine sees to.

use std::path::Path;

use anyhow::Context;
use runtime::JobError;

use crate::{
    calls::Step,
    change::{self, Start, Weights},
};

/// Of the norm of the weights, what f32 can tell apart: half its epsilon.
const LEAST_CHANGE: f64 = f32::EPSILON as f64 / 2.0;

/// What the worker said of its training so far, beside its last step.
#[derive(Debug, Clone)]
pub(crate) struct Heard {
    /// What trains, with its versions.
    pub engine: String,
    pub skipped: u32,
    lowest_rate: f64,
    longest_gradient: f64,
}

impl Heard {
    pub(crate) fn new(engine: String, skipped: u32) -> Self {
        Self { engine, skipped, lowest_rate: f64::INFINITY, longest_gradient: 0.0 }
    }

    pub(crate) fn count(&mut self, step: &Step) {
        self.lowest_rate = self.lowest_rate.min(step.learning_rate);
        self.longest_gradient = self.longest_gradient.max(step.grad_norm_max);
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
enum Untrained {
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
        "check weights-changed: {steps} steps changed them by {change:e} of their norm, less than f32 can tell ({LEAST_CHANGE:e}); raise training.learning_rate (it was {rate:e} at the last step) (R113)"
    )]
    Unchanged { steps: u32, change: f64, rate: f64 },
    #[error(
        "check gradient: it was 0 in all of {steps} steps; start from a model or another seed, for this one cannot learn (R113)"
    )]
    NoGradient { steps: u32 },
}

/// How far the weights of a saved step have come from the start, if that can be told.
///
/// # Errors
/// When it did not train: no other try will.
pub(crate) async fn saved(
    checkpoint: &Path,
    start: &Start,
    step: &Step,
    heard: &Heard,
) -> Result<Option<f64>, JobError> {
    let (path, start) = (checkpoint.to_owned(), start.clone());
    let compare = move || change::compare(&path, &start);
    let compared = tokio::task::spawn_blocking(compare).await.map_err(JobError::retry)?;
    let weights = compared
        .with_context(|| format!("look at {}", checkpoint.display()))
        .map_err(JobError::retry)?;
    judge(&weights, step, heard).map_err(JobError::fatal)?;
    Ok(weights.change)
}

fn judge(weights: &Weights, last: &Step, heard: &Heard) -> Result<(), Untrained> {
    let Step { step, steps, tokens, learning_rate, .. } = *last;
    let rate = heard.lowest_rate;
    if rate <= 0.0 {
        return Err(Untrained::Rate { step, rate });
    }
    if last.trained_tokens == 0 {
        return Err(Untrained::NoneScored { step, tokens });
    }
    if let Some((tensor, value)) = weights.broken.clone() {
        return Err(Untrained::NotFinite { step, tensor, value });
    }
    match weights.change {
        // The first steps of a long warm-up may do next to nothing.
        _ if step < steps => Ok(()),
        Some(change) if change < LEAST_CHANGE => {
            Err(Untrained::Unchanged { steps, change, rate: learning_rate })
        }
        None if heard.longest_gradient == 0.0 => Err(Untrained::NoGradient { steps }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> Step {
        Step {
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
        }
    }

    fn judged(change: Option<f64>, step: Step) -> Result<(), Untrained> {
        let mut heard = Heard::new("engine".into(), 0);
        heard.count(&step);
        judge(&Weights { change, broken: None }, &step, &heard)
    }

    #[test]
    fn a_training_that_trained_passes() {
        assert_eq!(judged(Some(1e-2), step()), Ok(()));
        assert_eq!(judged(None, step()), Ok(()), "from scratch there is nothing to compare with");
        let half_way = Step { steps: 9, ..step() };
        assert_eq!(judged(Some(0.0), half_way), Ok(()), "it may still come to something");
    }

    #[test]
    fn each_way_not_to_train_is_told_by_the_check_its_value_and_the_remedy() {
        let told = |change, step| judged(change, step).unwrap_err().to_string();
        for (found, parts) in [
            (
                told(Some(1e-2), Step { learning_rate: 0.0, ..step() }),
                ["check learning-rate", "was 0e0", "training.learning_rate"],
            ),
            (
                told(Some(1e-2), Step { trained_tokens: 0, ..step() }),
                ["check trained-tokens", "of 90 tokens", "completions"],
            ),
            (
                told(Some(3e-9), step()),
                ["check weights-changed", "by 3e-9", "raise training.learning_rate (it was 1e-3"],
            ),
            (
                told(None, Step { grad_norm_max: 0.0, ..step() }),
                ["check gradient", "all of 3 steps", "another seed"],
            ),
        ] {
            assert!(parts.iter().all(|part| found.contains(part)), "{found}");
        }
        let weights = Weights { change: Some(0.1), broken: Some(("a.lora_B".into(), f32::NAN)) };
        let half_way = Step { steps: 9, ..step() };
        let found =
            judge(&weights, &half_way, &Heard::new(String::new(), 0)).unwrap_err().to_string();
        assert!(
            found.contains("check weights-finite: `a.lora_B` holds NaN after step 3"),
            "{found}"
        );
    }
}
