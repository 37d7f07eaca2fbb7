//! One simulated generator: continuous batching as `engine`'s, room for jobs as the
//! generator role's. Times are nanoseconds.

use std::collections::{BTreeMap, VecDeque};

/// Sequences a box runs at once.
const SLOTS: u32 = 64;

/// The share of a full step's time that a step with one sequence takes too: weights are
/// read either way.
const STEP_FIXED: f64 = 0.25;

/// Between two words of a worker about a job.
const TELL_EVERY: u64 = 200_000_000;

pub(super) struct Machine {
    /// Tokens a second with full slots.
    speed: f64,
    /// Whether it has measured that.
    known: bool,
    /// Samples drawn so far, and their tokens.
    drawn: u32,
    tokens: u32,
    pub(super) lost: bool,
    /// It takes nothing new for a while.
    pub(super) resting: bool,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    held: BTreeMap<usize, Held>,
    /// Samples not done, as far as the agent was told.
    outstanding: u32,
    pub(super) stepping: bool,
    /// A pull is open.
    pub(super) asking: bool,
    /// The order it was done with last, and since when it had it.
    settled: Option<(usize, u64)>,
}

struct Sequence {
    job: usize,
    tokens: u32,
    tokens_left: u32,
}

struct Held {
    since: u64,
    left: u32,
    untold: u32,
    told_at: u64,
}

impl Machine {
    pub(super) fn new(speed: f64, known: bool) -> Self {
        Self {
            speed,
            known,
            drawn: 0,
            tokens: 0,
            lost: false,
            resting: false,
            running: Vec::new(),
            waiting: VecDeque::new(),
            held: BTreeMap::new(),
            outstanding: 0,
            stepping: false,
            asking: false,
            settled: None,
        }
    }

    pub(super) fn may_ask(&self) -> bool {
        !self.lost && !self.resting && !self.asking && self.outstanding < SLOTS
    }

    pub(super) fn is_idle(&self) -> bool {
        self.held.is_empty()
    }

    /// What it holds.
    pub(super) fn orders(&self) -> Vec<usize> {
        self.held.keys().copied().collect()
    }

    /// Samples of that which are not done, as its agent was told.
    pub(super) fn left(&self) -> u32 {
        self.outstanding
    }

    /// How fast it is, as it has found out.
    pub(super) fn pace(&self) -> conduct::Pace {
        conduct::Pace {
            tokens_per_s: if self.known { self.speed } else { 0.0 },
            tokens_a_sample: f64::from(self.tokens) / f64::from(self.drawn.max(1)),
            slots: SLOTS,
        }
    }

    /// Since it has an order.
    pub(super) fn wall_s(&self, order: usize, now: u64) -> f64 {
        let since = self.settled.filter(|(settled, _)| *settled == order);
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let wall_s = since.map_or(0.0, |(_, since)| (now - since) as f64 / 1e9);
        wall_s
    }

    pub(super) fn take(&mut self, job: usize, tokens: Vec<u32>, now: u64) {
        let samples = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        self.outstanding += samples;
        self.held.insert(job, Held { since: now, left: samples, untold: 0, told_at: now });
        let sequence = |tokens| Sequence { job, tokens, tokens_left: tokens };
        self.waiting.extend(tokens.into_iter().map(sequence));
    }

    /// Fills the slots; how long the next step takes, if there is anything to do.
    pub(super) fn begin_step(&mut self) -> Option<u64> {
        let free = (SLOTS as usize).saturating_sub(self.running.len());
        let next = self.waiting.drain(..free.min(self.waiting.len()));
        self.running.extend(next);
        if self.running.is_empty() {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "at most so many as there are slots")]
        let full = self.running.len() as f64 / f64::from(SLOTS);
        let seconds = (STEP_FIXED + (1.0 - STEP_FIXED) * full) * f64::from(SLOTS) / self.speed;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "seconds of one step"
        )]
        let nanoseconds = (seconds * 1e9) as u64;
        Some(nanoseconds)
    }

    /// Every running sequence is one token further; the jobs that are whole now.
    pub(super) fn end_step(&mut self, now: u64) -> Vec<usize> {
        let mut whole = Vec::new();
        for sequence in &mut self.running {
            sequence.tokens_left -= 1;
        }
        for done in self.running.extract_if(.., |sequence| sequence.tokens_left == 0) {
            self.drawn += 1;
            self.tokens += done.tokens;
            let Some(held) = self.held.get_mut(&done.job) else { continue };
            held.left -= 1;
            held.untold += 1;
            if held.left == 0 {
                whole.push(done.job);
            }
        }
        for held in self.held.values_mut().filter(|held| held.left > 0) {
            if now - held.told_at >= TELL_EVERY {
                held.told_at = now;
                self.outstanding -= std::mem::take(&mut held.untold);
            }
        }
        whole
    }

    /// The job's samples are in the log.
    pub(super) fn settle(&mut self, job: usize) {
        if let Some(held) = self.held.remove(&job) {
            self.outstanding -= held.untold;
            self.settled = Some((job, held.since));
            self.known = true;
        }
    }
}
