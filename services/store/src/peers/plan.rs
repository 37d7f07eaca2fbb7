//! The plan of a download: which part of a file to request from which source next. Pure: no sockets
//! and no clocks.
//!
//! The agents that fetch a file take different parts from the store and the rest from each other.
//! Each agent announces the parts that it has and the parts that it is fetching from the store (its
//! *claims*). It takes from the store only parts that no peer has or claims, beginning with its own
//! share of the file. When no such part is left and the rest does not arrive from peers, it
//! requests the rest from the store.

use std::{collections::BTreeMap, ops::Range, time::Duration};

/// Enough to fill the connection, and few enough not to delay the end of the download.
const REQUESTS_PER_PEER: usize = 2;
/// Answers of all peers that arrive together have to be buffered.
const PEER_REQUESTS_MAX: usize = 16;
/// Parallel requests to the store and bytes of one request while other agents fetch the same file.
const STORE_SHARED: (usize, u64) = (2, 512 << 10);
/// The same while no other agent fetches the file.
const STORE_ALONE: (usize, u64) = (4, 16 << 20);
/// The smallest number of requests for an agent's own share; with larger requests the others would
/// wait for it.
const SHARE_DIVISOR: usize = 10;
/// Divisor of the request size for parts of another agent's share.
const HELP_DIVISOR: usize = 4;
/// The time for which parts that others have or claim are left to them once no other part is
/// missing, and after which a requested part counts as late.
const PEER_PATIENCE: Duration = Duration::from_millis(500);
/// Time for which the claims of a peer hold after its last new part.
const CLAIM_TTL: Duration = Duration::from_secs(3);

