//! Runs as users see them, folded from their facts on each call.

use std::time::Duration;

use bus::{LogEvent, PresenceError, PublishError, PublishOutcome, ReadError};
use cycle::{
    QueuePlace, QueueTurns, Run, awaited_verdicts, describe_missing_roles, describe_unmet_needs,
    queue_places, run_user,
};
use futures::{
    Stream, StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, Timestamp, WorkKind, v1};

use crate::{FleetControl, checkpoints::checkpoint_infos};

/// Attempts while other writers take the same number.
const CONTROL_ATTEMPTS_MAX: u32 = 16;

/// A failure to read or control a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("there is no run {0}; `flotilla run list` lists all (R101)")]
    Unknown(RunId),
    #[error("run {run} has ended ({state}); start a new one (R104)")]
    Ended { run: RunId, state: String },
    #[error("run {0} is part of no sweep (R107)")]
    NoSweep(RunId),
    #[error("run {run} has no suite {suite:?}; its suites are: {suites} (R107)")]
    NoSuite { run: RunId, suite: String, suites: String },
    #[error("too many concurrent changes to {0}; try again (R105)")]
    Busy(RunId),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("write to the log")]
    Publish(#[from] PublishError),
    #[error(transparent)]
    Presence(#[from] PresenceError),
}

impl RunError {
    /// Returns true if the same call may succeed later: the log is the reason.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Busy(_) | Self::Read(_) | Self::Publish(_) | Self::Presence(_) => true,
            Self::Unknown(_) | Self::Ended { .. } | Self::NoSweep(_) | Self::NoSuite { .. } => {
                false
            }
        }
    }
}

impl FleetControl {
    /// Returns all facts of a run so far, in log order. Fails if the run does not exist.
    pub(crate) async fn read_run_records(&self, run: &RunId) -> Result<Vec<Record>, RunError> {
        let records = self.read_records(vec![format!("flotilla.{run}.>")]).await?;
        if records.is_empty() { Err(RunError::Unknown(run.clone())) } else { Ok(records) }
    }

    /// Skips unreadable entries.
    pub(crate) async fn read_records(
        &self,
        filters: Vec<String>,
    ) -> Result<Vec<Record>, ReadError> {
        let mut facts = std::pin::pin!(self.bus.follow_facts(filters, 0));
        let mut records = Vec::new();
        while let Some(followed) = facts.next().await {
            match followed? {
                LogEvent::Record(record) => records.push(record),
                LogEvent::CaughtUp => break,
                LogEvent::Unreadable { .. } => {}
            }
        }
        Ok(records)
    }

    /// Returns a run, folded from its facts.
    pub async fn get_run(&self, run: &RunId) -> Result<Run, RunError> {
        fold_run(&self.read_run_records(run).await?).ok_or_else(|| RunError::Unknown(run.clone()))
    }

    /// Returns every run of the log, oldest first, without checkpoints and evals.
    pub async fn list_runs(&self) -> Result<Vec<Run>, RunError> {
        Ok(self.list_queues().await?.0)
    }

    /// Returns the runs as [`FleetControl::list_runs`] does, and the turns of their queues.
    async fn list_queues(&self) -> Result<(Vec<Run>, QueueTurns), RunError> {
        let kinds = ["spec", "watched", "control.*", "cycle.*.*", "done"];
        let filters = kinds.iter().map(|kind| format!("flotilla.*.{kind}")).collect();
        let (mut runs, mut turns) = (Vec::<Run>::new(), QueueTurns::default());
        for record in self.read_records(filters).await? {
            let id = &record.fact.subject.run;
            match runs.iter_mut().find(|run| run.id == *id) {
                Some(run) => {
                    run.fold_record(&record);
                    turns.record_turn(run, &record);
                }
                None => runs.extend(Run::start(&record)),
            }
        }
        Ok((runs, turns))
    }

    /// Returns a run in the API's form. If it waits for agents or in the queue, its message says
    /// for which.
    pub async fn describe_run(&self, id: &RunId) -> Result<v1::Run, RunError> {
        let run = self.get_run(id).await?;
        let view = self.run_with_message(&run, &self.list_agents().await?).await?;
        if !run.is_queued() {
            return Ok(view);
        }
        let (runs, turns) = self.list_queues().await?;
        Ok(with_queue_place(
            view,
            &queue_places(&runs, &turns, wire::clock::minute_of_day().into()),
        ))
    }

