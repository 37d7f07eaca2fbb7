//! How an agent takes its own failures: it rests so that others get the job, keeps away
//! from work while its disk is full, and goes into quarantine when it fails at one job
//! after another.

use std::{collections::BTreeSet, time::Duration};

use crate::Fault;

/// An agent that fails at so many different jobs in a row is in quarantine.
const JOBS_MAX: usize = 3;

/// A quarantine lasts so many leases, and is over with the first job that succeeds.
const QUARANTINE_LEASES: u32 = 10;

/// An agent that failed takes nothing for this much longer than its job is held back, so
/// that another gets it.
const REST: Duration = Duration::from_millis(500);

/// A box that lacks space looks again after this, then twice as long, and so on.
const DISK_REST: Duration = Duration::from_secs(2);
const DISK_REST_MAX: Duration = Duration::from_secs(300);

/// What is shared is looked for again after this, then twice as long, and so on.
const AWAY_REST: Duration = Duration::from_secs(1);
const AWAY_REST_MAX: Duration = Duration::from_secs(15);

/// What is shared may be away for so many looks, about an hour, before that is a failure.
const LOOKS_MAX: u32 = 240;

/// How one role of an agent has fared lately.
#[derive(Debug, Clone, Default)]
pub struct Temper {
    /// Jobs failed since the last success, by the subject that called for them.
    failed: BTreeSet<String>,
    full: u32,
}

/// What the role does before it takes the next job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rest {
    pub pause: Duration,
    /// What users are told; empty when there is nothing to tell.
    pub trouble: String,
    pub quarantine: bool,
}

impl Temper {
    /// A job was done: all is well.
    pub fn done(&mut self) {
        *self = Self::default();
    }

    /// A job failed and goes back after `delay`.
    pub fn failed(
        &mut self,
        job: &str,
        fault: Fault,
        message: &str,
        delay: Duration,
        lease: Duration,
    ) -> Rest {
        let rest = |pause, trouble| Rest { pause, trouble, quarantine: false };
        match fault {
            // Nobody's but the job's.
            Fault::Content => return rest(Duration::ZERO, String::new()),
            Fault::Company | Fault::Away => return rest(delay + REST, String::new()),
            Fault::Disk => {
                let pause = DISK_REST.saturating_mul(1 << self.full.min(16)).min(DISK_REST_MAX);
                self.full = self.full.saturating_add(1);
                return rest(pause, message.to_owned());
            }
            Fault::Work => {}
        }
        // Bounded: more than it takes for a quarantine need not be remembered.
        if self.failed.len() < JOBS_MAX {
            self.failed.insert(job.to_owned());
        }
        if self.failed.len() < JOBS_MAX {
            return rest(delay + REST, String::new());
        }
        Rest {
            pause: lease.saturating_mul(QUARANTINE_LEASES),
            trouble: format!("in quarantine: {JOBS_MAX} jobs in a row failed, the last: {message}"),
            quarantine: true,
        }
    }

    /// How long to wait before the `look`th look (from 0) for what is away. `None`: it has
    /// been away for too long.
    pub fn away(look: u32) -> Option<Duration> {
        let pause = AWAY_REST.saturating_mul(1 << look.min(16)).min(AWAY_REST_MAX);
        (look < LOOKS_MAX).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn fail(temper: &mut Temper, job: &str, fault: Fault) -> Rest {
        temper.failed(job, fault, "no", Duration::from_secs(1), LEASE)
    }

    #[test]
    fn three_different_jobs_in_a_row_are_a_quarantine_that_one_success_ends() {
        let mut temper = Temper::default();
        for job in ["a", "a", "a", "b"] {
            assert!(!fail(&mut temper, job, Fault::Work).quarantine);
        }
        let rest = fail(&mut temper, "c", Fault::Work);
        assert!(rest.quarantine && rest.pause == 10 * LEASE, "{rest:?}");
        assert!(fail(&mut temper, "d", Fault::Work).quarantine, "still");
        temper.done();
        assert!(!fail(&mut temper, "e", Fault::Work).quarantine);
    }

    #[test]
    fn what_is_not_the_agents_fault_does_not_count_against_it() {
        let mut temper = Temper::default();
        for fault in [Fault::Content, Fault::Away, Fault::Disk, Fault::Company] {
            for job in ["a", "b", "c"] {
                assert!(!fail(&mut temper, job, fault).quarantine);
            }
        }
        assert!(!fail(&mut temper, "d", Fault::Work).quarantine);
    }

    #[test]
    fn a_full_disk_is_looked_at_ever_less_often_and_told() {
        let mut temper = Temper::default();
        let rests: Vec<Duration> =
            (0..10).map(|_| fail(&mut temper, "a", Fault::Disk).pause).collect();
        assert!(rests.windows(2).all(|pair| pair[1] == (2 * pair[0]).min(DISK_REST_MAX)));
        assert_eq!(fail(&mut temper, "a", Fault::Disk).trouble, "no");
        let looks: Duration = (0..).map_while(Temper::away).sum();
        assert!(looks > Duration::from_secs(3000) && looks < Duration::from_secs(4000));
    }
}
