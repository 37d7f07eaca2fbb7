//! The view of the fleet: the last status of each agent, and one line for each run.

use std::collections::BTreeMap;

use cycle::{QueueStatus, describe_missing_roles, describe_pause, describe_queue_wait};
use wire::{FactBody, Record, RunId, v1};

/// Beyond that, the agent that was silent longest is removed.
const AGENTS_MAX: usize = 4096;

/// Agents and runs of one message, some hundred kilobytes.
const CHANGES_PER_MESSAGE: usize = 128;

/// Seconds between updates of the messages of waiting runs, for agents that stopped in silence.
const UPDATE_MESSAGES_EVERY_S: u64 = 10;

/// A projection of agents' statuses and of the facts that [`FleetView::FACT_KINDS`] lists.
///
/// ```text
/// view.update_agent(status);
/// view.apply_fact(&record);
/// while let Some((change, reached)) = view.changes_since(revision) {
///     send(change);
///     revision = reached;
/// }
/// ```
#[derive(Debug, Clone, Default)]
pub struct FleetView {
    agents: BTreeMap<String, RevisionedValue<v1::AgentStatus>>,
    runs: BTreeMap<RunId, RevisionedValue<RunLineState>>,
    revision: u64,
    /// The time of the newest status, in seconds since 1970.
    now_s: u64,
    /// When the messages of waiting runs were last updated, in the same seconds.
    messages_at_s: u64,
}

#[derive(Debug, Clone)]
struct RevisionedValue<T> {
    value: T,
    revision: u64,
}

#[derive(Debug, Clone, Default)]
struct RunLineState {
    line: v1::RunLine,
    paused: bool,
    queue: QueueStatus,
    /// The reason of the last pause.
    pause_reason: String,
    /// Held-out pass rates by cycle, of a run that has not ended.
    heldouts: BTreeMap<u32, Option<v1::cycle_done::Rate>>,
    /// Of a run that has not ended.
    open_spec: Option<Box<v1::Spec>>,
}

