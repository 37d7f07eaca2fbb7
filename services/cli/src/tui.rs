//! `flotilla watch`: the fleet and its runs in a terminal.
//!
//! `model` holds the state and what keys do to it, `render` draws it, and this file connects both
//! to the bus and the terminal.

mod model;
mod render;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use bus::ReadError;
use control::{FleetControl, RunError};
use futures::{Stream, StreamExt, stream, stream::BoxStream};
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

use crate::{args::TuiArgs, fleet::FleetArgs, output, signals};

use self::model::{KeyOutcome, TuiAction, TuiKey, TuiModel};

/// Minimum time between two frames.
const FRAME_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two reads of the list of runs. Facts of the selected run arrive as they are
/// written.
const RUN_LIST_INTERVAL: Duration = Duration::from_secs(2);
/// Time that the keyboard thread waits for a key, which bounds how long it takes to end.
const KEY_POLL_TIMEOUT: Duration = Duration::from_millis(100);
/// Capacity of the queue of keys that were not handled yet.
const KEY_QUEUE_CAPACITY: usize = 64;

/// Runs the terminal UI until `q` is pressed or a signal arrives. With `--json`, prints each change
/// as a JSON line instead.
///
/// # Errors
/// If there is neither a terminal nor `--json`, or if the bus is closed.
pub(crate) async fn run_tui(
    fleet: &FleetArgs,
    args: TuiArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let run = args.run.map(RunId::new).transpose()?;
    if !json && !output::is_interactive_terminal() {
        bail!(
            "flotilla watch draws on a terminal: use --json for a line a change, or \
             `flotilla run watch RUN` (A107)"
        );
    }
    let stop = signals::stop_token()?;
    let control = fleet.connect_control().await?;
    let mut looking = TuiSession::start_session(control, run).await?;
    if json {
        let lines = async {
            loop {
                let seen = looking.next_event().await?;
                let is_fact = matches!(seen, TuiEvent::Fact(_));
                if let TuiEvent::Status(status) = &seen {
                    output::print_json(&json!({ "agent": status }))?;
                }
                looking.apply_event(seen).await;
                if let Some(run) = looking.model.run.as_ref().filter(|_| is_fact) {
                    output::print_json(&json!({ "run": control::run_to_proto(run) }))?;
                }
            }
        };
        return stop.run_until_cancelled(lines).await.unwrap_or(Ok(ExitCode::SUCCESS));
    }
    let ended = CancellationToken::new();
    let _listens_no_more = ended.clone().drop_guard();
    let keys = spawn_key_reader(ended)?;
    let mut terminal = ratatui::try_init().context("draw on this terminal")?;
    let shown = run_event_loop(&mut terminal, &mut looking, keys, &stop).await;
    ratatui::restore();
    shown.map(|()| ExitCode::SUCCESS)
}

/// Handles keys and events and draws at most one frame per `FRAME_INTERVAL`, until `q` is pressed
/// or `stop` is cancelled.
async fn run_event_loop(
    terminal: &mut DefaultTerminal,
    looking: &mut TuiSession,
    mut keys: mpsc::Receiver<TerminalInput>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut frame = interval(FRAME_INTERVAL);
    frame.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut drawn = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = frame.tick(), if !drawn => {
                terminal.draw(|frame| render::draw_screen(frame, &looking.model)).context("draw")?;
                drawn = true;
            }
            pressed = keys.recv() => {
                drawn = false;
                let Some(pressed) = pressed else { return Ok(()) };
                let TerminalInput::Key(key) = pressed else { continue };
                match looking.model.handle_key(key) {
                    KeyOutcome::Nothing => {}
                    KeyOutcome::Quit => return Ok(()),
                    KeyOutcome::SelectRun(run) => looking.select_run(&run).await,
                    KeyOutcome::Perform(act) => looking.perform_action(act).await,
                }
            }
            seen = looking.next_event() => {
                drawn = false;
                looking.apply_event(seen?).await;
            }
        }
    }
}

/// An input from the terminal.
#[derive(Debug, Clone, Copy)]
enum TerminalInput {
    Key(TuiKey),
    /// The terminal has a new size.
    Resized,
}

