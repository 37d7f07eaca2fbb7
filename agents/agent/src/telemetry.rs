//! Host telemetry and protection: samples the host at an interval, and pauses, ends or holds back
//! work. The measurements and detectors are in the crate `hardware`; this module applies their
//! decisions to processes.

mod energy;
mod sampler_thread;
mod shootdowns;
mod telemetry_proto;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use agent_core::JobFault;
use hardware::{
    hang_detector::HangDetector,
    host_files::LiveFiles,
    memory_guard::MemoryGuard,
    owner_policy::{ForeignProcess, OwnerLimits, OwnerPolicy, OwnerPolicyInput},
    storm::{
        ObservedTraining, StepPace, StormAction, StormCause, StormDetector, StormLevel,
        StormResponder, StormResponse, StormThresholds,
    },
    telemetry::HostTelemetry,
};
use metrics::MetricsEndpoint;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use wire::{WorkKind, v1};

use crate::{
    JobError, ProcessGroups,
    live_status::{LiveStatus, StatusTrouble},
};

pub(crate) use energy::EnergyShare;
pub use shootdowns::ShootdownSpan;

use energy::EnergyMeter;
use sampler_thread::{SamplerThread, TelemetrySample};
use shootdowns::ShootdownCounters;

const IDLE_SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// Longer than the five seconds after which the kernel may suspend a card.
const IDLE_SENSOR_INTERVAL: Duration = Duration::from_secs(15);

/// A job that fails this soon after the workers were killed failed for that reason.
const TERMINATION_BLAME_WINDOW: Duration = Duration::from_secs(10);

/// The settings of host telemetry and protection.
#[derive(Debug)]
pub struct TelemetryOptions {
    /// The directory that contains sysfs and procfs: `/` except in tests.
    pub root: PathBuf,
    /// The interval while a job runs.
    pub sample_interval: Duration,
    /// The owner's limits: quiet hours, power, heat and other programs.
    pub owner_limits: OwnerLimits,
    pub on_storm: StormResponse,
    pub thresholds: StormThresholds,
    /// The longest time for which workers are paused.
    pub pause_max: Duration,
    /// The bytes of memory that a training must leave free where the GPU shares the system's
    /// memory.
    pub keep_free: u64,
    /// The process groups of all children of the agent.
    pub process_groups: ProcessGroups,
    pub metrics: Option<MetricsEndpoint>,
}

/// A handle to the host's telemetry. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct TelemetryHandle {
    state: Arc<TelemetryState>,
}

#[derive(Debug)]
struct TelemetryState {
    /// True while new jobs may be taken.
    accepts_work: watch::Sender<bool>,
    energy_meter: EnergyMeter,
    shootdown_counters: ShootdownCounters,
    last_termination: Mutex<Option<WorkerTermination>>,
    /// Ends a long pause between samples.
    job_started: Notify,
}

/// The last time that workers were killed to protect the host.
#[derive(Debug, Clone)]
struct WorkerTermination {
    at: Instant,
    /// `None` for the workers of all roles.
    kind: Option<WorkKind>,
    fault: JobFault,
    reason: String,
}

impl TelemetryHandle {
    /// Creates a handle that permits no job before the first sample. Without a root the host is not
    /// sampled, and jobs are always permitted.
    pub(crate) fn new(root: Option<&PathBuf>) -> Self {
        let state = TelemetryState {
            accepts_work: watch::Sender::new(root.is_none()),
            energy_meter: EnergyMeter::start_now(),
            shootdown_counters: ShootdownCounters::new(root.map(LiveFiles::new)),
            last_termination: Mutex::default(),
            job_started: Notify::new(),
        };
        Self { state: Arc::new(state) }
    }

    /// Waits until the host may take new jobs. Cancel-safe.
    pub(crate) async fn wait_until_allowed(&self) {
        // The sender lives as long as the state.
        let _ = self.state.accepts_work.subscribe().wait_for(|open| *open).await;
    }

    /// Waits until the host may not take new jobs. Cancel-safe.
    pub(crate) async fn wait_until_forbidden(&self) {
        let _ = self.state.accepts_work.subscribe().wait_for(|open| !*open).await;
    }