impl FleetView {
    /// Subjects, after the run's name, of the small facts that this view uses.
    pub const FACT_KINDS: [&'static str; 5] =
        ["spec", "watched", "control.*", "cycle.*.done", "done"];

    /// Returns the number of changes applied so far.
    pub fn current_revision(&self) -> u64 {
        self.revision
    }

    /// Stores the status of an agent in place of its previous one.
    pub fn update_agent(&mut self, status: v1::AgentStatus) {
        self.revision += 1;
        if self.agents.len() >= AGENTS_MAX && !self.agents.contains_key(&status.agent) {
            self.evict_silent_agent();
        }
        let seen = status.seen_at.as_ref().and_then(|at| u64::try_from(at.seconds).ok());
        self.now_s = self.now_s.max(seen.unwrap_or_default());
        let known = RevisionedValue { value: status, revision: self.revision };
        let offer = |it: &v1::AgentStatus| (it.state, it.roles.clone(), it.pool.clone());
        let offered = offer(&known.value);
        let before = self.agents.insert(known.value.agent.clone(), known);
        if self.now_s >= self.messages_at_s + UPDATE_MESSAGES_EVERY_S
            || before.is_none_or(|before| offer(&before.value) != offered)
        {
            self.update_waiting_runs();
        }
    }

    fn update_waiting_runs(&mut self) {
        self.messages_at_s = self.now_s;
        for known in self.runs.values_mut() {
            let agents = self.agents.values().map(|agent| &agent.value);
            if known.value.update_waiting_message(agents, self.now_s) {
                known.revision = self.revision;
            }
        }
    }

    fn evict_silent_agent(&mut self) {
        let silent = self.agents.iter().min_by_key(|(_, known)| known.revision);
        if let Some(agent) = silent.map(|(agent, _)| agent.clone()) {
            self.agents.remove(&agent);
        }
    }

    /// Applies a fact of any run; facts must come in log order.
    pub fn apply_fact(&mut self, record: &Record) {
        let run = &record.fact.subject.run;
        if let FactBody::Spec(spec) = &record.fact.body {
            let mut spec = spec.clone();
            let forked = spec.take_forked_cycles().cycles;
            let (line, queue) = (start_line(&spec, record), QueueStatus::from_spec(&spec));
            let open_spec = Some(Box::new(spec));
            let mut value = RunLineState { line, open_spec, queue, ..RunLineState::default() };
            forked
                .iter()
                .filter_map(|cycle| cycle.done.as_ref())
                .for_each(|done| value.apply_done(done));
            self.runs.insert(run.clone(), RevisionedValue { value, revision: 0 });
        }
        let Some(known) = self.runs.get_mut(run) else { return };
        self.revision += 1;
        known.revision = self.revision;
        known.value.apply_record(record);
        let agents = self.agents.values().map(|agent| &agent.value);
        known.value.update_waiting_message(agents, self.now_s);
    }

    /// Returns what changed after a revision (everything after 0), and the revision that this
    /// reaches, which is not the last one if there is too much for one message. Returns `None`
    /// without changes.
    pub fn changes_since(&self, revision: u64) -> Option<(v1::FleetChange, u64)> {
        if self.revision <= revision {
            return None;
        }
        let agents = self.agents.values().map(|known| known.revision);
        let runs = self.runs.values().map(|known| known.revision);
        let mut changed: Vec<u64> = agents.chain(runs).filter(|it| *it > revision).collect();
        changed.sort_unstable();
        let reached = changed.get(CHANGES_PER_MESSAGE - 1).copied().unwrap_or(self.revision);
        let is_due = |at: u64| at > revision && at <= reached;
        let agents = self.agents.values().filter(|known| is_due(known.revision));
        let runs = self.runs.values().filter(|known| is_due(known.revision));
        let change = v1::FleetChange {
            agents: agents.map(|known| known.value.clone()).collect(),
            runs: runs.map(|known| known.value.line.clone()).collect(),
        };
        Some((change, reached))
    }
}

fn start_line(spec: &v1::Spec, record: &Record) -> v1::RunLine {
    let cycles = match &spec.kind {
        Some(v1::spec::Kind::Raft(raft)) => raft.cycles,
        Some(v1::spec::Kind::Watched(_) | v1::spec::Kind::Sft(_)) | None => 0,
    };
    v1::RunLine {
        run: record.fact.subject.run.to_string(),
        name: spec.name.clone(),
        kind: spec.kind_name().into(),
        state: "running".into(),
        submitted_at: Some(record_time(record)),
        cycles,
        trial_of: spec.trial_of(),
        forked_from: spec.forked_from(),
        ..Default::default()
    }
}

impl RunLineState {
    fn apply_record(&mut self, record: &Record) {
        if let FactBody::Control(control) = &record.fact.body {
            self.queue = self.queue.after_control(control);
        }
        match &record.fact.body {
            FactBody::Control(control) if self.line.ended_at.is_none() => match control.action() {
                v1::control::Action::Pause => {
                    self.paused = true;
                    control.short_reason().clone_into(&mut self.pause_reason);
                    let user = wire::control_user(control, record.author.as_ref());
                    self.line.message = describe_pause(user.as_ref(), control.short_reason());
                }
                v1::control::Action::Resume => {
                    self.paused = false;
                    self.line.message.clear();
                }
                v1::control::Action::Cancel | v1::control::Action::Unspecified => {}
            },
            FactBody::CycleDone(done) => self.apply_done(done),
            FactBody::Done(done) => {
                self.line.state = done.status().as_str_name().to_lowercase();
                self.line.message.clone_from(&done.message);
                self.line.ended_at = Some(record_time(record));
                (self.open_spec, self.heldouts) = (None, BTreeMap::new());
            }
            _ => {}
        }
        if self.line.ended_at.is_none() {
            self.line.state = match (self.queue.is_waiting(), self.paused) {
                (true, _) => "queued",
                (false, true) => "paused",
                (false, false) => "running",
            }
            .into();
        }
        if self.queue.is_waiting()
            && let Some(spec) = &self.open_spec
        {
            self.line.message = describe_queue_wait(spec, &self.pause_reason);
        }
    }

    fn apply_done(&mut self, done: &v1::CycleDone) {
        self.line.cycles_done = self.line.cycles_done.saturating_add(1);
        self.line.heldout = done.heldout;
        self.heldouts.insert(done.cycle, done.heldout);
        self.line.best_cycle = done.best;
        self.line.best_heldout = self.heldouts.get(&done.best).copied().flatten();
    }

    /// Updates the message of a run that may wait for agents. Returns true if it changed.
    fn update_waiting_message<'a>(
        &mut self,
        agents: impl Iterator<Item = &'a v1::AgentStatus>,
        now_s: u64,
    ) -> bool {
        let Some(spec) =
            self.open_spec.as_ref().filter(|_| !self.paused && !self.queue.is_waiting())
        else {
            return false;
        };
        let message = describe_missing_roles(spec, agents, now_s);
        let changed = message != self.line.message;
        self.line.message = message;
        changed
    }
}

