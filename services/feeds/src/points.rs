//! What trackers are told of a run: which figures it has, by name and step.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;
use wire::{Body, Record, v1};

/// Settings of a run; trackers have limits of their own.
const SETTINGS_MAX: usize = 200;
const SETTING_BYTES_MAX: usize = 500;

/// One fact, as trackers understand it.
#[derive(Debug, Clone)]
pub struct Told {
    /// Of the fact, which is there for those who want all of it.
    pub record: Arc<Record>,
    pub what: What,
}

#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// The first of a run.
    Begun(Begun),
    /// Perhaps none.
    Figures(Vec<Figure>),
    Ended(v1::done::Status),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Begun {
    pub name: String,
    pub kind: &'static str,
    /// By their place in the spec, such as `raft.sampling.temperature`.
    pub settings: BTreeMap<String, String>,
}

/// A figure, at a step: of training, its optimizer steps over all cycles; of cycles, their number.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    pub key: String,
    pub value: f64,
    pub step: u64,
}

/// A run, as far as its figures' steps need it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Course {
    /// Optimizer steps of each cycle so far.
    steps: BTreeMap<u32, u32>,
}

impl Course {
    /// In log order. What trackers do not care for has no figures.
    pub(crate) fn tell(&mut self, record: Arc<Record>) -> Told {
        let what = match &record.fact.body {
            Body::Spec(spec) => What::Begun(begun(spec)),
            Body::Done(done) => What::Ended(done.status()),
            body => What::Figures(self.figures(body)),
        };
        Told { record, what }
    }

    fn figures(&mut self, body: &Body) -> Vec<Figure> {
        let mut figures = Figures(Vec::new());
        match body {
            Body::Checkpoint(checkpoint) => self.checkpoint(&mut figures, checkpoint),
            Body::Eval(eval) => {
                let step = self.step(eval.cycle, eval.step);
                let suite = &eval.suite;
                figures.add(format!("eval/{suite}/perplexity"), eval.perplexity, step);
                figures.add(format!("eval/{suite}/bits_per_byte"), eval.bits_per_byte, step);
                figures.add(format!("eval/{suite}/nll"), eval.mean_nll, step);
                figures.add(format!("eval/{suite}/stderr"), eval.stderr, step);
            }
            Body::Selected(selected) => {
                let step = selected.cycle.into();
                figures.add("select/considered", selected.considered.into(), step);
                figures.add("select/kept", selected.kept.into(), step);
                figures.add("select/min_reward", selected.min_reward, step);
                figures.add("select/diversity", selected.diversity, step);
                figures.maybe("select/entropy", selected.entropy, step);
            }
            Body::CycleDone(done) => cycle(&mut figures, done),
            _ => {}
        }
        figures.0
    }

    fn checkpoint(&mut self, figures: &mut Figures, checkpoint: &v1::Checkpoint) {
        let steps = self.steps.entry(checkpoint.cycle).or_default();
        *steps = checkpoint.step.max(*steps);
        // What a run begins with was trained by nobody.
        if checkpoint.step == 0 {
            return;
        }
        let step = self.step(checkpoint.cycle, checkpoint.step);
        figures.add("train/loss", checkpoint.loss, step);
        figures.add("train/learning_rate", checkpoint.learning_rate, step);
        figures.add("train/grad_norm", checkpoint.grad_norm, step);
        figures.maybe("train/weight_change", checkpoint.weight_change, step);
        #[expect(clippy::cast_precision_loss, reason = "far fewer tokens than 2^52")]
        figures.add("train/tokens", checkpoint.tokens as f64, step);
    }

    /// Of all cycles, which train one after the other.
    fn step(&self, cycle: u32, step: u32) -> u64 {
        let before = self.steps.range(..cycle).map(|(_, steps)| u64::from(*steps));
        before.sum::<u64>() + u64::from(step)
    }
}

fn cycle(figures: &mut Figures, done: &v1::CycleDone) {
    let step = done.cycle.into();
    let mut rate = |name: String, rate: &Option<v1::cycle_done::Rate>| {
        if let Some(rate) = rate {
            figures.add(format!("{name}/pass_rate"), rate.mean, step);
            figures.add(format!("{name}/pass_rate_stderr"), rate.stderr, step);
        }
    };
    rate("heldout".into(), &done.heldout);
    rate("cycle".into(), &done.train);
    done.suites.iter().for_each(|suite| rate(format!("suite/{}", suite.suite), &suite.rate));
    for at in &done.pass_at {
        figures.add(format!("heldout/pass_at_{}", at.k), at.mean, step);
    }
    figures.add("cycle/sampled", done.sampled.into(), step);
    for (phase, seconds) in [
        ("generate", done.generate_s),
        ("verify", done.verify_s),
        ("train", done.train_s),
        ("eval", done.eval_s),
    ] {
        figures.add(format!("seconds/{phase}"), seconds, step);
    }
    if done.metered > 0 {
        figures.add("cycle/joules_a_sample", done.joules / f64::from(done.metered), step);
    }
}

