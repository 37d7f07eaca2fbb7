//! Decides the steps of one candidate in a leader election, without clock and network. Clocks of
//! different hosts are never compared; only the time for which a claim stayed unchanged while this
//! candidate watched it counts.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

const RENEWALS_PER_LEASE: u32 = 4;
const RETRIES_PER_LEASE: u32 = 16;
/// One tenth of the lease is added before a claim counts as abandoned, for pauses and late reads.
const ABANDON_MARGIN_DIVISOR: u32 = 10;
/// Bounds the lease of another candidate's claim, so that a wrong one cannot lock out the others.
/// No coordinator uses a longer one.
const LEASE_MAX: Duration = Duration::from_secs(3600);
const REQUEST_LIMIT_MIN: Duration = Duration::from_millis(250);

/// The value of the leader key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaderClaim {
    pub(super) holder: String,
    /// Never decreases, even if the bucket was lost: at least the time of the claim in milliseconds
    /// since 1970.
    pub(super) epoch: u64,
    pub(super) lease_ms: u64,
    /// Recognises the candidate's own write if its answer was lost.
    pub(super) nonce: String,
    /// True if the holder gave up the leadership.
    pub(super) released: bool,
}

impl LeaderClaim {
    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a claim has only string keys")
    }

    /// Returns 1.1 times the lease, which is capped at one hour.
    pub(super) fn abandon_timeout(&self) -> Duration {
        let lease = Duration::from_millis(self.lease_ms).min(LEASE_MAX);
        lease + lease / ABANDON_MARGIN_DIVISOR
    }
}

/// The next action of a candidate.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ElectionStep {
    Read,
    Write { claim: LeaderClaim, revision: u64 },
    Wait { until: Instant },
}

/// One candidate: the claim last read, its own term if it leads, and a write whose outcome is
/// unknown.
///
/// * No claim read yet, or a request failed: read.
/// * Another claim holds: wait until it is abandoned, and read it every half lease.
/// * The claim is released or abandoned: write a claim with a higher epoch.
/// * Leading: renew every quarter of the lease; the term ends one lease after the last accepted
///   write was sent.
#[derive(Debug)]
pub(super) struct ElectionState {
    holder: String,
    lease: Duration,
    observed: Option<ObservedClaim>,
    term: Option<HeldTerm>,
    /// The write and the time at which it was sent.
    pending: Option<(LeaderClaim, Instant)>,
    retry_at: Option<Instant>,
    read_due: bool,
}

#[derive(Debug)]
struct ObservedClaim {
    revision: u64,
    claim: Option<LeaderClaim>,
    /// First read of this revision.
    since: Instant,
    read_at: Instant,
}

#[derive(Debug)]
struct HeldTerm {
    claim: LeaderClaim,
    revision: u64,
    sent_at: Instant,
}

impl ElectionState {
    pub(super) fn new(holder: String, lease: Duration) -> Self {
        Self {
            holder,
            lease,
            observed: None,
            term: None,
            pending: None,
            retry_at: None,
            read_due: true,
        }
    }

    pub(super) fn current_term(&self) -> Option<(u64, Instant)> {
        self.term.as_ref().map(|held| (held.claim.epoch, held.sent_at + self.lease))
    }

    /// Returns a quarter of the lease, at least 250 ms.
    pub(super) fn request_limit(&self) -> Duration {
        (self.lease / RENEWALS_PER_LEASE).max(REQUEST_LIMIT_MIN)
    }

    /// `unix_ms` is a lower bound for the epoch of a new claim; `nonce` must be unique.
    pub(super) fn next_step(&mut self, now: Instant, unix_ms: u64, nonce: String) -> ElectionStep {
        if self.current_term().is_some_and(|(_, until)| now >= until) {
            self.term = None;
            self.read_due = true;
        }
        if let Some(until) = self.retry_at.filter(|at| *at > now) {
            return ElectionStep::Wait { until };
        }
        self.retry_at = None;
        if self.read_due {
            return ElectionStep::Read;
        }
        match (&self.term, &self.observed) {
            (Some(held), _) => {
                let renew_at = held.sent_at + self.lease / RENEWALS_PER_LEASE;
                if now < renew_at {
                    return ElectionStep::Wait { until: renew_at };
                }
                let (epoch, revision) = (held.claim.epoch, held.revision);
                self.propose_claim(now, epoch, revision, nonce)
            }
            (None, Some(seen)) => {
                self.next_follower_step(now, unix_ms, nonce, seen.read_at, seen.revision)
            }
            (None, None) => ElectionStep::Read,
        }
    }

