//! Elects one leader among coordinators by compare-and-set on a key. Two leaders at the same time
//! are harmless, because facts are write-once; no code may rely on there being exactly one.

mod election;

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};

use self::election::{ElectionState, ElectionStep, LeaderClaim};
use crate::{
    Bus, kv,
    request_error::{RequestError, code},
};

#[doc(hidden)]
pub use self::election::fuzzing;

const LEADER_KEY: &str = "leader";
const RELEASE_LIMIT: Duration = Duration::from_secs(2);
/// Longer than the lease of a coordinator in a cluster, with its margin.
const OBSERVE_LIMIT: Duration = Duration::from_secs(20);
const OBSERVE_INTERVAL: Duration = Duration::from_millis(100);

/// A handle to a candidate's campaign, which runs in a task until the handle is dropped or
/// released.
///
/// The candidate reads the claim, writes its own if the current one is released or expired, and
/// renews it four times per lease. Dropping the handle stops the campaign like a crash: others take
/// over after the lease. After [`LeadershipHandle::release_leadership`] they take over at once.
///
/// ```text
/// let mut leadership = bus.campaign_for_leadership("coordinator-1", lease);
/// while leadership.wait_changed().await { /* leading: act until the next change */ }
/// ```
pub struct LeadershipHandle {
    term: watch::Receiver<Option<LeaderTerm>>,
    reported_epoch: Option<u64>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

/// A term in which this candidate leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LeaderTerm {
    epoch: u64,
    /// Counted from before the last renewal was sent.
    until: Instant,
}

impl Bus {
    /// Starts a campaign for leadership under the name `holder`. A leader that crashes is replaced
    /// within 1.1 times `lease`: use 3 s with one server and 15 s with a cluster, whose failover
    /// takes up to 8 s.
    pub fn campaign_for_leadership(&self, holder: &str, lease: Duration) -> LeadershipHandle {
        let (publish, term) = watch::channel(None);
        let (stop, stopped) = oneshot::channel();
        let candidate = CampaignTask {
            bus: self.clone(),
            election: ElectionState::new(holder.to_owned(), lease),
            term_tx: publish,
        };
        let task = tokio::spawn(candidate.run(stopped));
        LeadershipHandle { term, reported_epoch: None, stop: Some(stop), task }
    }

    /// Returns the name of the candidate that leads, or `None` without a leader. As clocks differ,
    /// it waits for the next renewal: a quarter of a lease; without a leader up to 20 s.
    pub async fn find_leader(&self) -> Result<Option<String>, RequestError> {
        let first = self.kv_get(LEADER_KEY).await?;
        let claim =
            first.value.and_then(|value| serde_json::from_slice::<LeaderClaim>(&value).ok());
        let Some(claim) = claim.filter(|claim| !claim.released) else { return Ok(None) };
        let deadline = Instant::now() + claim.abandon_timeout().min(OBSERVE_LIMIT);
        while Instant::now() < deadline {
            sleep(OBSERVE_INTERVAL).await;
            let now = self.kv_get(LEADER_KEY).await?;
            if now.revision != first.revision {
                let newer =
                    now.value.and_then(|it| serde_json::from_slice::<LeaderClaim>(&it).ok());
                return Ok(newer.filter(|claim| !claim.released).map(|claim| claim.holder));
            }
        }
        Ok(None)
    }
}

impl LeadershipHandle {
    /// Returns true while this candidate leads.
    pub fn is_leader(&self) -> bool {
        self.current_epoch().is_some()
    }

    /// Returns the epoch of the current term, or `None` if this candidate does not lead. Epochs
    /// grow with every leader, even if the bucket was lost.
    pub fn current_epoch(&self) -> Option<u64> {
        self.term.borrow().filter(|term| Instant::now() < term.until).map(|term| term.epoch)
    }

    /// Waits until leadership is won (true) or lost (false). Cancel-safe.
    pub async fn wait_changed(&mut self) -> bool {
        let reported = self.reported_epoch;
        let changed = |term: &Option<LeaderTerm>| term.map(|term| term.epoch) != reported;
        let epoch = match self.term.wait_for(changed).await {
            Ok(term) => term.map(|term| term.epoch),
            // The campaign has ended: no change will follow.
            Err(_) => std::future::pending().await,
        };
        self.reported_epoch = epoch;
        epoch.is_some()
    }

