//! Which part of a file to ask whom for next. Pure: knows neither sockets nor clocks.
//!
//! Everybody takes other parts from the store and the rest from each other. Each says which parts
//! it has and which it is getting from the store (its *claims*), and takes from the store only
//! what nobody has or claims, beginning at a place of its own. When nothing of that kind is left
//! and the rest does not come either, the store is asked for it after all.

use std::{collections::BTreeMap, ops::Range, time::Duration};

/// Asked of one peer at once: what is on its way must fill the link, and what waits there when all
/// else is done delays the end.
const ASKED_OF_PEER: usize = 2;
/// Of all of them: what they send at once has to wait somewhere.
const ASKED_OF_ALL: usize = 16;
/// Requests to the store at once, and the bytes of one, while others fetch the same file.
const STORE_SHARED: (usize, u64) = (2, 512 << 10);
/// The same when nobody else seems to want it.
const STORE_ALONE: (usize, u64) = (4, 16 << 20);
/// One request takes no more than this part of what is one's own share, or all would wait for it.
const SHARE: usize = 10;
/// Of another's share, a smaller part is taken at once.
const HELP: usize = 4;
/// How long what others have or claim is left to them once nothing else is missing, and how long a
/// part may be on its way by then.
const PATIENCE: Duration = Duration::from_millis(500);
/// A claim is one for as long as who made it goes on getting parts.
const BELIEVED: Duration = Duration::from_secs(3);

/// One flag for each part.
pub(crate) type Marks = Vec<bool>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Store,
    Peer(usize),
}

/// Parts to ask for, in one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Take {
    pub(crate) from: Source,
    pub(crate) parts: Range<usize>,
}

#[derive(Debug)]
pub(crate) struct Plan {
    parts: Vec<Part>,
    part_bytes: u64,
    others: BTreeMap<usize, Other>,
    /// What to take from the store first.
    own: Range<usize>,
    store_requests: usize,
    store_run_bytes: u64,
    /// Since when nothing new is left to take from the store.
    idle_since: Option<Duration>,
    turn: u64,
    /// The store is asked for nothing more.
    alone: bool,
}

#[derive(Debug, Clone, Default)]
struct Part {
    have: bool,
    of_store: bool,
    of_peer: bool,
    asked_at: Duration,
    /// How many peers have it.
    held: usize,
}

#[derive(Debug)]
struct Other {
    has: Marks,
    claims: Marks,
    requests: usize,
    progress_at: Duration,
    spoke: bool,
}

impl Plan {
    /// For one of `count` that begin at places of their own, of which this is the `place`th.
    pub(crate) fn new(parts: usize, part_bytes: u64, (place, count): (usize, usize)) -> Self {
        Self {
            parts: vec![Part::default(); parts],
            part_bytes,
            others: BTreeMap::new(),
            own: parts * place / count.max(1)..parts * (place + 1) / count.max(1),
            store_requests: 0,
            store_run_bytes: STORE_SHARED.1,
            idle_since: None,
            turn: place as u64,
            alone: false,
        }
    }

    /// A peer that may have something to say.
    pub(crate) fn joined(&mut self, peer: usize, now: Duration) {
        let none = vec![false; self.parts.len()];
        let (has, claims) = (none.clone(), none);
        let other = Other { has, claims, requests: 0, progress_at: now, spoke: false };
        self.others.insert(peer, other);
    }

    /// What it has and what it claims, as of now. What it had once it has.
    pub(crate) fn heard(&mut self, peer: usize, (has, claims): (Marks, Marks), now: Duration) {
        let Some(other) = self.others.get_mut(&peer) else { return };
        other.spoke = true;
        for (index, part) in self.parts.iter_mut().enumerate() {
            if has[index] && !other.has[index] {
                other.has[index] = true;
                other.progress_at = now;
                part.held += 1;
            }
        }
        other.claims = claims;
    }

    /// It is asked for nothing more; what was asked of it ends by itself.
    pub(crate) fn left(&mut self, peer: usize) {
        let Some(other) = self.others.remove(&peer) else { return };
        for (part, had) in self.parts.iter_mut().zip(other.has) {
            part.held -= usize::from(had);
        }
    }

    /// The store failed: what peers have may be all there is.
    pub(crate) fn without_store(&mut self) {
        self.alone = true;
    }

    pub(crate) fn has_peers(&self) -> bool {
        !self.others.is_empty()
    }

    /// What to ask for now, which is then taken as asked for.
    pub(crate) fn next(&mut self, now: Duration) -> Option<Take> {
        let take = self.of_peers(now).or_else(|| self.of_store(now))?;
        for part in &mut self.parts[take.parts.clone()] {
            part.asked_at = now;
            match take.from {
                Source::Store => part.of_store = true,
                Source::Peer(_) => part.of_peer = true,
            }
        }
        match take.from {
            Source::Store => self.store_requests += 1,
            Source::Peer(peer) => {
                if let Some(other) = self.others.get_mut(&peer) {
                    other.requests += 1;
                }
            }
        }
        Some(take)
    }

