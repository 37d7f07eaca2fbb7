//! Prometheus metrics of a coordinator and its gateway; docs/METRICS.md lists all names.

use std::fmt;

use bus::Bus;
use coordinator::{FleetMetrics, LoopStatus, RunMetrics};
use gateway::CallCounts;
use metrics::{MetricLabels, MetricsPage, count_value, flag_value};
use tokio::sync::watch;

/// The sources of the coordinator's metrics page.
pub(super) struct CoordinatorMetrics {
    pub(super) turns: watch::Receiver<LoopStatus>,
    pub(super) figures: watch::Receiver<FleetMetrics>,
    pub(super) bus: Bus,
    pub(super) calls: CallCounts,
}

impl fmt::Debug for CoordinatorMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

impl metrics::MetricsSource for CoordinatorMetrics {
    fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let turn = *self.turns.borrow();
        write_coordinator(page, turn, self.bus.is_connected())?;
        write_calls(page, &self.calls)?;
        let figures = self.figures.borrow().clone();
        let agents = figures.agents.into_iter();
        let agents: Vec<_> =
            agents.map(|(state, agents)| (vec![("state", state)], count_value(agents))).collect();
        page.write_gauges("flotilla_agents", "Agents seen recently, by state", &agents)?;
        write_runs(page, &figures.runs)
    }
}

/// Writes the metrics of the control loop.
fn write_coordinator(page: &mut MetricsPage<'_>, turn: LoopStatus, connected: bool) -> fmt::Result {
    let LoopStatus { caught_up, leads, open_runs, last_sequence: facts } = turn;
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    page.write_gauges("flotilla_coordinator_info", "The coordinator; always 1", &[(version, 1.0)])?;
    for (name, help, value) in [
        ("flotilla_coordinator_leads", "1 while this coordinator is the leader", flag_value(leads)),
        ("flotilla_coordinator_caught_up", "1 after the log was replayed", flag_value(caught_up)),
        ("flotilla_bus_connected", "1 while connected to the NATS server", flag_value(connected)),
        ("flotilla_runs_open", "Runs that have not ended", count_value(open_runs as u64)),
    ] {
        page.write_gauge(name, help, Some(value))?;
    }
    let (name, help) = ("flotilla_log_sequence", "Log sequence of the last applied fact");
    page.write_gauge(name, help, Some(count_value(facts)))
}

/// Writes the metrics of gateway calls and streams.
fn write_calls(page: &mut MetricsPage<'_>, calls: &CallCounts) -> fmt::Result {
    let told = calls.calls_by_outcome();
    let answered =
        told.iter().map(|((method, code), it)| (call_labels(method, code), count_value(it.calls)));
    let help = "Calls answered; streaming calls count when opened";
    page.write_counters("flotilla_gateway_calls", help, &answered.collect::<Vec<_>>())?;
    let took = told.iter().map(|((method, code), it)| (call_labels(method, code), it.seconds));
    let help = "Time to the answer, or to the opening of a stream";
    page.write_counters("flotilla_gateway_call_seconds", help, &took.collect::<Vec<_>>())?;
    let streams = Some(count_value(calls.open_streams()));
    page.write_gauge("flotilla_gateway_streams_open", "Open streams", streams)?;
    let removed = calls.removed_leftovers();
    let help = "Abandoned uploads removed from the store";
    page.write_counter("flotilla_store_leftovers_removed", help, Some(count_value(removed.count)))?;
    let help = "Bytes freed by removing abandoned uploads";
    page.write_counter(
        "flotilla_store_leftovers_removed_bytes",
        help,
        Some(count_value(removed.bytes)),
    )
}

/// Returns the labels of a call metric.
fn call_labels(method: &str, code: &str) -> MetricLabels {
    vec![("method", method.to_owned()), ("code", code.to_owned())]
}

