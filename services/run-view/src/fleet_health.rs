//! The health of a fleet on one screen: problems with remedies, and the next command to type. A
//! failed run is no problem of the fleet, but is named as the next thing to look at.

use std::collections::BTreeMap;

use wire::v1::{self, agent_status::State, run::State as RunState};

use crate::agent_text::{agent_state_text, is_silent, silent_seconds, status_line, trouble_text};

/// An agent that is silent for longer was removed, and is not listed.
const FORGOTTEN_AFTER_S: i64 = 24 * 3600;
/// A fuller log may be full before someone looks again.
const LOG_PERCENT_MAX: u64 = 90;
/// Below that, a checkpoint or a cache may not fit.
const DISK_BYTES_MIN: u64 = 1 << 30;

/// The screen: 80 columns and at most 24 lines for a fleet without problems.
const COLUMNS: usize = 80;
const AGENT_LINES: usize = 6;
const RUN_LINES: usize = 4;
const PROBLEM_LINES: usize = 6;

/// The state of a fleet's parts, as one reader has found it.
#[derive(Debug, Clone, Default)]
pub struct FleetReadings {
    /// In seconds since 1970.
    pub now_s: u64,
    pub bus: String,
    pub log_bytes: u64,
    /// `None` if only the disk limits the log.
    pub log_limit: Option<u64>,
    /// The coordinator that leads.
    pub leader: Option<String>,
    /// The address of the page.
    pub page: String,
    pub store: String,
    /// Empty if the store works.
    pub store_problem: String,
    /// Free space of the disk with the fleet's directory, if it is on this machine.
    pub disk_free: Option<u64>,
    pub agents: Vec<v1::AgentStatus>,
    pub runs: Vec<v1::Run>,
    /// Options that select the fleet, such as ` --dir fleet`.
    pub place: String,
}

/// Something that keeps a fleet from working.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetProblem {
    pub problem: String,
    pub remedy: String,
}

/// The problems of a fleet, which is healthy without any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetHealth {
    pub problems: Vec<FleetProblem>,
    /// The command to type next.
    pub next: String,
}

impl FleetHealth {
    /// Finds the problems in the readings of a fleet.
    pub fn assess(readings: &FleetReadings) -> Self {
        let mut problems: Vec<FleetProblem> = service_problems(readings);
        let agents = known_agents(readings);
        problems.extend(agents.filter_map(|agent| agent_problem(agent, readings)));
        problems.extend(readings.runs.iter().filter_map(waiting_problem));
        Self { next: next_command(readings), problems }
    }

    /// Returns true if the fleet has no problem.
    pub fn is_healthy(&self) -> bool {
        self.problems.is_empty()
    }

    /// Returns the lines of the screen for these readings.
    pub fn screen_lines(&self, readings: &FleetReadings) -> Vec<String> {
        let mut lines = vec![match self.problems.len() {
            0 => "the fleet is healthy".to_owned(),
            1 => "the fleet has a problem".to_owned(),
            more => format!("the fleet has {more} problems"),
        }];
        lines.extend(service_lines(readings));
        lines.extend(agent_lines(readings));
        lines.extend(run_lines(readings));
        let lines = lines.into_iter().map(|line| cut_line(&line));
        let mut lines: Vec<String> = lines.collect();
        // Remedies are not cut: they are to be typed.
        for FleetProblem { problem, remedy } in self.problems.iter().take(PROBLEM_LINES) {
            lines.push(format!("! {problem}"));
            lines.extend((!remedy.is_empty()).then(|| format!("  remedy: {remedy}")));
        }
        lines.extend(left_out(self.problems.len(), PROBLEM_LINES, "problems: --json lists all"));
        lines.push(format!("next: {}", self.next));
        lines
    }
}

