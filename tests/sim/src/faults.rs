//! What a seed's world suffers. Each kind of trouble is there in some seeds and not in
//! others, so that they are also met alone.

/// How long the time of trouble is.
pub(crate) const TROUBLE_MS: u64 = 90_000;

/// Everything that can go wrong, until it is healed.
#[derive(Debug, Clone, PartialEq)]
pub struct Faults {
    /// Of a message, a chance in a thousand: to be lost, to come twice, to come very late.
    pub lost: u32,
    pub doubled: u32,
    pub late: u32,
    /// Mean time between crashes of any process, in milliseconds; 0 for never.
    pub crash_every: u64,
    /// The same for processes that are stopped and go on later, peers cut off from the
    /// server, restarts of the server, outages of the store.
    pub freeze_every: u64,
    pub cut_every: u64,
    pub server_every: u64,
    pub store_every: u64,
    /// Mean time between a user's pauses, and whether the run is cancelled in the end.
    pub pause_every: u64,
    pub cancel: bool,
    /// A chance in a thousand that an agent dies at any step of a job.
    pub dies: u32,
    /// Of agents: one fails at many jobs, one makes samples of another policy, one is slow.
    pub flaky: bool,
    /// One whose driver ends whatever it is handed: no fault of the run's.
    pub broken: bool,
    /// All of them fail at many jobs, as with a bad driver update.
    pub sick: bool,
    pub liar: bool,
    /// One that samples with another policy than it says, most of the time.
    pub stale: bool,
    /// Agents that wrote a failure find in the end that they were done after all.
    pub zombies: bool,
    pub slow: bool,
    /// One job ends every agent that tries it.
    pub poison: bool,
    /// Acknowledgements the server had given before a crash are sometimes forgotten.
    pub forgets: bool,
    /// The server's clock jumps when it restarts.
    pub clock_jumps: bool,
    pub coordinators: usize,
    /// A mistake somebody could make, to see that it is found.
    pub bug: Option<Bug>,
}

/// Mistakes in the parts that are modelled here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Agents acknowledge before they write.
    AcksFirst,
    /// Agents work on orders of paused runs and of earlier rounds.
    WorksOnStaleOrders,
    /// The log takes a second fact on a subject.
    TakesTwice,
    /// Agents make samples with what they loaded last, and say they did as ordered.
    WrongPolicy,
    /// Leases are never given to another.
    KeepsLeases,
}

impl Bug {
    pub const ALL: [Self; 5] = [
        Self::AcksFirst,
        Self::WorksOnStaleOrders,
        Self::TakesTwice,
        Self::WrongPolicy,
        Self::KeepsLeases,
    ];
}

impl Faults {
    pub fn none() -> Self {
        Self {
            lost: 0,
            doubled: 0,
            late: 0,
            crash_every: 0,
            freeze_every: 0,
            cut_every: 0,
            server_every: 0,
            store_every: 0,
            pause_every: 0,
            cancel: false,
            dies: 0,
            flaky: false,
            broken: false,
            sick: false,
            liar: false,
            stale: false,
            zombies: false,
            slow: false,
            poison: false,
            forgets: false,
            clock_jumps: false,
            coordinators: 1,
            bug: None,
        }
    }

    /// The troubles of a seed.
    pub fn of(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(wire::derive_seed(seed, &["faults"]));
        let mut sometimes = |share: f64, value: u64| {
            if random.f64() < share { random.u64(value / 2..=value * 2) } else { 0 }
        };
        let permille = |value: u64| u32::try_from(value).unwrap_or(0);
        Self {
            lost: permille(sometimes(0.5, 30)),
            doubled: permille(sometimes(0.5, 30)),
            late: permille(sometimes(0.4, 20)),
            crash_every: sometimes(0.6, 2_500),
            freeze_every: sometimes(0.5, 3_000),
            cut_every: sometimes(0.5, 3_000),
            server_every: sometimes(0.4, 9_000),
            store_every: sometimes(0.4, 9_000),
            pause_every: sometimes(0.3, 6_000),
            cancel: sometimes(0.1, 2) > 0,
            dies: permille(sometimes(0.5, 10)),
            flaky: sometimes(0.3, 2) > 0,
            sick: sometimes(0.15, 2) > 0,
            liar: sometimes(0.2, 2) > 0,
            zombies: sometimes(0.3, 2) > 0,
            slow: sometimes(0.4, 2) > 0,
            poison: sometimes(0.1, 2) > 0,
            forgets: sometimes(0.5, 2) > 0,
            clock_jumps: sometimes(0.5, 2) > 0,
            coordinators: if sometimes(0.3, 2) > 0 { 3 } else { 2 },
            // Drawn last, so that what the others of a seed are stays as it was.
            broken: sometimes(0.25, 2) > 0,
            stale: sometimes(0.25, 2) > 0,
            bug: None,
        }
    }
}
