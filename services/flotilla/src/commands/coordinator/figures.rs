//! What a coordinator and its gateway tell Prometheus; all names are in docs/METRICS.md.

use std::fmt;

use bus::Bus;
use coordinator::{Figures, RunFigures, Turn};
use gateway::Counts;
use metrics::{Labels, Page, count, flag};
use tokio::sync::watch;

pub(super) struct Source {
    pub(super) turns: watch::Receiver<Turn>,
    pub(super) figures: watch::Receiver<Figures>,
    pub(super) bus: Bus,
    pub(super) calls: Counts,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

impl metrics::Source for Source {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        let turn = *self.turns.borrow();
        coordinator(page, turn, self.bus.is_connected())?;
        calls(page, &self.calls)?;
        let figures = self.figures.borrow().clone();
        let agents = figures.agents.into_iter();
        let agents: Vec<_> =
            agents.map(|(state, agents)| (vec![("state", state)], count(agents))).collect();
        page.gauge("flotilla_agents", "Agents that were heard lately, by state", &agents)?;
        runs(page, &figures.runs)
    }
}

fn coordinator(page: &mut Page<'_>, turn: Turn, connected: bool) -> fmt::Result {
    let Turn { caught_up, leads, open_runs, facts } = turn;
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    page.gauge("flotilla_coordinator_info", "The coordinator; always 1", &[(version, 1.0)])?;
    for (name, help, value) in [
        ("flotilla_coordinator_leads", "1 while this one decides", flag(leads)),
        ("flotilla_coordinator_caught_up", "1 once the log was replayed", flag(caught_up)),
        ("flotilla_bus_connected", "1 while the NATS server is there", flag(connected)),
        ("flotilla_runs_open", "Runs that have not ended", count(open_runs as u64)),
    ] {
        page.one(name, help, Some(value))?;
    }
    let (name, help) = ("flotilla_log_sequence", "Place of the last fact that was taken in");
    page.one(name, help, Some(count(facts)))
}

fn calls(page: &mut Page<'_>, calls: &Counts) -> fmt::Result {
    let told = calls.told();
    let answered = told.iter().map(|((method, code), it)| (by(method, code), count(it.calls)));
    let help = "Calls that were answered; of streams, those that were opened";
    page.counters("flotilla_gateway_calls", help, &answered.collect::<Vec<_>>())?;
    let took = told.iter().map(|((method, code), it)| (by(method, code), it.seconds));
    let help = "Until an answer was there, or a stream was open";
    page.counters("flotilla_gateway_call_seconds", help, &took.collect::<Vec<_>>())?;
    let streams = Some(count(calls.streams()));
    page.one("flotilla_gateway_streams_open", "Streams that somebody listens to", streams)
}

fn by(method: &str, code: &str) -> Labels {
    vec![("method", method.to_owned()), ("code", code.to_owned())]
}

fn runs(page: &mut Page<'_>, runs: &[RunFigures]) -> fmt::Result {
    let info = |run: &RunFigures| {
        let labels =
            [("run", run.run.clone()), ("name", run.name.clone()), ("kind", run.kind.to_owned())];
        (labels.to_vec(), 1.0)
    };
    let help = "A run that has not ended; always 1";
    page.gauge("flotilla_run_info", help, &runs.iter().map(info).collect::<Vec<_>>())?;
    let phase =
        |run: &RunFigures| (vec![("run", run.run.clone()), ("phase", run.phase.to_owned())], 1.0);
    let help = "1 for the phase the run is in";
    page.gauge("flotilla_run_phase", help, &runs.iter().map(phase).collect::<Vec<_>>())?;
    let mut each = |name: &str, help: &str, value: fn(&RunFigures) -> Option<f64>| {
        let values = runs.iter().filter_map(|run| Some((of(run), value(run)?)));
        page.gauge(name, help, &values.collect::<Vec<_>>())
    };
    each("flotilla_run_paused", "1 while it is paused", |run| Some(flag(run.paused)))?;
    each("flotilla_run_cycle", "The cycle that is worked on", |run| Some(run.cycle.into()))?;
    each("flotilla_run_cycles", "The last cycle's number", |run| Some(run.cycles.into()))?;
    let samples = "Training samples of the cycle that is worked on:";
    each("flotilla_run_samples_planned", &format!("{samples} planned"), |run| {
        Some(count(run.samples.planned))
    })?;
    each("flotilla_run_samples_drawn", &format!("{samples} drawn"), |run| {
        Some(count(run.samples.drawn))
    })?;
    each("flotilla_run_samples_judged", &format!("{samples} judged"), |run| {
        Some(count(run.samples.judged))
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
    each("flotilla_run_failures", help, |run| Some(count(run.failures as u64)))?;
    let help = "Place of its last fact in the log: it changes while the run goes on";
    each("flotilla_run_sequence", help, |run| Some(count(run.sequence)))?;
    let evals = |value: fn(&(f64, f64)) -> f64| -> Vec<(Labels, f64)> {
        let each = runs.iter().flat_map(|run| {
            run.evals.iter().map(move |(suite, figures)| {
                let mut labels = of(run);
                labels.push(("suite", suite.clone()));
                (labels, value(figures))
            })
        });
        each.collect()
    };
    page.gauge("flotilla_run_perplexity", "The last of each suite", &evals(|it| it.0))?;
    page.gauge("flotilla_run_bits_per_byte", "The last of each suite", &evals(|it| it.1))
}

fn of(run: &RunFigures) -> Labels {
    vec![("run", run.run.clone())]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use coordinator::Samples;
    use metrics::{documented, names};

    use super::*;

    /// All there can be, without a bus or a gateway.
    #[derive(Debug)]
    struct Everything;

    fn run() -> RunFigures {
        RunFigures {
            run: "r-1".into(),
            name: "sums".into(),
            kind: "raft",
            phase: "generate",
            paused: false,
            cycle: 2,
            cycles: 5,
            samples: Samples { planned: 160, drawn: 80, judged: 40 },
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

    impl metrics::Source for Everything {
        fn write(&self, page: &mut Page<'_>) -> fmt::Result {
            coordinator(page, Turn { leads: true, ..Turn::default() }, true)?;
            calls(page, &Counts::of("Runs.Get", 0.5))?;
            page.gauge("flotilla_agents", "", &[(vec![("state", "ready".into())], 1.0)])?;
            runs(page, &[run()])
        }
    }

    #[test]
    fn the_page_names_every_metric_that_is_served_and_no_other() {
        let page = include_str!("../../../../../docs/METRICS.md");
        let (_, page) = page.split_once("## The coordinator").expect("its metrics");
        assert_eq!(names(&metrics::text(Everything)), documented(page));
    }

    #[test]
    fn figures_carry_their_run() {
        let text = metrics::text(Everything);
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
