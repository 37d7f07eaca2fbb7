//! Conversion of facts to updates for exporters: the metrics of a run, by name and step.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;
use wire::{FactBody, Record, v1};

/// Tools have limits of their own.
const SETTINGS_MAX: usize = 200;
const SETTING_BYTES_MAX: usize = 500;

/// One fact, converted for exporters.
#[derive(Debug, Clone)]
pub struct RunUpdate {
    pub record: Arc<Record>,
    pub kind: UpdateKind,
}

#[derive(Debug, Clone, PartialEq)]
pub enum UpdateKind {
    Started(RunStart),
    /// Empty for facts without metrics.
    Metrics(Vec<MetricPoint>),
    Ended(v1::done::Status),
}

#[derive(Debug, Clone, PartialEq)]
pub struct RunStart {
    pub name: String,
    pub kind: &'static str,
    /// Values by their path in the spec, such as `raft.sampling.temperature`.
    pub settings: BTreeMap<String, String>,
}

/// The value of a metric at a step: the optimizer step over all cycles for training and evaluation,
/// and the cycle number for other metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricPoint {
    /// Such as `train/loss`.
    pub key: String,
    /// Always finite.
    pub value: f64,
    pub step: u64,
}

/// The optimizer steps of a run so far, which give metrics their step.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunProgress {
    cycle_steps: BTreeMap<u32, u32>,
}

impl RunProgress {
    /// Converts a fact. Facts must arrive in log order.
    pub(crate) fn next_update(&mut self, record: Arc<Record>) -> RunUpdate {
        let what = match &record.fact.body {
            FactBody::Spec(spec) => {
                let mut spec = spec.clone();
                for checkpoint in
                    spec.take_forked_cycles().cycles.iter().flat_map(|it| &it.checkpoints)
                {
                    let steps = self.cycle_steps.entry(checkpoint.cycle).or_default();
                    *steps = checkpoint.step.max(*steps);
                }
                UpdateKind::Started(start_from_spec(&spec))
            }
            FactBody::Done(done) => UpdateKind::Ended(done.status()),
            body => UpdateKind::Metrics(self.fact_metrics(body)),
        };
        RunUpdate { record, kind: what }
    }

    fn fact_metrics(&mut self, body: &FactBody) -> Vec<MetricPoint> {
        let mut figures = MetricList(Vec::new());
        match body {
            FactBody::Checkpoint(checkpoint) => self.add_checkpoint(&mut figures, checkpoint),
            FactBody::Eval(eval) => {
                let step = self.total_step(eval.cycle, eval.step);
                let suite = &eval.suite;
                figures.add_value(format!("eval/{suite}/perplexity"), eval.perplexity, step);
                figures.add_value(format!("eval/{suite}/bits_per_byte"), eval.bits_per_byte, step);
                figures.add_value(format!("eval/{suite}/nll"), eval.mean_nll, step);
                figures.add_value(format!("eval/{suite}/stderr"), eval.stderr, step);
            }
            FactBody::Selected(selected) => {
                let step = selected.cycle.into();
                figures.add_value("select/considered", selected.considered.into(), step);
                figures.add_value("select/kept", selected.kept.into(), step);
                figures.add_value("select/min_reward", selected.min_reward, step);
                figures.add_value("select/diversity", selected.diversity, step);
                figures.add_optional("select/entropy", selected.entropy, step);
            }
            FactBody::CycleDone(done) => add_cycle(&mut figures, done),
            _ => {}
        }
        figures.0
    }

    fn add_checkpoint(&mut self, figures: &mut MetricList, checkpoint: &v1::Checkpoint) {
        let steps = self.cycle_steps.entry(checkpoint.cycle).or_default();
        *steps = checkpoint.step.max(*steps);
        // The checkpoint with which a run begins has no training metrics.
        if checkpoint.step == 0 {
            return;
        }
        let step = self.total_step(checkpoint.cycle, checkpoint.step);
        figures.add_value("train/loss", checkpoint.loss, step);
        figures.add_value("train/learning_rate", checkpoint.learning_rate, step);
        figures.add_value("train/grad_norm", checkpoint.grad_norm, step);
        figures.add_optional("train/weight_change", checkpoint.weight_change, step);
        if let Some(found) = &checkpoint.weighting {
            add_weighting(figures, found, step);
        }
        #[expect(clippy::cast_precision_loss, reason = "far fewer tokens than 2^52")]
        figures.add_value("train/tokens", checkpoint.tokens as f64, step);
    }