    fn next_follower_step(
        &mut self,
        now: Instant,
        unix_ms: u64,
        nonce: String,
        read_at: Instant,
        revision: u64,
    ) -> ElectionStep {
        let claim =
            self.observed.as_ref().and_then(|seen| seen.claim.as_ref().map(|c| (c, seen.since)));
        let Some((claim, since)) = claim.filter(|(claim, _)| !claim.released) else {
            let previous = claim.map_or(0, |(claim, _)| claim.epoch);
            return self.propose_claim(
                now,
                unix_ms.max(previous.saturating_add(1)),
                revision,
                nonce,
            );
        };
        let abandoned_at = since + claim.abandon_timeout();
        if read_at >= abandoned_at {
            let epoch = unix_ms.max(claim.epoch.saturating_add(1));
            return self.propose_claim(now, epoch, revision, nonce);
        }
        let until = abandoned_at.min(read_at + self.lease / 2);
        if now >= until {
            return ElectionStep::Read;
        }
        ElectionStep::Wait { until }
    }

    fn propose_claim(
        &mut self,
        now: Instant,
        epoch: u64,
        revision: u64,
        nonce: String,
    ) -> ElectionStep {
        let claim = LeaderClaim {
            holder: self.holder.clone(),
            epoch,
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            nonce,
            released: false,
        };
        self.pending = Some((claim.clone(), now));
        ElectionStep::Write { claim, revision }
    }

    /// Confirms a pending write of this candidate, or ends its term if another claim is stored.
    pub(super) fn record_read(&mut self, now: Instant, revision: u64, claim: Option<LeaderClaim>) {
        self.read_due = false;
        let ours =
            |held: &LeaderClaim| claim.as_ref().is_some_and(|claim| claim.nonce == held.nonce);
        if let Some((pending, sent)) = self.pending.take_if(|(pending, _)| ours(pending)) {
            self.term = Some(HeldTerm { claim: pending, revision, sent_at: sent });
        } else if self.term.as_ref().is_some_and(|held| !ours(&held.claim)) {
            self.term = None;
        }
        match &mut self.observed {
            Some(seen) if seen.revision == revision => seen.read_at = now,
            seen => *seen = Some(ObservedClaim { revision, claim, since: now, read_at: now }),
        }
    }

    /// Begins or renews the term.
    pub(super) fn record_write(&mut self, sent: Instant, revision: u64, claim: LeaderClaim) {
        self.pending = None;
        self.term = Some(HeldTerm { claim, revision, sent_at: sent });
    }

    /// Called after another candidate wrote the key.
    pub(super) fn request_read(&mut self) {
        self.read_due = true;
    }

    /// The effect is unknown, so the key is read again after 1/16 of the lease.
    pub(super) fn record_failure(&mut self, now: Instant) {
        self.read_due = true;
        self.retry_at = Some(now + self.lease / RETRIES_PER_LEASE);
    }

    /// Ends the term; returns the released claim to write and the revision to write over.
    pub(super) fn take_release(&mut self) -> Option<(LeaderClaim, u64)> {
        let held = self.term.take()?;
        Some((LeaderClaim { released: true, ..held.claim }, held.revision))
    }
}

/// Entry point for tests with hostile values of the leader key.
#[doc(hidden)]
pub mod fuzzing {
    use super::{Duration, ElectionState, Instant, LeaderClaim};