struct Figures(Vec<Figure>);

impl Figures {
    /// What is no number is left out: few trackers take it.
    fn add(&mut self, key: impl Into<String>, value: f64, step: u64) {
        if value.is_finite() {
            self.0.push(Figure { key: key.into(), value, step });
        }
    }

    fn maybe(&mut self, key: &str, value: Option<f64>, step: u64) {
        if let Some(value) = value {
            self.add(key, value, step);
        }
    }
}

fn begun(spec: &v1::Spec) -> Begun {
    let mut settings = Vec::new();
    if let Ok(spec) = serde_json::to_value(spec) {
        flatten(&mut settings, String::new(), &spec);
    }
    // Where there are too many, it is the details of lists that are left out.
    settings.sort_by_key(|(place, _)| place.matches('.').count());
    settings.truncate(SETTINGS_MAX);
    let kind = spec.kind_name();
    Begun { name: spec.name.clone(), kind, settings: settings.into_iter().collect() }
}

fn flatten(settings: &mut Vec<(String, String)>, place: String, value: &Value) {
    let below = |name: &str| if place.is_empty() { name.into() } else { format!("{place}.{name}") };
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| flatten(settings, below(name), value));
        }
        Value::Array(values)
            if values.iter().any(|value| value.is_object() || value.is_array()) =>
        {
            let values = values.iter().enumerate();
            values.for_each(|(at, value)| flatten(settings, below(&at.to_string()), value));
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
    use wire::{Fact, Place, RunId, Subject};

    use super::*;

    fn record(place: Place, body: Body) -> Arc<Record> {
        let subject = Subject::new(&RunId::new("r-1").unwrap(), place);
        Arc::new(Record { sequence: 1, time_ms: 5, author: None, fact: Fact { subject, body } })
    }

    fn checkpoint(cycle: u32, step: u32) -> Arc<Record> {
        let body =
            v1::Checkpoint { cycle, step, loss: 0.5, grad_norm: f64::NAN, ..Default::default() };
        record(Place::Checkpoint { cycle, step }, Body::Checkpoint(body))
    }

    fn figures(told: Told) -> Vec<Figure> {
        match told.what {
            What::Figures(figures) => figures,
            other => panic!("{other:?}"),
        }
    }

    fn steps(told: Told) -> Vec<u64> {
        figures(told).iter().map(|figure| figure.step).collect()
    }

    #[test]
    fn training_s_steps_go_on_from_cycle_to_cycle() {
        let mut course = Course::default();
        assert!(steps(course.tell(checkpoint(0, 0))).is_empty(), "nobody trained it");
        assert!(steps(course.tell(checkpoint(1, 10))).iter().all(|step| *step == 10));
        assert!(steps(course.tell(checkpoint(1, 20))).iter().all(|step| *step == 20));
        assert!(steps(course.tell(checkpoint(2, 10))).iter().all(|step| *step == 30));
        let eval = v1::Eval { cycle: 2, step: 10, suite: "text".into(), ..Default::default() };
        let suite = wire::SuiteName::new("text").unwrap();
        let eval = record(Place::Eval { cycle: 2, step: 10, suite }, Body::Eval(eval));
        let eval = figures(course.tell(eval));
        assert_eq!((eval[0].key.as_str(), eval[0].step), ("eval/text/perplexity", 30));
    }

    #[test]
    fn what_is_no_number_is_no_figure() {
        let told = figures(Course::default().tell(checkpoint(1, 10)));
        assert!(told.iter().any(|figure| figure.key == "train/loss"));
        assert!(told.iter().all(|figure| figure.key != "train/grad_norm"));
    }

    #[test]
    fn settings_are_named_by_their_place_and_have_a_bound() {
        let sampling = v1::Sampling { temperature: 0.5, ..Default::default() };
        let schedules = v1::Schedules { temperature: vec![1.0; 3], ..Default::default() };
        let raft = v1::spec::Raft {
            sampling: Some(sampling),
            schedules: Some(schedules),
            prompt_suites: (0..300)
                .map(|n| v1::PromptSuite { name: "é".repeat(600 + n), ..Default::default() })
                .collect(),
            ..Default::default()
        };
        let kind = Some(v1::spec::Kind::Raft(raft));
        let spec = v1::Spec { name: "sums".into(), kind, ..Default::default() };
        let What::Begun(begun) = Course::default().tell(record(Place::Spec, Body::Spec(spec))).what
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
