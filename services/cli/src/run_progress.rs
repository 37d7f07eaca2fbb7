//! Progress of a run on stderr: a bar on a terminal, lines elsewhere.

use std::{collections::BTreeMap, time::Duration};

use control::FleetControl;
use cycle::{Run, RunPhase};
use futures::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::output;

/// Interval between two frames of the bar, which shows that the process is alive.
const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

/// Follows a run to its end and shows its progress. Facts up to log position `after` are not
/// printed.
///
/// # Errors
/// If the run does not exist or the log cannot be read.
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
    let mut view = RunProgressView::new(after);
    let mut run: Option<Run> = None;
    loop {
        tokio::select! {
            fact = facts.next() => {
                let Some(record) = fact.transpose()? else { break };
                match &mut run {
                    None => run = Run::start(&record),
                    Some(run) => run.fold_record(&record),
                }
                if let Some(run) = &run {
                    view.show_fact(run, &record);
                }
            }
            Some(status) = statuses.next() => {
                if let Some(run) = &run {
                    view.update_status(run, status);
                }
            }
        }
    }
    view.bar.finish_and_clear();
    run.ok_or_else(|| control::RunError::Unknown(id.clone()).into())
}

/// The display of a run's progress.
struct RunProgressView {
    /// Log position up to which facts are not printed.
    shown_up_to: u64,
    /// Bar of the current phase; hidden if stderr is not a terminal.
    bar: ProgressBar,
    jobs: ActiveJobs,
}

/// The active jobs of one run, as agents report them, by agent.
#[derive(Debug, Default)]
pub(crate) struct ActiveJobs(BTreeMap<String, Vec<v1::ActiveJob>>);

impl RunProgressView {
    /// Creates the display.
    fn new(shown_up_to: u64) -> Self {
        Self { shown_up_to, bar: create_bar(), jobs: ActiveJobs::default() }
    }

    /// Prints a new fact and updates the bar.
    fn show_fact(&mut self, run: &Run, record: &Record) {
        if record.sequence > self.shown_up_to
            && let Some(line) = describe_fact(run, record)
        {
            self.print_above_bar(&line);
        }
        self.update_bar(run);
    }

    /// Stores an agent's status and updates the bar.
    fn update_status(&mut self, run: &Run, status: v1::AgentStatus) {
        self.jobs.update_agent(run, &status);
        self.update_bar(run);
    }

    /// Prints a line above the bar, or on stderr without a bar.
    fn print_above_bar(&self, line: &str) {
        if output::stderr_is_terminal() {
            output::print_above_bar(&self.bar, line);
        } else {
            output::print_message(line);
        }
    }

    /// Updates the bar from the state of the run.
    fn update_bar(&self, run: &Run) {
        let (cycle, phase) = (run.active_cycle(), run.current_phase());
        let PhaseGauge { done, total, note } = self.jobs.phase_gauge(run);
        self.bar.set_length(total);
        self.bar.set_position(done);
        output::set_bar_labels(&self.bar, &format!("cycle {cycle} {}", phase.as_str()), &note);
    }
}

impl ActiveJobs {
    /// Returns the active jobs of a run from all statuses.
    pub(crate) fn from_statuses<'a>(
        run: &Run,
        statuses: impl IntoIterator<Item = &'a v1::AgentStatus>,
    ) -> Self {
        let mut jobs = Self::default();
        statuses.into_iter().for_each(|status| jobs.update_agent(run, status));
        jobs
    }

    /// Replaces the jobs of one agent with those of its new status.
    fn update_agent(&mut self, run: &Run, status: &v1::AgentStatus) {
        let ours = status.jobs.iter().filter(|job| job.run == run.id.as_str()).cloned();
        self.0.insert(status.agent.clone(), ours.collect());
    }

    /// Returns the progress of the run's current phase.
    pub(crate) fn phase_gauge(&self, run: &Run) -> PhaseGauge {
        let (number, phase) = (run.active_cycle(), run.current_phase());
        let jobs = || self.0.values().flatten();
        let Some(cycle) = run.cycles.get(&number) else { return self.training_gauge(phase) };
        match phase {
            RunPhase::Generate => self.sampling_gauge(cycle, v1::Purpose::Train),
            RunPhase::Evaluate => {
                let waiting = jobs().map(|job| job.note.as_str()).find(|note| !note.is_empty());
                let mut gauge = self.sampling_gauge(cycle, v1::Purpose::Heldout);
                gauge.note = waiting.unwrap_or_default().to_owned();
                gauge
            }
            RunPhase::Verify => {
                let all = cycle.jobs_for(v1::Purpose::Train);
                let judged = all.filter(|(_, job)| job.verdicts.is_some()).count() as u64;
                let total = cycle.jobs_for(v1::Purpose::Train).count() as u64;
                PhaseGauge { done: judged, total, note: "jobs".into() }
            }
            RunPhase::Train if run.is_watched() => Self::watched_gauge(cycle),
            RunPhase::Plan | RunPhase::Select | RunPhase::Train | RunPhase::Done => {
                self.training_gauge(phase)
            }
        }
    }

    /// Returns the progress of a watched training, which is known only by its checkpoints.
    fn watched_gauge(cycle: &cycle::Cycle) -> PhaseGauge {
        let last = cycle.checkpoints.values().next_back();
        let (done, total) = last.map_or((0, 0), |last| (last.step, last.steps));
        PhaseGauge { done: done.into(), total: total.max(1).into(), note: "steps published".into() }
    }

    /// Returns the progress of the training job, or an empty gauge in phases without training.
    fn training_gauge(&self, phase: RunPhase) -> PhaseGauge {
        let job = self.0.values().flatten().find(|job| job.role == "trainer");
        match job {
            Some(job) if matches!(phase, RunPhase::Plan | RunPhase::Train) => PhaseGauge {
                done: job.done.into(),
                total: job.total.max(1).into(),
                note: job.note.clone(),
            },
            _ => PhaseGauge { done: 0, total: 1, note: String::new() },
        }
    }

    /// Returns the progress of sampling: samples of finished jobs plus those of active generators.
    fn sampling_gauge(&self, cycle: &cycle::Cycle, purpose: v1::Purpose) -> PhaseGauge {
        let planned = cycle.jobs_for(purpose).flat_map(|(_, job)| &job.draws);
        let total: u64 = planned.map(|draw| u64::from(draw.count)).sum();
        let accepted = cycle.jobs_for(purpose).filter_map(|(_, job)| job.samples.as_ref());
        let mut done: u64 = accepted.map(|samples| u64::from(samples.count)).sum();
        let active: Vec<&v1::ActiveJob> =
            self.0.values().flatten().filter(|job| job.role == "generator").collect();
        done += active.iter().map(|job| u64::from(job.done)).sum::<u64>();
        let note = format!("samples, {} jobs running", active.len());
        PhaseGauge { done: done.min(total), total: total.max(1), note }
    }
}

