//! Simulates one generator with continuous batching like `engine` and the admission of the
//! generator role. Times are nanoseconds.

use std::collections::{BTreeMap, VecDeque};

/// Sequences that a box runs at once.
const SLOTS: u32 = 64;

/// Share of a full step's time that a step with one sequence also needs, because weights are read
/// in both cases.
const STEP_FIXED: f64 = 0.25;

/// Interval between two progress messages of a worker about a job, in nanoseconds.
const PROGRESS_INTERVAL: u64 = 200_000_000;

/// It pulls an order while it has fewer outstanding samples than slots. Each step advances all
/// running sequences by one token; finished sequences free their slots for waiting ones.
pub(super) struct SimulatedGenerator {
    /// Tokens per second with full slots.
    speed: f64,
    known: bool,
    drawn: u32,
    tokens: u32,
    pub(super) lost: bool,
    /// True while the box pulls no orders because it declined one.
    pub(super) backing_off: bool,
    running: Vec<SimulatedSequence>,
    waiting: VecDeque<SimulatedSequence>,
    held: BTreeMap<usize, SimulatedJob>,
    outstanding: u32,
    pub(super) stepping: bool,
    pub(super) pulling: bool,
    last_completed: Option<(usize, u64)>,
}

struct SimulatedSequence {
    job: usize,
    tokens: u32,
    tokens_left: u32,
}

struct SimulatedJob {
    since: u64,
    samples_left: u32,
    unreported: u32,
    /// Time of the last progress report, in nanoseconds.
    reported_at: u64,
}

impl SimulatedGenerator {
    pub(super) fn new(speed: f64, known: bool) -> Self {
        Self {
            speed,
            known,
            drawn: 0,
            tokens: 0,
            lost: false,
            backing_off: false,
            running: Vec::new(),
            waiting: VecDeque::new(),
            held: BTreeMap::new(),
            outstanding: 0,
            stepping: false,
            pulling: false,
            last_completed: None,
        }
    }

    /// Changes the speed of the next steps.
    pub(super) fn set_speed(&mut self, speed: f64) {
        self.speed = speed;
    }

    pub(super) fn can_pull(&self) -> bool {
        !self.lost && !self.backing_off && !self.pulling && self.outstanding < SLOTS
    }

    pub(super) fn is_idle(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn held_orders(&self) -> Vec<usize> {
        self.held.keys().copied().collect()
    }

    pub(super) fn outstanding_samples(&self) -> u32 {
        self.outstanding
    }

    pub(super) fn sampling_throughput(&self) -> agent_core::SamplingThroughput {
        agent_core::SamplingThroughput {
            tokens_per_s: if self.known { self.speed } else { 0.0 },
            tokens_per_sample: f64::from(self.tokens) / f64::from(self.drawn.max(1)),
            slots: SLOTS,
        }
    }

    /// Returns the seconds since the box received its last completed order, or 0 for another order.
    pub(super) fn order_seconds(&self, order: usize, now: u64) -> f64 {
        let since = self.last_completed.filter(|(settled, _)| *settled == order);
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let wall_s = since.map_or(0.0, |(_, since)| (now - since) as f64 / 1e9);
        wall_s
    }

    pub(super) fn accept_order(&mut self, job: usize, tokens: Vec<u32>, now: u64) {
        let samples = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        self.outstanding += samples;
        self.held.insert(
            job,
            SimulatedJob { since: now, samples_left: samples, unreported: 0, reported_at: now },
        );
        let sequence = |tokens| SimulatedSequence { job, tokens, tokens_left: tokens };
        self.waiting.extend(tokens.into_iter().map(sequence));
    }

    /// Fills the free slots and returns the duration of the next step, or `None` without sequences.
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

    pub(super) fn end_step(&mut self, now: u64) -> Vec<usize> {
        let mut whole = Vec::new();
        for sequence in &mut self.running {
            sequence.tokens_left -= 1;
        }
        for done in self.running.extract_if(.., |sequence| sequence.tokens_left == 0) {
            self.drawn += 1;
            self.tokens += done.tokens;
            let Some(held) = self.held.get_mut(&done.job) else { continue };
            held.samples_left -= 1;
            held.unreported += 1;
            if held.samples_left == 0 {
                whole.push(done.job);
            }
        }
        for held in self.held.values_mut().filter(|held| held.samples_left > 0) {
            if now - held.reported_at >= PROGRESS_INTERVAL {
                held.reported_at = now;
                self.outstanding -= std::mem::take(&mut held.unreported);
            }
        }
        whole
    }

    pub(super) fn complete_order(&mut self, job: usize) {
        if let Some(held) = self.held.remove(&job) {
            self.outstanding -= held.unreported;
            self.last_completed = Some((job, held.since));
            self.known = true;
        }
    }
}
