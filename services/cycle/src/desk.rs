//! What a coordinator keeps of all runs between the log and its decisions.
//!
//! It decides only on a state that holds all it wrote itself; until its own facts have
//! come back through the log it waits. What could not be written is decided anew.

use std::collections::{BTreeMap, BTreeSet};

use wire::{Body, Fact, Place, Record, RunId, Subject, v1};

use crate::{
    decide::{Command, Inputs, decide},
    state::Run,
};

/// All open runs of a log.
#[derive(Debug, Clone, Default)]
pub struct Desk {
    open: BTreeMap<RunId, Open>,
    ended: BTreeSet<RunId>,
    /// Sequence of the last entry seen, and of the last one written here.
    folded: u64,
    written: u64,
    caught_up: bool,
}

/// A run that has not ended.
#[derive(Debug, Clone)]
struct Open {
    run: Run,
    /// Something happened since the last decision.
    stirred: bool,
    /// Time has passed since then: what is out may have to be ordered once more.
    looked_for: bool,
    /// The same, of the decision that is due.
    looking: bool,
    /// Why it cannot go on: what others would react to is not there.
    broken: Option<String>,
}

impl Desk {
    /// Takes in the log's next entry. Earlier ones are ignored.
    pub fn fold(&mut self, record: &Record) {
        if record.sequence <= self.folded {
            return;
        }
        self.folded = record.sequence;
        let id = &record.fact.subject.run;
        if self.ended.contains(id) {
            return;
        }
        match self.open.get_mut(id) {
            Some(open) => {
                open.run.fold(record);
                open.stirred = true;
            }
            None => {
                let open = |run| Open {
                    run,
                    stirred: true,
                    looked_for: true,
                    looking: true,
                    broken: None,
                };
                self.open.extend(Run::start(record).map(|run| (id.clone(), open(run))));
            }
        }
        if matches!(record.fact.body, Body::Done(_)) {
            self.open.remove(id);
            self.ended.insert(id.clone());
        }
    }

    /// Takes in an entry that is no fact: the run it stands in cannot go on.
    pub fn unreadable(&mut self, sequence: u64, subject: &str, error: &str) {
        self.folded = self.folded.max(sequence);
        let run = subject.parse().ok().map(|subject: Subject| subject.run);
        if let Some(open) = run.and_then(|run| self.open.get_mut(&run)) {
            let message = format!("entry {sequence} of the log cannot be read: {error}");
            open.broken.get_or_insert(message);
            open.stirred = true;
        }
    }

    /// The log as it was at the start has been seen.
    pub fn caught_up(&mut self) {
        self.caught_up = true;
    }

    /// A fact of ours stands at this position.
    pub fn wrote(&mut self, sequence: u64) {
        self.written = self.written.max(sequence);
    }

    /// Decide for every run anew: time has passed, or a write failed.
    pub fn stir(&mut self) {
        self.open.values_mut().for_each(|open| (open.stirred, open.looked_for) = (true, true));
    }

    pub fn open(&self) -> impl Iterator<Item = &Run> {
        self.open.values().map(|open| &open.run)
    }

    pub fn run(&self, id: &RunId) -> Option<&Run> {
        self.open.get(id).map(|open| &open.run)
    }

    pub fn folded(&self) -> u64 {
        self.folded
    }

    /// The runs to decide for now; whoever fails at one stirs later. None before the whole
    /// log is known, all that was written here included.
    pub fn due(&mut self) -> Vec<RunId> {
        if !self.caught_up || self.folded < self.written {
            return Vec::new();
        }
        let stirred = self.open.iter_mut().filter(|(_, open)| open.stirred);
        let due = stirred.map(|(id, open)| {
            open.stirred = false;
            open.looking = std::mem::take(&mut open.looked_for);
            id.clone()
        });
        due.collect()
    }

    /// What to write for a run, in this order; whoever cannot write one does not go on to
    /// the next.
    pub fn decide(&self, id: &RunId, inputs: Inputs<'_>) -> Vec<Command> {
        let Some(open) = self.open.get(id) else { return Vec::new() };
        match &open.broken {
            Some(message) => vec![give_up(id, message.clone())],
            None => decide(&open.run, Inputs { again: open.looking && inputs.again, ..inputs }),
        }
    }
}

/// The end of a run that cannot go on.
pub fn give_up(id: &RunId, message: String) -> Command {
    let done = v1::Done { status: v1::done::Status::Failed.into(), message };
    let fact = Fact { subject: Subject::new(id, Place::Done), body: Body::Done(done) };
    Command { fact, blob: None }
}