/// The progress of a phase, in samples, jobs or steps.
pub(crate) struct PhaseGauge {
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) note: String,
}

/// Creates the bar, hidden if stderr is not a terminal.
fn create_bar() -> ProgressBar {
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

/// Returns a line about a fact, or `None` for facts that are not shown.
fn describe_fact(run: &Run, record: &Record) -> Option<String> {
    let id = &run.id;
    Some(match (&record.fact.subject.key, &record.fact.body) {
        (_, FactBody::Spec(spec)) => watched_spec(run).map_or_else(
            || format!("{id}: {} run, seed {}", run.kind_name(), spec.seed),
            |watched| format!("{id}: watched run of {} on {}", watched.source, watched.host),
        ),
        (_, FactBody::Control(control)) => {
            format!("{id}: {}", control.action().as_str_name().to_lowercase())
        }
        (FactKey::Plan { cycle }, FactBody::Plan(plan)) => {
            let samples: u32 = plan.jobs.iter().flat_map(|job| &job.draws).map(|d| d.count).sum();
            format!("{id}: cycle {cycle}: {samples} samples planned in {} jobs", plan.jobs.len())
        }
        (_, FactBody::Selected(selected)) => describe_selection(id, selected),
        (_, FactBody::Checkpoint(v1::Checkpoint { step: 0, .. })) => return None,
        (_, FactBody::Checkpoint(c)) => {
            format!(
                "{id}: cycle {}: checkpoint {}/{}, loss {:.4}",
                c.cycle, c.step, c.steps, c.loss
            )
        }
        (_, FactBody::Eval(e)) => format!(
            "{id}: cycle {}: step {}, {}: perplexity {:.4} ± {:.4} ({})",
            e.cycle, e.step, e.suite, e.perplexity, e.stderr, e.agent
        ),
        (_, FactBody::Failure(f)) => {
            let end = if f.r#final { "given up" } else { "will be retried" };
            format!("{id}: {} {} failed on {}, {end}: {}", f.kind, f.id, f.agent, f.message)
        }
        (_, FactBody::Quarantine(found)) => {
            format!("{id}: {}", crate::commands::canary_report::quarantine_line(found))
        }
        (_, FactBody::CycleDone(done)) => describe_cycle_done(id, done),
        (_, FactBody::Done(done)) => {
            let reason = if done.message.is_empty() { "" } else { ": " };
            let status = done.status().as_str_name().to_lowercase();
            format!("{id}: {status}{reason}{}", done.message)
        }
        _ => return None,
    })
}

/// Returns the spec of a watched training, if the run is one.
fn watched_spec(run: &Run) -> Option<&v1::spec::Watched> {
    match &run.spec.kind {
        Some(v1::spec::Kind::Watched(watched)) => Some(watched),
        _ => None,
    }
}

/// Returns a line about a selection, with the drop reasons.
fn describe_selection(id: &RunId, selected: &v1::Selected) -> String {
    let dropped: Vec<String> =
        selected.dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let v1::Selected { cycle, kept, considered, .. } = selected;
    format!("{id}: cycle {cycle}: kept {kept} of {considered} ({})", dropped.join(", "))
}

/// Returns a line about a finished cycle, with its pass rates.
fn describe_cycle_done(id: &RunId, done: &v1::CycleDone) -> String {
    let heldout = done.heldout.as_ref().map_or(String::new(), |rate| {
        format!(": held-out pass rate {:.1} % ± {:.1}", rate.mean * 100.0, rate.stderr * 100.0)
    });
    let suites = done.suites.iter().filter_map(|suite| Some((&suite.suite, suite.rate?)));
    let suites = suites.map(|(name, rate)| format!(", {name} {:.1} %", rate.mean * 100.0));
    format!("{id}: cycle {} done{heldout}{}", done.cycle, suites.collect::<String>())
}
