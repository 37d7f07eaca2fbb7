//! Prometheus metrics of a coordinator and its gateway; docs/METRICS.md lists all names.

use std::fmt;

use bus::Bus;
use coordinator::{FleetMetrics, LoopStatus};
use gateway::CallCounts;
use metrics::MetricsPage;
use tokio::sync::watch;

#[derive(Debug)]
pub(super) struct CoordinatorMetrics {
    pub(super) turns: watch::Receiver<LoopStatus>,
    pub(super) figures: watch::Receiver<FleetMetrics>,
    pub(super) bus: Bus,
    pub(super) calls: CallCounts,
}

impl metrics::MetricsSource for CoordinatorMetrics {
    fn write_metrics(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        self.turns.borrow().write_metrics(page, self.bus.is_connected())?;
        self.calls.write_metrics(page)?;
        self.figures.borrow().write_metrics(page)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use coordinator::{RunMetrics, TrainSampleCounts};
    use metrics::{parse_documented_names, parse_metric_names};

    use super::*;

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
            LoopStatus { leads: true, ..LoopStatus::default() }.write_metrics(page, true)?;
            CallCounts::from_call("Runs.Get", 0.5).write_metrics(page)?;
            let agents = BTreeMap::from([("ready".to_owned(), 1)]);
            FleetMetrics { runs: vec![run()], agents }.write_metrics(page)
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
