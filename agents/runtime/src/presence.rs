//! What an agent says of itself: who it is, what it works on, how fast it is.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bus::Bus;
use hardware::doctor::Finding;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use wire::{Timestamp, v1};

/// Between two messages on the bus.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// A box between two jobs has the next one by then.
const IDLE_AFTER: Duration = Duration::from_millis(100);

/// Between two records for late joiners; each is a durable write.
const RECORD_EVERY: u32 = 10;

/// The agent's own account, shared by its tasks.
#[derive(Debug, Clone)]
pub(crate) struct Presence {
    status: Arc<Mutex<v1::AgentStatus>>,
    jobs: Arc<Mutex<BTreeMap<u64, v1::ActiveJob>>>,
    /// By role; empty when all is well.
    troubles: Arc<Mutex<BTreeMap<&'static str, Trouble>>>,
    /// The last job has ended.
    idle: Arc<Notify>,
}

/// What keeps a role from working.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub message: String,
    pub quarantine: bool,
}

/// How far one job is. Dropping the last clone takes the job off the account.
#[derive(Debug, Clone)]
pub struct Progress {
    entry: Arc<Entry>,
}

#[derive(Debug)]
struct Entry {
    key: u64,
    jobs: Arc<Mutex<BTreeMap<u64, v1::ActiveJob>>>,
    idle: Arc<Notify>,
}

impl Presence {
    pub(crate) fn new(status: v1::AgentStatus) -> Self {
        Self {
            status: Arc::new(Mutex::new(status)),
            jobs: Arc::default(),
            troubles: Arc::default(),
            idle: Arc::default(),
        }
    }

    /// Puts a job on the account.
    pub(crate) fn begin(&self, key: u64, job: v1::ActiveJob) -> Progress {
        if let Ok(mut jobs) = self.jobs.lock() {
            jobs.insert(key, job);
        }
        let (jobs, idle) = (self.jobs.clone(), self.idle.clone());
        Progress { entry: Arc::new(Entry { key, jobs, idle }) }
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut v1::AgentStatus)) {
        if let Ok(mut status) = self.status.lock() {
            change(&mut status);
        }
    }

    /// A role is done here from now on.
    pub(crate) fn take_up(&self, role: &str) {
        self.update(|status| {
            status.withheld.retain(|withheld| withheld.role != role);
            if !status.roles.iter().any(|has| has == role) {
                status.roles.push(role.to_owned());
                status.roles.sort();
            }
        });
    }

    /// A role is not done here, for what was found.
    pub(crate) fn withhold(&self, role: &str, finding: &Finding) {
        let withheld = withheld(role, finding);
        self.update(|status| {
            status.withheld.retain(|withheld| withheld.role != role);
            status.withheld.push(withheld);
        });
    }

    /// What keeps a role from working, until it is said to be over.
    pub(crate) fn trouble(&self, role: &'static str, trouble: Option<Trouble>) {
        if let Ok(mut troubles) = self.troubles.lock() {
            match trouble {
                Some(trouble) => drop(troubles.insert(role, trouble)),
                None => drop(troubles.remove(role)),
            }
        }
    }

    /// What is at hand.
    pub(crate) fn jobs(&self) -> Vec<v1::ActiveJob> {
        self.jobs.lock().map(|jobs| jobs.values().cloned().collect()).unwrap_or_default()
    }

    pub(crate) fn now(&self) -> v1::AgentStatus {
        let mut status = self.status.lock().map(|status| status.clone()).unwrap_or_default();
        if let Ok(troubles) = self.troubles.lock() {
            let said =
                troubles.iter().map(|(role, trouble)| format!("{role}: {}", trouble.message));
            status.trouble = said.collect::<Vec<_>>().join("; ");
            let ready = status.state() == v1::agent_status::State::Ready;
            if ready && troubles.values().any(|trouble| trouble.quarantine) {
                status.state = v1::agent_status::State::Quarantined.into();
            }
        }
        status.seen_at = Some(timestamp_now());
        status.rss_bytes = resident_bytes();
        status.jobs = self.jobs();
        let rests = status.telemetry.as_ref().is_some_and(|now| !now.resting.is_empty());
        if rests && status.state() == v1::agent_status::State::Ready {
            // Until its owner's wishes are met.
            status.state = v1::agent_status::State::Draining.into();
        }
        status
    }

    /// Speaks until stopped, and says goodbye. It looks again at what changes by itself.
    pub(crate) async fn speak(
        &self,
        bus: &Bus,
        look: impl Fn(&mut v1::AgentStatus),
        stop: CancellationToken,
    ) {
        let mut tick = tokio::time::interval(SAY_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut ticks = 0_u32;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.idles() => {
                    self.say(bus, false).await;
                    continue;
                }
                _ = tick.tick() => {}
            }
            self.update(&look);
            self.say(bus, ticks.is_multiple_of(RECORD_EVERY)).await;
            ticks = ticks.wrapping_add(1);
        }
        self.update(|status| status.state = v1::agent_status::State::Stopped.into());
        self.say(bus, true).await;
    }

    /// Resolves when there is nothing to do, and not just between two jobs: what others still
    /// hold may be done sooner here. Cancel-safe.
    async fn idles(&self) {
        loop {
            self.idle.notified().await;
            tokio::time::sleep(IDLE_AFTER).await;
            if self.jobs().is_empty() {
                return;
            }
        }
    }

    /// A lost status message is followed by the next: errors are only noted.
    pub(crate) async fn say(&self, bus: &Bus, record: bool) {
        let status = self.now();
        if let Err(error) = bus.announce(&status).await {
            tracing::debug!(%error, "announcing");
        }
        if record && let Err(error) = bus.record_status(&status).await {
            tracing::warn!(%error, "recording the agent's status");
        }
    }
}

impl Progress {
    /// `done` of `total`, and what a person may want to know of it.
    pub fn set(&self, done: u32, total: u32, note: impl Into<String>) {
        if let Ok(mut jobs) = self.entry.jobs.lock()
            && let Some(job) = jobs.get_mut(&self.entry.key)
        {
            (job.done, job.total, job.note) = (done, total, note.into());
        }
    }
}

impl Progress {
    /// Held, and not worked on, for as long as `waits`.
    pub(crate) fn waits(&self, waits: bool, note: impl Into<String>) {
        if let Ok(mut jobs) = self.entry.jobs.lock()
            && let Some(job) = jobs.get_mut(&self.entry.key)
        {
            (job.waits, job.note) = (waits, note.into());
        }
    }

    /// What a person may want to know of it.
    pub fn note(&self, note: impl Into<String>) {
        if let Ok(mut jobs) = self.entry.jobs.lock()
            && let Some(job) = jobs.get_mut(&self.entry.key)
        {
            job.note = note.into();
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Ok(mut jobs) = self.jobs.lock() {
            jobs.remove(&self.key);
            if jobs.is_empty() {
                self.idle.notify_one();
            }
        }
    }
}

fn withheld(role: &str, finding: &Finding) -> v1::Withheld {
    v1::Withheld {
        role: role.to_owned(),
        finding: finding.id.to_owned(),
        seen: finding.seen.clone(),
        remedy: finding.remedy.clone(),
    }
}

pub(crate) fn timestamp_now() -> Timestamp {
    wire::timestamp(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Resident memory of this process, from `/proc/self/statm`; 0 where there is none.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Memory of the box.
pub(crate) fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}