/// Returns the problems of bus, coordinator, store and disk.
fn service_problems(readings: &FleetReadings) -> Vec<FleetProblem> {
    let FleetReadings { log_bytes, log_limit, place, .. } = readings;
    let mut problems = Vec::new();
    let mut add = |problem: String, remedy: String| problems.push(FleetProblem { problem, remedy });
    if readings.leader.is_none() {
        add(
            "no coordinator leads: no run advances".into(),
            format!("flotilla up{place}, or start `flotilla coordinator` on its box"),
        );
    }
    if let Some(limit) = log_limit.filter(|limit| *log_bytes >= limit / 100 * LOG_PERCENT_MAX) {
        add(
            format!(
                "the log has {} of {}; a full log stops",
                size_text(*log_bytes),
                size_text(limit)
            ),
            "restart the coordinator with a larger --log-max-gib, or a smaller --keep-cycles"
                .into(),
        );
    }
    if !readings.store_problem.is_empty() {
        add(
            format!("the store does not work: {}", readings.store_problem),
            "flotilla topics store".into(),
        );
    }
    if let Some(free) = readings.disk_free.filter(|free| *free < DISK_BYTES_MIN) {
        add(
            format!("the disk of the fleet's directory has only {} free", size_text(free)),
            format!("free some; flotilla checkpoint prune{place} lists what can go"),
        );
    }
    problems
}

fn known_agents(readings: &FleetReadings) -> impl Iterator<Item = &v1::AgentStatus> {
    let is_known = |agent: &&v1::AgentStatus| {
        agent.state() != State::Stopped
            && silent_seconds(agent, readings.now_s) <= FORGOTTEN_AFTER_S
    };
    readings.agents.iter().filter(is_known)
}

fn agent_problem(agent: &v1::AgentStatus, readings: &FleetReadings) -> Option<FleetProblem> {
    let name = &agent.agent;
    if is_silent(agent, readings.now_s) {
        let seconds = silent_seconds(agent, readings.now_s);
        return Some(FleetProblem {
            problem: format!("agent {name} on {} is silent for {seconds} s", agent.host),
            remedy: format!("start `flotilla agent` on {} again, or check its network", agent.host),
        });
    }
    let trouble = trouble_text(agent);
    let is_quarantined = agent.state() == State::Quarantined;
    if trouble.is_empty() && !is_quarantined {
        return None;
    }
    let is = if is_quarantined { "is quarantined" } else { "has trouble" };
    let trouble = if trouble.is_empty() { "it failed several jobs" } else { &trouble };
    Some(FleetProblem {
        problem: format!("agent {name} {is}: {}", trouble.replace('\n', " ")),
        remedy: format!("flotilla doctor on {}, and the agent's log there", agent.host),
    })
}

/// Returns the problem of a running run for which the fleet lacks agents. Its message has the
/// remedy after a semicolon.
fn waiting_problem(run: &v1::Run) -> Option<FleetProblem> {
    if run.state() != RunState::Running || run.message.is_empty() {
        return None;
    }
    let (problem, remedy) = run.message.split_once("; ").unwrap_or((&run.message, ""));
    Some(FleetProblem { problem: format!("{} {problem}", run.run), remedy: remedy.to_owned() })
}

/// Returns the command that fits the newest run, or how to get agents and runs.
fn next_command(readings: &FleetReadings) -> String {
    let place = &readings.place;
    if known_agents(readings).next().is_none() {
        let is_closed = readings.page.starts_with("https:");
        return match is_closed {
            true => {
                format!("flotilla token create --roles trainer,generator,verifier,evaluator{place}")
            }
            false => format!("flotilla agent --nats {}", readings.bus),
        };
    }
    let newest = |states: &[RunState]| {
        let run = readings.runs.iter().rfind(|run| states.contains(&run.state()));
        run.map(|run| run.run.as_str())
    };
    if let Some(run) = newest(&[RunState::Running]) {
        return format!("flotilla run watch {run}{place}");
    }
    if let Some(run) = newest(&[RunState::Paused]) {
        return format!("flotilla run resume {run}{place}");
    }
    if newest(&[RunState::Queued]).is_some() {
        return format!("flotilla run queue{place}");
    }
    match readings.runs.last() {
        None => format!("flotilla run new{place}"),
        Some(run) if run.state() == RunState::Succeeded => {
            format!("flotilla checkpoint export {} --out {}{place}", run.run, run.run)
        }
        Some(run) => format!("flotilla run explain {}{place}", run.run),
    }
}

fn service_lines(readings: &FleetReadings) -> Vec<String> {
    let log = match readings.log_limit {
        Some(limit) => format!("{} of {}", size_text(readings.log_bytes), size_text(limit)),
        None => size_text(readings.log_bytes),
    };
    let store = if readings.store_problem.is_empty() { "works" } else { "does not work" };
    let leader = readings.leader.as_deref().unwrap_or("none leads");
    let mut lines = vec![
        format!("  bus          {}, log {log}", readings.bus),
        format!("  coordinator  {leader}, page {}", readings.page),
        format!("  store        {store}, {}", readings.store),
    ];
    lines.extend(readings.disk_free.map(|free| format!("  disk         {} free", size_text(free))));
    lines
}