    /// Returns the optimizer step over all cycles, which train one after the other.
    fn total_step(&self, cycle: u32, step: u32) -> u64 {
        let before = self.cycle_steps.range(..cycle).map(|(_, steps)| u64::from(*steps));
        before.sum::<u64>() + u64::from(step)
    }
}

/// Adds the weights that an objective gave to tokens.
fn add_weighting(figures: &mut MetricList, found: &v1::checkpoint::Weighting, step: u64) {
    figures.add_value("train/dropped_tokens", found.dropped_share(), step);
    figures.add_value("train/clipped_weights", found.token_share(found.clipped), step);
    figures.add_optional("train/ratio", found.ratio, step);
    figures.add_optional("train/drift", found.drift, step);
    figures.add_optional("train/divergence", found.divergence, step);
    for (number, count) in found.ratios.iter().enumerate() {
        figures.add_value(format!("train/ratio_class_{number}"), found.token_share(*count), step);
    }
}

fn add_cycle(figures: &mut MetricList, done: &v1::CycleDone) {
    let step = done.cycle.into();
    let mut rate = |name: String, rate: &Option<v1::cycle_done::Rate>| {
        if let Some(rate) = rate {
            figures.add_value(format!("{name}/pass_rate"), rate.mean, step);
            figures.add_value(format!("{name}/pass_rate_stderr"), rate.stderr, step);
        }
    };
    rate("heldout".into(), &done.heldout);
    rate("cycle".into(), &done.train);
    done.suites.iter().for_each(|suite| rate(format!("suite/{}", suite.suite), &suite.rate));
    for at in &done.pass_at {
        figures.add_value(format!("heldout/pass_at_{}", at.k), at.mean, step);
    }
    figures.add_value("cycle/sampled", done.sampled.into(), step);
    for (phase, seconds) in [
        ("generate", done.generate_s),
        ("verify", done.verify_s),
        ("train", done.train_s),
        ("eval", done.eval_s),
    ] {
        figures.add_value(format!("seconds/{phase}"), seconds, step);
    }
    if done.metered > 0 {
        figures.add_value("cycle/joules_a_sample", done.joules / f64::from(done.metered), step);
    }
}

struct MetricList(Vec<MetricPoint>);

impl MetricList {
    /// Skips NaN and infinite values, which few tools accept.
    fn add_value(&mut self, key: impl Into<String>, value: f64, step: u64) {
        if value.is_finite() {
            self.0.push(MetricPoint { key: key.into(), value, step });
        }
    }

    fn add_optional(&mut self, key: &str, value: Option<f64>, step: u64) {
        if let Some(value) = value {
            self.add_value(key, value, step);
        }
    }
}

fn start_from_spec(spec: &v1::Spec) -> RunStart {
    let mut settings = Vec::new();
    if let Ok(spec) = serde_json::to_value(spec) {
        flatten_settings(&mut settings, String::new(), &spec);
    }
    // Above the limit, the most deeply nested settings are dropped.
    settings.sort_by_key(|(place, _)| place.matches('.').count());
    settings.truncate(SETTINGS_MAX);
    let kind = spec.kind_name();
    RunStart { name: spec.name.clone(), kind, settings: settings.into_iter().collect() }
}

