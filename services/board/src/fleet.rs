//! The fleet: its agents as they last said of themselves, and its runs in a line each.

use std::collections::BTreeMap;

use wire::{Body, Record, RunId, v1};

/// Agents that are remembered: beyond, those that are gone make room for others.
const AGENTS_MAX: usize = 4096;

/// Agents and runs of one message: some hundred kilobytes.
const TOGETHER_MAX: usize = 128;

/// Folded from statuses and from the few facts that [`Fleet::KINDS`] names.
#[derive(Debug, Clone, Default)]
pub struct Fleet {
    agents: BTreeMap<String, Known<v1::AgentStatus>>,
    runs: BTreeMap<RunId, Known<Line>>,
    /// Counts what was heard.
    revision: u64,
}

#[derive(Debug, Clone)]
struct Known<T> {
    is: T,
    /// When it last changed.
    revision: u64,
}

#[derive(Debug, Clone, Default)]
struct Line {
    shown: v1::RunLine,
    paused: bool,
}

impl Fleet {
    /// The facts that are taken in, as they stand behind a run's name: those of a run that say how
    /// it is, and are small.
    pub const KINDS: [&'static str; 4] = ["spec", "control.*", "cycle.*.done", "done"];

    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// What an agent says of itself.
    pub fn hear(&mut self, status: v1::AgentStatus) {
        self.revision += 1;
        if self.agents.len() >= AGENTS_MAX && !self.agents.contains_key(&status.agent) {
            self.forget_one();
        }
        let known = Known { is: status, revision: self.revision };
        self.agents.insert(known.is.agent.clone(), known);
    }

    /// The one that has been silent for longest.
    fn forget_one(&mut self) {
        let silent = self.agents.iter().min_by_key(|(_, known)| known.revision);
        if let Some(agent) = silent.map(|(agent, _)| agent.clone()) {
            self.agents.remove(&agent);
        }
    }

    /// A fact of any run, in log order.
    pub fn fold(&mut self, record: &Record) {
        let run = &record.fact.subject.run;
        if let Body::Spec(spec) = &record.fact.body {
            let line = Line { shown: begun(spec, record), paused: false };
            self.revision += 1;
            self.runs.insert(run.clone(), Known { is: line, revision: self.revision });
            return;
        }
        let Some(known) = self.runs.get_mut(run) else { return };
        self.revision += 1;
        known.revision = self.revision;
        known.is.note(record);
    }

    /// What has changed behind a revision, all of it behind 0; and the revision that it comes up to,
    /// which is not the last where there is too much for one message.
    pub fn since(&self, revision: u64) -> Option<(v1::FleetChange, u64)> {
        if self.revision <= revision {
            return None;
        }
        let agents = self.agents.values().map(|known| known.revision);
        let runs = self.runs.values().map(|known| known.revision);
        let mut changed: Vec<u64> = agents.chain(runs).filter(|it| *it > revision).collect();
        changed.sort_unstable();
        let reached = changed.get(TOGETHER_MAX - 1).copied().unwrap_or(self.revision);
        let is_told = |at: u64| at > revision && at <= reached;
        let agents = self.agents.values().filter(|known| is_told(known.revision));
        let runs = self.runs.values().filter(|known| is_told(known.revision));
        let change = v1::FleetChange {
            agents: agents.map(|known| known.is.clone()).collect(),
            runs: runs.map(|known| known.is.shown.clone()).collect(),
        };
        Some((change, reached))
    }
}

fn begun(spec: &v1::Spec, record: &Record) -> v1::RunLine {
    let cycles = match &spec.kind {
        Some(v1::spec::Kind::Raft(raft)) => raft.cycles,
        Some(v1::spec::Kind::Watched(_) | v1::spec::Kind::Sft(_)) | None => 0,
    };
    v1::RunLine {
        run: record.fact.subject.run.to_string(),
        name: spec.name.clone(),
        kind: spec.kind_name().into(),
        state: "running".into(),
        submitted_at: Some(at(record)),
        cycles,
        ..Default::default()
    }
}

impl Line {
    fn note(&mut self, record: &Record) {
        match &record.fact.body {
            Body::Control(control) => match control.action() {
                v1::control::Action::Pause => self.paused = true,
                v1::control::Action::Resume => self.paused = false,
                v1::control::Action::Cancel | v1::control::Action::Unspecified => {}
            },
            Body::CycleDone(done) => {
                self.shown.cycles_done = self.shown.cycles_done.saturating_add(1);
                self.shown.heldout = done.heldout;
            }
            Body::Done(done) => {
                self.shown.state = done.status().as_str_name().to_lowercase();
                self.shown.message.clone_from(&done.message);
                self.shown.ended_at = Some(at(record));
            }
            _ => {}
        }
        if self.shown.ended_at.is_none() {
            self.shown.state = if self.paused { "paused" } else { "running" }.into();
        }
    }
}

fn at(record: &Record) -> wire::Timestamp {
    wire::timestamp(std::time::Duration::from_millis(record.time_ms))
}

#[cfg(test)]
mod tests {
    use wire::{Fact, Place, Subject};

