//! The faults that a seed injects. Each kind occurs in some seeds only, so that it also occurs
//! alone.

/// The duration of the phase with faults.
pub(crate) const FAULTS_MS: u64 = 90_000;

/// The share of seeds whose runs may end with other results than without faults.
const CHANGED_SHARE: f64 = 0.35;

/// All faults of a seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Faults {
    /// Probabilities per 1000 that a message is lost, duplicated or very late.
    pub lost: u32,
    pub duplicated: u32,
    pub late: u32,
    /// The mean time between process crashes, in milliseconds. 0 disables them.
    pub crash_every: u64,
    /// Likewise for processes that stop and continue later, for connections between a peer and the
    /// server, for restarts of the server, for outages of the store, for a full disk (of the log,
    /// the store or an agent), and for a file in the store that is lost or damaged.
    pub freeze_every: u64,
    pub cut_every: u64,
    pub server_every: u64,
    pub store_every: u64,
    pub full_every: u64,
    pub damage_every: u64,
    /// The mean time between pauses of a run by its user, and whether the users cancel the runs in
    /// the end.
    pub pause_every: u64,
    pub cancel: bool,
    /// The probability per 1000 that an agent dies at any step of a job.
    pub death_permille: u32,
    /// One agent fails at many jobs.
    pub flaky: bool,
    /// The driver of one agent fails at every job, which does not count as a failure of the run.
    pub broken: bool,
    /// All agents fail at many jobs, as after a bad driver update.
    pub all_flaky: bool,
    /// One agent sometimes samples with another policy, and reports it.
    pub liar: bool,
    /// One agent samples with another policy than it reports, most of the time.
    pub stale: bool,
    /// Agents that wrote a failure still write the result later.
    pub late_results: bool,
    pub slow: bool,
    /// One job kills every agent that works on it.
    pub poison: bool,
    /// The server may forget recent acknowledgements in a crash.
    pub loses_acks: bool,
    /// The clock of the server jumps when it restarts.
    pub clock_jumps: bool,
    /// A crash of the server may lose the last facts of the log, as without
    /// `sync_interval: always`.
    pub loses_tail: bool,
    /// The clocks of processes differ, and run fast or slow.
    pub skewed_clocks: bool,
    /// The server accepts no batches, like those before 2.12.
    pub unbatched: bool,
    /// The fleet is closed, and one of its agents is revoked.
    pub revokes: bool,
    /// The number of finished cycles whose bulky facts stay in the log; `None` if nothing is
    /// archived.
    pub keep_cycles: Option<u32>,
    pub coordinators: usize,
    /// A deliberate bug that the checks must find.
    pub bug: Option<Bug>,
}

/// Bugs in the simulated parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Agents acknowledge before they write.
    AcksFirst,
    /// Agents work on orders of paused runs and of earlier rounds.
    WorksOnStaleOrders,
    /// The log accepts a second fact with the same subject.
    AcceptsDuplicates,
    /// Agents sample with another policy than they report.
    WrongPolicy,
    /// Agents decline orders although nobody else works.
    DeclinesAlone,
    /// Expired leases are never given to another agent.
    NeverExpiresLeases,
}

impl Bug {
    pub const ALL: [Self; 6] = [
        Self::AcksFirst,
        Self::WorksOnStaleOrders,
        Self::AcceptsDuplicates,
        Self::WrongPolicy,
        Self::DeclinesAlone,
        Self::NeverExpiresLeases,
    ];
}

impl Faults {
    pub fn none() -> Self {
        Self {
            lost: 0,
            duplicated: 0,
            late: 0,
            crash_every: 0,
            freeze_every: 0,
            cut_every: 0,
            server_every: 0,
            store_every: 0,
            full_every: 0,
            damage_every: 0,
            pause_every: 0,
            cancel: false,
            death_permille: 0,
            flaky: false,
            broken: false,
            all_flaky: false,
            liar: false,
            stale: false,
            late_results: false,
            slow: false,
            poison: false,
            loses_acks: false,
            clock_jumps: false,
            loses_tail: false,
            skewed_clocks: false,
            unbatched: false,
            revokes: false,
            keep_cycles: None,
            coordinators: 1,
            bug: None,
        }
    }

    /// Draws the faults of a seed. Those that may change the results of a run are drawn in fewer
    /// than half of the seeds, so that the results of most can be compared.
    pub fn from_seed(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(wire::derive_seed(seed, &["faults"]));
        let may_change_results = random.f64() < CHANGED_SHARE;
        let mut sometimes = |share: f64, value: u64| {
            if random.f64() < share { random.u64(value / 2..=value * 2) } else { 0 }
        };
        let permille = |value: u64| u32::try_from(value).unwrap_or(0);
        let faults = Self {
            lost: permille(sometimes(0.5, 30)),
            duplicated: permille(sometimes(0.5, 30)),
            late: permille(sometimes(0.4, 20)),
            crash_every: sometimes(0.6, 2_500),
            freeze_every: sometimes(0.5, 3_000),
            cut_every: sometimes(0.5, 3_000),
            server_every: sometimes(0.4, 9_000),
            store_every: sometimes(0.4, 9_000),
            full_every: sometimes(0.3, 9_000),
            damage_every: sometimes(0.3, 20_000),
            pause_every: sometimes(0.3, 6_000),
            cancel: sometimes(0.2, 2) > 0,
            death_permille: permille(sometimes(0.5, 10)),
            flaky: sometimes(0.4, 2) > 0,
            all_flaky: sometimes(0.3, 2) > 0,
            liar: sometimes(0.4, 2) > 0,
            late_results: sometimes(0.3, 2) > 0,
            slow: sometimes(0.4, 2) > 0,
            poison: sometimes(0.25, 2) > 0,
            loses_acks: sometimes(0.5, 2) > 0,
            clock_jumps: sometimes(0.5, 2) > 0,
            coordinators: if sometimes(0.3, 2) > 0 { 3 } else { 2 },
            broken: sometimes(0.25, 2) > 0,
            stale: sometimes(0.5, 2) > 0,
            loses_tail: sometimes(0.15, 2) > 0,
            skewed_clocks: sometimes(0.5, 2) > 0,
            unbatched: sometimes(0.3, 2) > 0,
            revokes: sometimes(0.3, 2) > 0,
            keep_cycles: (sometimes(0.5, 2) > 0).then_some(u32::from(sometimes(0.3, 2) > 0)),
            bug: None,
        };
        if may_change_results { faults } else { faults.without_changed_results() }
    }

    /// Removes the faults that may change the results of a run.
    fn without_changed_results(self) -> Self {
        Self {
            damage_every: 0,
            cancel: false,
            flaky: false,
            all_flaky: false,
            liar: false,
            poison: false,
            stale: false,
            ..self
        }
    }

    /// Returns what remains after the phase with faults.
    pub(crate) fn after_healing(&self) -> Self {
        Self {
            poison: self.poison,
            unbatched: self.unbatched,
            revokes: self.revokes,
            bug: self.bug,
            ..Self::none()
        }
    }
}
