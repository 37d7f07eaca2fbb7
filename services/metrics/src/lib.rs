//! Metrics of a process for Prometheus, and their HTTP endpoint. Names follow node_exporter where
//! it has them; docs/METRICS.md lists all. This crate does not know what is measured.

mod endpoint;
mod metrics_page;

pub use endpoint::MetricsEndpoint;
pub use metrics_page::{
    MetricLabels, MetricsPage, MetricsSource, count_value, flag_value, parse_documented_names,
    parse_metric_names, render_source,
};