fn record_time(record: &Record) -> wire::Timestamp {
    wire::to_timestamp(std::time::Duration::from_millis(record.time_ms))
}

#[cfg(test)]
mod tests {
    use wire::{AgentId, Fact, FactKey, Subject};

    use super::*;

    fn record(sequence: u64, run: &str, place: FactKey, body: FactBody) -> Record {
        let subject = Subject::new(&RunId::new(run).unwrap(), place);
        let time_ms = sequence * 1000;
        Record { sequence, time_ms, author: None, fact: Fact { subject, body } }
    }

    fn control(sequence: u64, action: v1::control::Action) -> Record {
        let body = FactBody::Control(v1::Control { action: action.into(), ..Default::default() });
        record(sequence, "r-1", FactKey::Control { number: sequence }, body)
    }

    fn done(sequence: u64, status: v1::done::Status) -> Record {
        let done = v1::Done { status: status.into(), message: "said".into() };
        record(sequence, "r-1", FactKey::Done, FactBody::Done(done))
    }

    fn cycle_done(sequence: u64, cycle: u32, best: u32, mean: f64) -> Record {
        let heldout = Some(v1::cycle_done::Rate { mean, ..Default::default() });
        let done = v1::CycleDone { cycle, best, heldout, ..Default::default() };
        record(sequence, "r-1", FactKey::CycleDone { cycle }, FactBody::CycleDone(done))
    }

    fn fleet() -> FleetView {
        let mut fleet = FleetView::default();
        let verifier = Some(v1::Verifier::default());
        let raft = v1::spec::Raft { cycles: 3, verifier, ..Default::default() };
        let kind = Some(v1::spec::Kind::Raft(raft));
        let spec = v1::Spec { name: "sums".into(), kind, ..Default::default() };
        fleet.apply_fact(&record(1, "r-1", FactKey::Spec, FactBody::Spec(spec)));
        fleet
    }

    fn state(fleet: &FleetView) -> String {
        fleet.changes_since(0).unwrap().0.runs[0].state.clone()
    }

    #[test]
    fn a_run_is_retold_when_it_changes_and_only_then() {
        let mut fleet = fleet();
        let (first, _) = fleet.changes_since(0).unwrap();
        assert_eq!((first.runs[0].name.as_str(), first.runs[0].cycles), ("sums", 3));
        let seen = fleet.current_revision();
        assert_eq!(fleet.changes_since(seen), None);
        fleet.update_agent(v1::AgentStatus { agent: "box".into(), ..Default::default() });
        let (heard, _) = fleet.changes_since(seen).unwrap();
        assert_eq!((heard.agents.len(), heard.runs.len()), (1, 0));
        let mut pause = control(2, v1::control::Action::Pause);
        pause.author = Some(AgentId::new("ann").unwrap());
        fleet.apply_fact(&pause);
        assert_eq!(state(&fleet), "paused");
        assert_eq!(fleet.changes_since(0).unwrap().0.runs[0].message, "by ann");
        fleet.apply_fact(&control(3, v1::control::Action::Resume));
        assert_eq!(state(&fleet), "running");
        fleet.apply_fact(&done(4, v1::done::Status::Failed));
        // Facts after the end change nothing.
        fleet.apply_fact(&control(5, v1::control::Action::Pause));
        let line = &fleet.changes_since(0).unwrap().0.runs[0];
        assert_eq!((line.state.as_str(), line.message.as_str()), ("failed", "said"));
        assert!(line.ended_at.is_some());
    }

    #[test]
    fn a_queued_run_says_why_it_waits() {
        let mut fleet = fleet();
        let queue = Some(v1::spec::Queue::default());
        let spec = v1::Spec { queue, ..v1::Spec::default() };
        fleet.apply_fact(&record(2, "r-1", FactKey::Spec, FactBody::Spec(spec)));
        let shown = |fleet: &FleetView| {
            let line = fleet.changes_since(0).unwrap().0.runs[0].clone();
            (line.state, line.message)
        };
        let queued = |message: &str| ("queued".to_owned(), message.to_owned());
        assert_eq!(shown(&fleet), queued("waits in the queue"));
        let by_queue = |sequence, action, reason: &str| {
            let mut record = control(sequence, action);
            let control = v1::Control {
                action: action.into(),
                reason: reason.into(),
                queue: true,
                ..Default::default()
            };
            record.fact.body = FactBody::Control(control);
            record
        };
        fleet.apply_fact(&by_queue(3, v1::control::Action::Resume, ""));
        assert_eq!(shown(&fleet).0, "running");
        fleet.apply_fact(&by_queue(4, v1::control::Action::Pause, "r-2 goes first"));
        assert_eq!(shown(&fleet), queued("waits: r-2 goes first"));
        fleet.apply_fact(&control(5, v1::control::Action::Pause));
        assert_eq!(shown(&fleet).0, "paused");
    }

