//! Figures as they are when somebody asks for them.

use std::{collections::BTreeSet, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

pub type Labels = Vec<(&'static str, String)>;

/// Writes its figures on a page, as they are now.
pub trait Source: fmt::Debug + Send + Sync + 'static {
    /// # Errors
    /// When the page cannot be written.
    fn write(&self, page: &mut Page<'_>) -> fmt::Result;
}

/// What is being told.
#[derive(Debug)]
pub struct Page<'a> {
    encoder: DescriptorEncoder<'a>,
}

#[derive(Debug)]
struct Asked<S>(S);

impl<S: Source> Collector for Asked<S> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.write(&mut Page { encoder })
    }
}

/// What a source says now, as text.
pub fn text(source: impl Source) -> String {
    render(&registry(source))
}

pub(crate) fn registry(source: impl Source) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Asked(source)));
    registry
}

pub(crate) fn render(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = prometheus_client::encoding::text::encode(&mut text, registry);
    text
}

impl Page<'_> {
    /// # Errors
    /// When the page cannot be written; so with all of these.
    pub fn gauge(&mut self, name: &str, help: &str, values: &[(Labels, f64)]) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, values)
    }

    /// `name` without `_total`, which is added.
    pub fn counters(&mut self, name: &str, help: &str, values: &[(Labels, f64)]) -> fmt::Result {
        self.family(name, help, MetricType::Counter, values)
    }

    /// As [`Page::counters`].
    pub fn counter(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let values: Vec<_> = value.into_iter().map(|value| (Labels::new(), value)).collect();
        self.counters(name, help, &values)
    }

    pub fn one(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let values: Vec<_> = value.into_iter().map(|value| (Labels::new(), value)).collect();
        self.gauge(name, help, &values)
    }

    /// Nothing where there is no value.
    fn family(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: &[(Labels, f64)],
    ) -> fmt::Result {
        if values.is_empty() {
            return Ok(());
        }
        let mut metric = self.encoder.encode_descriptor(name, help, None, kind)?;
        if let [(labels, value)] = values
            && labels.is_empty()
        {
            return encode(kind, *value, metric);
        }
        for (labels, value) in values {
            encode(kind, *value, metric.encode_family(labels)?)?;
        }
        Ok(())
    }
}

fn encode(kind: MetricType, value: f64, metric: MetricEncoder<'_>) -> fmt::Result {
    match kind {
        MetricType::Counter => ConstCounter::new(value).encode(metric),
        _ => ConstGauge::new(value).encode(metric),
    }
}

/// Names of what a text has, as Prometheus stores them: counters end in `_total`.
pub fn names(text: &str) -> BTreeSet<String> {
    let typed = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let name = |typed: &str| match typed.split_once(' ') {
        Some((name, "counter")) => format!("{name}_total"),
        Some((name, _)) => name.to_owned(),
        None => typed.to_owned(),
    };
    typed.map(name).collect()
}

/// Names in a page of documentation, which has a row for each: ``| `name{label}` | … |``.
pub fn documented(page: &str) -> BTreeSet<String> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.split('{').next().unwrap_or_default().to_owned()).collect()
}

pub fn flag(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus knows no other numbers")]
pub fn count(value: u64) -> f64 {
    value as f64
}
