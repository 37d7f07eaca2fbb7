//! The status of each run, as far as an agent needs it: paused, over, and the round of its orders.

use std::collections::{BTreeMap, BTreeSet};

use wire::{FactBody, FactKey, Record, RunId, Subject, v1};

/// The status of a run as far as it decides whether work for it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunStatus {
    /// 1 + the number of resumes. Orders of earlier rounds are stale: the coordinator has written
    /// new ones.
    pub round: u32,
    pub paused: bool,
    /// True if the run is done or cancelled, so that no job of it is needed.
    pub is_over: bool,
}

impl Default for RunStatus {
    fn default() -> Self {
        Self { round: 1, paused: false, is_over: false }
    }
}

/// The status of all runs, folded from their `control`, `done` and `archived` facts.
#[derive(Debug, Clone, Default)]
pub struct RunStatuses {
    /// Runs without any such fact have the default.
    runs: BTreeMap<RunId, RunStatus>,
    /// Archived cycles of open runs, whose bulky facts the log has purged or will purge soon.
    archived_cycles: BTreeMap<RunId, BTreeSet<u32>>,
    last_sequence: u64,
}

impl RunStatuses {
    /// Applies the next fact of the log: `control`, `done` and `archived` facts change the status
    /// of their run. Facts of other kinds and facts already seen are ignored.
    pub fn apply_fact(&mut self, record: &Record) {
        use v1::control::Action;
        if record.sequence <= self.last_sequence {
            return;
        }
        let run = &record.fact.subject.run;
        if let FactKey::Archived { cycle } = record.fact.subject.key {
            self.last_sequence = record.sequence;
            if !self.run_status(run).is_over {
                self.archived_cycles.entry(run.clone()).or_default().insert(cycle);
            }
            return;
        }
        let action = match &record.fact.body {
            FactBody::Done(_) => Action::Cancel,
            FactBody::Control(control) => control.action(),
            _ => return,
        };
        self.last_sequence = record.sequence;
        let status = self.runs.entry(run.clone()).or_default();
        match action {
            Action::Pause => status.paused = true,
            Action::Resume => {
                status.round = status.round.saturating_add(u32::from(status.paused));
                status.paused = false;
            }
            Action::Cancel => {
                status.is_over = true;
                self.archived_cycles.remove(run);
            }
            Action::Unspecified => {}
        }
    }

    /// Returns the status of a run; the default (round 1, neither paused nor over) if no fact is
    /// about it.
    pub fn run_status(&self, run: &RunId) -> RunStatus {
        self.runs.get(run).copied().unwrap_or_default()
    }

    /// Returns the status of a fact's run as it applies to that fact: for orders and samples of an
    /// archived cycle the run is over, because results for them would be ignored.
    pub fn status_for_fact(&self, subject: &Subject) -> RunStatus {
        let status = self.run_status(&subject.run);
        let archived = subject.key.cycle_number().filter(|_| subject.key.is_bulky());
        let gone = archived.is_some_and(|cycle| {
            self.archived_cycles.get(&subject.run).is_some_and(|cycles| cycles.contains(&cycle))
        });
        RunStatus { is_over: status.is_over || gone, ..status }
    }
}

#[cfg(test)]
mod tests {
    use wire::Fact;

    use super::*;

    fn status(facts: &[(&str, &str)], subject: &str) -> RunStatus {
        let mut statuses = RunStatuses::default();
        for (sequence, (subject, payload)) in (1..).zip(facts) {
            let subject = format!("flotilla.r1.{subject}");
            let fact = Fact::from_json(&subject, payload.as_bytes()).unwrap();
            statuses.apply_fact(&Record { sequence, time_ms: 0, author: None, fact });
        }
        statuses.status_for_fact(&format!("flotilla.r1.{subject}").parse().unwrap())
    }

    #[test]
    fn each_resume_begins_a_round_and_a_cancel_ends_all() {
        let (pause, resume) = (r#"{"action":"PAUSE"}"#, r#"{"action":"RESUME"}"#);
        let steps = [("control.1", pause), ("control.2", resume), ("control.3", resume)];
        let state = |n: usize| status(&steps[..n], "samples.1.j1");
        assert_eq!(state(1), RunStatus { round: 1, paused: true, is_over: false });
        assert_eq!(state(3), RunStatus { round: 2, paused: false, is_over: false });
        let cancel = [("control.1", r#"{"action":"CANCEL"}"#)];
        assert!(status(&cancel, "checkpoint.1.4").is_over);
        assert!(status(&[("done", "{}")], "checkpoint.1.4").is_over);
    }

    #[test]
    fn samples_of_an_archived_cycle_are_over_and_its_checkpoints_are_not() {
        let archived = [("cycle.1.archived", r#"{"cycle":1}"#)];
        assert!(status(&archived, "samples.1.j1").is_over);
        assert!(!status(&archived, "samples.2.j1").is_over);
        assert!(!status(&archived, "checkpoint.1.4").is_over);
    }
}
