//! Watching the box while it works: a look a second, what it means for the jobs, and what is
//! done about it. The numbers and decisions are `hardware`'s; here they meet processes.

mod energy;
mod looker;
mod report;
mod span;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use conduct::Fault;
use hardware::{
    citizen::{Citizen, Foreign, Look, Wishes},
    files::Live,
    floor::Floor,
    hang::Hang,
    storm::{Act, Cause, Level, OnStorm, Pace, Reaction, Thresholds, Training, Weather},
    telemetry::Telemetry,
};
use metrics::Endpoint;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use wire::{WorkKind, v1};

use crate::{
    Herd, JobError,
    presence::{Presence, Trouble},
};

pub(crate) use energy::Share;
pub use span::Span;

use energy::Account;
use looker::{Looked, Looker};
use span::Spans;

/// Between looks while nothing runs.
const IDLE_EVERY: Duration = Duration::from_secs(5);

/// Between questions to the sensors while nothing runs, so that a card may fall asleep: the
/// kernel lets it after five seconds.
const IDLE_SENSORS_EVERY: Duration = Duration::from_secs(15);

/// What failed so soon after the workers were ended failed for that.
const BLAME: Duration = Duration::from_secs(10);

/// How a box is watched.
#[derive(Debug)]
pub struct Options {
    /// Where sysfs and procfs are; `/` but for tests.
    pub root: PathBuf,
    /// Between looks while anything runs.
    pub every: Duration,
    pub wishes: Wishes,
    pub on_storm: OnStorm,
    pub thresholds: Thresholds,
    /// No pause of the workers is longer.
    pub pause_max: Duration,
    /// Bytes of memory that a training must leave where the GPU has none of its own.
    pub keep_free: u64,
    /// All children of the agent.
    pub herd: Herd,
    /// Where the numbers are served, if they are.
    pub metrics: Option<Endpoint>,
}

/// What the agent's other tasks see of it.
#[derive(Debug, Clone)]
pub(crate) struct Watch {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Whether something new may be taken.
    open: watch::Sender<bool>,
    energy: Account,
    spans: Spans,
    ended: Mutex<Option<Ended>>,
    /// A job begins.
    begins: Notify,
}

/// That workers were ended for the box's sake, the last time.
#[derive(Debug, Clone)]
struct Ended {
    at: Instant,
    /// Whose; all without.
    kind: Option<WorkKind>,
    fault: Fault,
    why: String,
}

impl Watch {
    /// Of a box at `root`, where nothing is taken before the first look; nobody looks without.
    pub(crate) fn new(root: Option<&PathBuf>) -> Self {
        let state = State {
            open: watch::Sender::new(root.is_none()),
            energy: Account::open(),
            spans: Spans::new(root.map(Live::new)),
            ended: Mutex::default(),
            begins: Notify::new(),
        };
        Self { state: Arc::new(state) }
    }

    /// Resolves while something new may be taken. Cancel-safe.
    pub(crate) async fn allowed(&self) {
        // The sender lives as long as the state.
        let _ = self.state.open.subscribe().wait_for(|open| *open).await;
    }

    /// Resolves while nothing may. Cancel-safe.
    pub(crate) async fn forbidden(&self) {
        let _ = self.state.open.subscribe().wait_for(|open| !*open).await;
    }

    /// A job's share of what the box takes, for as long as it is kept.
    pub(crate) fn share(&self) -> Share {
        self.state.begins.notify_one();
        self.state.energy.share()
    }

    pub(crate) fn span(&self) -> Span {
        self.state.spans.begin()
    }

    /// What failed because the workers were ended for the box's sake is not the job's fault.
    pub(crate) fn blame(&self, kind: WorkKind, error: JobError) -> JobError {
        let ended = self.state.ended.lock().ok().and_then(|ended| ended.clone());
        let applies = |ended: &Ended| {
            ended.at.elapsed() < BLAME && ended.kind.is_none_or(|ended| ended == kind)
        };
        match (error, ended.filter(applies)) {
            // However its end was read.
            (JobError::Failed { fault, log_tail, .. }, Some(Ended { fault: known, why, .. }))
                if fault != Fault::Content =>
            {
                JobError::Failed { fault: known, message: why, log_tail }
            }
            (error, _) => error,
        }
    }

    /// Before workers are ended, so that none fails unexplained.
    fn ends(&self, kind: Option<WorkKind>, fault: Fault, why: String) {
        if let Ok(mut ended) = self.state.ended.lock() {
            *ended = Some(Ended { at: Instant::now(), kind, fault, why });
        }
    }
}

