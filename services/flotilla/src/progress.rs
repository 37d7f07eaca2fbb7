//! A run as it goes: bars on a terminal, lines elsewhere, always on stderr.

use std::{collections::BTreeMap, time::Duration};

use control::Control;
use cycle::{Phase, Run};
use futures::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use wire::{Body, Place, Record, RunId, v1};

use crate::output;

/// Frames of a spinner, so that a person sees it is alive.
const TICK: Duration = Duration::from_millis(100);

/// Follows a run to its end, showing how it goes.
pub(crate) async fn follow(control: &Control, id: &RunId, after: u64) -> anyhow::Result<Run> {
    let mut facts = control.watch_run(id, 0).await?;
    let mut statuses = match control.bus().watch_statuses().await {
        Ok(statuses) => statuses.boxed(),
        // Bars move by facts alone then.
        Err(_) => stream::pending().boxed(),
    };
    let mut view = View::new(after);
    let mut run: Option<Run> = None;
    loop {
        tokio::select! {
            fact = facts.next() => {
                let Some(record) = fact.transpose()? else { break };
                match &mut run {
                    None => run = Run::start(&record),
                    Some(run) => run.fold(&record),
                }
                if let Some(run) = &run {
                    view.fact(run, &record);
                }
            }
            Some(status) = statuses.next() => {
                if let Some(run) = &run {
                    view.status(run, status);
                }
            }
        }
    }
    view.bar.finish_and_clear();
    run.ok_or_else(|| control::RunError::Unknown(id.clone()).into())
}

struct View {
    /// Facts up to here were shown before.
    after: u64,
    /// Shows what the run waits for; hidden elsewhere than on a terminal.
    bar: ProgressBar,
    jobs: Jobs,
}

/// What agents say they are doing for a run, by agent.
#[derive(Debug, Default)]
pub(crate) struct Jobs(BTreeMap<String, Vec<v1::ActiveJob>>);

impl View {
    fn new(after: u64) -> Self {
        Self { after, bar: bar(), jobs: Jobs::default() }
    }

    fn fact(&mut self, run: &Run, record: &Record) {
        if record.sequence > self.after
            && let Some(line) = describe(run, record)
        {
            self.line(&line);
        }
        self.update(run);
    }

    fn status(&mut self, run: &Run, status: v1::AgentStatus) {
        self.jobs.hear(run, &status);
        self.update(run);
    }

    fn line(&self, line: &str) {
        if output::on_terminal() {
            self.bar.println(line);
        } else {
            output::say(line);
        }
    }

    fn update(&self, run: &Run) {
        let (cycle, phase) = (run.cycle_at_work(), run.phase());
        let Gauge { done, total, note } = self.jobs.gauge(run);
        self.bar.set_prefix(format!("cycle {cycle} {}", phase.as_str()));
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.bar.set_message(note);
    }
}

impl Jobs {
    pub(crate) fn of<'a>(
        run: &Run,
        statuses: impl IntoIterator<Item = &'a v1::AgentStatus>,
    ) -> Self {
        let mut jobs = Self::default();
        statuses.into_iter().for_each(|status| jobs.hear(run, status));
        jobs
    }

    fn hear(&mut self, run: &Run, status: &v1::AgentStatus) {
        let ours = status.jobs.iter().filter(|job| job.run == run.id.as_str()).cloned();
        self.0.insert(status.agent.clone(), ours.collect());
    }

    /// How far the phase is that the run is in.
    pub(crate) fn gauge(&self, run: &Run) -> Gauge {
        let (number, phase) = (run.cycle_at_work(), run.phase());
        let jobs = || self.0.values().flatten();
        let Some(cycle) = run.cycles.get(&number) else { return self.trained(phase) };
        match phase {
            Phase::Generate => self.sampled(cycle, v1::Purpose::Train),
            Phase::Evaluate => {
                let waiting = jobs().map(|job| job.note.as_str()).find(|note| !note.is_empty());
                let mut gauge = self.sampled(cycle, v1::Purpose::Heldout);
                gauge.note = waiting.unwrap_or_default().to_owned();
                gauge
            }
            Phase::Verify => {
                let all = cycle.jobs_for(v1::Purpose::Train);
                let judged = all.filter(|(_, job)| job.verdicts.is_some()).count() as u64;
                let total = cycle.jobs_for(v1::Purpose::Train).count() as u64;
                Gauge { done: judged, total, note: "jobs".into() }
            }
            Phase::Train if run.is_watched() => Self::watched(cycle),
            Phase::Plan | Phase::Select | Phase::Train | Phase::Done => self.trained(phase),
        }
    }

    /// Nobody says how far a watched training is but its checkpoints.
    fn watched(cycle: &cycle::Cycle) -> Gauge {
        let last = cycle.checkpoints.values().next_back();
        let (done, total) = last.map_or((0, 0), |last| (last.step, last.steps));
        Gauge { done: done.into(), total: total.max(1).into(), note: "steps published".into() }
    }

    fn trained(&self, phase: Phase) -> Gauge {
        let job = self.0.values().flatten().find(|job| job.role == "trainer");
        match job {
            Some(job) if matches!(phase, Phase::Plan | Phase::Train) => Gauge {
                done: job.done.into(),
                total: job.total.max(1).into(),
                note: job.note.clone(),
            },
            _ => Gauge { done: 0, total: 1, note: String::new() },
        }
    }

    fn sampled(&self, cycle: &cycle::Cycle, purpose: v1::Purpose) -> Gauge {
        let planned = cycle.jobs_for(purpose).flat_map(|(_, job)| &job.draws);
        let total: u64 = planned.map(|draw| u64::from(draw.count)).sum();
        let accepted = cycle.jobs_for(purpose).filter_map(|(_, job)| job.samples.as_ref());
        let mut done: u64 = accepted.map(|samples| u64::from(samples.count)).sum();
        let active: Vec<&v1::ActiveJob> =
            self.0.values().flatten().filter(|job| job.role == "generator").collect();
        done += active.iter().map(|job| u64::from(job.done)).sum::<u64>();
        let note = format!("samples, {} jobs running", active.len());
        Gauge { done: done.min(total), total: total.max(1), note }
    }
}

