//! Electing one leader among coordinators by compare-and-set on a key. It only avoids
//! duplicated effort: facts are write-once, so two leaders at a time do no harm, and
//! nothing may rely on there being one.

mod election;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::StreamExt;
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use self::election::{Claim, Election, Step};
use crate::{
    Bus, kv,
    request::{RequestError, code},
};

#[doc(hidden)]
pub use self::election::fuzzing;

const KEY: &str = "leader";
/// A clean stop waits this long for the server to hear of it.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// A candidate that campaigns until it is dropped or released.
pub struct Leadership {
    term: watch::Receiver<Option<Term>>,
    /// What `changed` last told.
    told: Option<u64>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Term {
    epoch: u64,
    /// Counted from before the last renewal was sent.
    until: Instant,
}

impl Bus {
    /// Campaigns for leadership under the name `holder`. A leader that crashes is replaced
    /// within `lease` and a tenth; 3 s suits one server, 15 s a cluster (its own failover takes
    /// up to 8 s).
    pub fn leadership(&self, holder: &str, lease: Duration) -> Leadership {
        let (publish, term) = watch::channel(None);
        let (stop, stopped) = oneshot::channel();
        let candidate = Candidate {
            bus: self.clone(),
            election: Election::new(holder.to_owned(), lease),
            publish,
        };
        let task = tokio::spawn(candidate.run(stopped));
        Leadership { term, told: None, stop: Some(stop), task }
    }
}

impl Leadership {
    pub fn is_leader(&self) -> bool {
        self.epoch().is_some()
    }

    /// Grows with every leader, even over a lost bucket; None while another leads.
    pub fn epoch(&self) -> Option<u64> {
        self.term.borrow().filter(|term| Instant::now() < term.until).map(|term| term.epoch)
    }

    /// Waits until leadership is won or lost; true when it was won. Cancel-safe.
    pub async fn changed(&mut self) -> bool {
        let told = self.told;
        let changed = |term: &Option<Term>| term.map(|term| term.epoch) != told;
        let epoch = match self.term.wait_for(changed).await {
            Ok(term) => term.map(|term| term.epoch),
            // The campaign is over: nothing will ever change again.
            Err(_) => std::future::pending().await,
        };
        self.told = epoch;
        epoch.is_some()
    }

    /// Stops campaigning and, when leading, lets another take over at once.
    pub async fn release(mut self) {
        if let Some(stop) = self.stop.take() {
            // Fails only when the campaign has ended.
            let _ = stop.send(());
            let _ = (&mut self.task).await;
        }
    }
}

/// Dropping stops the campaign without a word, as a crash would; see `release`.
impl Drop for Leadership {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// After a wake-up, latest first.
const RECHECKS: [Duration; 4] = [
    Duration::from_millis(2000),
    Duration::from_millis(500),
    Duration::from_millis(100),
    Duration::from_millis(20),
];

struct Candidate {
    bus: Bus,
    election: Election,
    publish: watch::Sender<Option<Term>>,
}

impl Candidate {
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) {
        // Every write of the key, even a refused one, wakes the others.
        let mut wakes = self.bus.shared.client.subscribe(kv::subject(KEY)).await.ok();
        // What woke us may not be on the server's disk yet: a read then still finds the old.
        let mut again = Vec::new();
        loop {
            let nonce = self.bus.shared.client.new_inbox();
            let step = self.election.step(Instant::now(), unix_ms(), nonce);
            match step {
                Step::Read => self.read().await,
                Step::Write { claim, revision } => self.write(claim, revision).await,
                Step::Wait { until } => {
                    let follower = self.election.term().is_none();
                    let wake = async {
                        match &mut wakes {
                            Some(wakes) if follower => drop(wakes.next().await),
                            _ => std::future::pending().await,
                        }
                    };
                    let recheck = again.last().copied();
                    tokio::select! {
                        () = sleep_until(until) => {}
                        () = wake => {
                            self.election.look_again();
                            again = RECHECKS.map(|after| Instant::now() + after).to_vec();
                        }
                        () = sleep_until(recheck.unwrap_or(until)), if recheck.is_some() => {
                            again.pop();
                            self.election.look_again();
                        }
                        _ = &mut stopped => break,
                    }
                }
            }
            self.announce();
        }
        self.resign().await;
    }

    async fn read(&mut self) {
        let limit = self.election.request_limit();
        match timeout(limit, self.bus.kv_get(KEY)).await {
            Ok(Ok(entry)) => {
                let claim = entry.value.and_then(|value| serde_json::from_slice(&value).ok());
                self.election.saw(Instant::now(), entry.revision, claim);
            }
            Ok(Err(error)) => self.failed(&error),
            Err(_) => self.failed(&RequestError::TimedOut { limit }),
        }
    }

    async fn write(&mut self, claim: Claim, revision: u64) {
        // Past it a success is worth nothing.
        let sent = Instant::now();
        let deadline = sent + self.election.request_limit();
        let value = Bytes::from(claim.to_json());
        match timeout_at(deadline, self.bus.kv_put(KEY, value, Some(revision))).await {
            Ok(Ok(revision)) => self.election.wrote(sent, revision, claim),
            Ok(Err(error)) if error.is_code(code::WRONG_LAST_SEQUENCE) => {
                self.election.look_again();
            }
            Ok(Err(error)) => self.failed(&error),
            Err(_) => self.failed(&RequestError::TimedOut { limit: deadline - sent }),
        }
    }

    fn failed(&mut self, error: &RequestError) {
        tracing::debug!(%error, "the election could not reach the bus");
        self.election.failed(Instant::now());
    }

    fn announce(&self) {
        let term = self.election.term().map(|(epoch, until)| Term { epoch, until });
        self.publish.send_if_modified(|current| {
            let changed = current.map(|term| term.epoch) != term.map(|term| term.epoch);
            if changed {
                tracing::info!(epoch = term.map(|term| term.epoch), "leadership changed");
            }
            *current = term;
            changed
        });
    }

    async fn resign(mut self) {
        let resignation = self.election.resignation();
        self.publish.send_replace(None);
        if let Some((claim, revision)) = resignation {
            let put = self.bus.kv_put(KEY, claim.to_json().into(), Some(revision));
            if !matches!(timeout(RELEASE_LIMIT, put).await, Ok(Ok(_))) {
                tracing::debug!("the release of leadership did not get through");
            }
        }
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