    /// Stops the campaign and releases a held claim, so that another candidate takes over at once.
    pub async fn release_leadership(mut self) {
        if let Some(stop) = self.stop.take() {
            // This fails only if the campaign has ended.
            let _ = stop.send(());
            let _ = (&mut self.task).await;
        }
    }
}

/// Stops without releasing the claim, as a crash would.
impl Drop for LeadershipHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads after a wake-up, the latest first.
const RECHECK_DELAYS: [Duration; 4] = [
    Duration::from_millis(2000),
    Duration::from_millis(500),
    Duration::from_millis(100),
    Duration::from_millis(20),
];

/// Performs the steps of an [`ElectionState`] on the bucket.
struct CampaignTask {
    bus: Bus,
    election: ElectionState,
    term_tx: watch::Sender<Option<LeaderTerm>>,
}

impl CampaignTask {
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) {
        // Every write of the key, even a refused one, wakes the other candidates.
        let mut wakes = self.bus.shared.client.subscribe(kv::key_subject(LEADER_KEY)).await.ok();
        // The write that woke this task may not be stored yet; a read would then return the old
        // claim. Read several times.
        let mut rechecks = Vec::new();
        loop {
            let nonce = self.bus.shared.client.new_inbox();
            let step = self.election.next_step(Instant::now(), wire::clock::unix_millis(), nonce);
            match step {
                ElectionStep::Read => self.read_claim().await,
                ElectionStep::Write { claim, revision } => self.write_claim(claim, revision).await,
                ElectionStep::Wait { until } => {
                    let follower = self.election.current_term().is_none();
                    let wake = async {
                        match &mut wakes {
                            Some(wakes) if follower => drop(wakes.next().await),
                            _ => std::future::pending().await,
                        }
                    };
                    let recheck = rechecks.last().copied();
                    tokio::select! {
                        () = sleep_until(until) => {}
                        () = wake => {
                            self.election.request_read();
                            rechecks = RECHECK_DELAYS.map(|after| Instant::now() + after).to_vec();
                        }
                        () = sleep_until(recheck.unwrap_or(until)), if recheck.is_some() => {
                            rechecks.pop();
                            self.election.request_read();
                        }
                        _ = &mut stopped => break,
                    }
                }
            }
            self.publish_term();
        }
        self.release_claim().await;
    }

    async fn read_claim(&mut self) {
        let limit = self.election.request_limit();
        match timeout(limit, self.bus.kv_get(LEADER_KEY)).await {
            Ok(Ok(entry)) => {
                let claim = entry.value.and_then(|value| serde_json::from_slice(&value).ok());
                self.election.record_read(Instant::now(), entry.revision, claim);
            }
            Ok(Err(error)) => self.record_failure(&error),
            Err(_) => self.record_failure(&RequestError::TimedOut { limit }),
        }
    }

    async fn write_claim(&mut self, claim: LeaderClaim, revision: u64) {
        // A success after this deadline is useless.
        let sent = Instant::now();
        let deadline = sent + self.election.request_limit();
        let value = Bytes::from(claim.to_json());
        match timeout_at(deadline, self.bus.kv_put(LEADER_KEY, value, Some(revision))).await {
            Ok(Ok(revision)) => self.election.record_write(sent, revision, claim),
            Ok(Err(error)) if error.has_server_code(code::WRONG_LAST_SEQUENCE) => {
                self.election.request_read();
            }
            Ok(Err(error)) => self.record_failure(&error),
            Err(_) => self.record_failure(&RequestError::TimedOut { limit: deadline - sent }),
        }
    }

    fn record_failure(&mut self, error: &RequestError) {
        tracing::debug!(%error, "the election could not reach the bus");
        self.election.record_failure(Instant::now());
    }

    fn publish_term(&self) {
        let term = self.election.current_term().map(|(epoch, until)| LeaderTerm { epoch, until });
        self.term_tx.send_if_modified(|current| {
            let changed = current.map(|term| term.epoch) != term.map(|term| term.epoch);
            if changed {
                tracing::info!(epoch = term.map(|term| term.epoch), "leadership changed");
            }
            *current = term;
            changed
        });
    }

    async fn release_claim(mut self) {
        let resignation = self.election.take_release();
        self.term_tx.send_replace(None);
        if let Some((claim, revision)) = resignation {
            let put = self.bus.kv_put(LEADER_KEY, claim.to_json().into(), Some(revision));
            if !matches!(timeout(RELEASE_LIMIT, put).await, Ok(Ok(_))) {
                tracing::debug!("could not release leadership");
            }
        }
    }
}