/// Looks until `stop`. `aside` says that somebody else trains here, which is watched.
pub(crate) async fn run(
    options: Options,
    watch: Watch,
    presence: Presence,
    aside: bool,
    stop: CancellationToken,
) {
    let Options { root, every, wishes, on_storm, thresholds, pause_max, keep_free, herd, metrics } =
        options;
    let serving = async {
        match metrics {
            Some(endpoint) => endpoint.serve(presence.clone()).await,
            None => std::future::pending().await,
        }
    };
    let guard = Guard {
        watch,
        presence: presence.clone(),
        aside,
        herd,
        weather: Weather::new(thresholds),
        quiet_per_s: thresholds.clear_per_s,
        reaction: Reaction::new(on_storm, millis(pause_max)),
        citizen: Citizen::new(wishes),
        pace: None,
        hang: Hang::default(),
        floor: Floor::new(keep_free),
        cause: None,
        storms: 0,
        reacted: "",
        looked: false,
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = guard.look(Live::new(root), every) => {}
        never = serving => match never {},
    }
}

/// What it remembers from look to look. Paused workers go on when it is gone.
struct Guard {
    watch: Watch,
    presence: Presence,
    aside: bool,
    herd: Herd,
    weather: Weather,
    quiet_per_s: f64,
    reaction: Reaction,
    citizen: Citizen,
    /// Of our own training, by the job's name.
    pace: Option<(String, Pace)>,
    hang: Hang,
    floor: Floor,
    /// Of what is not calm.
    cause: Option<Cause>,
    storms: u64,
    reacted: &'static str,
    looked: bool,
}

impl Guard {
    async fn look(mut self, files: Live, every: Duration) {
        let mut looker = Looker::start(files);
        let (mut asked_sensors, began) = (None, Instant::now());
        loop {
            let jobs = self.presence.jobs();
            let busy = self.aside || !jobs.is_empty();
            let sensors_due =
                asked_sensors.is_none_or(|at: Instant| at.elapsed() >= IDLE_SENSORS_EVERY);
            let sensors = busy || sensors_due;
            if sensors {
                asked_sensors = Some(Instant::now());
            }
            match looker.look(began.elapsed(), sensors).await {
                Some(looked) => self.take(&looked, &jobs),
                None => self.miss(),
            }
            let pause = if busy { every } else { IDLE_EVERY.max(every) };
            tokio::time::sleep(every).await;
            tokio::select! {
                () = self.watch.state.begins.notified() => {}
                () = tokio::time::sleep(pause.saturating_sub(every)) => {}
            }
        }
    }

    /// Numbers that are not true any more are worse than none, and no reason to rest.
    fn miss(&self) {
        self.presence.update(|status| status.telemetry = None);
        self.trouble("box", None);
        self.watch.state.open.send_replace(true);
    }

    fn take(&mut self, looked: &Looked, jobs: &[v1::ActiveJob]) {
        let now = &looked.telemetry;
        let before = self.weather.level();
        let level = self.weather.hear(now);
        let training = self.training(now.at_ms, jobs);
        let hang = self.hang.hear(now, training);
        self.trouble("training", hang);
        if let Some(available) = self.floor.hear(now, training) {
            self.make_room(available);
        }
        let evaluates = |cause| matches!(cause, Some(Cause::EvaluationInTraining { .. }));
        let last = self.cause.take();
        let is_quiet = now.tlb_per_s.is_some_and(|rate| rate < self.quiet_per_s);
        self.cause = match (level, last) {
            (Level::Calm, _) => None,
            // It is over, and has yet to prove that it stays so.
            (_, Some(last)) if is_quiet => Some(last),
            _ => Some(Cause::of(now, training)),
        };
        // That steps stand still shows only after a while.
        let news = before != level || (evaluates(self.cause) && !evaluates(last));
        let cause = self.cause.map(Cause::describe);
        self.storms += u64::from(before < level && level == Level::Storm);
        self.tell(news, level, now.tlb_per_s, cause.as_deref().unwrap_or_default());
        self.watch.state.spans.hear(now.tlb_per_s, level == Level::Storm);
        self.watch.state.energy.measured(now.watts);
        let words = cause.as_deref().unwrap_or_default();
        self.react(now.at_ms, level, is_quiet, words);
        let resting = self.rest(now, &looked.foreign, jobs);
        let storm = v1::telemetry::Storm {
            level: report::level(level).into(),
            cause: cause.unwrap_or_default(),
            reaction: self.reacted.into(),
            storms: self.storms,
        };
        let telemetry = report::telemetry(now, storm, resting);
        self.presence.update(|status| status.telemetry = Some(telemetry));
    }

