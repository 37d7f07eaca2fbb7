//! The amounts of a run: tokens of samples and of trainings.

use wire::v1;

use super::{EvidenceBuilder, UncertainAmount};
use crate::{run_history::RunHistory, workload::RunWorkload};

/// Bytes of text in a token, without measurement.
const ASSUMED_TOKEN_BYTES: f64 = 3.5;
/// Tokens of a sequence of a training, without measurement; less if the spec allows less.
const ASSUMED_SEQUENCE_TOKENS: f64 = 200.0;
/// Share of `max_new_tokens` that a sample uses, without measurement.
const ASSUMED_LENGTH_SHARE: f64 = 0.5;
/// Share of prompts with a sample that is kept, without measurement.
const ASSUMED_KEPT_SHARE: f64 = 0.5;
const ASSUMED_AMOUNT_DEVIATION: f64 = 0.5;

/// Relative change of amounts from one run to the next, which the facts of one run cannot show:
/// other prompts, a model that learns.
const LENGTH_DRIFT: f64 = 0.06;
const KEPT_DRIFT: f64 = 0.06;

impl EvidenceBuilder<'_> {
    /// Returns the generated tokens of a sample. Samples that reached the limit grow with it.
    pub(super) fn tokens_per_sample(&mut self, purpose: v1::Purpose) -> UncertainAmount {
        let limit = self.workload.max_new_tokens;
        let wanted = match purpose {
            v1::Purpose::Heldout => self.workload.heldout_samples,
            _ => self.workload.train_samples,
        };
        let cycles = self.histories.iter().flat_map(|history| {
            let limit = sampling_limit(history);
            history.cycles.values().map(move |cycle| (limit, cycle))
        });
        let means: Vec<(f64, f64)> = cycles
            .filter_map(|(before, cycle)| {
                let jobs = || cycle.drawn.iter().filter(|job| job.purpose == purpose);
                let samples: f64 = jobs().map(|job| f64::from(job.samples)).sum();
                let cut: f64 = jobs().map(|job| f64::from(job.cut)).sum();
                let tokens: f64 = jobs().map(|job| job.tokens as f64).sum();
                let growth = if before > 0.0 && limit > 0.0 { (limit / before).ln() } else { 0.0 };
                let exponent = if growth < 0.0 { 0.5 + cut / samples / 2.0 } else { cut / samples };
                (samples > 0.0).then(|| {
                    let mean = tokens / samples * (growth * exponent).exp();
                    (if limit > 0.0 { mean.min(limit) } else { mean }, 0.3 * growth.abs())
                })
            })
            .collect();
        if means.is_empty() {
            if wanted > 0.0 {
                self.assumed.push(format!(
                    "samples of {:.0} tokens, half of max_new_tokens",
                    ASSUMED_LENGTH_SHARE * limit
                ));
            }
            let median = ASSUMED_LENGTH_SHARE * limit;
            return UncertainAmount { median, deviation: ASSUMED_AMOUNT_DEVIATION };
        }
        let values: Vec<f64> = means.iter().map(|(mean, _)| *mean).collect();
        let stretch = means.iter().map(|(_, stretch)| *stretch).fold(0.0, f64::max);
        let amount = log_mean(&values, LENGTH_DRIFT);
        UncertainAmount { deviation: amount.deviation.hypot(stretch), ..amount }
    }

    /// Returns the tokens of the training of a cycle, in all passes.
    pub(super) fn training_tokens(&mut self) -> UncertainAmount {
        let workload = self.workload;
        let (amount, times) = match workload.sequences_max {
            Some(sequences) => (self.sequence_tokens(), sequences),
            None if workload.train_samples == 0.0 => (self.example_tokens(), workload.epochs),
            None => (self.kept_tokens(), workload.epochs),
        };
        UncertainAmount { median: amount.median * times, ..amount }
    }

    /// Returns the tokens of one sequence of a training with a limit of steps.
    fn sequence_tokens(&mut self) -> UncertainAmount {
        let per_sequence = self.histories.iter().flat_map(|history| {
            let before = RunWorkload::from_spec(&history.spec);
            let sequences = before.and_then(|before| before.sequences_max);
            history.cycles.values().filter_map(move |cycle| {
                let (_, checkpoint) = cycle.trained.as_ref()?;
                let each = checkpoint.tokens as f64 / sequences?;
                (each > 0.0).then_some(each)
            })
        });
        let per_sequence: Vec<f64> = per_sequence.collect();
        if per_sequence.is_empty() {
            let median = ASSUMED_SEQUENCE_TOKENS.min(self.workload.max_tokens / 2.0);
            self.assumed.push(format!("training sequences of {median:.0} tokens"));
            return UncertainAmount { median, deviation: ASSUMED_AMOUNT_DEVIATION };
        }
        log_mean(&per_sequence, LENGTH_DRIFT)
    }

    /// Returns the tokens of one pass over the samples that a cycle keeps.
    fn kept_tokens(&mut self) -> UncertainAmount {
        let workload = self.workload;
        let kept = self.kept_samples();
        let per_kept = self.histories.iter().flat_map(|history| {
            let epochs = training_epochs(history);
            history.cycles.values().filter_map(move |cycle| {
                let (_, checkpoint) = cycle.trained.as_ref()?;
                let kept = f64::from(cycle.selected.as_ref()?.kept);
                let per = checkpoint.tokens as f64 / epochs? / kept;
                (kept > 0.0 && per > 0.0).then_some(per)
            })
        });
        let per_kept: Vec<f64> = per_kept.collect();
        let each = if per_kept.is_empty() {
            self.assumed.push("training examples as long as max_new_tokens".to_owned());
            let median = workload.max_new_tokens;
            UncertainAmount { median, deviation: ASSUMED_AMOUNT_DEVIATION }
        } else {
            log_mean(&per_kept, LENGTH_DRIFT)
        };
        UncertainAmount {
            median: kept.median * each.median,
            deviation: kept.deviation.hypot(each.deviation),
        }
    }

    /// Returns the samples that a cycle keeps.
    fn kept_samples(&mut self) -> UncertainAmount {
        let workload = self.workload;
        let prompts = workload.train_samples / workload.samples_per_prompt;
        let most = match workload.keep_per_prompt {
            0.0 => workload.samples_per_prompt,
            most => most.min(workload.samples_per_prompt),
        };
        let (mut per_prompt, mut stretch) = (Vec::new(), 0.0_f64);
        for history in &self.histories {
            let before = RunWorkload::from_spec(&history.spec);
            let Some(before) = before.filter(|it| it.samples_per_prompt > 0.0) else { continue };
            let growth = (workload.samples_per_prompt / before.samples_per_prompt).ln();
            for selected in history.cycles.values().filter_map(|cycle| cycle.selected.as_ref()) {
                let prompts = f64::from(selected.considered) / before.samples_per_prompt;
                let kept = f64::from(selected.kept) / prompts;
                if selected.kept > 0 && prompts > 0.0 {
                    // With a limit for each prompt, more samples help only prompts without any.
                    let limited = workload.keep_per_prompt > 0.0;
                    let exponent = if limited { (1.0 - kept / most).clamp(0.0, 1.0) } else { 1.0 };
                    per_prompt.push((kept * (growth * exponent).exp()).min(most));
                    stretch = stretch.max(0.3 * growth.abs() * exponent);
                }
            }
        }
        if per_prompt.is_empty() {
            self.assumed.push("half of the samples that the selection could keep".to_owned());
            let median = ASSUMED_KEPT_SHARE * most * prompts;
            return UncertainAmount { median, deviation: ASSUMED_AMOUNT_DEVIATION };
        }
        let amount = log_mean(&per_prompt, KEPT_DRIFT);
        UncertainAmount {
            median: amount.median * prompts,
            deviation: amount.deviation.hypot(stretch),
        }
    }

    /// Returns the tokens of one pass over the examples of an SFT run.
    fn example_tokens(&mut self) -> UncertainAmount {
        let bytes = self.workload.example_bytes;
        let per_byte = self.histories.iter().filter_map(|history| {
            let before = RunWorkload::from_spec(&history.spec)?;
            let (_, checkpoint) = history.cycles.get(&0)?.trained.as_ref()?;
            let tokens = checkpoint.tokens as f64 / training_epochs(history)?;
            (before.example_bytes > 0.0 && tokens > 0.0).then(|| tokens / before.example_bytes)
        });
        let per_byte: Vec<f64> = per_byte.collect();
        if per_byte.is_empty() {
            self.assumed.push(format!("a token of {ASSUMED_TOKEN_BYTES} bytes of the examples"));
            let median = bytes / ASSUMED_TOKEN_BYTES;
            return UncertainAmount { median, deviation: ASSUMED_AMOUNT_DEVIATION };
        }
        let each = log_mean(&per_byte, LENGTH_DRIFT);
        UncertainAmount { median: each.median * bytes, deviation: each.deviation }
    }
}

/// Returns the limit of tokens of a history's training samples; 0 if it draws none.
fn sampling_limit(history: &RunHistory) -> f64 {
    RunWorkload::from_spec(&history.spec).map_or(0.0, |workload| workload.max_new_tokens)
}

/// Returns the passes over the data, or `None` if the history's spec limits the steps.
fn training_epochs(history: &RunHistory) -> Option<f64> {
    let workload = RunWorkload::from_spec(&history.spec)?;
    workload.sequences_max.is_none().then_some(workload.epochs)
}

/// Returns the geometric mean of positive values, with the deviation of a new run's mean.
fn log_mean(values: &[f64], drift: f64) -> UncertainAmount {
    let count = values.len() as f64;
    let logs = || values.iter().map(|value| value.ln());
    let mean = logs().sum::<f64>() / count;
    let squares = logs().map(|log| (log - mean).powi(2)).sum::<f64>();
    // One more value of the usual drift keeps few values from looking certain.
    let variance = (squares + drift.powi(2)) / count;
    UncertainAmount { median: mean.exp(), deviation: (variance / count).sqrt().hypot(drift) }
}