    /// Returns every run as [`FleetControl::describe_run`] does, oldest first, without checkpoints,
    /// evals and the phases of open runs.
    pub async fn describe_runs(&self) -> Result<Vec<v1::Run>, RunError> {
        let ((runs, turns), agents) = (self.list_queues().await?, self.list_agents().await?);
        let places = queue_places(&runs, &turns, wire::clock::minute_of_day().into());
        let mut views = Vec::new();
        for run in &runs {
            let view = self.run_with_message(run, &agents).await?;
            views.push(with_queue_place(without_open_phase(view), &places));
        }
        Ok(views)
    }

    /// Returns a run in the API's form. If it waits for agents, its message says for which, or why
    /// none can verify.
    async fn run_with_message(
        &self,
        run: &Run,
        agents: &[v1::AgentStatus],
    ) -> Result<v1::Run, ReadError> {
        let mut view = run_to_proto(run);
        if view.state() == v1::run::State::Running {
            view.message = describe_missing_roles(&run.spec, agents, wire::clock::unix_seconds());
            if view.message.is_empty() {
                view.message = self.describe_waiting_verification(run).await?;
            }
        }
        Ok(view)
    }

    /// Returns why no agent can do a run's newest failed verification; empty if one has done it.
    async fn describe_waiting_verification(&self, run: &Run) -> Result<String, ReadError> {
        let failures = format!("flotilla.{}.failure.{}.*.*", run.id, WorkKind::Verify);
        let record = self.bus.get_fact(&failures).await?;
        let Some(FactBody::Failure(failure)) = record.map(|record| record.fact.body) else {
            return Ok(String::new());
        };
        let Some(awaited) = awaited_verdicts(run, &failure) else { return Ok(String::new()) };
        let written = self.bus.get_fact(&Subject::new(&run.id, awaited).to_string()).await?;
        Ok(if written.is_none() { describe_unmet_needs(&failure) } else { String::new() })
    }

    /// Folds only the spec, control and done facts. The cost does not depend on the number of
    /// samples.
    async fn read_run_status(&self, id: &RunId) -> Result<Run, RunError> {
        let kinds = ["spec", "watched", "control.*", "done"];
        let filters = kinds.iter().map(|kind| format!("flotilla.{id}.{kind}")).collect();
        fold_run(&self.read_records(filters).await?).ok_or_else(|| RunError::Unknown(id.clone()))
    }

    /// Pauses, resumes or cancels a run. Has no effect if the run is in the requested state
    /// already. Fails if the run does not exist or has ended.
    pub async fn control_run(&self, id: &RunId, control: v1::Control) -> Result<bool, RunError> {
        let action = control.action();
        for _ in 0..CONTROL_ATTEMPTS_MAX {
            let run = self.read_run_status(id).await?;
            if let Some(done) = &run.done {
                let state = done.status().as_str_name().to_lowercase();
                return Err(RunError::Ended { run: id.clone(), state });
            }
            if has_state(&run, action) {
                return Ok(false);
            }
            let place = FactKey::Control { number: run.last_control.saturating_add(1) };
            let body = FactBody::Control(control.clone());
            let fact = Fact { subject: Subject::new(id, place), body };
            if let PublishOutcome::New { .. } = self.bus.publish_fact(&fact).await? {
                return Ok(true);
            }
        }
        Err(RunError::Busy(id.clone()))
    }

    /// Yields a run's facts after a cursor, then new ones; ends after the `done` fact. Fails if the
    /// run does not exist.
    pub async fn watch_run(
        &self,
        run: &RunId,
        after: u64,
    ) -> Result<BoxStream<'static, Result<Record, ReadError>>, RunError> {
        let last = |place| Subject::new(run, place).to_string();
        if self.bus.find_spec(run).await?.is_none() {
            return Err(RunError::Unknown(run.clone()));
        }
        let done = self.bus.get_fact(&last(FactKey::Done)).await?;
        if done.is_some_and(|done| done.sequence <= after) {
            return Ok(stream::empty().boxed());
        }
        let facts = self.bus.follow_facts(vec![format!("flotilla.{run}.>")], after);
        let records = facts.try_filter_map(async |followed| {
            Ok(match followed {
                LogEvent::Record(record) => Some(record),
                LogEvent::CaughtUp | LogEvent::Unreadable { .. } => None,
            })
        });
        Ok(take_until_done(records.boxed()).boxed())
    }
}