/// Writes the metrics of open runs.
fn write_runs(page: &mut MetricsPage<'_>, runs: &[RunMetrics]) -> fmt::Result {
    let info = |run: &RunMetrics| {
        let labels =
            [("run", run.run.clone()), ("name", run.name.clone()), ("kind", run.kind.to_owned())];
        (labels.to_vec(), 1.0)
    };
    let help = "A run that has not ended; always 1";
    page.write_gauges("flotilla_run_info", help, &runs.iter().map(info).collect::<Vec<_>>())?;
    let phase =
        |run: &RunMetrics| (vec![("run", run.run.clone()), ("phase", run.phase.to_owned())], 1.0);
    let help = "1 for the phase the run is in";
    page.write_gauges("flotilla_run_phase", help, &runs.iter().map(phase).collect::<Vec<_>>())?;
    let mut each = |name: &str, help: &str, value: fn(&RunMetrics) -> Option<f64>| {
        let values = runs.iter().filter_map(|run| Some((run_labels(run), value(run)?)));
        page.write_gauges(name, help, &values.collect::<Vec<_>>())
    };
    each("flotilla_run_paused", "1 while the run is paused", |run| Some(flag_value(run.paused)))?;
    each("flotilla_run_cycle", "Current cycle", |run| Some(run.cycle.into()))?;
    each("flotilla_run_cycles", "The last cycle's number", |run| Some(run.cycles.into()))?;
    let samples = "Training samples of the current cycle:";
    each("flotilla_run_samples_planned", &format!("{samples} planned"), |run| {
        Some(count_value(run.samples.planned))
    })?;
    each("flotilla_run_samples_drawn", &format!("{samples} drawn"), |run| {
        Some(count_value(run.samples.drawn))
    })?;
    each("flotilla_run_samples_judged", &format!("{samples} judged"), |run| {
        Some(count_value(run.samples.judged))
    })?;
    let help = "Samples that the last selection kept";
    each("flotilla_run_samples_kept", help, |run| run.kept.map(Into::into))?;
    let help = "Pass rate of held-out samples after the last cycle";
    each("flotilla_run_heldout_pass_ratio", help, |run| run.heldout_pass_rate)?;
    let help = "Pass rate of training samples in the last cycle";
    each("flotilla_run_train_pass_ratio", help, |run| run.train_pass_rate)?;
    each("flotilla_run_loss", "Of the last checkpoint", |run| run.loss)?;
    each("flotilla_run_learning_rate", "Of the last checkpoint", |run| run.learning_rate)?;
    let help = "Work that failed, retried or not";
    each("flotilla_run_failures", help, |run| Some(count_value(run.failures as u64)))?;
    let help = "Log sequence of the run's last fact: it changes while the run makes progress";
    each("flotilla_run_sequence", help, |run| Some(count_value(run.sequence)))?;
    let evals = |value: fn(&(f64, f64)) -> f64| -> Vec<(MetricLabels, f64)> {
        let each = runs.iter().flat_map(|run| {
            run.evals.iter().map(move |(suite, figures)| {
                let mut labels = run_labels(run);
                labels.push(("suite", suite.clone()));
                (labels, value(figures))
            })
        });
        each.collect()
    };
    page.write_gauges("flotilla_run_perplexity", "The last of each suite", &evals(|it| it.0))?;
    page.write_gauges("flotilla_run_bits_per_byte", "The last of each suite", &evals(|it| it.1))
}

/// Returns the labels of a run metric.
fn run_labels(run: &RunMetrics) -> MetricLabels {
    vec![("run", run.run.clone())]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use coordinator::TrainSampleCounts;
    use metrics::{parse_documented_names, parse_metric_names};

    use super::*;

    /// All there can be, without a bus or a gateway.
    #[derive(Debug)]
    struct Everything;

    fn run() -> RunMetrics {
        RunMetrics {
            run: "r-1".into(),
            name: "sums".into(),
            kind: "raft",
            phase: "generate",
            paused: false,
            cycle: 2,
            cycles: 5,
            samples: TrainSampleCounts { planned: 160, drawn: 80, judged: 40 },
            kept: Some(17),
            heldout_pass_rate: Some(0.25),
            train_pass_rate: Some(0.5),
            loss: Some(1.5),
            learning_rate: Some(1e-4),
            evals: BTreeMap::from([("text".into(), (7.5, 0.9))]),
            failures: 1,
            sequence: 99,
        }
    }

    impl metrics::MetricsSource for Everything {
        fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
            write_coordinator(page, LoopStatus { leads: true, ..LoopStatus::default() }, true)?;
            write_calls(page, &CallCounts::from_call("Runs.Get", 0.5))?;
            page.write_gauges("flotilla_agents", "", &[(vec![("state", "ready".into())], 1.0)])?;
            write_runs(page, &[run()])
        }
    }

    #[test]
    fn the_page_names_every_metric_that_is_served_and_no_other() {
        let page = include_str!("../../../../../docs/METRICS.md");
        let (_, page) = page.split_once("## The coordinator").expect("its metrics");
        assert_eq!(
            parse_metric_names(&metrics::render_source(Everything)),
            parse_documented_names(page)
        );
    }

    #[test]
    fn figures_carry_their_run() {
        let text = metrics::render_source(Everything);
        for line in [
            "flotilla_run_perplexity{run=\"r-1\",suite=\"text\"} 7.5",
            "flotilla_run_samples_drawn{run=\"r-1\"} 80.0",
            "flotilla_gateway_calls_total{method=\"Runs.Get\",code=\"ok\"} 1.0",
            "flotilla_gateway_call_seconds_total{method=\"Runs.Get\",code=\"ok\"} 0.5",
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in:\n{text}");
        }
    }
}
