//! The state of the terminal UI, and what keys do to it. Knows no terminal, bus or clock.

use std::{cell::Cell, collections::BTreeMap, fmt};

use cycle::Run;
use run_view::RunView;
use wire::{Record, RunId, v1};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TuiKey {
    Up,
    Down,
    PageUp,
    PageDown,
    Tab,
    Enter,
    Escape,
    Char(char),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeyOutcome {
    Nothing,
    Quit,
    SelectRun(RunId),
    Perform(TuiAction),
}

/// An action that changes the fleet, performed only after a `y`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TuiAction {
    Steer { run: RunId, action: v1::control::Action },
    Drain { agent: String },
}

impl fmt::Display for TuiAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steer { run, action } => {
                write!(f, "{} {run}", action.as_str_name().to_lowercase())
            }
            Self::Drain { agent } => write!(f, "drain {agent}"),
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum TuiFocus {
    #[default]
    Runs,
    Agents,
}

/// The part of the fleet on the screen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum TuiView {
    /// Agents, runs, and the selected run in short.
    #[default]
    Overview,
    /// All of the selected run.
    Run,
    /// All of the selected agent.
    Agent,
}

/// Runs whose facts are read besides the selected run's.
const FOLLOWED_RUNS_MAX: usize = 16;

/// Lines that a page key scrolls.
const PAGE_LINES: isize = 10;

#[derive(Debug, Default)]
pub(super) struct TuiModel {
    pub(super) agents: BTreeMap<String, v1::AgentStatus>,
    /// All runs, newest first.
    pub(super) runs: Vec<v1::Run>,
    pub(super) selected_run: Option<RunId>,
    pub(super) run: Option<Run>,
    pub(super) run_view: Option<RunView>,
    /// Open runs besides the selected one, for their phases; `None` before the first fact.
    followed: BTreeMap<RunId, Option<Run>>,
    pub(super) focus: TuiFocus,
    pub(super) view: TuiView,
    /// The list of keys covers the screen.
    pub(super) shows_keys: bool,
    /// First line shown of a run or an agent.
    pub(super) scroll: usize,
    /// The largest useful value of `scroll`, known once the screen is drawn.
    pub(super) scroll_max: Cell<usize>,
    /// Name of the selected agent; `None` stands for the first.
    pub(super) selected_agent: Option<String>,
    /// Action that waits for confirmation by `y`.
    pub(super) pending_action: Option<TuiAction>,
    pub(super) message: String,
}

impl TuiModel {
    /// Replaces an agent's status, unless it has a newer one.
    pub(super) fn update_agent(&mut self, status: v1::AgentStatus) {
        let seen = |status: &v1::AgentStatus| status.seen_at.map(|at| (at.seconds, at.nanos));
        if self.agents.get(&status.agent).is_none_or(|known| seen(known) <= seen(&status)) {
            self.agents.insert(status.agent.clone(), status);
        }
    }

    /// Replaces the list of runs, given oldest first. Returns the newest run if no run is selected
    /// yet.
    pub(super) fn update_runs(&mut self, mut runs: Vec<v1::Run>) -> Option<RunId> {
        runs.reverse();
        self.runs = runs;
        let Self { runs, followed, .. } = self;
        followed.retain(|id, _| runs.iter().any(|run| run.run == id.as_str() && is_open(run)));
        match self.selected_run {
            None => self.run_id_at(0),
            Some(_) => None,
        }
    }

    pub(super) fn select_run(&mut self, run: &RunId) {
        self.selected_run = Some(run.clone());
        (self.run, self.run_view) = (None, None);
    }

    pub(super) fn apply_fact(&mut self, record: &Record) {
        match &mut self.run {
            Some(run) => run.fold_record(record),
            None => self.run = Run::start(record),
        }
        match &mut self.run_view {
            Some(board) => board.apply_fact(record.clone()),
            None => self.run_view = RunView::start(record),
        }
    }

    /// Returns the open runs whose facts are not read yet, and counts them as followed.
    pub(super) fn runs_to_follow(&mut self) -> Vec<RunId> {
        let room = FOLLOWED_RUNS_MAX.saturating_sub(self.followed.len());
        let open = self.runs.iter().filter(|run| is_open(run));
        let others = open
            .filter_map(|run| RunId::new(run.run.as_str()).ok())
            .filter(|id| Some(id) != self.selected_run.as_ref() && !self.followed.contains_key(id));
        let wanted: Vec<RunId> = others.take(room).collect();
        self.followed.extend(wanted.iter().map(|id| (id.clone(), None)));
        wanted
    }

