//! What the log says of each run, as far as an agent must know it: whether it is paused
//! or over, and which round of orders is the current one.

use std::collections::BTreeMap;

use wire::{Body, Record, RunId, v1};

/// The state of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Course {
    /// 1 + the resumes so far. Orders of earlier rounds have been written anew.
    pub round: u32,
    pub paused: bool,
    /// Done or cancelled: nothing of it needs doing any more.
    pub over: bool,
}

impl Default for Course {
    fn default() -> Self {
        Self { round: 1, paused: false, over: false }
    }
}

/// The states of all runs, folded from their `control` and `done` facts.
#[derive(Debug, Clone, Default)]
pub struct Courses {
    runs: BTreeMap<RunId, Course>,
    sequence: u64,
}

impl Courses {
    /// Takes in the next fact; others than those named are ignored, and so are those seen.
    pub fn note(&mut self, record: &Record) {
        use v1::control::Action;
        if record.sequence <= self.sequence {
            return;
        }
        let action = match &record.fact.body {
            Body::Done(_) => Action::Cancel,
            Body::Control(control) => control.action(),
            _ => return,
        };
        self.sequence = record.sequence;
        let course = self.runs.entry(record.fact.subject.run.clone()).or_default();
        match action {
            Action::Pause => course.paused = true,
            Action::Resume => {
                course.round = course.round.saturating_add(u32::from(course.paused));
                course.paused = false;
            }
            Action::Cancel => course.over = true,
            Action::Unspecified => {}
        }
    }

    pub fn of(&self, run: &RunId) -> Course {
        self.runs.get(run).copied().unwrap_or_default()
    }
}
