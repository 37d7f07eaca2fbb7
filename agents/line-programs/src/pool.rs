//! Several processes of one program, which requests share.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use serde_json::{Map, Value};
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::{
    LineBounds, LineFailure, LineProgram, LineProgramError, ProgramLauncher,
    backoff::RestartBackoff,
};

/// The longest time that a request waits for a program that failed before. If the pause before the
/// restart is longer, it fails at once.
const RESTART_WAIT_MAX: Duration = Duration::from_secs(1);

/// The number of checks for idle processes per idle timeout.
const IDLE_CHECKS: u32 = 4;

/// Attempts of a request whose process was ended because of another request.
const ATTEMPTS_MAX: u32 = 2;

/// The size and the bounds of a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolSettings {
    /// Maximum number of processes, at least 1.
    pub processes: usize,
    /// Maximum number of concurrent requests per process, at least 1.
    pub concurrent: usize,
    /// A process is ended after this time without requests.
    pub idle_timeout: Duration,
    pub bounds: LineBounds,
}

/// A pool of processes of one program. Cheap to clone; the processes end when the last clone and
/// the last lease are dropped.
///
/// A request takes the process with the fewest requests, and prefers a running one. A process that
/// ended is replaced when the next request needs it: at once after one failure, then after a pause
/// that doubles with each failure. Requests that would have to wait longer than a second fail with
/// the last problem, so a broken program fails a job within seconds.
#[derive(Clone)]
pub struct LineProgramPool {
    shared: Arc<PoolShared>,
}

struct PoolShared {
    launcher: Box<dyn ProgramLauncher>,
    settings: PoolSettings,
    /// One permit for each request that the processes may have at the same time.
    permits: Arc<Semaphore>,
    /// The process of each slot. Locked while it is being started.
    programs: Vec<AsyncMutex<Option<LineProgram>>>,
    state: Mutex<PoolState>,
}

/// The processes by their index, and their failures.
struct PoolState {
    slots: Vec<PoolSlot>,
    backoff: RestartBackoff,
    last_failure: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct PoolSlot {
    leases: usize,
    is_started: bool,
    last_use: Instant,
}

/// The right to send requests to one process of a pool: one at a time if the pool's processes are
/// not concurrent. The same process answers all of them, or none.
pub struct LeasedProgram {
    program: LineProgram,
    lease: SlotLease,
}

/// A slot's lease, which ends when this is dropped.
struct SlotLease {
    shared: Arc<PoolShared>,
    index: usize,
    _permit: OwnedSemaphorePermit,
}

impl LineProgramPool {
    /// Creates a pool; processes are started when requests need them. Must be called in a tokio
    /// runtime, in which a task ends idle processes.
    pub fn new(launcher: Box<dyn ProgramLauncher>, settings: PoolSettings) -> Self {
        let processes = settings.processes.max(1);
        let now = Instant::now();
        let slot = PoolSlot { leases: 0, is_started: false, last_use: now };
        let permits = processes.saturating_mul(settings.concurrent.max(1));
        let shared = Arc::new(PoolShared {
            launcher,
            settings,
            permits: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
            programs: (0..processes).map(|_| AsyncMutex::default()).collect(),
            state: Mutex::new(PoolState {
                slots: vec![slot; processes],
                backoff: RestartBackoff::default(),
                last_failure: None,
            }),
        });
        tokio::spawn(end_idle_programs(Arc::downgrade(&shared), settings.idle_timeout));
        Self { shared }
    }

    /// Sends one object to a process and returns its answer, both without their `id`. Waits until a
    /// process has room for it. The request is sent to a second process if the first one was ended
    /// because of another request.
    ///
    /// # Errors
    /// When no process can be started, or the process ends, hangs or breaks the protocol.
    pub async fn request_answer(
        &self,
        request: &Map<String, Value>,
        timeout: Duration,
    ) -> Result<Map<String, Value>, LineProgramError> {
        let mut attempt = 1;
        loop {
            let leased = self.lease_program().await?;
            match leased.request_answer(request.clone(), timeout).await {
                Err(error)
                    if error.failure == LineFailure::Interrupted && attempt < ATTEMPTS_MAX =>
                {
                    attempt += 1;
                }
                answered => return answered,
            }
        }
    }

