//! The agent's live status: its identity, jobs, speed and troubles, shared by its tasks and
//! announced on the bus.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bus::Bus;
use doctor::DoctorFinding;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use wire::{WorkKind, v1};

const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(1);

/// Between two jobs, the next one arrives sooner than this.
const IDLE_GRACE: Duration = Duration::from_millis(100);

/// Identifies a job: several roles of an agent may hold the same fact.
pub(crate) type JobKey = (WorkKind, u64);

/// The agent's live status. Cheap to clone; clones share one status.
#[derive(Debug, Clone)]
pub(crate) struct LiveStatus {
    status: Arc<Mutex<v1::AgentStatus>>,
    /// By the kind of work and the sequence of the fact that ordered the job.
    jobs: Arc<Mutex<BTreeMap<JobKey, v1::ActiveJob>>>,
    /// By role or subsystem.
    troubles: Arc<Mutex<BTreeMap<&'static str, StatusTrouble>>>,
    /// Notified when the last job has ended.
    idle: Arc<Notify>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StatusTrouble {
    pub message: String,
    pub quarantine: bool,
}

/// The progress of one job in the agent's status. Dropping the last clone removes the job from the
/// status.
#[derive(Debug, Clone)]
pub struct JobProgress {
    entry: Arc<ProgressEntry>,
}

#[derive(Debug)]
struct ProgressEntry {
    key: JobKey,
    jobs: Arc<Mutex<BTreeMap<JobKey, v1::ActiveJob>>>,
    idle: Arc<Notify>,
}

impl LiveStatus {
    pub(crate) fn new(status: v1::AgentStatus) -> Self {
        Self {
            status: Arc::new(Mutex::new(status)),
            jobs: Arc::default(),
            troubles: Arc::default(),
            idle: Arc::default(),
        }
    }

    /// Adds a job under a key, which must be unique.
    pub(crate) fn add_job(&self, key: JobKey, job: v1::ActiveJob) -> JobProgress {
        if let Ok(mut jobs) = self.jobs.lock() {
            jobs.insert(key, job);
        }
        let (jobs, idle) = (self.jobs.clone(), self.idle.clone());
        JobProgress { entry: Arc::new(ProgressEntry { key, jobs, idle }) }
    }

    pub(crate) fn update_status(&self, change: impl FnOnce(&mut v1::AgentStatus)) {
        if let Ok(mut status) = self.status.lock() {
            change(&mut status);
        }
    }

    /// Adds a role to the enabled roles, and removes it from the withheld ones.
    pub(crate) fn enable_role(&self, role: &str) {
        self.update_status(|status| {
            status.withheld.retain(|withheld| withheld.role != role);
            if !status.roles.iter().any(|has| has == role) {
                status.roles.push(role.to_owned());
                status.roles.sort();
            }
        });
    }

    pub(crate) fn withhold_role(&self, role: &str, finding: &DoctorFinding) {
        let withheld = withheld_role(role, finding);
        self.update_status(|status| {
            status.withheld.retain(|withheld| withheld.role != role);
            status.withheld.push(withheld);
        });
    }

    pub(crate) fn set_trouble(&self, role: &'static str, trouble: Option<StatusTrouble>) {
        if let Ok(mut troubles) = self.troubles.lock() {
            match trouble {
                Some(trouble) => drop(troubles.insert(role, trouble)),
                None => drop(troubles.remove(role)),
            }
        }
    }

    pub(crate) fn active_jobs(&self) -> Vec<v1::ActiveJob> {
        self.jobs.lock().map(|jobs| jobs.values().cloned().collect()).unwrap_or_default()
    }