    fn training(&mut self, now_ms: u64, jobs: &[v1::ActiveJob]) -> Training {
        let ours = jobs.iter().find(|job| job.role == "trainer");
        let Some(job) = ours else {
            self.pace = None;
            let only_watched = self.aside && jobs.iter().all(|job| job.role == "watcher");
            return if only_watched { Training::Watched } else { Training::No };
        };
        let name = format!("{} {} {}", job.run, job.cycle, job.job);
        if self.pace.as_ref().is_none_or(|(known, _)| *known != name) {
            self.pace = Some((name, Pace::begin(job.done, now_ms)));
        }
        let stalled_ms = self.pace.as_mut().and_then(|(_, pace)| {
            pace.note(job.done, now_ms);
            if !self.reacted.is_empty() {
                pace.kept(now_ms);
            }
            pace.stalled_ms(now_ms)
        });
        Training::Ours { stalled_ms }
    }

    fn tell(&self, news: bool, level: Level, rate: Option<f64>, cause: &str) {
        let per_s = rate.unwrap_or_default().round();
        let words = match level {
            Level::Calm => "TLB shootdowns are few again",
            Level::Warn => "many TLB shootdowns",
            Level::Storm => "a storm of TLB shootdowns",
        };
        if news && level > Level::Calm {
            tracing::warn!(per_s, cause, "{words}");
        } else if news {
            tracing::info!(per_s, "{words}");
        }
        let message = (level > Level::Calm).then(|| format!("{words}: {cause}"));
        self.trouble("storm", message);
    }

    fn trouble(&self, of: &'static str, message: Option<String>) {
        let trouble = message.map(|message| Trouble { message, quarantine: false });
        self.presence.trouble(of, trouble);
    }

    fn react(&mut self, now_ms: u64, level: Level, is_quiet: bool, cause: &str) {
        // Nobody to pause is as good.
        let is_quiet = is_quiet || self.herd.is_empty();
        match self.reaction.next(now_ms, level, is_quiet) {
            Some(Act::Pause) => {
                tracing::warn!("the workers are paused until the storm is over");
                self.herd.pause();
                self.reacted = "the workers are paused";
            }
            Some(Act::Resume) => {
                tracing::info!("the workers go on");
                self.herd.resume();
                self.reacted = "";
            }
            Some(Act::Kill) => {
                tracing::warn!("the workers are ended for a storm");
                let why = format!("ended for a storm of TLB shootdowns: {cause}");
                self.watch.ends(None, Fault::Box, why);
                self.herd.kill();
            }
            None => {}
        }
    }

    /// Ends the training, which may be tried with smaller passes, here or elsewhere.
    fn make_room(&self, available: u64) {
        let why = format!(
            "ended before the box froze: {:.1} GiB of memory were left (--keep-free)",
            gib(available)
        );
        tracing::warn!(why, "the training is ended");
        self.watch.ends(Some(WorkKind::Train), Fault::TooLarge, why);
        self.herd.kill_named(WorkKind::Train.as_str());
    }

    /// Why nothing new is taken; empty when it is.
    fn rest(&mut self, now: &Telemetry, foreign: &[Foreign], jobs: &[v1::ActiveJob]) -> String {
        let look = Look { now, minute: minute_of_day(), foreign, idle: jobs.is_empty() };
        let resting = self.citizen.consider(&look);
        let changed = self.watch.state.open.send_replace(resting.is_none()) != resting.is_none();
        match &resting {
            Some(why) if changed => {
                tracing::info!(why, "takes nothing new, finishes what it holds");
            }
            None if changed && self.looked => tracing::info!("takes work again"),
            _ => {}
        }
        self.looked = true;
        self.trouble("box", resting.as_ref().map(|why| format!("takes nothing new: {why}")));
        resting.unwrap_or_default()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.reacted.is_empty() {
            self.herd.resume();
        }
    }
}

/// By the box's clock and time zone; UTC where it has none.
fn minute_of_day() -> u16 {
    let time = jiff::Zoned::now().time();
    let minute = i16::from(time.hour()) * 60 + i16::from(time.minute());
    u16::try_from(minute).unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "told to a tenth")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