    /// Waits for a process with room for a request, starts it if necessary, and reserves the room
    /// until the lease is dropped. Use it for several requests to the same process.
    ///
    /// # Errors
    /// When no process can be started now.
    pub async fn lease_program(&self) -> Result<LeasedProgram, LineProgramError> {
        let shared = &self.shared;
        let permit = Arc::clone(&shared.permits).acquire_owned().await;
        let closed = |_| LineProgramError::new(LineFailure::NotStarted, "the pool is closed");
        let permit = permit.map_err(closed)?;
        let index = shared.lock_state().lease_slot();
        let lease = SlotLease { shared: Arc::clone(shared), index, _permit: permit };
        let mut place = shared.programs[index].lock().await;
        if let Some(program) = place.as_ref().filter(|program| program.is_running()) {
            return Ok(LeasedProgram { program: program.clone(), lease });
        }
        *place = None;
        shared.wait_backoff().await?;
        let started = LineProgram::start(&*shared.launcher, shared.settings.bounds).await;
        let program = started.inspect_err(|error| shared.lock_state().record_failure(error))?;
        *place = Some(program.clone());
        shared.lock_state().slots[index].is_started = true;
        drop(place);
        Ok(LeasedProgram { program, lease })
    }
}

impl LeasedProgram {
    /// Sends one object to the process and returns its answer, both without their `id`. See
    /// [`LineProgram::request_answer`].
    ///
    /// # Errors
    /// When the request is too long, or the process ends, hangs or breaks the protocol.
    pub async fn request_answer(
        &self,
        request: Map<String, Value>,
        timeout: Duration,
    ) -> Result<Map<String, Value>, LineProgramError> {
        let answered = self.program.request_answer(request, timeout).await;
        let mut state = self.lease.shared.lock_state();
        match &answered {
            Ok(_) => state.backoff.record_answer(),
            Err(error) => {
                let has_ended = error.failure != LineFailure::Request;
                if has_ended && self.program.should_count_failure() {
                    state.record_failure(error);
                }
            }
        }
        drop(state);
        answered
    }

    /// Returns false once the process has ended.
    pub fn is_running(&self) -> bool {
        self.program.is_running()
    }
}

impl PoolShared {
    /// A panic while it was locked leaves it usable: each change is complete.
    fn lock_state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a process may be started again. Fails if that takes too long.
    async fn wait_backoff(&self) -> Result<(), LineProgramError> {
        let left = self.lock_state().pause_left();
        if left > RESTART_WAIT_MAX {
            let problem = self.lock_state().backoff.describe_failures(left);
            return Err(LineProgramError::new(LineFailure::NotStarted, problem));
        }
        tokio::time::sleep(left).await;
        Ok(())
    }

    /// Ends the processes that had no request for the idle timeout.
    fn end_idle(&self) {
        for (index, place) in self.programs.iter().enumerate() {
            // A locked one is in use.
            let Ok(mut place) = place.try_lock() else { continue };
            let mut state = self.lock_state();
            let slot = &mut state.slots[index];
            if slot.leases == 0 && slot.last_use.elapsed() >= self.settings.idle_timeout {
                slot.is_started = false;
                // Dropping the last handle closes its stdin.
                *place = None;
            }
        }
    }
}

impl PoolState {
    /// Chooses the slot with the fewest leases, and of these a started one. There is always one
    /// with room, as each lease has a permit.
    fn lease_slot(&mut self) -> usize {
        let order = |index: &usize| (self.slots[*index].leases, !self.slots[*index].is_started);
        let index = (0..self.slots.len()).min_by_key(order).unwrap_or_default();
        let slot = &mut self.slots[index];
        slot.leases += 1;
        slot.last_use = Instant::now();
        index
    }

    fn record_failure(&mut self, error: &LineProgramError) {
        self.backoff.record_failure(error.to_string());
        self.last_failure = Some(Instant::now());
    }

    fn pause_left(&self) -> Duration {
        let since = self.last_failure.map_or(Duration::MAX, |at| at.elapsed());
        self.backoff.pause().saturating_sub(since)
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let mut state = self.shared.lock_state();
        let slot = &mut state.slots[self.index];
        slot.leases = slot.leases.saturating_sub(1);
        slot.last_use = Instant::now();
    }
}

impl fmt::Debug for LineProgramPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LineProgramPool").field(&self.shared.settings).finish()
    }
}

impl fmt::Debug for LeasedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeasedProgram").field(&self.lease.index).finish()
    }
}

/// Ends idle processes until the pool is dropped.
async fn end_idle_programs(pool: Weak<PoolShared>, idle_timeout: Duration) {
    loop {
        tokio::time::sleep(idle_timeout / IDLE_CHECKS).await;
        match pool.upgrade() {
            Some(pool) => pool.end_idle(),
            None => return,
        }
    }
}