/// Converts JSON to pairs of path and text. A list of plain values is one setting.
fn flatten_settings(settings: &mut Vec<(String, String)>, place: String, value: &Value) {
    let below = |name: &str| if place.is_empty() { name.into() } else { format!("{place}.{name}") };
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| flatten_settings(settings, below(name), value));
        }
        Value::Array(values)
            if values.iter().any(|value| value.is_object() || value.is_array()) =>
        {
            let values = values.iter().enumerate();
            values
                .for_each(|(at, value)| flatten_settings(settings, below(&at.to_string()), value));
        }
        _ => {
            let mut text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text.truncate(text.floor_char_boundary(SETTING_BYTES_MAX));
            settings.push((place, text));
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::{Fact, FactKey, RunId, Subject};

    use super::*;

    fn record(place: FactKey, body: FactBody) -> Arc<Record> {
        let subject = Subject::new(&RunId::new("r-1").unwrap(), place);
        Arc::new(Record { sequence: 1, time_ms: 5, author: None, fact: Fact { subject, body } })
    }

    fn checkpoint(cycle: u32, step: u32) -> Arc<Record> {
        let body =
            v1::Checkpoint { cycle, step, loss: 0.5, grad_norm: f64::NAN, ..Default::default() };
        record(FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(body))
    }

    fn figures(update: RunUpdate) -> Vec<MetricPoint> {
        match update.kind {
            UpdateKind::Metrics(figures) => figures,
            other => panic!("{other:?}"),
        }
    }

    fn steps(update: RunUpdate) -> Vec<u64> {
        figures(update).iter().map(|figure| figure.step).collect()
    }

    #[test]
    fn training_s_steps_go_on_from_cycle_to_cycle() {
        let mut progress = RunProgress::default();
        assert!(steps(progress.next_update(checkpoint(0, 0))).is_empty(), "it is not trained");
        assert!(steps(progress.next_update(checkpoint(1, 10))).iter().all(|step| *step == 10));
        assert!(steps(progress.next_update(checkpoint(1, 20))).iter().all(|step| *step == 20));
        assert!(steps(progress.next_update(checkpoint(2, 10))).iter().all(|step| *step == 30));
        let eval = v1::Eval { cycle: 2, step: 10, suite: "text".into(), ..Default::default() };
        let suite = wire::SuiteName::new("text").unwrap();
        let eval = record(FactKey::Eval { cycle: 2, step: 10, suite }, FactBody::Eval(eval));
        let eval = figures(progress.next_update(eval));
        assert_eq!((eval[0].key.as_str(), eval[0].step), ("eval/text/perplexity", 30));
    }

    #[test]
    fn values_that_are_not_numbers_are_no_metrics() {
        let points = figures(RunProgress::default().next_update(checkpoint(1, 10)));
        assert!(points.iter().any(|figure| figure.key == "train/loss"));
        assert!(points.iter().all(|figure| figure.key != "train/grad_norm"));
    }

    #[test]
    fn settings_are_named_by_their_place_and_have_a_bound() {
        let sampling = v1::Sampling { temperature: 0.5, ..Default::default() };
        let schedules = v1::Schedules { temperature: vec![1.0; 3], ..Default::default() };
        let raft = v1::spec::Raft {
            verifier: Some(v1::Verifier::default()),
            sampling: Some(sampling),
            schedules: Some(schedules),
            prompt_suites: (0..300)
                .map(|n| v1::PromptSuite { name: "é".repeat(600 + n), ..Default::default() })
                .collect(),
            ..Default::default()
        };
        let kind = Some(v1::spec::Kind::Raft(raft));
        let spec = v1::Spec { name: "sums".into(), kind, ..Default::default() };
        let UpdateKind::Started(begun) =
            RunProgress::default().next_update(record(FactKey::Spec, FactBody::Spec(spec))).kind
        else {
            panic!("a spec begins a run")
        };
        assert_eq!((begun.name.as_str(), begun.kind), ("sums", "raft"));
        assert_eq!(begun.settings["raft.sampling.temperature"], "0.5");
        assert_eq!(begun.settings["raft.schedules.temperature"], "[1.0,1.0,1.0]");
        assert!(begun.settings.len() <= SETTINGS_MAX);
        assert!(begun.settings.values().all(|text| text.len() <= SETTING_BYTES_MAX));
    }
}
