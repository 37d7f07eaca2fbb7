//! Sweeps: the runs of one spec that differ in some settings, and their comparison.

use std::collections::BTreeMap;

use cycle::{Run, best_checkpoint};
use serde::Serialize;
use wire::{RunId, v1};

use crate::{FleetControl, RunError, runs::fold_run};

/// The runs of a sweep side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepReport {
    pub sweep: String,
    /// The run with the highest held-out pass rate, or without any the lowest perplexity of the
    /// first suite. `None` before the first measurement.
    pub best: Option<String>,
    pub runs: Vec<SweepRow>,
}

/// The results of one run of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepRow {
    pub run: String,
    pub settings: BTreeMap<String, String>,
    /// `running`, `queued`, `succeeded` …
    pub state: String,
    /// Cycle and step of the best checkpoint so far.
    pub best_cycle: Option<u32>,
    pub best_step: Option<u32>,
    /// Held-out pass rate of that cycle.
    pub heldout: Option<v1::cycle_done::Rate>,
    /// Perplexities of that checkpoint, in the order of the spec's suites.
    pub perplexities: Vec<SweepPerplexity>,
    /// Seconds of work, without pauses and queue.
    pub wall_s: f64,
}

/// A perplexity of a run's best checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepPerplexity {
    pub suite: String,
    pub perplexity: f64,
    pub stderr: f64,
}

impl FleetControl {
    /// Returns the ids of the runs of a sweep, in the order of their submission. `run` is one of
    /// them, such as the first, which is the sweep's name.
    pub async fn list_sweep_runs(&self, run: &RunId) -> Result<Vec<RunId>, RunError> {
        let runs = self.list_runs().await?;
        let found = runs.iter().find(|known| known.id == *run);
        let found = found.ok_or_else(|| RunError::Unknown(run.clone()))?;
        let sweep = found.spec.sweep.as_ref().ok_or_else(|| RunError::NoSweep(run.clone()))?;
        let is_member =
            |run: &&Run| run.spec.sweep.as_ref().is_some_and(|it| it.name == sweep.name);
        Ok(runs.iter().filter(is_member).map(|run| run.id.clone()).collect())
    }

    /// Compares the runs of the sweep that `run` is part of.
    pub async fn compare_sweep(&self, run: &RunId) -> Result<SweepReport, RunError> {
        let mut runs = Vec::new();
        for id in self.list_sweep_runs(run).await? {
            let records = self.records_without_samples(&id).await?;
            runs.push(fold_run(&records).ok_or(RunError::Unknown(id))?);
        }
        let now_ms = wire::clock::unix_seconds().saturating_mul(1000);
        Ok(report_sweep(&runs, now_ms))
    }
}

fn report_sweep(runs: &[Run], now_ms: u64) -> SweepReport {
    let rows: Vec<SweepRow> = runs.iter().map(|run| describe_sweep_run(run, now_ms)).collect();
    let sweep = runs.iter().find_map(|run| run.spec.sweep.as_ref());
    SweepReport {
        sweep: sweep.map_or_else(String::new, |sweep| sweep.name.clone()),
        best: best_row(&rows).map(|row| row.run.clone()),
        runs: rows,
    }
}