    /// Applies a fact of a run that is followed besides the selected one.
    pub(super) fn apply_followed_fact(&mut self, record: &Record) {
        match self.followed.get_mut(&record.fact.subject.run) {
            Some(Some(run)) => run.fold_record(record),
            Some(started) => *started = Run::start(record),
            None => {}
        }
    }

    /// Returns a run folded from all of its facts. The list of runs is made of few facts, which do
    /// not tell the phase.
    pub(super) fn folded_run(&self, id: &str) -> Option<&Run> {
        let followed = self.followed.iter().find(|(run, _)| run.as_str() == id);
        let selected = self.run.as_ref().filter(|run| run.id.as_str() == id);
        selected.or_else(|| followed?.1.as_ref())
    }

    /// While an action is pending, only `y` confirms it; any other key cancels it.
    pub(super) fn handle_key(&mut self, key: TuiKey) -> KeyOutcome {
        if let Some(act) = self.pending_action.take() {
            return if key == TuiKey::Char('y') {
                KeyOutcome::Perform(act)
            } else {
                KeyOutcome::Nothing
            };
        }
        self.message.clear();
        let showed_keys = std::mem::take(&mut self.shows_keys);
        match key {
            TuiKey::Char('q') => return KeyOutcome::Quit,
            TuiKey::Char('?') => self.shows_keys = !showed_keys,
            // Any other key closes the list of keys.
            _ if showed_keys => {}
            TuiKey::Escape => self.show(TuiView::Overview),
            TuiKey::Enter => self.show(match self.focus {
                TuiFocus::Runs => TuiView::Run,
                TuiFocus::Agents => TuiView::Agent,
            }),
            TuiKey::Tab => {
                self.focus = match self.focus {
                    TuiFocus::Runs => TuiFocus::Agents,
                    TuiFocus::Agents => TuiFocus::Runs,
                };
                if self.view != TuiView::Overview {
                    return self.handle_key(TuiKey::Enter);
                }
            }
            TuiKey::Up | TuiKey::Char('k') => return self.move_by(-1),
            TuiKey::Down | TuiKey::Char('j') => return self.move_by(1),
            TuiKey::PageUp => return self.move_by(-PAGE_LINES),
            TuiKey::PageDown => return self.move_by(PAGE_LINES),
            TuiKey::Char('p') => self.propose_control(v1::control::Action::Pause),
            TuiKey::Char('r') => self.propose_control(v1::control::Action::Resume),
            TuiKey::Char('c') => self.propose_control(v1::control::Action::Cancel),
            TuiKey::Char('d') => self.propose_drain(),
            TuiKey::Char(_) => {}
        }
        KeyOutcome::Nothing
    }

    fn show(&mut self, view: TuiView) {
        self.view = view;
        self.scroll = 0;
    }

    pub(super) fn selected_agent(&self) -> Option<&v1::AgentStatus> {
        self.agents.values().nth(self.selected_agent_index())
    }

    /// Returns 0 if the agent is not known any more.
    pub(super) fn selected_agent_index(&self) -> usize {
        let name = self.selected_agent.as_ref();
        name.and_then(|name| self.agents.keys().position(|it| it == name)).unwrap_or(0)
    }

    /// Returns the state of the selected run; `None` without one.
    fn selected_run_state(&self) -> Option<v1::run::State> {
        self.run.as_ref().map(Run::current_state).or_else(|| {
            let at = self.selected_run_index()?;
            self.runs.get(at).map(v1::Run::state)
        })
    }

    /// Returns the actions that the selected run or agent allows now, each with its key.
    pub(super) fn possible_actions(&self) -> Vec<(char, &'static str)> {
        use v1::run::State;
        let mut actions = match self.selected_run_state() {
            Some(State::Running) => vec![('p', "pause"), ('c', "cancel")],
            Some(State::Paused) => vec![('r', "resume"), ('c', "cancel")],
            Some(State::Queued) => vec![('p', "pause"), ('r', "resume"), ('c', "cancel")],
            _ => Vec::new(),
        };
        if self.can_drain() {
            actions.push(('d', "drain"));
        }
        actions
    }