pub(crate) struct Gauge {
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) note: String,
}

fn bar() -> ProgressBar {
    if !output::on_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let template = "{prefix:>18} {wide_bar:.green} {pos}/{len} {msg}";
    let style = ProgressStyle::with_template(template);
    let bar =
        ProgressBar::new(1).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(TICK);
    bar
}

/// A fact in a line, if a person wants to know of it.
fn describe(run: &Run, record: &Record) -> Option<String> {
    let id = &run.id;
    Some(match (&record.fact.subject.place, &record.fact.body) {
        (_, Body::Spec(spec)) => watched_of(run).map_or_else(
            || format!("{id}: {} run, seed {}", run.kind(), spec.seed),
            |watched| format!("{id}: watched run of {} on {}", watched.source, watched.host),
        ),
        (_, Body::Control(control)) => {
            format!("{id}: {}", control.action().as_str_name().to_lowercase())
        }
        (Place::Plan { cycle }, Body::Plan(plan)) => {
            let samples: u32 = plan.jobs.iter().flat_map(|job| &job.draws).map(|d| d.count).sum();
            format!("{id}: cycle {cycle}: {samples} samples planned in {} jobs", plan.jobs.len())
        }
        (_, Body::Selected(selected)) => selection(id, selected),
        (_, Body::Checkpoint(v1::Checkpoint { step: 0, .. })) => return None,
        (_, Body::Checkpoint(c)) => {
            format!(
                "{id}: cycle {}: checkpoint {}/{}, loss {:.4}",
                c.cycle, c.step, c.steps, c.loss
            )
        }
        (_, Body::Eval(e)) => format!(
            "{id}: cycle {}: step {}, {}: perplexity {:.4} ± {:.4} ({})",
            e.cycle, e.step, e.suite, e.perplexity, e.stderr, e.agent
        ),
        (_, Body::Failure(f)) => {
            let end = if f.r#final { "given up" } else { "will be tried again" };
            format!("{id}: {} {} failed on {}, {end}: {}", f.kind, f.id, f.agent, f.message)
        }
        (_, Body::Quarantine(found)) => {
            format!("{id}: {}", crate::commands::proof::quarantine_line(found))
        }
        (_, Body::CycleDone(done)) => cycle_done(id, done),
        (_, Body::Done(done)) => {
            let reason = if done.message.is_empty() { "" } else { ": " };
            let status = done.status().as_str_name().to_lowercase();
            format!("{id}: {status}{reason}{}", done.message)
        }
        _ => return None,
    })
}

fn watched_of(run: &Run) -> Option<&v1::spec::Watched> {
    match &run.spec.kind {
        Some(v1::spec::Kind::Watched(watched)) => Some(watched),
        _ => None,
    }
}

fn selection(id: &RunId, selected: &v1::Selected) -> String {
    let dropped: Vec<String> =
        selected.dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let v1::Selected { cycle, kept, considered, .. } = selected;
    format!("{id}: cycle {cycle}: kept {kept} of {considered} ({})", dropped.join(", "))
}

fn cycle_done(id: &RunId, done: &v1::CycleDone) -> String {
    let heldout = done.heldout.as_ref().map_or(String::new(), |rate| {
        format!(": held-out pass rate {:.1} % ± {:.1}", rate.mean * 100.0, rate.stderr * 100.0)
    });
    let suites = done.suites.iter().filter_map(|suite| Some((&suite.suite, suite.rate?)));
    let suites = suites.map(|(name, rate)| format!(", {name} {:.1} %", rate.mean * 100.0));
    format!("{id}: cycle {} done{heldout}{}", done.cycle, suites.collect::<String>())
}