/// Returns the earlier one of equal rows.
fn best_row(rows: &[SweepRow]) -> Option<&SweepRow> {
    let rate = |row: &SweepRow| row.heldout.map(|rate| rate.mean).filter(|it| it.is_finite());
    let perplexity = |row: &SweepRow| {
        row.perplexities.first().map(|it| it.perplexity).filter(|it| it.is_finite())
    };
    let by_rate = rows.iter().filter_map(|row| Some((-rate(row)?, row)));
    let by_perplexity = rows.iter().filter_map(|row| Some((perplexity(row)?, row)));
    let least = |(a, _): &(f64, &SweepRow), (b, _): &(f64, &SweepRow)| a.total_cmp(b);
    by_rate.min_by(least).or_else(|| by_perplexity.min_by(least)).map(|(_, row)| row)
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds far below 2^52")]
fn describe_sweep_run(run: &Run, now_ms: u64) -> SweepRow {
    let best = best_checkpoint(run).map(|best| (best.cycle, best.step));
    let cycle = best.and_then(|(cycle, _)| run.cycles.get(&cycle));
    let evals = cycle.into_iter().flat_map(|cycle| cycle.evals.values());
    let evals: Vec<&v1::Eval> =
        evals.filter(|eval| best.is_some_and(|(_, step)| step == eval.step)).collect();
    let perplexities = run.spec.suites.iter().filter_map(|suite| {
        let eval = evals.iter().find(|eval| eval.suite == suite.name)?;
        let (perplexity, stderr) = (eval.perplexity, eval.stderr);
        Some(SweepPerplexity { suite: suite.name.clone(), perplexity, stderr })
    });
    SweepRow {
        run: run.id.to_string(),
        settings: run.spec.sweep.as_ref().map_or_else(BTreeMap::new, |it| it.settings.clone()),
        state: run.current_state().as_str_name().to_lowercase(),
        best_cycle: best.map(|(cycle, _)| cycle),
        best_step: best.map(|(_, step)| step),
        heldout: cycle.and_then(|cycle| cycle.done.as_ref()?.heldout),
        perplexities: perplexities.collect(),
        wall_s: run.worked_ms(now_ms) as f64 / 1000.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(run: &str, rate: Option<f64>, perplexity: Option<f64>) -> SweepRow {
        let heldout = rate.map(|mean| v1::cycle_done::Rate { mean, ..Default::default() });
        let measured =
            |perplexity| SweepPerplexity { suite: "text".into(), perplexity, stderr: 0.1 };
        SweepRow {
            run: run.into(),
            settings: BTreeMap::new(),
            state: "running".into(),
            best_cycle: None,
            best_step: None,
            heldout,
            perplexities: perplexity.into_iter().map(measured).collect(),
            wall_s: 0.0,
        }
    }

    #[test]
    fn the_best_run_has_the_highest_pass_rate_or_without_any_the_lowest_perplexity() {
        let best = |rows: &[SweepRow]| best_row(rows).map(|row| row.run.clone());
        let (a, b) = (row("a", Some(0.4), Some(1.0)), row("b", Some(0.5), Some(9.0)));
        let (c, d) = (row("c", None, Some(3.0)), row("d", None, Some(2.0)));
        assert_eq!(best(&[a, b.clone(), d.clone()]).as_deref(), Some("b"));
        assert_eq!(best(&[b.clone(), SweepRow { run: "e".into(), ..b }]).as_deref(), Some("b"));
        assert_eq!(best(&[c, row("n", None, Some(f64::NAN)), d]).as_deref(), Some("d"));
        assert_eq!(best(&[row("x", None, None)]), None);
    }

    #[test]
    fn a_row_has_the_figures_of_the_best_checkpoint() {
        let sweep = v1::spec::Sweep { name: "s-1".into(), settings: BTreeMap::new() };
        let suites = vec![v1::Suite { name: "text".into(), ..Default::default() }];
        let kind = Some(v1::spec::Kind::Sft(v1::spec::Sft::default()));
        let spec = v1::Spec { sweep: Some(sweep), suites, kind, ..Default::default() };
        let mut run = Run::new(RunId::new("s-1").unwrap(), spec, 1000);
        for (step, perplexity) in [(10, 5.0), (20, 4.0), (30, 6.0)] {
            let cycle = run.cycles.entry(0).or_default();
            cycle.checkpoints.insert(step, v1::Checkpoint { step, ..Default::default() });
            let suite = "text".to_owned();
            let eval = v1::Eval { step, suite, perplexity, stderr: 0.5, ..Default::default() };
            cycle.evals.insert((step, "text".parse().unwrap()), eval);
        }
        let report = report_sweep(&[run], 5000);
        let row = &report.runs[0];
        assert_eq!((report.sweep.as_str(), report.best.as_deref()), ("s-1", Some("s-1")));
        assert_eq!((row.best_cycle, row.best_step, row.wall_s), (Some(0), Some(20), 4.0));
        assert_eq!((row.perplexities[0].perplexity, row.perplexities[0].stderr), (4.0, 0.5));
    }
}