    fn can_drain(&self) -> bool {
        use v1::agent_status::State;
        let state = self.selected_agent().map(v1::AgentStatus::state);
        self.focus == TuiFocus::Agents && matches!(state, Some(State::Ready | State::Quarantined))
    }

    /// Asks for confirmation of an action that the selected run allows.
    fn propose_control(&mut self, action: v1::control::Action) {
        let Some(run) = self.selected_run.clone() else { return };
        let name = action.as_str_name().to_lowercase();
        if self.possible_actions().iter().any(|(_, possible)| *possible == name) {
            self.pending_action = Some(TuiAction::Steer { run, action });
        } else if let Some(state) = self.selected_run_state() {
            let state = state.as_str_name().to_lowercase();
            self.message = format!("{run}: {state}, so there is nothing to {name}");
        }
    }

    fn propose_drain(&mut self) {
        let agent = self.selected_agent().map(|agent| agent.agent.clone());
        match agent {
            Some(agent) if self.can_drain() => {
                self.pending_action = Some(TuiAction::Drain { agent });
            }
            Some(_) => self.message = "select an agent that is ready (Tab) to drain it".to_owned(),
            None => {}
        }
    }

    /// Scrolls a run or an agent, and moves the selection of a list.
    fn move_by(&mut self, by: isize) -> KeyOutcome {
        if self.view == TuiView::Overview {
            return self.move_selection(by);
        }
        self.scroll = self.scroll.saturating_add_signed(by).min(self.scroll_max.get());
        KeyOutcome::Nothing
    }

    fn move_selection(&mut self, by: isize) -> KeyOutcome {
        let moved =
            |at: usize, count: usize| at.saturating_add_signed(by).min(count.saturating_sub(1));
        match self.focus {
            TuiFocus::Agents => {
                let to = moved(self.selected_agent_index(), self.agents.len());
                self.selected_agent = self.agents.keys().nth(to).cloned();
            }
            TuiFocus::Runs => {
                let at = self.selected_run_index();
                let to = moved(at.unwrap_or(0), self.runs.len());
                if at != Some(to)
                    && let Some(run) = self.run_id_at(to)
                {
                    return KeyOutcome::SelectRun(run);
                }
            }
        }
        KeyOutcome::Nothing
    }

    pub(super) fn selected_run_index(&self) -> Option<usize> {
        let chosen = self.selected_run.as_ref()?.as_str();
        self.runs.iter().position(|run| run.run == chosen)
    }

    fn run_id_at(&self, at: usize) -> Option<RunId> {
        RunId::new(self.runs.get(at)?.run.as_str()).ok()
    }
}