pub(crate) type PartBitmap = Vec<bool>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PartSource {
    Store,
    Peer(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartRequest {
    pub(crate) source: PartSource,
    pub(crate) parts: Range<usize>,
}

/// The plan of one download. It decides which part to request next, and from which source:
///
/// 1. the rarest part that a peer with a free request has, own share first;
/// 2. else a run of parts from the store that no peer has or claims: first from the own share, then
///    from anywhere;
/// 3. else, after 500 ms without such a part, one missing part from the store: a part that no peer
///    was asked for, else the one whose request is oldest.
///
/// ```text
/// loop { while let Some(request) = plan.next(now) { start(request) }
///        on a verified part:      plan.mark_received(index)
///        at the end of a request: plan.end_request(&request)
///        on an announcement:      plan.update_peer(peer, availability, now) }
/// ```
///
/// Times are durations since the start of the download.
#[derive(Debug)]
pub(crate) struct DownloadPlan {
    parts: Vec<PartState>,
    part_bytes: u64,
    peers: BTreeMap<usize, PeerState>,
    own_share: Range<usize>,
    store_requests: usize,
    /// Bytes of the next request to the store; doubles with each complete answer.
    store_run_bytes: u64,
    /// The time since when no unclaimed part is left to take from the store.
    idle_since: Option<Duration>,
    random_state: u64,
    store_disabled: bool,
}

#[derive(Debug, Clone, Default)]
struct PartState {
    received: bool,
    asked_store: bool,
    asked_peer: bool,
    asked_at: Duration,
    holder_count: usize,
}

#[derive(Debug)]
struct PeerState {
    has: PartBitmap,
    claims: PartBitmap,
    requests: usize,
    /// The time of its last new part.
    progress_at: Duration,
    has_announced: bool,
}

impl DownloadPlan {
    /// Creates the plan of the agent with rank `place` of `count`; the rank decides its own share.
    pub(crate) fn new(parts: usize, part_bytes: u64, (place, count): (usize, usize)) -> Self {
        Self {
            parts: vec![PartState::default(); parts],
            part_bytes,
            peers: BTreeMap::new(),
            own_share: parts * place / count.max(1)..parts * (place + 1) / count.max(1),
            store_requests: 0,
            store_run_bytes: STORE_SHARED.1,
            idle_since: None,
            random_state: place as u64,
            store_disabled: false,
        }
    }

    pub(crate) fn add_peer(&mut self, peer: usize, now: Duration) {
        let none = vec![false; self.parts.len()];
        let (has, claims) = (none.clone(), none);
        let other = PeerState { has, claims, requests: 0, progress_at: now, has_announced: false };
        self.peers.insert(peer, other);
    }

    /// Applies an announcement; parts are never taken back.
    pub(crate) fn update_peer(
        &mut self,
        peer: usize,
        (has, claims): (PartBitmap, PartBitmap),
        now: Duration,
    ) {
        let Some(other) = self.peers.get_mut(&peer) else { return };
        other.has_announced = true;
        for (index, part) in self.parts.iter_mut().enumerate() {
            if has[index] && !other.has[index] {
                other.has[index] = true;
                other.progress_at = now;
                part.holder_count += 1;
            }
        }
        other.claims = claims;
    }

    /// Removes a peer. Its running requests end on their own.
    pub(crate) fn remove_peer(&mut self, peer: usize) {
        let Some(other) = self.peers.remove(&peer) else { return };
        for (part, had) in self.parts.iter_mut().zip(other.has) {
            part.holder_count -= usize::from(had);
        }
    }

    pub(crate) fn disable_store(&mut self) {
        self.store_disabled = true;
    }

    pub(crate) fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Returns the next request and marks its parts as requested, or `None` if nothing is to be
    /// requested now.
    pub(crate) fn next(&mut self, now: Duration) -> Option<PartRequest> {
        let take = self.next_from_peers(now).or_else(|| self.next_from_store(now))?;
        for part in &mut self.parts[take.parts.clone()] {
            part.asked_at = now;
            match take.source {
                PartSource::Store => part.asked_store = true,
                PartSource::Peer(_) => part.asked_peer = true,
            }
        }
        match take.source {
            PartSource::Store => self.store_requests += 1,
            PartSource::Peer(peer) => {
                if let Some(other) = self.peers.get_mut(&peer) {
                    other.requests += 1;
                }
            }
        }
        Some(take)
    }

    /// Chooses the rarest missing part, and of its holders the one with the fewest requests.
    fn next_from_peers(&mut self, now: Duration) -> Option<PartRequest> {
        if self.peers.values().map(|other| other.requests).sum::<usize>() >= PEER_REQUESTS_MAX {
            return None;
        }
        let free = |other: &PeerState| other.requests < REQUESTS_PER_PEER;
        if !self.peers.values().any(free) {
            return None;
        }
        // The start is random, because otherwise all agents would want the same parts at the same
        // time.
        self.random_state =
            self.random_state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let count = self.parts.len();
        let begin = usize::try_from(self.random_state >> 33).unwrap_or(0) % count;
        // The own share comes first, so that a part that only one peer has leaves it once.
        let own = self.own_share.clone();
        let middle = own.start + begin % own.len().max(1);
        let own = (middle..own.end).chain(own.start..middle);
        let mut best: Option<(usize, usize, usize)> = None;
        for index in own.chain(begin..count).chain(0..begin) {
            let part = &self.parts[index];
            let late = part.asked_at + PEER_PATIENCE <= now;
            let wanted = !part.received
                && !part.asked_peer
                && (!part.asked_store || late)
                && part.holder_count > 0;
            if !wanted || best.is_some_and(|(held, ..)| held <= part.holder_count) {
                continue;
            }
            let holders = self.peers.iter().filter(|(_, other)| other.has[index] && free(other));
            if let Some((peer, _)) = holders.min_by_key(|(_, other)| other.requests) {
                best = Some((part.holder_count, index, *peer));
            }
        }
        let (_, index, peer) = best?;
        Some(PartRequest { source: PartSource::Peer(peer), parts: index..index + 1 })
    }

    fn next_from_store(&mut self, now: Duration) -> Option<PartRequest> {
        let others = self.peers.values().filter(|other| other.has_announced).count();
        let (requests, bytes) = if others == 0 { STORE_ALONE } else { STORE_SHARED };
        if self.store_disabled || self.store_requests >= requests {
            return None;
        }
        let count = self.parts.len();
        let run = usize::try_from(self.store_run_bytes.min(bytes) / self.part_bytes).unwrap_or(1);
        let run = if others == 0 { run } else { run.min(count / (SHARE_DIVISOR * others)) }.max(1);
        let is_new = |index: usize| self.is_unclaimed(index, now);
        let mut own = self.own_share.clone();
        let elsewhere = || {
            // The owner of a share starts at its front, so a helper starts anywhere.
            let begin = usize::try_from(self.random_state >> 33).unwrap_or(0) % count;
            (begin..count).chain(0..begin).find(|index| is_new(*index))
        };
        let found = own.find(|index| is_new(*index)).map(|start| (start, run));
        let found = found.or_else(|| Some((elsewhere()?, run.div_ceil(HELP_DIVISOR))));
        if let Some((start, run)) = found {
            let end = (start..count.min(start + run)).take_while(|index| is_new(*index)).count();
            self.idle_since = None;
            return Some(PartRequest { source: PartSource::Store, parts: start..start + end });
        }
        let idle_since = *self.idle_since.get_or_insert(now);
        if idle_since + PEER_PATIENCE > now {
            return None;
        }
        let missing = self.parts.iter().enumerate().filter(|(_, part)| {
            !part.received
                && !part.asked_store
                && (!part.asked_peer || part.asked_at + PEER_PATIENCE <= now)
        });
        let oldest = missing.min_by_key(|(_, part)| (part.asked_peer, part.asked_at));
        oldest.map(|(index, _)| PartRequest { source: PartSource::Store, parts: index..index + 1 })
    }

    /// Returns true if a part is missing, not requested, and neither held nor claimed by a peer.
    fn is_unclaimed(&self, index: usize, now: Duration) -> bool {
        let part = &self.parts[index];
        let claimed =
            |other: &PeerState| other.claims[index] && now < other.progress_at + CLAIM_TTL;
        let free =
            !part.received && !part.asked_store && !part.asked_peer && part.holder_count == 0;
        free && !self.peers.values().any(claimed)
    }

    /// Returns false if the part was received before.
    pub(crate) fn mark_received(&mut self, index: usize) -> bool {
        !std::mem::replace(&mut self.parts[index].received, true)
    }

    /// Ends a request; its missing parts may be requested again.
    pub(crate) fn end_request(&mut self, take: &PartRequest) {
        let whole = self.parts[take.parts.clone()].iter().all(|part| part.received);
        for part in &mut self.parts[take.parts.clone()] {
            match take.source {
                PartSource::Store => part.asked_store = false,
                PartSource::Peer(_) => part.asked_peer = false,
            }
        }
        match take.source {
            PartSource::Store => {
                self.store_requests -= 1;
                if whole {
                    self.store_run_bytes = STORE_ALONE.1.min(self.store_run_bytes * 2);
                }
            }
            PartSource::Peer(peer) => {
                if let Some(other) = self.peers.get_mut(&peer) {
                    other.requests = other.requests.saturating_sub(1);
                }
            }
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.parts.iter().all(|part| part.received)
    }

    /// Returns the received parts, and the parts being fetched from the store.
    pub(crate) fn own_availability(&self) -> (PartBitmap, PartBitmap) {
        let claims = self.parts.iter().map(|part| part.asked_store && !part.received);
        (self.parts.iter().map(|part| part.received).collect(), claims.collect())
    }
}

#[cfg(test)]
mod tests;
