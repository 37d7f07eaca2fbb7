//! Progress of a run on stderr: a bar on a terminal, lines elsewhere.

use std::time::Duration;

use control::FleetControl;
use cycle::Run;
use futures::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use run_view::{ActiveJobs, PhaseProgress, describe_fact};
use wire::RunId;

use crate::output;

const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

/// Facts up to log position `after` are not printed.
pub(crate) async fn follow_run(
    control: &FleetControl,
    id: &RunId,
    after: u64,
) -> anyhow::Result<Run> {
    let mut facts = control.watch_run(id, 0).await?;
    let mut statuses = match control.bus().watch_statuses().await {
        Ok(statuses) => statuses.boxed(),
        // Without statuses, the bar moves only by facts.
        Err(_) => stream::pending().boxed(),
    };
    let bar = create_bar();
    let (mut run, mut jobs): (Option<Run>, _) = (None, ActiveJobs::default());
    loop {
        tokio::select! {
            fact = facts.next() => {
                let Some(record) = fact.transpose()? else { break };
                match &mut run {
                    None => run = Run::start(&record),
                    Some(run) => run.fold_record(&record),
                }
                if record.sequence > after
                    && let Some(line) = run.as_ref().and_then(|run| describe_fact(run, &record))
                {
                    output::print_above_bar(&bar, &line);
                }
            }
            Some(status) = statuses.next() => {
                if let Some(run) = &run {
                    jobs.update_agent(run, &status);
                }
            }
        }
        if let Some(run) = &run {
            update_bar(&bar, run, &jobs);
        }
    }
    bar.finish_and_clear();
    run.ok_or_else(|| control::RunError::Unknown(id.clone()).into())
}

fn update_bar(bar: &ProgressBar, run: &Run, jobs: &ActiveJobs) {
    let (cycle, phase) = (run.active_cycle(), run.current_phase());
    let PhaseProgress { done, total, note } = jobs.phase_progress(run);
    bar.set_length(total);
    bar.set_position(done);
    output::set_bar_labels(bar, &format!("cycle {cycle} {}", phase.as_str()), &note);
}

/// Returns a bar that is hidden unless stderr is a terminal.
pub(crate) fn create_bar() -> ProgressBar {
    if !output::stderr_is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let template = "{prefix:>18} {wide_bar:.green} {pos}/{len} {msg}";
    let style = ProgressStyle::with_template(template);
    let bar =
        ProgressBar::new(1).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(SPINNER_INTERVAL);
    bar
}
