//! What there is to see, and what keys do to it. Knows no terminal, no bus and no clock.

use std::{collections::BTreeMap, fmt};

use board::Board;
use cycle::Run;
use wire::{Record, RunId, v1};

/// What was pressed, as far as it means something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    Tab,
    Escape,
    Char(char),
}

/// What a key asks for beyond the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Nothing,
    Quit,
    Choose(RunId),
    Do(Act),
}

/// What changes the fleet: done after a `y`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    Steer { run: RunId, action: v1::control::Action },
    Drain { agent: String },
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steer { run, action } => {
                write!(f, "{} {run}", action.as_str_name().to_lowercase())
            }
            Self::Drain { agent } => write!(f, "drain {agent}"),
        }
    }
}

/// Which list the arrows go through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Focus {
    #[default]
    Runs,
    Agents,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) agents: BTreeMap<String, v1::AgentStatus>,
    /// The newest first.
    pub(super) runs: Vec<v1::Run>,
    /// The chosen one, and what is known of it.
    pub(super) chosen: Option<RunId>,
    pub(super) run: Option<Run>,
    pub(super) board: Option<Board>,
    pub(super) focus: Focus,
    /// The chosen agent's place.
    pub(super) agent: usize,
    /// What a `y` would do.
    pub(super) asks: Option<Act>,
    /// What became of what was asked for last.
    pub(super) said: String,
}

impl Model {
    pub(super) fn heard(&mut self, status: v1::AgentStatus) {
        self.agents.insert(status.agent.clone(), status);
    }

    /// Which runs there are, oldest first. Returns what is then to be chosen: the newest, where
    /// nobody has chosen yet.
    pub(super) fn listed(&mut self, mut runs: Vec<v1::Run>) -> Option<RunId> {
        runs.reverse();
        self.runs = runs;
        match self.chosen {
            None => self.place(0),
            Some(_) => None,
        }
    }

    pub(super) fn choose(&mut self, run: &RunId) {
        self.chosen = Some(run.clone());
        (self.run, self.board) = (None, None);
    }

    /// A fact of the chosen run.
    pub(super) fn fact(&mut self, record: &Record) {
        match &mut self.run {
            Some(run) => run.fold(record),
            None => self.run = Run::start(record),
        }
        match &mut self.board {
            Some(board) => board.fold(record.clone()),
            None => self.board = Board::start(record),
        }
    }

    pub(super) fn key(&mut self, key: Key) -> Outcome {
        if let Some(act) = self.asks.take() {
            return if key == Key::Char('y') { Outcome::Do(act) } else { Outcome::Nothing };
        }
        self.said.clear();
        match key {
            Key::Char('q') | Key::Escape => return Outcome::Quit,
            Key::Tab => {
                self.focus = match self.focus {
                    Focus::Runs => Focus::Agents,
                    Focus::Agents => Focus::Runs,
                };
            }
            Key::Up | Key::Char('k') => return self.step(-1),
            Key::Down | Key::Char('j') => return self.step(1),
            Key::Char('p') => self.ask_to(v1::control::Action::Pause),
            Key::Char('r') => self.ask_to(v1::control::Action::Resume),
            Key::Char('c') => self.ask_to(v1::control::Action::Cancel),
            Key::Char('d') => {
                let agent = self.agents.keys().nth(self.agent).cloned();
                self.asks = agent.map(|agent| Act::Drain { agent });
            }
            Key::Char(_) => {}
        }
        Outcome::Nothing
    }

    fn ask_to(&mut self, action: v1::control::Action) {
        self.asks = self.chosen.clone().map(|run| Act::Steer { run, action });
    }

    fn step(&mut self, by: isize) -> Outcome {
        let moved =
            |at: usize, count: usize| at.saturating_add_signed(by).min(count.saturating_sub(1));
        match self.focus {
            Focus::Agents => self.agent = moved(self.agent, self.agents.len()),
            Focus::Runs => {
                let at = self.at();
                let to = moved(at.unwrap_or(0), self.runs.len());
                if at != Some(to)
                    && let Some(run) = self.place(to)
                {
                    return Outcome::Choose(run);
                }
            }
        }
        Outcome::Nothing
    }

    /// Where the chosen run is in the list.
    pub(super) fn at(&self) -> Option<usize> {
        let chosen = self.chosen.as_ref()?.as_str();
        self.runs.iter().position(|run| run.run == chosen)
    }

    fn place(&self, at: usize) -> Option<RunId> {
        RunId::new(self.runs.get(at)?.run.as_str()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let mut model = Model::default();
        for agent in ["box-1", "box-2"] {
            model.heard(v1::AgentStatus { agent: agent.into(), ..Default::default() });
        }
        let run = |name: &str| v1::Run { run: name.into(), ..Default::default() };
        let newest = model.listed(vec![run("r-old"), run("r-new")]).unwrap();
        assert_eq!(newest.as_str(), "r-new", "the newest is chosen at first");
        model.choose(&newest);
        model
    }

    fn run(name: &str) -> RunId {
        RunId::new(name).unwrap()
    }

    #[test]
    fn arrows_choose_and_stay_within_the_list() {
        let mut model = model();
        assert_eq!(model.key(Key::Up), Outcome::Nothing);
        assert_eq!(model.key(Key::Down), Outcome::Choose(run("r-old")));
        model.choose(&run("r-old"));
        assert_eq!(model.key(Key::Down), Outcome::Nothing);
        // A new run does not take the choice away.
        let runs = ["r-old", "r-new", "r-newer"]
            .map(|name| v1::Run { run: name.into(), ..Default::default() });
        assert_eq!(model.listed(runs.to_vec()), None);
        assert_eq!(model.key(Key::Up), Outcome::Choose(run("r-new")));
    }

    #[test]
    fn nothing_is_done_that_was_not_confirmed() {
        let mut model = model();
        for other in [Key::Char('n'), Key::Escape, Key::Char('q'), Key::Char('c')] {
            assert_eq!(model.key(Key::Char('c')), Outcome::Nothing);
            assert!(model.asks.is_some());
            assert_eq!(model.key(other), Outcome::Nothing, "{other:?} is no yes");
            assert!(model.asks.is_none());
        }
        model.key(Key::Char('c'));
        let action = v1::control::Action::Cancel;
        assert_eq!(
            model.key(Key::Char('y')),
            Outcome::Do(Act::Steer { run: run("r-new"), action })
        );
        model.key(Key::Tab);
        model.key(Key::Down);
        model.key(Key::Char('d'));
        let drain = Act::Drain { agent: "box-2".into() };
        assert_eq!(model.key(Key::Char('y')), Outcome::Do(drain));
        assert_eq!(model.key(Key::Char('q')), Outcome::Quit);
    }

    #[test]
    fn an_empty_fleet_takes_every_key() {
        let mut model = Model::default();
        for key in ['p', 'r', 'c', 'd', 'j', 'k', 'x'].map(Key::Char) {
            assert_eq!(model.key(key), Outcome::Nothing);
            assert!(model.asks.is_none(), "there is nothing to do it to");
        }
    }
}
