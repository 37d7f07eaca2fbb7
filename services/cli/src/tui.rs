//! `flotilla watch`: the fleet and its runs in a terminal.
//!
//! `model` holds the state and what keys do to it, `render` draws it, and this file connects both
//! to the bus and the terminal.

mod model;
mod render;

use std::time::Duration;

use anyhow::{Context, bail};
use bus::ReadError;
use control::{FleetControl, RunError};
use futures::{
    Stream, StreamExt, stream,
    stream::{BoxStream, SelectAll},
};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use wire::{AgentId, Record, RunId, v1};

use crate::{
    args::{GlobalArgs, TuiArgs},
    output, signals,
};

use self::model::{KeyOutcome, TuiAction, TuiKey, TuiModel};

const FRAME_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two reads of the list of runs. Facts of the selected run arrive as they are
/// written.
const RUN_LIST_INTERVAL: Duration = Duration::from_secs(2);
/// Agents record their status every ten seconds.
const STATUS_LIST_INTERVAL: Duration = Duration::from_secs(10);
/// Time that the keyboard thread waits for a key, which bounds how long it takes to end.
const KEY_POLL_TIMEOUT: Duration = Duration::from_millis(100);
const KEY_QUEUE_CAPACITY: usize = 64;

pub(crate) async fn run_tui(flags: &GlobalArgs, args: TuiArgs) -> anyhow::Result<()> {
    let run = args.run.map(RunId::new).transpose()?;
    if !flags.json && !output::is_interactive_terminal() {
        bail!(
            "flotilla watch draws on a terminal: use --json for a line a change, or \
             `flotilla run watch RUN` (A107)"
        );
    }
    let stop = signals::stop_token()?;
    let control = flags.fleet.connect_control().await?;
    let mut session = TuiSession::start_session(control, run).await?;
    if flags.json {
        let lines = async {
            loop {
                let seen = session.next_event().await?;
                let is_fact = matches!(seen, TuiEvent::Fact(_));
                if let TuiEvent::Status(status) = &seen {
                    output::print_json(&json!({ "agent": status }))?;
                }
                session.apply_event(seen).await;
                if let Some(run) = session.model.run.as_ref().filter(|_| is_fact) {
                    output::print_json(&json!({ "run": control::run_to_proto(run) }))?;
                }
            }
        };
        return stop.run_until_cancelled(lines).await.unwrap_or(Ok(()));
    }
    let ended = CancellationToken::new();
    let _end_key_reader = ended.clone().drop_guard();
    let keys = spawn_key_reader(ended)?;
    let mut terminal = ratatui::try_init().context("draw on this terminal")?;
    let shown = run_event_loop(&mut terminal, &mut session, keys, &stop).await;
    ratatui::restore();
    shown
}

async fn run_event_loop(
    terminal: &mut DefaultTerminal,
    session: &mut TuiSession,
    mut keys: mpsc::Receiver<Option<TuiKey>>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut frame = interval(FRAME_INTERVAL);
    frame.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut drawn = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = frame.tick(), if !drawn => {
                terminal.draw(|frame| render::draw_screen(frame, &session.model)).context("draw")?;
                drawn = true;
            }
            pressed = keys.recv() => {
                drawn = false;
                let Some(pressed) = pressed else { return Ok(()) };
                let Some(key) = pressed else { continue };
                match session.model.handle_key(key) {
                    KeyOutcome::Nothing => {}
                    KeyOutcome::Quit => return Ok(()),
                    KeyOutcome::SelectRun(run) => session.select_run(&run).await,
                    KeyOutcome::Perform(act) => session.perform_action(act).await,
                }
            }
            seen = session.next_event() => {
                drawn = false;
                let seen = seen?;
                let are_runs = matches!(seen, TuiEvent::Runs(_));
                session.apply_event(seen).await;
                if are_runs {
                    session.follow_open_runs().await;
                }
            }
        }
    }
}

