//! The decisions of one candidate. No clock, no network: times and answers come in,
//! the next step comes out. Others' clocks are never compared with ours, only how long
//! their claim has stood unchanged while we watched.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// A leader renews this often within its lease.
const RENEWALS: u32 = 4;
/// Failed requests are repeated this often within a lease.
const RETRIES: u32 = 16;
/// Added before a claim counts as abandoned, as a share of its lease: pauses and late reads.
const MARGIN: u32 = 10;
/// No coordinator leases for longer: a claim that says so must not lock out all others.
const LONGEST_LEASE: Duration = Duration::from_secs(3600);
const SHORTEST_REQUEST: Duration = Duration::from_millis(250);

/// What stands under the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) holder: String,
    /// Never goes back, not even when the bucket was lost: at least the time of the claim.
    pub(super) epoch: u64,
    pub(super) lease_ms: u64,
    /// Tells our own write from others' when its answer was lost.
    pub(super) nonce: String,
    pub(super) released: bool,
}

impl Claim {
    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a claim has only string keys")
    }

    fn abandoned_after(&self) -> Duration {
        let lease = Duration::from_millis(self.lease_ms).min(LONGEST_LEASE);
        lease + lease / MARGIN
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Read,
    /// Compare and set over this revision.
    Write {
        claim: Claim,
        revision: u64,
    },
    Wait {
        until: Instant,
    },
}

#[derive(Debug)]
pub(super) struct Election {
    holder: String,
    lease: Duration,
    seen: Option<Seen>,
    term: Option<Held>,
    /// Our last write, until we know what became of it.
    pending: Option<(Claim, Instant)>,
    retry_at: Option<Instant>,
    read_due: bool,
}

#[derive(Debug)]
struct Seen {
    revision: u64,
    claim: Option<Claim>,
    /// When we first saw this revision.
    since: Instant,
    read_at: Instant,
}

#[derive(Debug)]
struct Held {
    claim: Claim,
    revision: u64,
    sent: Instant,
}

impl Election {
    pub(super) fn new(holder: String, lease: Duration) -> Self {
        Self {
            holder,
            lease,
            seen: None,
            term: None,
            pending: None,
            retry_at: None,
            read_due: true,
        }
    }

    /// Epoch and end of our term, when we have one.
    pub(super) fn term(&self) -> Option<(u64, Instant)> {
        self.term.as_ref().map(|held| (held.claim.epoch, held.sent + self.lease))
    }

    pub(super) fn request_limit(&self) -> Duration {
        (self.lease / RENEWALS).max(SHORTEST_REQUEST)
    }

    /// What to do now.
    pub(super) fn step(&mut self, now: Instant, unix_ms: u64, nonce: String) -> Step {
        if self.term().is_some_and(|(_, until)| now >= until) {
            self.term = None;
            self.read_due = true;
        }
        if let Some(until) = self.retry_at.filter(|at| *at > now) {
            return Step::Wait { until };
        }
        self.retry_at = None;
        if self.read_due {
            return Step::Read;
        }
        match (&self.term, &self.seen) {
            (Some(held), _) => {
                let renew_at = held.sent + self.lease / RENEWALS;
                if now < renew_at {
                    return Step::Wait { until: renew_at };
                }
                let (epoch, revision) = (held.claim.epoch, held.revision);
                self.claim(now, epoch, revision, nonce)
            }
            (None, Some(seen)) => self.follow(now, unix_ms, nonce, seen.read_at, seen.revision),
            (None, None) => Step::Read,
        }
    }

    fn follow(
        &mut self,
        now: Instant,
        unix_ms: u64,
        nonce: String,
        read_at: Instant,
        revision: u64,
    ) -> Step {
        let claim =
            self.seen.as_ref().and_then(|seen| seen.claim.as_ref().map(|c| (c, seen.since)));
        let Some((claim, since)) = claim.filter(|(claim, _)| !claim.released) else {
            let previous = claim.map_or(0, |(claim, _)| claim.epoch);
            return self.claim(now, unix_ms.max(previous.saturating_add(1)), revision, nonce);
        };
        let abandoned_at = since + claim.abandoned_after();
        if read_at >= abandoned_at {
            let epoch = unix_ms.max(claim.epoch.saturating_add(1));
            return self.claim(now, epoch, revision, nonce);
        }
        let until = abandoned_at.min(read_at + self.lease / 2);
        if now >= until {
            return Step::Read;
        }
        Step::Wait { until }
    }

    fn claim(&mut self, now: Instant, epoch: u64, revision: u64, nonce: String) -> Step {
        let claim = Claim {
            holder: self.holder.clone(),
            epoch,
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            nonce,
            released: false,
        };
        self.pending = Some((claim.clone(), now));
        Step::Write { claim, revision }
    }

    /// The key was read.
    pub(super) fn saw(&mut self, now: Instant, revision: u64, claim: Option<Claim>) {
        self.read_due = false;
        let ours = |held: &Claim| claim.as_ref().is_some_and(|claim| claim.nonce == held.nonce);
        if let Some((pending, sent)) = self.pending.take_if(|(pending, _)| ours(pending)) {
            self.term = Some(Held { claim: pending, revision, sent });
        } else if self.term.as_ref().is_some_and(|held| !ours(&held.claim)) {
            self.term = None;
        }
        match &mut self.seen {
            Some(seen) if seen.revision == revision => seen.read_at = now,
            seen => *seen = Some(Seen { revision, claim, since: now, read_at: now }),
        }
    }