    /// Returns the status as of now: quarantined if any trouble is a quarantine, and draining while
    /// the owner's limits pause the host.
    pub(crate) fn current_status(&self) -> v1::AgentStatus {
        let mut status = self.status.lock().map(|status| status.clone()).unwrap_or_default();
        if let Ok(troubles) = self.troubles.lock() {
            let messages =
                troubles.iter().map(|(role, trouble)| format!("{role}: {}", trouble.message));
            status.trouble = messages.collect::<Vec<_>>().join("; ");
            let ready = status.state() == v1::agent_status::State::Ready;
            if ready && troubles.values().any(|trouble| trouble.quarantine) {
                status.state = v1::agent_status::State::Quarantined.into();
            }
        }
        status.seen_at = Some(wire::clock::now());
        status.rss_bytes = resident_bytes();
        status.jobs = self.active_jobs();
        let is_paused = status.telemetry.as_ref().is_some_and(|now| !now.resting.is_empty());
        if is_paused && status.state() == v1::agent_status::State::Ready {
            // This lasts until the owner's limits are met.
            status.state = v1::agent_status::State::Draining.into();
        }
        status
    }

    /// Announces the status each second and as soon as the agent is idle, and records it for late
    /// joiners at each `record_interval`, because a record is a durable write. When `stop` is
    /// cancelled it records the state stopped and returns. `refresh` updates parts of the status
    /// before each announcement.
    pub(crate) async fn announce_until_stopped(
        self,
        bus: Bus,
        record_interval: Duration,
        refresh: impl Fn(&mut v1::AgentStatus),
        stop: CancellationToken,
    ) {
        let mut tick = tokio::time::interval(ANNOUNCE_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let record_every = record_interval.as_secs().max(1);
        let mut ticks = 0_u64;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.wait_until_idle() => {
                    self.announce_status(&bus, false).await;
                    continue;
                }
                _ = tick.tick() => {}
            }
            self.update_status(&refresh);
            self.announce_status(&bus, ticks.is_multiple_of(record_every)).await;
            ticks = ticks.wrapping_add(1);
        }
        self.update_status(|status| status.state = v1::agent_status::State::Stopped.into());
        self.announce_status(&bus, true).await;
    }

    /// Waits for a pause that is longer than between two jobs; other agents' jobs may then be moved
    /// to this one. Cancel-safe.
    async fn wait_until_idle(&self) {
        loop {
            self.idle.notified().await;
            tokio::time::sleep(IDLE_GRACE).await;
            if self.active_jobs().is_empty() {
                return;
            }
        }
    }

    /// Errors are only logged, because the next message replaces a lost one.
    pub(crate) async fn announce_status(&self, bus: &Bus, record: bool) {
        let status = self.current_status();
        if let Err(error) = bus.announce_status(&status).await {
            tracing::debug!(%error, "announcing");
        }
        if record && let Err(error) = bus.record_status(&status).await {
            tracing::warn!(%error, "recording the agent's status failed");
        }
    }
}

impl JobProgress {
    /// Sets the progress to `done` of `total`, with a note for users. The agent's next status
    /// contains it.
    pub fn set_progress(&self, done: u32, total: u32, note: impl Into<String>) {
        self.update_job(|job| (job.done, job.total, job.note) = (done, total, note.into()));
    }

    pub(crate) fn set_waiting(&self, waits: bool, note: impl Into<String>) {
        self.update_job(|job| (job.waits, job.note) = (waits, note.into()));
    }

    /// Sets the note for users, and keeps the progress. The agent's next status contains it.
    pub fn set_note(&self, note: impl Into<String>) {
        self.update_job(|job| job.note = note.into());
    }

    fn update_job(&self, change: impl FnOnce(&mut v1::ActiveJob)) {
        if let Ok(mut jobs) = self.entry.jobs.lock()
            && let Some(job) = jobs.get_mut(&self.entry.key)
        {
            change(job);
        }
    }
}

impl Drop for ProgressEntry {
    fn drop(&mut self) {
        if let Ok(mut jobs) = self.jobs.lock() {
            jobs.remove(&self.key);
            if jobs.is_empty() {
                self.idle.notify_one();
            }
        }
    }
}

fn withheld_role(role: &str, finding: &DoctorFinding) -> v1::Withheld {
    v1::Withheld {
        role: role.to_owned(),
        finding: finding.id.to_owned(),
        seen: finding.seen.clone(),
        remedy: finding.remedy.clone(),
    }
}

/// Reads `/proc/self/statm`; 0 if that file is missing.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

pub(crate) fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}
