//! `flotilla run queue` and `flotilla run sweep`: runs that wait, and runs that differ in settings.

use control::{FleetControl, SweepReport, SweepRow};
use cycle::clock_text;
use run_view::rate_text;
use wire::{RunId, v1};

use crate::output;

/// Prints the queues of all pools in the order of their turns.
pub(super) async fn print_queue(control: &FleetControl, json: bool) -> anyhow::Result<()> {
    let mut runs = control.describe_runs().await?;
    runs.retain(|run| run.queue_place > 0);
    runs.sort_by(|a, b| (&a.pool, a.queue_place).cmp(&(&b.pool, b.queue_place)));
    if json {
        return output::print_json(&runs);
    }
    let rows = runs.iter().map(|run| {
        let queue = run.queue.unwrap_or_default();
        let message = match run.state() {
            v1::run::State::Queued => run.message.clone(),
            _ => "works".to_owned(),
        };
        [
            run.pool.clone(),
            run.queue_place.to_string(),
            run.run.clone(),
            run.user.clone(),
            queue.priority.to_string(),
            window_text(queue),
            message,
        ]
    });
    let headings = ["pool", ">place", "run", "user", ">priority", "window", "message"];
    output::print_list(headings, rows, "no run is queued");
    Ok(())
}

fn window_text(queue: v1::spec::Queue) -> String {
    let window = queue.from_minute.zip(queue.until_minute);
    window.map_or("-".into(), |(from, until)| {
        format!("{} to {}", clock_text(from), clock_text(until))
    })
}

/// Prints the comparison of the sweep that a run is part of.
pub(super) async fn print_sweep(
    control: &FleetControl,
    run: &RunId,
    json: bool,
) -> anyhow::Result<()> {
    let report = control.compare_sweep(run).await?;
    output::print_json_or(json, &report, || {
        output::print_text(&sweep_table(&report, output::stdout_width()));
    })
}

fn sweep_table(report: &SweepReport, width: Option<u16>) -> String {
    let rows = report.runs.iter().map(|row| {
        let is_best = report.best.as_ref() == Some(&row.run);
        [
            format!("{}{}", row.run, if is_best { " *" } else { "" }),
            settings_text(row),
            row.state.clone(),
            best_text(row),
            rate_text(row.heldout.as_ref()),
            perplexities_text(row),
            format!("{:.1}", row.wall_s),
        ]
    });
    let headings =
        ["run", "settings", "state", ">best", ">held-out pass rate", ">perplexity", ">wall s"];
    output::fit_table(headings, rows, width)
}

/// Returns the settings with the last parts of their paths, such as `learning_rate 0.0001`.
fn settings_text(row: &SweepRow) -> String {
    let settings = row.settings.iter().map(|(path, value)| {
        let key = path.rsplit('.').next().unwrap_or(path);
        format!("{key} {value}")
    });
    settings.collect::<Vec<_>>().join(", ")
}

/// Returns the best cycle, or the step if the run has one cycle.
fn best_text(row: &SweepRow) -> String {
    match (row.best_cycle, row.best_step) {
        (Some(0), Some(step)) if step > 0 => format!("step {step}"),
        (Some(cycle), _) => cycle.to_string(),
        (None, _) => "-".to_owned(),
    }
}

fn perplexities_text(row: &SweepRow) -> String {
    let suites = row.perplexities.iter();
    let texts: Vec<String> =
        suites.map(|it| format!("{} {:.4} ± {:.4}", it.suite, it.perplexity, it.stderr)).collect();
    output::text_or_dash(texts.join(", "))
}

#[cfg(test)]
mod tests {
    use control::SweepPerplexity;

    use super::*;

    #[test]
    fn the_table_marks_the_best_run_and_names_its_settings() {
        let row = |run: &str, seed: &str| SweepRow {
            run: run.into(),
            settings: [("seed".into(), seed.into()), ("raft.training.lr".into(), "1".into())]
                .into(),
            state: "succeeded".into(),
            best_cycle: Some(2),
            best_step: Some(8),
            heldout: Some(v1::cycle_done::Rate { mean: 0.5, stderr: 0.05, ..Default::default() }),
            perplexities: vec![SweepPerplexity {
                suite: "text".into(),
                perplexity: 4.0,
                stderr: 0.1,
            }],
            wall_s: 12.34,
        };
        let runs = vec![row("s-1", "1"), SweepRow { heldout: None, ..row("s-2", "2") }];
        let report = SweepReport { sweep: "s-1".into(), best: Some("s-1".into()), runs };
        let table = sweep_table(&report, None);
        let lines: Vec<&str> = table.lines().collect();
        let words = ["s-1 *", "lr 1, seed 1", "succeeded", "50.0 % ± 5.0", "text 4.0000", "12.3"];
        assert!(words.iter().all(|word| lines[2].contains(word)), "{table}");
        assert!(!lines[3].contains('*'), "{table}");
        let sft = SweepRow { best_cycle: Some(0), ..row("s-1", "1") };
        assert_eq!(best_text(&sft), "step 8");
    }
}