    #[test]
    fn a_run_says_which_agents_it_waits_for() {
        let mut fleet = fleet();
        let message = |fleet: &FleetView| fleet.changes_since(0).unwrap().0.runs[0].message.clone();
        assert!(message(&fleet).contains("no trainer and no generator and no verifier"));
        let mut agent = v1::AgentStatus { agent: "box".into(), ..Default::default() };
        agent.set_state(v1::agent_status::State::Ready);
        agent.roles = ["trainer", "generator", "verifier"].map(Into::into).into();
        let before = fleet.current_revision();
        fleet.update_agent(agent.clone());
        assert_eq!(message(&fleet), "");
        assert_eq!(fleet.changes_since(before).unwrap().0.runs.len(), 1);
        let before = fleet.current_revision();
        fleet.update_agent(agent.clone());
        assert_eq!(fleet.changes_since(before).unwrap().0.runs.len(), 0, "nothing changed");
        fleet.apply_fact(&control(2, v1::control::Action::Pause));
        agent.set_state(v1::agent_status::State::Draining);
        fleet.update_agent(agent);
        assert_eq!(message(&fleet), "");
        fleet.apply_fact(&control(3, v1::control::Action::Resume));
        assert!(message(&fleet).starts_with("waits: "));
        fleet.apply_fact(&done(4, v1::done::Status::Cancelled));
        assert_eq!(message(&fleet), "said");
    }

    #[test]
    fn a_run_waits_for_agents_that_stopped_in_silence() {
        let mut fleet = fleet();
        let agent = |name: &str, roles: &[&str], seconds| v1::AgentStatus {
            agent: name.into(),
            roles: roles.iter().map(|role| (*role).to_owned()).collect(),
            state: v1::agent_status::State::Ready.into(),
            seen_at: Some(wire::Timestamp { seconds, nanos: 0 }),
            ..Default::default()
        };
        fleet.update_agent(agent("a", &["trainer", "generator"], 1000));
        fleet.update_agent(agent("b", &["verifier"], 1000));
        assert_eq!(fleet.changes_since(0).unwrap().0.runs[0].message, "");
        fleet.update_agent(agent("b", &["verifier"], 1200));
        let (change, _) = fleet.changes_since(0).unwrap();
        assert!(change.runs[0].message.contains("no trainer and no generator;"), "{change:?}");
    }

    #[test]
    fn a_run_without_its_spec_is_none() {
        let mut fleet = FleetView::default();
        fleet.apply_fact(&done(1, v1::done::Status::Succeeded));
        assert_eq!(fleet.changes_since(0), None);
    }

    #[test]
    fn a_line_has_the_best_and_the_last_pass_rate() {
        let mut fleet = fleet();
        for (sequence, cycle, best, mean) in
            [(2, 0, 0, 0.1), (3, 1, 1, 0.4), (4, 2, 2, 0.6), (5, 3, 1, 0.2)]
        {
            fleet.apply_fact(&cycle_done(sequence, cycle, best, mean));
        }
        fleet.apply_fact(&done(6, v1::done::Status::Succeeded));
        let line = fleet.changes_since(0).unwrap().0.runs.remove(0);
        let [last, best] = [line.heldout, line.best_heldout].map(|rate| rate.unwrap().mean);
        assert_eq!((last, line.best_cycle, best), (0.2, 1, 0.4));
    }

    #[test]
    fn agents_that_come_and_go_for_ever_have_a_bound() {
        let mut fleet = FleetView::default();
        for number in 0..AGENTS_MAX + 10 {
            let agent = format!("box-{number}");
            fleet.update_agent(v1::AgentStatus { agent, ..Default::default() });
        }
        let (mut all, mut seen) = (Vec::new(), 0);
        while let Some((part, reached)) = fleet.changes_since(seen) {
            assert!(part.agents.len() <= CHANGES_PER_MESSAGE && reached > seen);
            all.extend(part.agents);
            seen = reached;
        }
        assert_eq!(all.len(), AGENTS_MAX);
        assert!(all.iter().all(|agent| agent.agent != "box-0"), "the first was silent longest");
    }
}
