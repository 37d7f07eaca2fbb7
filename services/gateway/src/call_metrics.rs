//! The Prometheus metrics of calls; docs/METRICS.md lists all names.

use std::fmt;

use metrics::{MetricLabels, MetricsPage, count_value};

use crate::CallCounts;

impl CallCounts {
    /// Writes the metrics of calls, streams and removed uploads.
    pub fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let counts = self.calls_by_outcome();
        let answered = counts
            .iter()
            .map(|((method, code), it)| (call_labels(method, code), count_value(it.calls)));
        let help = "Calls answered; streaming calls count when opened";
        page.write_counters("flotilla_gateway_calls", help, &answered.collect::<Vec<_>>())?;
        let took =
            counts.iter().map(|((method, code), it)| (call_labels(method, code), it.seconds));
        let help = "Seconds until the response, or until a stream is open";
        page.write_counters("flotilla_gateway_call_seconds", help, &took.collect::<Vec<_>>())?;
        let streams = Some(count_value(self.open_streams()));
        page.write_gauge("flotilla_gateway_streams_open", "Open streams", streams)?;
        let removed = self.removed_leftovers();
        let help = "Abandoned uploads removed from the store";
        page.write_counter(
            "flotilla_store_leftovers_removed",
            help,
            Some(count_value(removed.count)),
        )?;
        let help = "Bytes freed by removing abandoned uploads";
        page.write_counter(
            "flotilla_store_leftovers_removed_bytes",
            help,
            Some(count_value(removed.bytes)),
        )
    }
}

fn call_labels(method: &str, code: &str) -> MetricLabels {
    vec![("method", method.to_owned()), ("code", code.to_owned())]
}