/// The `done` fact is the last of a run.
fn take_until_done(
    records: BoxStream<'static, Result<Record, ReadError>>,
) -> impl Stream<Item = Result<Record, ReadError>> + Send {
    stream::unfold(Some(records), async |records| {
        let mut records = records?;
        let record = records.next().await?;
        let done = matches!(&record, Ok(record) if matches!(record.fact.body, FactBody::Done(_)));
        Some((record, (!done).then_some(records)))
    })
}

/// Returns true if the action would not change the run.
fn has_state(run: &Run, action: v1::control::Action) -> bool {
    use v1::control::Action;
    match action {
        // The queue's pause is not the user's, which lasts.
        Action::Pause => run.paused && !run.queue.is_waiting(),
        Action::Resume => !run.is_halted(),
        Action::Cancel => run.cancelled,
        Action::Unspecified => true,
    }
}

/// Returns `None` if no `spec` fact is among the records.
pub(crate) fn fold_run(records: &[Record]) -> Option<Run> {
    let mut records = records.iter();
    let mut run = records.by_ref().find_map(Run::start)?;
    records.for_each(|record| run.fold_record(record));
    Some(run)
}

/// Returns the run with this spec, but for its id and time of submission, that has not failed.
pub(crate) fn find_equal_run<'a>(runs: &'a [Run], spec: &v1::Spec) -> Option<&'a Run> {
    use v1::run::State::{Cancelled, Failed};
    let is_equal = |run: &&Run| {
        let plain = v1::Spec { run: String::new(), submitted_at: None, ..run.spec.clone() };
        plain == *spec && !matches!(run.current_state(), Failed | Cancelled)
    };
    runs.iter().find(is_equal)
}

/// Leaves out the phase of an open run, which cannot be told without its samples and verdicts.
fn without_open_phase(view: v1::Run) -> v1::Run {
    let phase = if view.ended_at.is_some() { view.phase.clone() } else { String::new() };
    v1::Run { phase, ..view }
}

fn with_queue_place(mut view: v1::Run, places: &[QueuePlace]) -> v1::Run {
    if let Some(place) = places.iter().find(|place| place.run.as_str() == view.run) {
        view.queue_place = place.place;
        if view.state() == v1::run::State::Queued {
            view.message.clone_from(&place.message);
        }
    }
    view
}

/// Converts a run to the API's form.
pub fn run_to_proto(run: &Run) -> v1::Run {
    v1::Run {
        run: run.id.to_string(),
        name: run.spec.name.clone(),
        kind: run.kind_name().into(),
        state: run.current_state().into(),
        message: run.state_reason(),
        seed: run.spec.seed,
        submitted_at: Some(to_timestamp(run.submitted_ms)),
        ended_at: run.ended_ms.map(to_timestamp),
        cycle: run.active_cycle(),
        cycles: run.last_cycle(),
        phase: run.current_phase().as_str().into(),
        cycles_done: run.cycles.values().filter_map(|cycle| cycle.done.clone()).collect(),
        checkpoints: checkpoint_infos(run),
        evals: run.cycles.values().flat_map(|cycle| cycle.evals.values().cloned()).collect(),
        failures: run.failures.clone(),
        cursor: run.sequence,
        forked_from: run.spec.forked_from(),
        trial_of: run.spec.trial_of(),
        pool: run.spec.pool.clone(),
        user: run_user(run),
        queue: run.spec.queue,
        queue_place: 0,
        sweep: run.spec.sweep.clone(),
        data_sources: run.spec.data_sources.clone(),
    }
}

/// Converts milliseconds since 1970 to the API's timestamp.
pub fn to_timestamp(time_ms: u64) -> Timestamp {
    wire::to_timestamp(Duration::from_millis(time_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_run_has_a_phase_once_it_has_ended() {
        let open = v1::Run { phase: "plan".into(), ..v1::Run::default() };
        assert_eq!(without_open_phase(open.clone()).phase, "");
        let ended = v1::Run { phase: "done".into(), ended_at: Some(to_timestamp(1000)), ..open };
        assert_eq!(without_open_phase(ended).phase, "done");
    }
}