    /// The rarest part that one of them has, of whom the fewest is asked.
    fn of_peers(&mut self, now: Duration) -> Option<Take> {
        if self.others.values().map(|other| other.requests).sum::<usize>() >= ASKED_OF_ALL {
            return None;
        }
        let free = |other: &Other| other.requests < ASKED_OF_PEER;
        if !self.others.values().any(free) {
            return None;
        }
        // Not all in the same order, or all would want the same parts at once.
        self.turn = self.turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let count = self.parts.len();
        let begin = usize::try_from(self.turn >> 33).unwrap_or(0) % count;
        // One's own share first, so that what only one has goes out from it once.
        let own = self.own.clone();
        let middle = own.start + begin % own.len().max(1);
        let own = (middle..own.end).chain(own.start..middle);
        let mut best: Option<(usize, usize, usize)> = None;
        for index in own.chain(begin..count).chain(0..begin) {
            let part = &self.parts[index];
            let late = part.asked_at + PATIENCE <= now;
            let wanted = !part.have && !part.of_peer && (!part.of_store || late) && part.held > 0;
            if !wanted || best.is_some_and(|(held, ..)| held <= part.held) {
                continue;
            }
            let holders = self.others.iter().filter(|(_, other)| other.has[index] && free(other));
            if let Some((peer, _)) = holders.min_by_key(|(_, other)| other.requests) {
                best = Some((part.held, index, *peer));
            }
        }
        let (_, index, peer) = best?;
        Some(Take { from: Source::Peer(peer), parts: index..index + 1 })
    }

    fn of_store(&mut self, now: Duration) -> Option<Take> {
        let others = self.others.values().filter(|other| other.spoke).count();
        let (requests, bytes) = if others == 0 { STORE_ALONE } else { STORE_SHARED };
        if self.alone || self.store_requests >= requests {
            return None;
        }
        let count = self.parts.len();
        let run = usize::try_from(self.store_run_bytes.min(bytes) / self.part_bytes).unwrap_or(1);
        let run = if others == 0 { run } else { run.min(count / (SHARE * others)) }.max(1);
        let is_new = |index: usize| self.is_new(index, now);
        let mut own = self.own.clone();
        let elsewhere = || {
            // Its owner begins at the front: who helps, anywhere.
            let begin = usize::try_from(self.turn >> 33).unwrap_or(0) % count;
            (begin..count).chain(0..begin).find(|index| is_new(*index))
        };
        let found = own.find(|index| is_new(*index)).map(|start| (start, run));
        let found = found.or_else(|| Some((elsewhere()?, run.div_ceil(HELP))));
        if let Some((start, run)) = found {
            let end = (start..count.min(start + run)).take_while(|index| is_new(*index)).count();
            self.idle_since = None;
            return Some(Take { from: Source::Store, parts: start..start + end });
        }
        let idle_since = *self.idle_since.get_or_insert(now);
        if idle_since + PATIENCE > now {
            return None;
        }
        let missing = self.parts.iter().enumerate().filter(|(_, part)| {
            !part.have && !part.of_store && (!part.of_peer || part.asked_at + PATIENCE <= now)
        });
        let oldest = missing.min_by_key(|(_, part)| (part.of_peer, part.asked_at));
        oldest.map(|(index, _)| Take { from: Source::Store, parts: index..index + 1 })
    }

    /// Whether nobody has it or is getting it.
    fn is_new(&self, index: usize, now: Duration) -> bool {
        let part = &self.parts[index];
        let claimed = |other: &Other| other.claims[index] && now < other.progress_at + BELIEVED;
        let free = !part.have && !part.of_store && !part.of_peer && part.held == 0;
        free && !self.others.values().any(claimed)
    }

    /// A part came and was right. `false` when it was there already.
    pub(crate) fn came(&mut self, index: usize) -> bool {
        !std::mem::replace(&mut self.parts[index].have, true)
    }

    /// A request is over; what did not come of it is asked for again.
    pub(crate) fn ended(&mut self, take: &Take) {
        let whole = self.parts[take.parts.clone()].iter().all(|part| part.have);
        for part in &mut self.parts[take.parts.clone()] {
            match take.from {
                Source::Store => part.of_store = false,
                Source::Peer(_) => part.of_peer = false,
            }
        }
        match take.from {
            Source::Store => {
                self.store_requests -= 1;
                if whole {
                    self.store_run_bytes = STORE_ALONE.1.min(self.store_run_bytes * 2);
                }
            }
            Source::Peer(peer) => {
                if let Some(other) = self.others.get_mut(&peer) {
                    other.requests = other.requests.saturating_sub(1);
                }
            }
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.parts.iter().all(|part| part.have)
    }

    /// What others are told: what is here, and what is on its way from the store.
    pub(crate) fn said(&self) -> (Marks, Marks) {
        let claims = self.parts.iter().map(|part| part.of_store && !part.have);
        (self.parts.iter().map(|part| part.have).collect(), claims.collect())
    }
}

#[cfg(test)]
mod tests;