    /// Runs a candidate against any bytes stored under the key.
    pub fn follow_claim(value: &[u8]) {
        let claim: Option<LeaderClaim> = serde_json::from_slice(value).ok();
        let lease = Duration::from_secs(3);
        let now = Instant::now();
        let mut me = ElectionState::new("me".to_owned(), lease);
        me.record_read(now, 1, claim.clone());
        me.next_step(now, 1, "a".to_owned());
        me.record_read(now + lease * 1000, 1, claim);
        me.next_step(now + lease * 1000, u64::MAX, "b".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn candidate(name: &str) -> ElectionState {
        ElectionState::new(name.to_owned(), LEASE)
    }

    fn write(step: ElectionStep) -> (LeaderClaim, u64) {
        match step {
            ElectionStep::Write { claim, revision } => (claim, revision),
            other => panic!("{other:?} is not a write"),
        }
    }

    /// A leader at revision 1, and the time its claim was sent.
    fn elected(now: Instant) -> ElectionState {
        let mut leader = candidate("a");
        leader.record_read(now, 0, None);
        let (claim, _) = write(leader.next_step(now, 500, "n1".into()));
        leader.record_write(now, 1, claim);
        leader
    }

    fn others_claim(released: bool) -> LeaderClaim {
        let (holder, nonce) = ("b".into(), "x".into());
        LeaderClaim { holder, epoch: 900, lease_ms: 10_000, nonce, released }
    }

    #[test]
    fn a_missing_or_released_claim_is_taken_at_once_with_a_greater_epoch() {
        let now = Instant::now();
        for (claim, epoch) in [(None, 500), (Some(others_claim(true)), 901)] {
            let mut me = candidate("a");
            assert_eq!(me.next_step(now, 500, "n".into()), ElectionStep::Read);
            me.record_read(now, 7, claim);
            let (claim, revision) = write(me.next_step(now, 500, "n".into()));
            assert_eq!((claim.epoch, revision), (epoch, 7));
        }
    }

    #[test]
    fn a_claim_that_makes_no_sense_is_taken_over() {
        let now = Instant::now();
        let claim = LeaderClaim { epoch: u64::MAX, lease_ms: u64::MAX, ..others_claim(false) };
        let mut me = candidate("a");
        me.record_read(now, 7, Some(claim.clone()));
        let later = now + LEASE_MAX * 2;
        me.record_read(later, 7, Some(claim));
        assert_eq!(write(me.next_step(later, 500, "n".into())).0.epoch, u64::MAX);
    }

    #[test]
    fn a_claim_is_abandoned_only_when_unchanged_for_its_lease_and_margin() {
        let now = Instant::now();
        let mut me = candidate("a");
        me.record_read(now, 7, Some(others_claim(false)));
        me.record_read(now + LEASE, 7, Some(others_claim(false)));
        assert!(matches!(me.next_step(now + LEASE, 500, "n".into()), ElectionStep::Wait { .. }));
        me.record_read(now + Duration::from_secs(11), 8, Some(others_claim(false)));
        let later = now + Duration::from_secs(12);
        assert!(
            matches!(me.next_step(later, 500, "n".into()), ElectionStep::Wait { .. }),
            "it was renewed"
        );
        let end = later + Duration::from_secs(10);
        assert_eq!(me.next_step(end, 500, "n".into()), ElectionStep::Read, "look before taking");
        me.record_read(end, 8, Some(others_claim(false)));
        write(me.next_step(end, 500, "n".into()));
    }

    #[test]
    fn a_term_counts_from_before_the_renewal_was_sent_and_ends_without_asking() {
        let now = Instant::now();
        let mut leader = elected(now);
        let (claim, revision) = write(leader.next_step(now + LEASE / 4, 600, "n2".into()));
        assert_eq!((claim.epoch, revision), (500, 1));
        leader.record_failure(now + LEASE / 2);
        assert_eq!(leader.current_term(), Some((500, now + LEASE)));
        leader.next_step(now + LEASE, 600, "n3".into());
        assert_eq!(leader.current_term(), None);
    }

    #[test]
    fn a_renewal_whose_answer_was_lost_is_adopted_and_another_claim_ends_the_term() {
        let now = Instant::now();
        let mut leader = elected(now);
        let sent = now + LEASE / 4;
        let (claim, _) = write(leader.next_step(sent, 600, "n2".into()));
        leader.record_failure(sent);
        leader.record_read(sent, 2, Some(claim));
        assert_eq!(leader.current_term(), Some((500, sent + LEASE)));
        leader.record_read(sent, 3, Some(others_claim(false)));
        assert_eq!(leader.current_term(), None);
    }
}
