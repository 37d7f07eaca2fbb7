//! The open runs of a coordinator, between the log and its decisions. Decisions are made only on a
//! state that contains every fact this coordinator has written: until they have come back through
//! the log, it waits. Facts that could not be written are planned again.

use std::collections::{BTreeMap, BTreeSet};

use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use crate::{
    command::{PlannerInputs, WriteCommand},
    planner::next_commands,
    run_queue::{QueueTurns, queue_commands},
    state::Run,
};

/// The open runs of a log, each with a dirty flag.
///
/// A run becomes dirty when a fact of it arrives or when [`RunSet::mark_dirty`] is called (time has
/// passed, or a write failed). The coordinator's loop is:
///
/// ```text
/// fold_record(record)...        each entry of the log; the run becomes dirty
/// mark_caught_up()              once, when the replay is complete
/// queue_commands(minute)        facts to write before the others
/// for id in take_dirty()        empty until the log contains all own writes
///     next_commands(id, inputs) facts to write, in order
///     record_write(sequence)    for each fact written
/// ```
///
/// A run that ends is dropped; later facts of it are ignored.
#[derive(Debug, Clone, Default)]
pub struct RunSet {
    open_runs: BTreeMap<RunId, OpenRun>,
    ended_runs: BTreeSet<RunId>,
    last_folded: u64,
    /// Last fact written by this coordinator.
    last_written: u64,
    /// The log was replayed to the end it had at the start.
    caught_up: bool,
    /// Includes the turns of runs that have ended.
    queue_turns: QueueTurns,
    /// The queues may have changed since their last decision.
    is_queue_due: bool,
}

#[derive(Debug, Clone)]
struct OpenRun {
    run: Run,
    is_dirty: bool,
    /// Time has passed since the last decision, so in-flight orders may have to be issued again.
    stragglers_due: bool,
    /// Value of `stragglers_due`, taken over for the decision that is now due.
    checks_stragglers: bool,
    /// Message about a log entry that makes it impossible to continue the run.
    unreadable_entry: Option<String>,
}

impl RunSet {
    /// Applies the next entry of the log to its run, which becomes dirty. A `spec` fact opens a
    /// run, a `done` fact drops it. Ignores entries that were seen before.
    pub fn fold_record(&mut self, record: &Record) {
        if record.sequence <= self.last_folded {
            return;
        }
        self.last_folded = record.sequence;
        let id = &record.fact.subject.run;
        if self.ended_runs.contains(id) {
            return;
        }
        match self.open_runs.get_mut(id) {
            Some(open) => {
                open.run.fold_record(record);
                open.is_dirty = true;
                self.queue_turns.record_turn(&open.run, record);
            }
            None => {
                let open = |run| OpenRun {
                    run,
                    is_dirty: true,
                    stragglers_due: true,
                    checks_stragglers: true,
                    unreadable_entry: None,
                };
                self.open_runs.extend(Run::start(record).map(|run| (id.clone(), open(run))));
            }
        }
        self.is_queue_due |= matches!(
            record.fact.body,
            FactBody::Spec(_) | FactBody::Control(_) | FactBody::Done(_)
        );
        if matches!(record.fact.body, FactBody::Done(_)) {
            self.open_runs.remove(id);
            self.ended_runs.insert(id.clone());
        }
    }

    /// Handles a refused write: another fact, at `sequence`, occupies `subject`, which is that of a
    /// run's next fact. The run becomes dirty. If that entry was folded already, it did not count
    /// and never will, so the run's next command ends it as failed; otherwise it is folded first.
    pub fn record_conflict(&mut self, subject: &Subject, sequence: u64) {
        let Some(open) = self.open_runs.get_mut(&subject.run) else { return };
        if sequence <= self.last_folded {
            let message = format!(
                "entry {sequence} of the log stands at {subject}, where a fact of the coordinator \
                 belongs; `flotilla audit {}` names its author",
                subject.run
            );
            open.unreadable_entry.get_or_insert(message);
        }
        open.is_dirty = true;
    }

