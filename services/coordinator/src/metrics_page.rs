//! The Prometheus metrics of the control loop, of agents and of open runs; docs/METRICS.md lists
//! all names.

use std::fmt;

use metrics::{MetricLabels, MetricsPage, count_value, flag_value};

use crate::{FleetMetrics, LoopStatus, RunMetrics};

impl LoopStatus {
    /// Writes the metrics of the loop; `connected` is true while the bus is connected.
    pub fn write_metrics(self, page: &mut MetricsPage<'_>, connected: bool) -> fmt::Result {
        let Self { caught_up, leads, open_runs, last_sequence: facts } = self;
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        page.write_gauges(
            "flotilla_coordinator_info",
            "The coordinator; always 1",
            &[(version, 1.0)],
        )?;
        for (name, help, value) in [
            (
                "flotilla_coordinator_leads",
                "1 while this coordinator is the leader",
                flag_value(leads),
            ),
            (
                "flotilla_coordinator_caught_up",
                "1 after the log was replayed",
                flag_value(caught_up),
            ),
            (
                "flotilla_bus_connected",
                "1 while connected to the NATS server",
                flag_value(connected),
            ),
            ("flotilla_runs_open", "Runs that have not ended", count_value(open_runs as u64)),
        ] {
            page.write_gauge(name, help, Some(value))?;
        }
        let (name, help) = ("flotilla_log_sequence", "Log sequence of the last applied fact");
        page.write_gauge(name, help, Some(count_value(facts)))
    }
}

impl FleetMetrics {
    /// Writes the metrics of agents and runs.
    pub fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let agents = self.agents.iter();
        let agents: Vec<_> = agents
            .map(|(state, count)| (vec![("state", state.clone())], count_value(*count)))
            .collect();
        page.write_gauges("flotilla_agents", "Agents seen recently, by state", &agents)?;
        write_runs(page, &self.runs)
    }
}

fn write_runs(page: &mut MetricsPage<'_>, runs: &[RunMetrics]) -> fmt::Result {
    let info = |run: &RunMetrics| {
        let labels =
            [("run", run.run.clone()), ("name", run.name.clone()), ("kind", run.kind.to_owned())];
        (labels.to_vec(), 1.0)
    };
    let help = "Open run; always 1";
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
    each("flotilla_run_cycles", "Number of cycles", |run| Some(run.cycles.into()))?;
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
    each("flotilla_run_loss", "Training loss of the last checkpoint", |run| run.loss)?;
    let help = "Learning rate of the last checkpoint";
    each("flotilla_run_learning_rate", help, |run| run.learning_rate)?;
    let help = "Failed attempts, retried or not";
    each("flotilla_run_failures", help, |run| Some(count_value(run.failures as u64)))?;
    let help = "Log sequence of the run's last fact; changes while the run progresses";
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
    let help = "Latest perplexity of each suite";
    page.write_gauges("flotilla_run_perplexity", help, &evals(|it| it.0))?;
    let help = "Latest bits per byte of each suite";
    page.write_gauges("flotilla_run_bits_per_byte", help, &evals(|it| it.1))
}

fn run_labels(run: &RunMetrics) -> MetricLabels {
    vec![("run", run.run.clone())]
}
