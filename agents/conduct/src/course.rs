//! What the log says of each run, as far as an agent must know it: whether it is paused
//! or over, and which round of orders is the current one.

use std::collections::{BTreeMap, BTreeSet};

use wire::{Body, Place, Record, RunId, Subject, v1};

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

/// The states of all runs, folded from their `control`, `done` and `archived` facts.
#[derive(Debug, Clone, Default)]
pub struct Courses {
    runs: BTreeMap<RunId, Course>,
    /// Cycles of open runs whose bulky facts the log has let go of, or soon will.
    archived: BTreeMap<RunId, BTreeSet<u32>>,
    sequence: u64,
}

impl Courses {
    /// Takes in the next fact; others than those named are ignored, and so are those seen.
    pub fn note(&mut self, record: &Record) {
        use v1::control::Action;
        if record.sequence <= self.sequence {
            return;
        }
        let run = &record.fact.subject.run;
        if let Place::Archived { cycle } = record.fact.subject.place {
            self.sequence = record.sequence;
            if !self.of(run).over {
                self.archived.entry(run.clone()).or_default().insert(cycle);
            }
            return;
        }
        let action = match &record.fact.body {
            Body::Done(_) => Action::Cancel,
            Body::Control(control) => control.action(),
            _ => return,
        };
        self.sequence = record.sequence;
        let course = self.runs.entry(run.clone()).or_default();
        match action {
            Action::Pause => course.paused = true,
            Action::Resume => {
                course.round = course.round.saturating_add(u32::from(course.paused));
                course.paused = false;
            }
            Action::Cancel => {
                course.over = true;
                self.archived.remove(run);
            }
            Action::Unspecified => {}
        }
    }

    pub fn of(&self, run: &RunId) -> Course {
        self.runs.get(run).copied().unwrap_or_default()
    }

    /// The state of a fact's run, as far as that fact is concerned: what is made of an order or
    /// of samples of an archived cycle would not count.
    pub fn of_fact(&self, subject: &Subject) -> Course {
        let course = self.of(&subject.run);
        let archived = subject.place.cycle().filter(|_| subject.place.is_bulky());
        let gone = archived.is_some_and(|cycle| {
            self.archived.get(&subject.run).is_some_and(|cycles| cycles.contains(&cycle))
        });
        Course { over: course.over || gone, ..course }
    }
}

#[cfg(test)]
mod tests {
    use wire::Fact;

    use super::*;

    fn course(facts: &[(&str, &str)], subject: &str) -> Course {
        let mut courses = Courses::default();
        for (sequence, (subject, payload)) in (1..).zip(facts) {
            let subject = format!("flotilla.r1.{subject}");
            let fact = Fact::decode(&subject, payload.as_bytes()).unwrap();
            courses.note(&Record { sequence, time_ms: 0, author: None, fact });
        }
        courses.of_fact(&format!("flotilla.r1.{subject}").parse().unwrap())
    }

    #[test]
    fn each_resume_begins_a_round_and_a_cancel_ends_all() {
        let (pause, resume) = (r#"{"action":"PAUSE"}"#, r#"{"action":"RESUME"}"#);
        let steps = [("control.1", pause), ("control.2", resume), ("control.3", resume)];
        let state = |n: usize| course(&steps[..n], "samples.1.j1");
        assert_eq!(state(1), Course { round: 1, paused: true, over: false });
        assert_eq!(state(3), Course { round: 2, paused: false, over: false });
        let cancel = [("control.1", r#"{"action":"CANCEL"}"#)];
        assert!(course(&cancel, "checkpoint.1.4").over);
    }

    #[test]
    fn what_is_made_for_an_archived_cycle_is_over_and_its_checkpoints_are_not() {
        let archived = [("cycle.1.archived", r#"{"cycle":1}"#)];
        assert!(course(&archived, "samples.1.j1").over);
        assert!(!course(&archived, "samples.2.j1").over);
        assert!(!course(&archived, "checkpoint.1.4").over);
    }
}