fn agent_lines(readings: &FleetReadings) -> Vec<String> {
    let agents: Vec<&v1::AgentStatus> = known_agents(readings).collect();
    let states = agents.iter().map(|agent| match is_silent(agent, readings.now_s) {
        true => "silent".to_owned(),
        false => agent.state().as_str_name().to_lowercase(),
    });
    let mut lines = vec![format!("  agents       {}", count_states(states))];
    lines.extend(agents.iter().take(AGENT_LINES).map(|agent| {
        let doing = match is_silent(agent, readings.now_s) {
            true => agent_state_text(agent, readings.now_s),
            false => status_line(agent),
        };
        let host = if agent.host.is_empty() { "-" } else { &agent.host };
        format!("    {:<20} {host:<14} {doing}", agent.agent)
    }));
    lines.extend(left_out(agents.len(), AGENT_LINES, "agents: `agents list`"));
    lines
}

fn run_lines(readings: &FleetReadings) -> Vec<String> {
    let states = readings.runs.iter().map(|run| run.state().as_str_name().to_lowercase());
    let mut lines = vec![format!("  runs         {}", count_states(states))];
    let is_open = |run: &&v1::Run| {
        matches!(run.state(), RunState::Running | RunState::Paused | RunState::Queued)
    };
    let open: Vec<&v1::Run> = readings.runs.iter().rev().filter(is_open).collect();
    lines.extend(open.iter().take(RUN_LINES).map(|run| {
        let state = run.state().as_str_name().to_lowercase();
        let cycle = match run.cycles {
            0 => String::new(),
            cycles => format!(", cycle {} of {cycles}", run.cycle),
        };
        format!("    {:<20} {state}{cycle}", run.run)
    }));
    lines.extend(left_out(open.len(), RUN_LINES, "runs: `run list`"));
    lines
}

/// Returns a line about the items of a list that are not shown.
fn left_out(count: usize, shown: usize, what: &str) -> Option<String> {
    (count > shown).then(|| format!("    and {} more {what}", count - shown))
}

/// Returns `2 ready, 1 silent`, or `none`.
fn count_states(states: impl Iterator<Item = String>) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    states.for_each(|state| *counts.entry(state).or_default() += 1);
    if counts.is_empty() {
        return "none".into();
    }
    let counts = counts.into_iter().map(|(state, count)| format!("{count} {state}"));
    counts.collect::<Vec<_>>().join(", ")
}

/// Cuts a line to the columns of the screen.
fn cut_line(line: &str) -> String {
    if line.chars().count() <= COLUMNS {
        return line.trim_end().to_owned();
    }
    line.chars().take(COLUMNS - 1).chain(['…']).collect()
}