    pub(crate) fn start_energy_share(&self) -> EnergyShare {
        self.state.job_started.notify_one();
        self.state.energy_meter.start_share()
    }

    pub(crate) fn start_shootdown_span(&self) -> ShootdownSpan {
        self.state.shootdown_counters.start_span()
    }

    /// Replaces the error of a job that failed shortly after its worker was killed to protect the
    /// host by that reason. Errors of the content are unchanged.
    pub(crate) fn explain_termination(&self, kind: WorkKind, error: JobError) -> JobError {
        let ended = self.state.last_termination.lock().ok().and_then(|ended| ended.clone());
        let applies = |ended: &WorkerTermination| {
            ended.at.elapsed() < TERMINATION_BLAME_WINDOW
                && ended.kind.is_none_or(|ended| ended == kind)
        };
        match (error, ended.filter(applies)) {
            // This applies to every other cause that was derived from the worker's death.
            (
                JobError::Failed { fault, log_tail, .. },
                Some(WorkerTermination { fault: known, reason: why, .. }),
            ) if fault != JobFault::InvalidInput => {
                JobError::Failed { fault: known, message: why, log_tail }
            }
            (error, _) => error,
        }
    }

    /// Must be called before the workers are killed, so that no job fails without an explanation.
    fn record_termination(&self, kind: Option<WorkKind>, fault: JobFault, why: String) {
        if let Ok(mut ended) = self.state.last_termination.lock() {
            *ended = Some(WorkerTermination { at: Instant::now(), kind, fault, reason: why });
        }
    }
}

/// Samples the host and serves the metrics until `stop` is cancelled. An external training on this
/// host counts as work.
pub(crate) async fn run_telemetry(
    options: TelemetryOptions,
    handle: TelemetryHandle,
    live_status: LiveStatus,
    has_external_training: bool,
    stop: CancellationToken,
) {
    let TelemetryOptions {
        root,
        sample_interval,
        owner_limits,
        on_storm,
        thresholds,
        pause_max,
        keep_free,
        process_groups,
        metrics,
    } = options;
    let serving = async {
        match metrics {
            Some(endpoint) => endpoint.serve_source(live_status.clone()).await,
            None => std::future::pending().await,
        }
    };
    let guard = HostGuard {
        handle,
        live_status: live_status.clone(),
        has_external_training,
        process_groups,
        storm_detector: StormDetector::new(thresholds),
        quiet_per_s: thresholds.clear_per_s,
        reaction: StormResponder::new(on_storm, to_millis(pause_max)),
        owner_policy: OwnerPolicy::new(owner_limits),
        training_pace: None,
        hang_detector: HangDetector::default(),
        memory_guard: MemoryGuard::new(keep_free),
        storm_cause: None,
        storm_count: 0,
        reaction_note: "",
        has_sampled: false,
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = guard.sample_forever(LiveFiles::new(root), sample_interval) => {}
        never = serving => match never {},
    }
}

/// The control loop that protects the host; its state from sample to sample.
///
/// With each sample it:
///
/// 1. updates the storm, hang and free-memory detectors;
/// 2. pauses, resumes or kills the workers by the reaction to storms;
/// 3. kills a training that leaves too little free memory;
/// 4. compares the host with its owner's limits, and forbids or permits new jobs;
/// 5. writes telemetry and troubles into the agent's status.
///
/// Dropping it resumes paused workers.
struct HostGuard {
    handle: TelemetryHandle,
    live_status: LiveStatus,
    has_external_training: bool,
    process_groups: ProcessGroups,
    storm_detector: StormDetector,
    quiet_per_s: f64,
    reaction: StormResponder,
    owner_policy: OwnerPolicy,
    /// The step rate of this agent's training, with the job's name.
    training_pace: Option<(String, StepPace)>,
    hang_detector: HangDetector,
    memory_guard: MemoryGuard,
    /// The cause of the current warning or storm.
    storm_cause: Option<StormCause>,
    storm_count: u64,
    reaction_note: &'static str,
    has_sampled: bool,
}