    use super::*;

    fn record(sequence: u64, run: &str, place: Place, body: Body) -> Record {
        let subject = Subject::new(&RunId::new(run).unwrap(), place);
        let time_ms = sequence * 1000;
        Record { sequence, time_ms, author: None, fact: Fact { subject, body } }
    }

    fn control(sequence: u64, action: v1::control::Action) -> Record {
        let body = Body::Control(v1::Control { action: action.into(), reason: String::new() });
        record(sequence, "r-1", Place::Control { number: sequence }, body)
    }

    fn done(sequence: u64, status: v1::done::Status) -> Record {
        let done = v1::Done { status: status.into(), message: "said".into() };
        record(sequence, "r-1", Place::Done, Body::Done(done))
    }

    fn fleet() -> Fleet {
        let mut fleet = Fleet::default();
        let raft = v1::spec::Raft { cycles: 3, ..Default::default() };
        let kind = Some(v1::spec::Kind::Raft(raft));
        let spec = v1::Spec { name: "sums".into(), kind, ..Default::default() };
        fleet.fold(&record(1, "r-1", Place::Spec, Body::Spec(spec)));
        fleet
    }

    fn state(fleet: &Fleet) -> String {
        fleet.since(0).unwrap().0.runs[0].state.clone()
    }

    #[test]
    fn a_run_is_retold_when_it_changes_and_only_then() {
        let mut fleet = fleet();
        let (first, _) = fleet.since(0).unwrap();
        assert_eq!((first.runs[0].name.as_str(), first.runs[0].cycles), ("sums", 3));
        let seen = fleet.revision();
        assert_eq!(fleet.since(seen), None);
        fleet.hear(v1::AgentStatus { agent: "box".into(), ..Default::default() });
        let (heard, _) = fleet.since(seen).unwrap();
        assert_eq!((heard.agents.len(), heard.runs.len()), (1, 0));
        fleet.fold(&control(2, v1::control::Action::Pause));
        assert_eq!(state(&fleet), "paused");
        fleet.fold(&control(3, v1::control::Action::Resume));
        assert_eq!(state(&fleet), "running");
        fleet.fold(&done(4, v1::done::Status::Failed));
        // What comes behind the end changes nothing.
        fleet.fold(&control(5, v1::control::Action::Pause));
        let line = &fleet.since(0).unwrap().0.runs[0];
        assert_eq!((line.state.as_str(), line.message.as_str()), ("failed", "said"));
        assert!(line.ended_at.is_some());
    }

    #[test]
    fn a_run_without_its_spec_is_none() {
        let mut fleet = Fleet::default();
        fleet.fold(&done(1, v1::done::Status::Succeeded));
        assert_eq!(fleet.since(0), None);
    }

    #[test]
    fn agents_that_come_and_go_for_ever_have_a_bound() {
        let mut fleet = Fleet::default();
        for number in 0..AGENTS_MAX + 10 {
            let agent = format!("box-{number}");
            fleet.hear(v1::AgentStatus { agent, ..Default::default() });
        }
        let (mut all, mut seen) = (Vec::new(), 0);
        while let Some((part, reached)) = fleet.since(seen) {
            assert!(part.agents.len() <= TOGETHER_MAX && reached > seen);
            all.extend(part.agents);
            seen = reached;
        }
        assert_eq!(all.len(), AGENTS_MAX);
        assert!(all.iter().all(|agent| agent.agent != "box-0"), "the first was silent longest");
    }
}