fn size_text(bytes: u64) -> String {
    if bytes < 1 << 30 {
        return format!("{} MiB", bytes >> 20);
    }
    let tenths = bytes / ((1 << 30) / 10);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_S: u64 = 1_000_000;

    fn agent(name: &str, seen_s_ago: i64, state: State) -> v1::AgentStatus {
        let seconds = i64::try_from(NOW_S).unwrap() - seen_s_ago;
        v1::AgentStatus {
            agent: name.into(),
            host: "box".into(),
            state: state.into(),
            seen_at: Some(wire::Timestamp { seconds, nanos: 0 }),
            ..Default::default()
        }
    }

    fn run(name: &str, state: RunState, message: &str) -> v1::Run {
        let mut run = v1::Run { run: name.into(), message: message.into(), ..Default::default() };
        run.set_state(state);
        run
    }

    fn healthy() -> FleetReadings {
        FleetReadings {
            now_s: NOW_S,
            bus: "tls://127.0.0.1:4222".into(),
            log_bytes: 3 << 30,
            log_limit: Some(64 << 30),
            leader: Some("coordinator-1".into()),
            page: "https://127.0.0.1:7070/".into(),
            store: format!("file:///{}/store", "long/".repeat(30)),
            disk_free: Some(50 << 30),
            agents: (0..9).map(|n| agent(&format!("agent-{n}"), 3, State::Ready)).collect(),
            runs: (0..9).map(|n| run(&format!("r-{n}"), RunState::Running, "")).collect(),
            place: " --dir fleet".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_healthy_fleet_fits_a_screen() {
        let readings = healthy();
        let health = FleetHealth::assess(&readings);
        assert!(health.is_healthy(), "{health:?}");
        let lines = health.screen_lines(&readings);
        assert!(lines.len() <= 24, "{lines:#?}");
        assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS), "{lines:#?}");
        for words in ["healthy", "3.0 GiB of 64.0 GiB", "9 ready", "and 3 more agents", "50.0 GiB"]
        {
            assert!(lines.iter().any(|line| line.contains(words)), "{words}: {lines:#?}");
        }
        assert_eq!(lines.last().unwrap(), "next: flotilla run watch r-8 --dir fleet");
    }

    #[test]
    fn a_run_is_shown_with_its_cycle_if_it_has_cycles() {
        let mut raft = run("raft-1", RunState::Running, "");
        (raft.cycle, raft.cycles) = (2, 5);
        let sft = run("base-1", RunState::Queued, "");
        let readings = FleetReadings { runs: vec![raft, sft], ..healthy() };
        let lines = run_lines(&readings);
        let words = |line: &String| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown: Vec<String> = lines[1..].iter().map(words).collect();
        assert_eq!(shown, ["base-1 queued", "raft-1 running, cycle 2 of 5"]);
    }

    #[test]
    fn each_part_that_fails_is_a_problem_with_a_remedy() {
        let waits = "waits: pool default has no trainer; start one with `flotilla agent`";
        let mut troubled = agent("sick", 3, State::Ready);
        troubled.trouble = "generator: the disk\nis full".into();
        let broken: [(&str, FleetReadings); 8] = [
            ("no coordinator leads", FleetReadings { leader: None, ..healthy() }),
            ("the log has 60.0", FleetReadings { log_bytes: 60 << 30, ..healthy() }),
            (
                "the store does not work: silent",
                FleetReadings { store_problem: "silent".into(), ..healthy() },
            ),
            ("only 512 MiB free", FleetReadings { disk_free: Some(1 << 29), ..healthy() }),
            (
                "silent for 40 s",
                FleetReadings { agents: vec![agent("gone", 40, State::Ready)], ..healthy() },
            ),
            (
                "is quarantined: it failed",
                FleetReadings { agents: vec![agent("bad", 1, State::Quarantined)], ..healthy() },
            ),
            ("has trouble: generator", FleetReadings { agents: vec![troubled], ..healthy() }),
            (
                "r-1 waits: pool default has no trainer",
                FleetReadings { runs: vec![run("r-1", RunState::Running, waits)], ..healthy() },
            ),
        ];
        for (words, readings) in broken {
            let health = FleetHealth::assess(&readings);
            let [problem] = &health.problems[..] else { panic!("{words}: {health:?}") };
            assert!(problem.problem.contains(words), "{words}: {problem:?}");
            assert!(!problem.remedy.is_empty() && !problem.problem.contains('\n'), "{problem:?}");
            let lines = health.screen_lines(&readings);
            assert!(lines[0].contains("has a problem"), "{lines:?}");
        }
    }

    #[test]
    fn agents_that_stopped_or_left_long_ago_are_no_problem() {
        let agents = vec![
            agent("stopped", 3000, State::Stopped),
            agent("left", FORGOTTEN_AFTER_S + 1, State::Ready),
        ];
        let readings = FleetReadings { agents, ..healthy() };
        let health = FleetHealth::assess(&readings);
        assert!(health.is_healthy(), "{health:?}");
        assert!(health.next.starts_with("flotilla token create --roles trainer,"), "{health:?}");
    }

    #[test]
    fn the_next_command_fits_the_newest_run() {
        use RunState::{Failed, Paused, Queued, Running, Succeeded};
        for (states, next) in [
            (&[][..], "flotilla run new"),
            (&[Succeeded][..], "flotilla checkpoint export r-0"),
            (&[Succeeded, Failed][..], "flotilla run explain r-1"),
            (&[Queued, Paused, Succeeded][..], "flotilla run resume r-1"),
            (&[Queued, Succeeded][..], "flotilla run queue"),
            (&[Running, Paused][..], "flotilla run watch r-0"),
        ] {
            let named = states.iter().enumerate();
            let runs = named.map(|(n, state)| run(&format!("r-{n}"), *state, "")).collect();
            let health = FleetHealth::assess(&FleetReadings { runs, ..healthy() });
            assert!(health.next.starts_with(next), "{next}: {}", health.next);
        }
    }
}