impl HostGuard {
    async fn sample_forever(mut self, files: LiveFiles, every: Duration) {
        let mut sampler = SamplerThread::start(files);
        let (mut asked_sensors, began) = (None, Instant::now());
        loop {
            let jobs = self.live_status.active_jobs();
            let busy = self.has_external_training || !jobs.is_empty();
            let sensors_due =
                asked_sensors.is_none_or(|at: Instant| at.elapsed() >= IDLE_SENSOR_INTERVAL);
            let sensors = busy || sensors_due;
            if sensors {
                asked_sensors = Some(Instant::now());
            }
            match sampler.take_sample(began.elapsed(), sensors).await {
                Some(sample) => self.handle_sample(&sample, &jobs),
                None => self.handle_missed_sample(),
            }
            let pause = if busy { every } else { IDLE_SAMPLE_INTERVAL.max(every) };
            tokio::time::sleep(every).await;
            tokio::select! {
                () = self.handle.state.job_started.notified() => {}
                () = tokio::time::sleep(pause.saturating_sub(every)) => {}
            }
        }
    }

    /// Removes the telemetry from the status and permits new jobs: outdated values are worse than
    /// missing ones, and are no reason to stop work.
    fn handle_missed_sample(&self) {
        self.live_status.update_status(|status| status.telemetry = None);
        self.set_trouble("box", None);
        self.handle.state.accepts_work.send_replace(true);
    }

    fn handle_sample(&mut self, sample: &TelemetrySample, jobs: &[v1::ActiveJob]) {
        let now = &sample.telemetry;
        let before = self.storm_detector.current_level();
        let level = self.storm_detector.observe_sample(now);
        let training = self.training_state(now.at_ms, jobs);
        let hang = self.hang_detector.observe_sample(now, training);
        self.set_trouble("training", hang);
        if let Some(available) = self.memory_guard.check_memory(now, training) {
            self.end_training(available);
        }
        let evaluates = |cause| matches!(cause, Some(StormCause::EvaluationInTraining { .. }));
        let last = self.storm_cause.take();
        let is_quiet = now.tlb_per_s.is_some_and(|rate| rate < self.quiet_per_s);
        self.storm_cause = match (level, last) {
            (StormLevel::Calm, _) => None,
            // The storm has ended, but it must stay quiet for a time before the level returns to
            // calm.
            (_, Some(last)) if is_quiet => Some(last),
            _ => Some(StormCause::from_telemetry(now, training)),
        };
        // A cause may change later, because stalled steps show only after a while.
        let news = before != level || (evaluates(self.storm_cause) && !evaluates(last));
        let cause = self.storm_cause.map(StormCause::describe_remedy);
        self.storm_count += u64::from(before < level && level == StormLevel::Storm);
        self.report_storm(news, level, now.tlb_per_s, cause.as_deref().unwrap_or_default());
        self.handle.state.shootdown_counters.record_rate(now.tlb_per_s, level == StormLevel::Storm);
        self.handle.state.energy_meter.record_power(now.watts);
        let words = cause.as_deref().unwrap_or_default();
        self.react_to_storm(now.at_ms, level, is_quiet, words);
        let blocked = self.apply_owner_limits(now, &sample.foreign, jobs);
        let storm = v1::telemetry::Storm {
            level: telemetry_proto::convert_level(level).into(),
            cause: cause.unwrap_or_default(),
            reaction: self.reaction_note.into(),
            storms: self.storm_count,
        };
        let telemetry = telemetry_proto::convert_telemetry(now, storm, blocked);
        self.live_status.update_status(|status| status.telemetry = Some(telemetry));
    }

    fn training_state(&mut self, now_ms: u64, jobs: &[v1::ActiveJob]) -> ObservedTraining {
        let ours = jobs.iter().find(|job| job.role == "trainer");
        let Some(job) = ours else {
            self.training_pace = None;
            let only_watched =
                self.has_external_training && jobs.iter().all(|job| job.role == "watcher");
            return if only_watched {
                ObservedTraining::Watched
            } else {
                ObservedTraining::NotTraining
            };
        };
        let name = format!("{} {} {}", job.run, job.cycle, job.job);
        if self.training_pace.as_ref().is_none_or(|(known, _)| *known != name) {
            self.training_pace = Some((name, StepPace::from_step(job.done, now_ms)));
        }
        let stalled_ms = self.training_pace.as_mut().and_then(|(_, pace)| {
            pace.record_step(job.done, now_ms);
            if !self.reaction_note.is_empty() {
                pace.reset_clock(now_ms);
            }
            pace.stalled_ms(now_ms)
        });
        ObservedTraining::Ours { stalled_ms }
    }