    /// Handles a log entry that is not a readable fact: the next command of the open run that its
    /// subject names ends that run as failed, with `error` in the message. Entries of other runs,
    /// and of subjects that a run does not wait for, are skipped.
    pub fn record_unreadable(&mut self, sequence: u64, subject: &str, error: &str) {
        self.last_folded = self.last_folded.max(sequence);
        let read = Subject::parse_with_author(subject).ok().map(|(subject, _)| subject);
        let waited = |subject: &Subject| {
            !matches!(
                subject.key,
                FactKey::Spec
                    | FactKey::WatchedSpec
                    | FactKey::WatchedCheckpoint { .. }
                    | FactKey::Declined { .. }
            )
        };
        let run = read.filter(waited).map(|subject| subject.run);
        if let Some(open) = run.and_then(|run| self.open_runs.get_mut(&run)) {
            let message = format!("entry {sequence} of the log cannot be read: {error}");
            open.unreadable_entry.get_or_insert(message);
            open.is_dirty = true;
        }
    }

    /// Records that the replay has reached the end that the log had at the start.
    pub fn mark_caught_up(&mut self) {
        self.caught_up = true;
    }

    /// Records the sequence of a fact written by this coordinator; planning waits until it was
    /// folded.
    pub fn record_write(&mut self, sequence: u64) {
        self.last_written = self.last_written.max(sequence);
    }

    /// Marks every open run as dirty and due for a straggler check, because time has passed or a
    /// write failed.
    pub fn mark_dirty(&mut self) {
        self.is_queue_due = true;
        self.open_runs
            .values_mut()
            .for_each(|open| (open.is_dirty, open.stragglers_due) = (true, true));
    }

    /// Iterates over the runs that have not ended.
    pub fn iter_open(&self) -> impl Iterator<Item = &Run> {
        self.open_runs.values().map(|open| &open.run)
    }

    /// Returns an open run; `None` if it has ended or is unknown.
    pub fn find_run(&self, id: &RunId) -> Option<&Run> {
        self.open_runs.get(id).map(|open| &open.run)
    }

    /// Returns the sequence of the last log entry seen.
    pub fn last_sequence(&self) -> u64 {
        self.last_folded
    }

    /// Returns the controls by which the queues pause and resume their runs. Empty while
    /// [`RunSet::take_dirty`] waits for the log, or if nothing has changed. A caller that fails to
    /// write them must call [`RunSet::mark_dirty`] later. `minute` is that of the local day.
    pub fn queue_commands(&mut self, minute: u32) -> Vec<WriteCommand> {
        if !self.is_settled() || !std::mem::take(&mut self.is_queue_due) {
            return Vec::new();
        }
        queue_commands(self.open_runs.values().map(|open| &open.run), &self.queue_turns, minute)
    }

    /// Returns the last turn of each user in each queue.
    #[cfg(test)]
    pub(crate) fn queue_turns(&self) -> &QueueTurns {
        &self.queue_turns
    }

    /// Returns true if the log has been replayed, including every fact written by this coordinator.
    fn is_settled(&self) -> bool {
        self.caught_up && self.last_folded >= self.last_written
    }

    /// Returns the ids of the dirty runs and clears their flags. Empty until the log has been
    /// replayed, including every fact written by this coordinator. A caller that fails to act on a
    /// run must call [`RunSet::mark_dirty`] later.
    pub fn take_dirty(&mut self) -> Vec<RunId> {
        if !self.is_settled() {
            return Vec::new();
        }
        let dirty = self.open_runs.iter_mut().filter(|(_, open)| open.is_dirty);
        let due = dirty.map(|(id, open)| {
            open.is_dirty = false;
            open.checks_stragglers = std::mem::take(&mut open.stragglers_due);
            id.clone()
        });
        due.collect()
    }

    /// Returns the facts to write for an open run, in this order; empty if it needs none now or is
    /// not open. A caller that cannot write one must not write the following ones.
    pub fn next_commands(&self, id: &RunId, inputs: PlannerInputs<'_>) -> Vec<WriteCommand> {
        let Some(open) = self.open_runs.get(id) else { return Vec::new() };
        match &open.unreadable_entry {
            Some(message) => vec![fail_run(id, message.clone())],
            None => next_commands(
                &open.run,
                PlannerInputs {
                    check_stragglers: open.checks_stragglers && inputs.check_stragglers,
                    ..inputs
                },
            ),
        }
    }
}

/// Returns the command that writes the `done` fact of a failed run; `message` is the reason for
/// users.
pub fn fail_run(id: &RunId, message: String) -> WriteCommand {
    let done = v1::Done { status: v1::done::Status::Failed.into(), message };
    let fact = Fact { subject: Subject::new(id, FactKey::Done), body: FactBody::Done(done) };
    WriteCommand { fact, blob: None }
}