/// Starts a thread that reads the keyboard, because reading blocks. It ends within
/// `KEY_POLL_TIMEOUT` after `ended` is cancelled.
fn spawn_key_reader(ended: CancellationToken) -> anyhow::Result<mpsc::Receiver<Option<TuiKey>>> {
    let (pressed, keys) = mpsc::channel(KEY_QUEUE_CAPACITY);
    let listen = move || {
        while !ended.is_cancelled() {
            match event::poll(KEY_POLL_TIMEOUT) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(_) => return,
            }
            let Ok(event) = event::read() else { continue };
            // Other events, such as a new size of the terminal, only draw the screen again.
            if pressed.blocking_send(to_tui_key(event)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".into()).spawn(listen).context("read the keyboard")?;
    Ok(keys)
}

/// Ctrl-C and Ctrl-D count as `q`, and other keys with Ctrl as none.
fn to_tui_key(event: Event) -> Option<TuiKey> {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
        return None;
    };
    Some(match code {
        // The terminal is in raw mode and delivers Ctrl-C as a key.
        KeyCode::Char(letter) if modifiers.contains(KeyModifiers::CONTROL) => {
            return ['c', 'd'].contains(&letter).then_some(TuiKey::Char('q'));
        }
        KeyCode::Char(letter) => TuiKey::Char(letter),
        KeyCode::Up => TuiKey::Up,
        KeyCode::Down => TuiKey::Down,
        KeyCode::Tab | KeyCode::BackTab => TuiKey::Tab,
        KeyCode::PageUp => TuiKey::PageUp,
        KeyCode::PageDown => TuiKey::PageDown,
        KeyCode::Enter => TuiKey::Enter,
        KeyCode::Esc => TuiKey::Escape,
        _ => return None,
    })
}

struct TuiSession {
    control: FleetControl,
    model: TuiModel,
    statuses: BoxStream<'static, v1::AgentStatus>,
    runs: BoxStream<'static, Result<Vec<v1::Run>, RunError>>,
    facts: BoxStream<'static, Result<Record, ReadError>>,
    /// Facts of the other open runs.
    followed: SelectAll<BoxStream<'static, Result<Record, ReadError>>>,
}

enum TuiEvent {
    Status(v1::AgentStatus),
    Runs(Vec<v1::Run>),
    Fact(Record),
    FollowedFact(Record),
}

impl TuiSession {
    async fn start_session(control: FleetControl, run: Option<RunId>) -> anyhow::Result<Self> {
        let announced = control.bus().watch_statuses().await?;
        let statuses = stream::select(announced, poll_statuses(control.clone())).boxed();
        let mut model = TuiModel::default();
        control.list_agents().await?.into_iter().for_each(|agent| model.update_agent(agent));
        let (runs, facts) = (poll_runs(control.clone()).boxed(), stream::empty().boxed());
        let followed = SelectAll::new();
        let mut session = Self { control, model, statuses, runs, facts, followed };
        if let Some(run) = run {
            // An unknown run is reported before anything is drawn.
            session.control.get_run(&run).await?;
            session.select_run(&run).await;
        }
        Ok(session)
    }

    /// Cancel-safe.
    async fn next_event(&mut self) -> anyhow::Result<TuiEvent> {
        Ok(tokio::select! {
            Some(status) = self.statuses.next() => TuiEvent::Status(status),
            Some(record) = self.facts.next() => TuiEvent::Fact(record?),
            Some(record) = self.followed.next() => TuiEvent::FollowedFact(record?),
            Some(runs) = self.runs.next() => TuiEvent::Runs(runs?),
            else => bail!("the bus is closed (B102)"),
        })
    }

    async fn apply_event(&mut self, seen: TuiEvent) {
        match seen {
            TuiEvent::Status(status) => self.model.update_agent(status),
            TuiEvent::Fact(record) => self.model.apply_fact(&record),
            TuiEvent::FollowedFact(record) => self.model.apply_followed_fact(&record),
            TuiEvent::Runs(runs) => {
                if let Some(run) = self.model.update_runs(runs) {
                    self.select_run(&run).await;
                }
            }
        }
    }

    /// Starts to read the facts of open runs that are not read yet.
    async fn follow_open_runs(&mut self) {
        for run in self.model.runs_to_follow() {
            // Without its facts, only its phase is missing.
            if let Ok(facts) = self.control.watch_run(&run, 0).await {
                self.followed.push(facts);
            }
        }
    }

    async fn select_run(&mut self, run: &RunId) {
        self.model.select_run(run);
        self.facts = match self.control.watch_run(run, 0).await {
            // The stream ends with the run; a fused stream can still be polled.
            Ok(facts) => facts.fuse().boxed(),
            Err(error) => {
                self.model.message = format!("{run}: {error}");
                stream::empty().boxed()
            }
        };
    }

    async fn perform_action(&mut self, act: TuiAction) {
        let done = self.try_action(&act).await;
        self.model.message = match done {
            Ok(()) => format!("done: {act}"),
            Err(error) => format!("{act}: {error:#}"),
        };
    }

    async fn try_action(&self, act: &TuiAction) -> anyhow::Result<()> {
        match act {
            TuiAction::Steer { run, action } => {
                let control = v1::Control { action: (*action).into(), ..Default::default() };
                self.control.control_run(run, control).await?;
            }
            TuiAction::Drain { agent } => self.control.drain_agent(&AgentId::new(agent)?).await?,
        }
        Ok(())
    }
}

/// Yields the statuses that agents record. In a closed fleet, users do not hear announced ones.
fn poll_statuses(control: FleetControl) -> impl Stream<Item = v1::AgentStatus> + Send {
    let mut again = interval(STATUS_LIST_INTERVAL);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    stream::unfold((control, again), async |(control, mut again)| {
        again.tick().await;
        // Without an answer, the last statuses become old, which is shown.
        let statuses = control.list_agents().await.unwrap_or_default();
        Some((stream::iter(statuses), (control, again)))
    })
    .flatten()
}

fn poll_runs(control: FleetControl) -> impl Stream<Item = Result<Vec<v1::Run>, RunError>> + Send {
    let mut again = interval(RUN_LIST_INTERVAL);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    stream::unfold((control, again), async |(control, mut again)| {
        again.tick().await;
        Some((control.describe_runs().await, (control, again)))
    })
}
