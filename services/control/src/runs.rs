//! Runs as users see them: folded from their facts, each time anew.

use std::time::Duration;

use bus::{Followed, PublishError, Published, ReadError};
use cycle::Run;
use futures::{
    Stream, StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use wire::{Body, Fact, Place, Record, RunId, Subject, Timestamp, v1};

use crate::Control;

/// Controls somebody else may write at the same moment.
const CONTROL_TRIES: u32 = 16;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("there is no run {0}; `flotilla run list` shows which there are (R101)")]
    Unknown(RunId),
    #[error("run {run} has ended ({state}); start a new one (R104)")]
    Ended { run: RunId, state: &'static str },
    #[error("too many others steer {0} at this moment; try again (R105)")]
    Busy(RunId),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("write to the log")]
    Publish(#[from] PublishError),
}

impl Control {
    /// All facts of one run so far, in log order.
    ///
    /// # Errors
    /// When there is no such run, or the log cannot be read.
    pub async fn records(&self, run: &RunId) -> Result<Vec<Record>, RunError> {
        let records = self.read_all(vec![format!("flotilla.{run}.>")]).await?;
        if records.is_empty() { Err(RunError::Unknown(run.clone())) } else { Ok(records) }
    }

    /// What the log holds now under the filters.
    pub(crate) async fn read_all(&self, filters: Vec<String>) -> Result<Vec<Record>, ReadError> {
        let mut facts = std::pin::pin!(self.bus.follow(filters, 0));
        let mut records = Vec::new();
        while let Some(followed) = facts.next().await {
            match followed? {
                Followed::Record(record) => records.push(record),
                Followed::CaughtUp => break,
                Followed::Unreadable { .. } => {}
            }
        }
        Ok(records)
    }

    /// # Errors
    /// When there is no such run, or the log cannot be read.
    pub async fn run(&self, run: &RunId) -> Result<Run, RunError> {
        fold(&self.records(run).await?).ok_or_else(|| RunError::Unknown(run.clone()))
    }

    /// Every run of the log, oldest first, without the checkpoints and evals.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn runs(&self) -> Result<Vec<Run>, RunError> {
        let kinds = ["spec", "control.*", "cycle.*.*", "done"];
        let filters = kinds.iter().map(|kind| format!("flotilla.*.{kind}")).collect();
        let mut runs: Vec<Run> = Vec::new();
        for record in self.read_all(filters).await? {
            let id = &record.fact.subject.run;
            match runs.iter_mut().find(|run| run.id == *id) {
                Some(run) => run.fold(&record),
                None => runs.extend(Run::start(&record)),
            }
        }
        Ok(runs)
    }

    /// A run as far as steering it needs to know, whatever it has sampled.
    async fn course(&self, id: &RunId) -> Result<Run, RunError> {
        let kinds = ["spec", "control.*", "done"];
        let filters = kinds.iter().map(|kind| format!("flotilla.{id}.{kind}")).collect();
        fold(&self.read_all(filters).await?).ok_or_else(|| RunError::Unknown(id.clone()))
    }

    /// Pauses, resumes or cancels a run. Asking for what already is changes nothing.
    ///
    /// # Errors
    /// When there is no such run or it has ended, or the log cannot be written.
    pub async fn steer(
        &self,
        id: &RunId,
        action: v1::control::Action,
        reason: &str,
    ) -> Result<(), RunError> {
        for _ in 0..CONTROL_TRIES {
            let run = self.course(id).await?;
            if let Some(done) = &run.done {
                let state = done.status().as_str_name();
                return Err(RunError::Ended { run: id.clone(), state });
            }
            if already(&run, action) {
                return Ok(());
            }
            let place = Place::Control { number: run.controls.saturating_add(1) };
            let body = Body::Control(v1::Control { action: action.into(), reason: reason.into() });
            let fact = Fact { subject: Subject::new(id, place), body };
            if let Published::New { .. } = self.bus.publish(&fact).await? {
                return Ok(());
            }
        }
        Err(RunError::Busy(id.clone()))
    }

    /// A run's facts after a cursor, then new ones; ends behind its `done`.
    ///
    /// # Errors
    /// When there is no such run, or the log cannot be read.
    pub async fn watch_run(
        &self,
        run: &RunId,
        after: u64,
    ) -> Result<BoxStream<'static, Result<Record, ReadError>>, RunError> {
        let last = |place| Subject::new(run, place).to_string();
        if self.bus.get(&last(Place::Spec)).await?.is_none() {
            return Err(RunError::Unknown(run.clone()));
        }
        let done = self.bus.get(&last(Place::Done)).await?;
        if done.is_some_and(|done| done.sequence <= after) {
            return Ok(stream::empty().boxed());
        }
        let facts = self.bus.follow(vec![format!("flotilla.{run}.>")], after);
        let records = facts.try_filter_map(async |followed| {
            Ok(match followed {
                Followed::Record(record) => Some(record),
                Followed::CaughtUp | Followed::Unreadable { .. } => None,
            })
        });
        Ok(until_done(records.boxed()).boxed())
    }
}

/// Ends behind the run's `done`: no record comes after it that could end the stream.
fn until_done(
    records: BoxStream<'static, Result<Record, ReadError>>,
) -> impl Stream<Item = Result<Record, ReadError>> + Send {
    stream::unfold(Some(records), async |records| {
        let mut records = records?;
        let record = records.next().await?;
        let done = matches!(&record, Ok(record) if matches!(record.fact.body, Body::Done(_)));
        Some((record, (!done).then_some(records)))
    })
}

fn already(run: &Run, action: v1::control::Action) -> bool {
    use v1::control::Action;
    match action {
        Action::Pause => run.paused,
        Action::Resume => !run.paused,
        Action::Cancel => run.cancelled,
        Action::Unspecified => true,
    }
}

pub(crate) fn fold(records: &[Record]) -> Option<Run> {
    let mut records = records.iter();
    let mut run = records.by_ref().find_map(Run::start)?;
    records.for_each(|record| run.fold(record));
    Some(run)
}

/// A run in the form the control API gives it.
pub fn view(run: &Run) -> v1::Run {
    let checkpoints = run.cycles.values().flat_map(|cycle| cycle.checkpoints.values());
    v1::Run {
        run: run.id.to_string(),
        name: run.spec.name.clone(),
        kind: run.kind().into(),
        state: run.state().into(),
        message: run.done.as_ref().map_or(String::new(), |done| done.message.clone()),
        seed: run.spec.seed,
        submitted_at: Some(timestamp(run.submitted_ms)),
        ended_at: run.ended_ms.map(timestamp),
        cycle: run.cycle_at_work(),
        cycles: run.last_cycle(),
        phase: run.phase().as_str().into(),
        cycles_done: run.cycles.values().filter_map(|cycle| cycle.done.clone()).collect(),
        checkpoints: checkpoints
            .map(|checkpoint| v1::CheckpointInfo {
                checkpoint: Some(checkpoint.clone()),
                ..Default::default()
            })
            .collect(),
        evals: run.cycles.values().flat_map(|cycle| cycle.evals.values().cloned()).collect(),
        failures: run.failures.clone(),
        cursor: run.sequence,
    }
}

/// Milliseconds since 1970 as the API's timestamp.
pub fn timestamp(time_ms: u64) -> Timestamp {
    wire::timestamp(Duration::from_millis(time_ms))
}