/// Starts a thread that reads the keyboard, because reading blocks. It ends within
/// `KEY_POLL_TIMEOUT` after `ended` is cancelled.
fn spawn_key_reader(ended: CancellationToken) -> anyhow::Result<mpsc::Receiver<TerminalInput>> {
    let (pressed, keys) = mpsc::channel(KEY_QUEUE_CAPACITY);
    let listen = move || {
        while !ended.is_cancelled() {
            let key = match event::poll(KEY_POLL_TIMEOUT) {
                Ok(true) => event::read().ok().and_then(to_terminal_input),
                Ok(false) => None,
                Err(_) => return,
            };
            if key.is_some_and(|key| pressed.blocking_send(key).is_err()) {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".into()).spawn(listen).context("read the keyboard")?;
    Ok(keys)
}

/// Converts a terminal event to an input, if it means something here.
fn to_terminal_input(event: Event) -> Option<TerminalInput> {
    if let Event::Resize(..) = event {
        return Some(TerminalInput::Resized);
    }
    to_tui_key(event).map(TerminalInput::Key)
}

/// Converts a key press to a key of the UI. Ctrl-C counts as `q`.
fn to_tui_key(event: Event) -> Option<TuiKey> {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
        return None;
    };
    Some(match code {
        // The terminal is in raw mode and delivers Ctrl-C as an ordinary key.
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => TuiKey::Char('q'),
        KeyCode::Char(letter) => TuiKey::Char(letter),
        KeyCode::Up => TuiKey::Up,
        KeyCode::Down => TuiKey::Down,
        KeyCode::Tab | KeyCode::BackTab => TuiKey::Tab,
        KeyCode::Esc => TuiKey::Escape,
        _ => return None,
    })
}

/// The state of the UI and the streams that update it.
struct TuiSession {
    control: FleetControl,
    model: TuiModel,
    statuses: BoxStream<'static, v1::AgentStatus>,
    runs: BoxStream<'static, Result<Vec<v1::Run>, RunError>>,
    facts: BoxStream<'static, Result<Record, ReadError>>,
}

/// An update from the bus.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
enum TuiEvent {
    Status(v1::AgentStatus),
    Runs(Vec<v1::Run>),
    Fact(Record),
}

impl TuiSession {
    /// Subscribes to statuses and runs, and selects `run` if it is given.
    ///
    /// # Errors
    /// If the run does not exist or the bus cannot be read.
    async fn start_session(control: FleetControl, run: Option<RunId>) -> anyhow::Result<Self> {
        let statuses = control.bus().watch_statuses().await?.boxed();
        let mut model = TuiModel::default();
        control.list_agents().await?.into_iter().for_each(|agent| model.update_agent(agent));
        let (runs, facts) = (poll_runs(control.clone()).boxed(), stream::empty().boxed());
        let mut looking = Self { control, model, statuses, runs, facts };
        if let Some(run) = run {
            // An unknown run is reported before anything is drawn.
            looking.control.get_run(&run).await?;
            looking.select_run(&run).await;
        }
        Ok(looking)
    }

    /// Waits for the next update. Cancel-safe.
    ///
    /// # Errors
    /// If a stream fails or the bus is closed.
    async fn next_event(&mut self) -> anyhow::Result<TuiEvent> {
        Ok(tokio::select! {
            Some(status) = self.statuses.next() => TuiEvent::Status(status),
            Some(record) = self.facts.next() => TuiEvent::Fact(record?),
            Some(runs) = self.runs.next() => TuiEvent::Runs(runs?),
            else => bail!("the bus is closed (B102)"),
        })
    }

    /// Applies an update to the model, and selects the newest run if none is selected.
    async fn apply_event(&mut self, seen: TuiEvent) {
        match seen {
            TuiEvent::Status(status) => self.model.update_agent(status),
            TuiEvent::Fact(record) => self.model.apply_fact(&record),
            TuiEvent::Runs(runs) => {
                if let Some(run) = self.model.update_runs(runs) {
                    self.select_run(&run).await;
                }
            }
        }
    }

    /// Selects a run and follows its facts from the beginning.
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

    /// Performs a confirmed action and shows its result in the footer.
    async fn perform_action(&mut self, act: TuiAction) {
        let done = match &act {
            TuiAction::Steer { run, action } => {
                self.control.control_run(run, *action, "").await.map_err(anyhow::Error::from)
            }
            TuiAction::Drain { agent } => self.drain_agent(agent).await,
        };
        self.model.message = match done {
            Ok(()) => format!("done: {act}"),
            Err(error) => format!("{act}: {error:#}"),
        };
    }

    /// Drains an agent.
    async fn drain_agent(&self, agent: &str) -> anyhow::Result<()> {
        Ok(self.control.drain_agent(&AgentId::new(agent)?).await?)
    }
}

/// Returns a stream that reads the list of runs every `RUN_LIST_INTERVAL`.
fn poll_runs(control: FleetControl) -> impl Stream<Item = Result<Vec<v1::Run>, RunError>> + Send {
    let mut again = interval(RUN_LIST_INTERVAL);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    stream::unfold((control, again), async |(control, mut again)| {
        again.tick().await;
        let runs = control.list_runs().await;
        let runs = runs.map(|runs| runs.iter().map(control::run_to_proto).collect());
        Some((runs, (control, again)))
    })
}
