//! The state of the terminal UI, and what keys do to it. Knows no terminal, bus or clock.

use std::{collections::BTreeMap, fmt};

use cycle::Run;
use run_view::RunView;
use wire::{Record, RunId, v1};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TuiKey {
    Up,
    Down,
    Tab,
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

#[derive(Debug, Default)]
pub(super) struct TuiModel {
    pub(super) agents: BTreeMap<String, v1::AgentStatus>,
    /// All runs, newest first.
    pub(super) runs: Vec<v1::Run>,
    pub(super) selected_run: Option<RunId>,
    pub(super) run: Option<Run>,
    pub(super) run_view: Option<RunView>,
    pub(super) focus: TuiFocus,
    pub(super) selected_agent: usize,
    /// Action that waits for confirmation by `y`.
    pub(super) pending_action: Option<TuiAction>,
    pub(super) message: String,
}

impl TuiModel {
    pub(super) fn update_agent(&mut self, status: v1::AgentStatus) {
        self.agents.insert(status.agent.clone(), status);
    }

    /// Replaces the list of runs, given oldest first. Returns the newest run if no run is selected
    /// yet.
    pub(super) fn update_runs(&mut self, mut runs: Vec<v1::Run>) -> Option<RunId> {
        runs.reverse();
        self.runs = runs;
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
        match key {
            TuiKey::Char('q') | TuiKey::Escape => return KeyOutcome::Quit,
            TuiKey::Tab => {
                self.focus = match self.focus {
                    TuiFocus::Runs => TuiFocus::Agents,
                    TuiFocus::Agents => TuiFocus::Runs,
                };
            }
            TuiKey::Up | TuiKey::Char('k') => return self.move_selection(-1),
            TuiKey::Down | TuiKey::Char('j') => return self.move_selection(1),
            TuiKey::Char('p') => self.propose_control(v1::control::Action::Pause),
            TuiKey::Char('r') => self.propose_control(v1::control::Action::Resume),
            TuiKey::Char('c') => self.propose_control(v1::control::Action::Cancel),
            TuiKey::Char('d') => {
                let agent = self.agents.keys().nth(self.selected_agent).cloned();
                self.pending_action = agent.map(|agent| TuiAction::Drain { agent });
            }
            TuiKey::Char(_) => {}
        }
        KeyOutcome::Nothing
    }

    fn propose_control(&mut self, action: v1::control::Action) {
        self.pending_action = self.selected_run.clone().map(|run| TuiAction::Steer { run, action });
    }

    fn move_selection(&mut self, by: isize) -> KeyOutcome {
        let moved =
            |at: usize, count: usize| at.saturating_add_signed(by).min(count.saturating_sub(1));
        match self.focus {
            TuiFocus::Agents => self.selected_agent = moved(self.selected_agent, self.agents.len()),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> TuiModel {
        let mut model = TuiModel::default();
        for agent in ["box-1", "box-2"] {
            model.update_agent(v1::AgentStatus { agent: agent.into(), ..Default::default() });
        }
        let run = |name: &str| v1::Run { run: name.into(), ..Default::default() };
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
        let drain = TuiAction::Drain { agent: "box-2".into() };
        assert_eq!(model.handle_key(TuiKey::Char('y')), KeyOutcome::Perform(drain));
        assert_eq!(model.handle_key(TuiKey::Char('q')), KeyOutcome::Quit);
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