    fn report_storm(&self, news: bool, level: StormLevel, rate: Option<f64>, cause: &str) {
        let per_s = rate.unwrap_or_default().round();
        let words = match level {
            StormLevel::Calm => "TLB shootdowns are back to normal",
            StormLevel::Warn => "many TLB shootdowns",
            StormLevel::Storm => "a storm of TLB shootdowns",
        };
        if news && level > StormLevel::Calm {
            tracing::warn!(per_s, cause, "{words}");
        } else if news {
            tracing::info!(per_s, "{words}");
        }
        let message = (level > StormLevel::Calm).then(|| format!("{words}: {cause}"));
        self.set_trouble("storm", message);
    }

    fn set_trouble(&self, of: &'static str, message: Option<String>) {
        let trouble = message.map(|message| StatusTrouble { message, quarantine: false });
        self.live_status.set_trouble(of, trouble);
    }

    fn react_to_storm(&mut self, now_ms: u64, level: StormLevel, is_quiet: bool, cause: &str) {
        // Without workers there is no process to pause, which counts as quiet.
        let is_quiet = is_quiet || self.process_groups.is_empty();
        match self.reaction.next_action(now_ms, level, is_quiet) {
            Some(StormAction::Pause) => {
                tracing::warn!("workers paused until the storm is over");
                self.process_groups.pause_all();
                self.reaction_note = "the workers are paused";
            }
            Some(StormAction::Resume) => {
                tracing::info!("workers resumed");
                self.process_groups.resume_all();
                self.reaction_note = "";
            }
            Some(StormAction::Kill) => {
                tracing::warn!("workers ended because of a storm");
                let why = format!("ended because of a storm of TLB shootdowns: {cause}");
                self.handle.record_termination(None, JobFault::HostUnfit, why);
                self.process_groups.kill_all();
            }
            None => {}
        }
    }

    /// The training may be retried with smaller passes, here or on another host.
    fn end_training(&self, available: u64) {
        let why = format!(
            "ended to keep the box responsive: only {:.1} GiB of memory were free (--keep-free)",
            to_gib(available)
        );
        tracing::warn!(why, "training ended");
        self.handle.record_termination(Some(WorkKind::Train), JobFault::OutOfMemory, why);
        self.process_groups.kill_named(WorkKind::Train.as_str());
    }

    /// Permits or forbids new jobs by the owner's limits. Returns the reason if they are forbidden,
    /// otherwise an empty string.
    fn apply_owner_limits(
        &mut self,
        now: &HostTelemetry,
        foreign: &[ForeignProcess],
        jobs: &[v1::ActiveJob],
    ) -> String {
        let input = OwnerPolicyInput {
            telemetry: now,
            minute: wire::clock::minute_of_day(),
            foreign_processes: foreign,
            idle: jobs.is_empty(),
        };
        let blocked = self.owner_policy.blocked_reason(&input);
        let changed =
            self.handle.state.accepts_work.send_replace(blocked.is_none()) != blocked.is_none();
        match &blocked {
            Some(why) if changed => {
                tracing::info!(why, "takes no new work, finishes current jobs");
            }
            None if changed && self.has_sampled => tracing::info!("takes work again"),
            _ => {}
        }
        self.has_sampled = true;
        self.set_trouble("box", blocked.as_ref().map(|why| format!("takes no new work: {why}")));
        blocked.unwrap_or_default()
    }
}

impl Drop for HostGuard {
    fn drop(&mut self) {
        if !self.reaction_note.is_empty() {
            self.process_groups.resume_all();
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "told to a tenth")]
fn to_gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn to_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
