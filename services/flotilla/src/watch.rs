//! `flotilla watch`: the fleet and its runs, in a terminal. `model` is what there is to see and
//! what keys do to it, `draw` puts it on the screen, and here they meet the bus and the terminal.

mod draw;
mod model;

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use bus::ReadError;
use control::{Control, RunError};
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

use crate::{cli::LookArgs, fleet::FleetArgs, output, signals};

use self::model::{Act, Key, Model, Outcome};

/// Between two pictures: as often as eyes see a difference.
const FRAME: Duration = Duration::from_millis(100);
/// Between two looks at which runs there are; the chosen one's facts come as they are written.
const RUNS: Duration = Duration::from_secs(2);
/// How long the keyboard is waited for, and so what ending takes.
const KEY_WAIT: Duration = Duration::from_millis(100);
/// Keys that were pressed and not yet looked at.
const KEYS_MAX: usize = 64;

pub(crate) async fn watch(
    fleet: &FleetArgs,
    args: LookArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let run = args.run.map(RunId::new).transpose()?;
    let on_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if !json && !on_terminal {
        bail!(
            "flotilla watch draws on a terminal: use --json for a line a change, or \
             `flotilla run watch RUN` (A107)"
        );
    }
    let stop = signals::stop_token()?;
    let control = fleet.control().await?;
    let mut looking = Looking::start(control, run).await?;
    if json {
        let lines = async {
            loop {
                let seen = looking.next().await?;
                let is_fact = matches!(seen, Seen::Fact(_));
                if let Seen::Status(status) = &seen {
                    output::print_json(&json!({ "agent": status }))?;
                }
                looking.take(seen).await;
                if let Some(run) = looking.model.run.as_ref().filter(|_| is_fact) {
                    output::print_json(&json!({ "run": control::view(run) }))?;
                }
            }
        };
        return stop.run_until_cancelled(lines).await.unwrap_or(Ok(ExitCode::SUCCESS));
    }
    let ended = CancellationToken::new();
    let _listens_no_more = ended.clone().drop_guard();
    let keys = keys(ended)?;
    let mut terminal = ratatui::try_init().context("draw on this terminal")?;
    let shown = show(&mut terminal, &mut looking, keys, &stop).await;
    ratatui::restore();
    shown.map(|()| ExitCode::SUCCESS)
}

/// Draws until `q` is pressed, or it is stopped.
async fn show(
    terminal: &mut DefaultTerminal,
    looking: &mut Looking,
    mut keys: mpsc::Receiver<Pressed>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut frame = interval(FRAME);
    frame.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut drawn = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = frame.tick(), if !drawn => {
                terminal.draw(|frame| draw::draw(frame, &looking.model)).context("draw")?;
                drawn = true;
            }
            pressed = keys.recv() => {
                drawn = false;
                let Some(pressed) = pressed else { return Ok(()) };
                let Pressed::Key(key) = pressed else { continue };
                match looking.model.key(key) {
                    Outcome::Nothing => {}
                    Outcome::Quit => return Ok(()),
                    Outcome::Choose(run) => looking.choose(&run).await,
                    Outcome::Do(act) => looking.act(act).await,
                }
            }
            seen = looking.next() => {
                drawn = false;
                looking.take(seen?).await;
            }
        }
    }
}

/// What the terminal tells.
#[derive(Debug, Clone, Copy)]
enum Pressed {
    Key(Key),
    /// It has another size.
    Resized,
}

/// Reads the keyboard in a thread, as reading blocks.
fn keys(ended: CancellationToken) -> anyhow::Result<mpsc::Receiver<Pressed>> {
    let (pressed, keys) = mpsc::channel(KEYS_MAX);
    let listen = move || {
        while !ended.is_cancelled() {
            let key = match event::poll(KEY_WAIT) {
                Ok(true) => event::read().ok().and_then(told),
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

fn told(event: Event) -> Option<Pressed> {
    if let Event::Resize(..) = event {
        return Some(Pressed::Resized);
    }
    key(event).map(Pressed::Key)
}

fn key(event: Event) -> Option<Key> {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
        return None;
    };
    Some(match code {
        // The terminal hands it over as any other key.
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Key::Char('q'),
        KeyCode::Char(letter) => Key::Char(letter),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Tab | KeyCode::BackTab => Key::Tab,
        KeyCode::Esc => Key::Escape,
        _ => return None,
    })
}

/// What is seen, and where it comes from.
struct Looking {
    control: Control,
    model: Model,
    statuses: BoxStream<'static, v1::AgentStatus>,
    runs: BoxStream<'static, Result<Vec<v1::Run>, RunError>>,
    facts: BoxStream<'static, Result<Record, ReadError>>,
}

/// Something that came.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
enum Seen {
    Status(v1::AgentStatus),
    Runs(Vec<v1::Run>),
    Fact(Record),
}

impl Looking {
    async fn start(control: Control, run: Option<RunId>) -> anyhow::Result<Self> {
        let statuses = control.bus().watch_statuses().await?.boxed();
        let mut model = Model::default();
        control.agents().await?.into_iter().for_each(|agent| model.heard(agent));
        let (runs, facts) = (listed(control.clone()).boxed(), stream::empty().boxed());
        let mut looking = Self { control, model, statuses, runs, facts };
        if let Some(run) = run {
            // One that is not there is said before anything is drawn.
            looking.control.run(&run).await?;
            looking.choose(&run).await;
        }
        Ok(looking)
    }

    /// What comes next. Cancel-safe.
    async fn next(&mut self) -> anyhow::Result<Seen> {
        Ok(tokio::select! {
            Some(status) = self.statuses.next() => Seen::Status(status),
            Some(record) = self.facts.next() => Seen::Fact(record?),
            Some(runs) = self.runs.next() => Seen::Runs(runs?),
            else => bail!("the bus is closed (B102)"),
        })
    }

    async fn take(&mut self, seen: Seen) {
        match seen {
            Seen::Status(status) => self.model.heard(status),
            Seen::Fact(record) => self.model.fact(&record),
            Seen::Runs(runs) => {
                if let Some(run) = self.model.listed(runs) {
                    self.choose(&run).await;
                }
            }
        }
    }

    async fn choose(&mut self, run: &RunId) {
        self.model.choose(run);
        self.facts = match self.control.watch_run(run, 0).await {
            // It ends with the run.
            Ok(facts) => facts.fuse().boxed(),
            Err(error) => {
                self.model.said = format!("{run}: {error}");
                stream::empty().boxed()
            }
        };
    }

    async fn act(&mut self, act: Act) {
        let done = match &act {
            Act::Steer { run, action } => {
                self.control.steer(run, *action, "").await.map_err(anyhow::Error::from)
            }
            Act::Drain { agent } => self.drain(agent).await,
        };
        self.model.said = match done {
            Ok(()) => format!("done: {act}"),
            Err(error) => format!("{act}: {error:#}"),
        };
    }

    async fn drain(&self, agent: &str) -> anyhow::Result<()> {
        Ok(self.control.drain(&AgentId::new(agent)?).await?)
    }
}

/// Which runs there are, again and again.
fn listed(control: Control) -> impl Stream<Item = Result<Vec<v1::Run>, RunError>> + Send {
    let mut again = interval(RUNS);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    stream::unfold((control, again), async |(control, mut again)| {
        again.tick().await;
        let runs = control.runs().await;
        let runs = runs.map(|runs| runs.iter().map(control::view).collect());
        Some((runs, (control, again)))
    })
}