    /// Our write was accepted.
    pub(super) fn wrote(&mut self, sent: Instant, revision: u64, claim: Claim) {
        self.pending = None;
        self.term = Some(Held { claim, revision, sent });
    }

    /// Somebody wrote the key.
    pub(super) fn look_again(&mut self) {
        self.read_due = true;
    }

    /// A request failed: whether it had an effect is unknown.
    pub(super) fn failed(&mut self, now: Instant) {
        self.read_due = true;
        self.retry_at = Some(now + self.lease / RETRIES);
    }

    /// What to write on the way out.
    pub(super) fn resignation(&mut self) -> Option<(Claim, u64)> {
        let held = self.term.take()?;
        Some((Claim { released: true, ..held.claim }, held.revision))
    }
}

/// Follows whatever stands under the key, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    use super::{Claim, Duration, Election, Instant};

    pub fn claim(value: &[u8]) {
        let claim: Option<Claim> = serde_json::from_slice(value).ok();
        let lease = Duration::from_secs(3);
        let now = Instant::now();
        let mut me = Election::new("me".to_owned(), lease);
        me.saw(now, 1, claim.clone());
        me.step(now, 1, "a".to_owned());
        me.saw(now + lease * 1000, 1, claim);
        me.step(now + lease * 1000, u64::MAX, "b".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn candidate(name: &str) -> Election {
        Election::new(name.to_owned(), LEASE)
    }

    fn write(step: Step) -> (Claim, u64) {
        match step {
            Step::Write { claim, revision } => (claim, revision),
            other => panic!("{other:?} is not a write"),
        }
    }

    /// A leader at revision 1, and the time its claim was sent.
    fn elected(now: Instant) -> Election {
        let mut leader = candidate("a");
        leader.saw(now, 0, None);
        let (claim, _) = write(leader.step(now, 500, "n1".into()));
        leader.wrote(now, 1, claim);
        leader
    }

    fn others_claim(released: bool) -> Claim {
        let (holder, nonce) = ("b".into(), "x".into());
        Claim { holder, epoch: 900, lease_ms: 10_000, nonce, released }
    }

    #[test]
    fn a_missing_or_released_claim_is_taken_at_once_with_a_greater_epoch() {
        let now = Instant::now();
        for (claim, epoch) in [(None, 500), (Some(others_claim(true)), 901)] {
            let mut me = candidate("a");
            assert_eq!(me.step(now, 500, "n".into()), Step::Read);
            me.saw(now, 7, claim);
            let (claim, revision) = write(me.step(now, 500, "n".into()));
            assert_eq!((claim.epoch, revision), (epoch, 7));
        }
    }

    #[test]
    fn a_claim_that_makes_no_sense_is_taken_over() {
        let now = Instant::now();
        let claim = Claim { epoch: u64::MAX, lease_ms: u64::MAX, ..others_claim(false) };
        let mut me = candidate("a");
        me.saw(now, 7, Some(claim.clone()));
        let later = now + LONGEST_LEASE * 2;
        me.saw(later, 7, Some(claim));
        assert_eq!(write(me.step(later, 500, "n".into())).0.epoch, u64::MAX);
    }

    #[test]
    fn a_claim_is_abandoned_only_when_unchanged_for_its_lease_and_margin() {
        let now = Instant::now();
        let mut me = candidate("a");
        me.saw(now, 7, Some(others_claim(false)));
        me.saw(now + LEASE, 7, Some(others_claim(false)));
        assert!(matches!(me.step(now + LEASE, 500, "n".into()), Step::Wait { .. }));
        me.saw(now + Duration::from_secs(11), 8, Some(others_claim(false)));
        let later = now + Duration::from_secs(12);
        assert!(matches!(me.step(later, 500, "n".into()), Step::Wait { .. }), "it was renewed");
        let end = later + Duration::from_secs(10);
        assert_eq!(me.step(end, 500, "n".into()), Step::Read, "look before taking");
        me.saw(end, 8, Some(others_claim(false)));
        write(me.step(end, 500, "n".into()));
    }

    #[test]
    fn a_term_counts_from_before_the_renewal_was_sent_and_ends_without_asking() {
        let now = Instant::now();
        let mut leader = elected(now);
        let (claim, revision) = write(leader.step(now + LEASE / 4, 600, "n2".into()));
        assert_eq!((claim.epoch, revision), (500, 1));
        leader.failed(now + LEASE / 2);
        assert_eq!(leader.term(), Some((500, now + LEASE)));
        leader.step(now + LEASE, 600, "n3".into());
        assert_eq!(leader.term(), None);
    }

    #[test]
    fn a_renewal_whose_answer_was_lost_is_adopted_and_another_claim_ends_the_term() {
        let now = Instant::now();
        let mut leader = elected(now);
        let sent = now + LEASE / 4;
        let (claim, _) = write(leader.step(sent, 600, "n2".into()));
        leader.failed(sent);
        leader.saw(sent, 2, Some(claim));
        assert_eq!(leader.term(), Some((500, sent + LEASE)));
        leader.saw(sent, 3, Some(others_claim(false)));
        assert_eq!(leader.term(), None);
    }
}