fn is_open(run: &v1::Run) -> bool {
    use v1::run::State::{Paused, Queued, Running};
    matches!(run.state(), Running | Paused | Queued)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> TuiModel {
        let mut model = TuiModel::default();
        for agent in ["box-1", "box-2"] {
            let state = v1::agent_status::State::Ready.into();
            model.update_agent(v1::AgentStatus {
                agent: agent.into(),
                state,
                ..Default::default()
            });
        }
        let state = v1::run::State::Running.into();
        let run = |name: &str| v1::Run { run: name.into(), state, ..Default::default() };
        let newest = model.update_runs(vec![run("r-old"), run("r-new")]).unwrap();
        assert_eq!(newest.as_str(), "r-new", "the newest is chosen at first");
        model.select_run(&newest);
        model
    }

    fn run(name: &str) -> RunId {
        RunId::new(name).unwrap()
    }

    #[test]
    fn arrows_choose_and_stay_within_the_list() {
        let mut model = model();
        assert_eq!(model.handle_key(TuiKey::Up), KeyOutcome::Nothing);
        assert_eq!(model.handle_key(TuiKey::Down), KeyOutcome::SelectRun(run("r-old")));
        model.select_run(&run("r-old"));
        assert_eq!(model.handle_key(TuiKey::Down), KeyOutcome::Nothing);
        // A new run does not take the choice away.
        let runs = ["r-old", "r-new", "r-newer"]
            .map(|name| v1::Run { run: name.into(), ..Default::default() });
        assert_eq!(model.update_runs(runs.to_vec()), None);
        assert_eq!(model.handle_key(TuiKey::Up), KeyOutcome::SelectRun(run("r-new")));
    }

    #[test]
    fn nothing_is_done_that_was_not_confirmed() {
        let mut model = model();
        for other in [TuiKey::Char('n'), TuiKey::Escape, TuiKey::Char('q'), TuiKey::Char('c')] {
            assert_eq!(model.handle_key(TuiKey::Char('c')), KeyOutcome::Nothing);
            assert!(model.pending_action.is_some());
            assert_eq!(model.handle_key(other), KeyOutcome::Nothing, "{other:?} is no yes");
            assert!(model.pending_action.is_none());
        }
        model.handle_key(TuiKey::Char('c'));
        let action = v1::control::Action::Cancel;
        assert_eq!(
            model.handle_key(TuiKey::Char('y')),
            KeyOutcome::Perform(TuiAction::Steer { run: run("r-new"), action })
        );
        model.handle_key(TuiKey::Tab);
        model.handle_key(TuiKey::Down);
        model.handle_key(TuiKey::Char('d'));
        // An agent whose name comes before does not change the selection.
        model.update_agent(v1::AgentStatus { agent: "a".into(), ..Default::default() });
        assert_eq!(model.selected_agent().map(|it| it.agent.as_str()), Some("box-2"));
        let drain = TuiAction::Drain { agent: "box-2".into() };
        assert_eq!(model.handle_key(TuiKey::Char('y')), KeyOutcome::Perform(drain));
        assert_eq!(model.handle_key(TuiKey::Char('q')), KeyOutcome::Quit);
    }

    #[test]
    fn only_actions_that_apply_are_offered() {
        let mut model = model();
        assert_eq!(model.possible_actions(), [('p', "pause"), ('c', "cancel")]);
        model.handle_key(TuiKey::Char('r'));
        assert!(model.pending_action.is_none());
        assert_eq!(model.message, "r-new: running, so there is nothing to resume");
        model.handle_key(TuiKey::Char('d'));
        assert!(model.pending_action.is_none(), "no agent is selected");
        model.handle_key(TuiKey::Tab);
        assert_eq!(model.possible_actions(), [('p', "pause"), ('c', "cancel"), ('d', "drain")]);
        let state = v1::run::State::Succeeded.into();
        let over = v1::Run { run: "r-new".into(), state, ..Default::default() };
        model.update_runs(vec![over]);
        assert_eq!(model.possible_actions(), [('d', "drain")]);
        model.handle_key(TuiKey::Char('p'));
        assert_eq!(model.message, "r-new: succeeded, so there is nothing to pause");
    }

    #[test]
    fn enter_opens_escape_goes_back_and_a_question_mark_shows_the_keys() {
        let mut model = model();
        model.handle_key(TuiKey::Enter);
        assert_eq!(model.view, TuiView::Run);
        model.scroll_max.set(12);
        model.handle_key(TuiKey::PageDown);
        model.handle_key(TuiKey::PageDown);
        model.handle_key(TuiKey::Up);
        assert_eq!(model.scroll, 11);
        model.handle_key(TuiKey::Tab);
        assert_eq!((model.view, model.scroll), (TuiView::Agent, 0));
        model.handle_key(TuiKey::Char('?'));
        assert!(model.shows_keys);
        assert_eq!(model.handle_key(TuiKey::Escape), KeyOutcome::Nothing);
        assert_eq!((model.shows_keys, model.view), (false, TuiView::Agent));
        assert_eq!(model.handle_key(TuiKey::Escape), KeyOutcome::Nothing);
        assert_eq!(model.view, TuiView::Overview);
        assert_eq!(model.handle_key(TuiKey::Escape), KeyOutcome::Nothing, "only q quits");
    }

    #[test]
    fn an_empty_fleet_takes_every_key() {
        let mut model = TuiModel::default();
        for key in ['p', 'r', 'c', 'd', 'j', 'k', 'x'].map(TuiKey::Char) {
            assert_eq!(model.handle_key(key), KeyOutcome::Nothing);
            assert!(model.pending_action.is_none(), "there is nothing to do it to");
        }
    }
}
