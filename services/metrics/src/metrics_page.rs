//! Metrics that are collected at each request, encoded as OpenMetrics text.

use std::{collections::BTreeSet, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

pub type MetricLabels = Vec<(&'static str, String)>;

/// A source of metrics, which is read at each request.
pub trait MetricsSource: fmt::Debug + Send + Sync + 'static {
    fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result;
}

/// The page of metrics that a source writes to.
#[derive(Debug)]
pub struct MetricsPage<'a> {
    encoder: DescriptorEncoder<'a>,
}

#[derive(Debug)]
struct SourceCollector<S>(S);

impl<S: MetricsSource> Collector for SourceCollector<S> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.write_metrics(&mut MetricsPage { encoder })
    }
}

/// Returns the current metrics of a source as text.
pub fn render_source(source: impl MetricsSource) -> String {
    render_registry(&build_registry(source))
}

pub(crate) fn build_registry(source: impl MetricsSource) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(SourceCollector(source)));
    registry
}

pub(crate) fn render_registry(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = prometheus_client::encoding::text::encode(&mut text, registry);
    text
}

impl MetricsPage<'_> {
    /// Writes a gauge with one value for each set of labels; without values nothing.
    pub fn write_gauges(
        &mut self,
        name: &str,
        help: &str,
        values: &[(MetricLabels, f64)],
    ) -> fmt::Result {
        self.write_family(name, help, MetricType::Gauge, values)
    }

    /// Writes a counter with one value for each set of labels. `name` lacks the suffix `_total`.
    pub fn write_counters(
        &mut self,
        name: &str,
        help: &str,
        values: &[(MetricLabels, f64)],
    ) -> fmt::Result {
        self.write_family(name, help, MetricType::Counter, values)
    }

    /// Writes a counter, if it has a value. `name` lacks the suffix `_total`.
    pub fn write_counter(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let values: Vec<_> = value.into_iter().map(|value| (MetricLabels::new(), value)).collect();
        self.write_counters(name, help, &values)
    }

    /// Writes a gauge, if it has a value.
    pub fn write_gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let values: Vec<_> = value.into_iter().map(|value| (MetricLabels::new(), value)).collect();
        self.write_gauges(name, help, &values)
    }

    /// Writes one metric with all its values; without values nothing.
    fn write_family(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: &[(MetricLabels, f64)],
    ) -> fmt::Result {
        if values.is_empty() {
            return Ok(());
        }
        let mut metric = self.encoder.encode_descriptor(name, help, None, kind)?;
        if let [(labels, value)] = values
            && labels.is_empty()
        {
            return encode_value(kind, *value, metric);
        }
        for (labels, value) in values {
            encode_value(kind, *value, metric.encode_family(labels)?)?;
        }
        Ok(())
    }
}

fn encode_value(kind: MetricType, value: f64, metric: MetricEncoder<'_>) -> fmt::Result {
    match kind {
        MetricType::Counter => ConstCounter::new(value).encode(metric),
        _ => ConstGauge::new(value).encode(metric),
    }
}

/// Returns the names of the metrics as Prometheus stores them: counters end in `_total`.
pub fn parse_metric_names(text: &str) -> BTreeSet<String> {
    let typed = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let name = |typed: &str| match typed.split_once(' ') {
        Some((name, "counter")) => format!("{name}_total"),
        Some((name, _)) => name.to_owned(),
        None => typed.to_owned(),
    };
    typed.map(name).collect()
}

/// Returns the names in a page of documentation, which has a row for each: ``| `name{label}` | …
/// |``.
pub fn parse_documented_names(page: &str) -> BTreeSet<String> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.split('{').next().unwrap_or_default().to_owned()).collect()
}

/// Returns 1 for true and 0 for false.
pub fn flag_value(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus knows no other numbers")]
pub fn count_value(value: u64) -> f64 {
    value as f64
}
