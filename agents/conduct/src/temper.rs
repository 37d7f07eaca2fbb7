//! How an agent takes its own failures: it rests so that others get the job, keeps away
//! from work it cannot do (its disk is full), and goes into quarantine when it fails at one job
//! after another.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::Fault;

/// An agent that fails at so many different jobs in a row is in quarantine.
const JOBS_MAX: usize = 3;

/// A quarantine lasts so many leases, and is over with the first job that succeeds.
const QUARANTINE_LEASES: u32 = 10;

/// An agent that failed takes nothing for this much longer than its job is held back, so
/// that another gets it.
const REST: Duration = Duration::from_millis(500);

/// A box that cannot do the work looks again after this, then twice as long, and so on.
const BOX_REST: Duration = Duration::from_secs(2);
const BOX_REST_MAX: Duration = Duration::from_secs(300);

/// A box whose driver, libraries or card end whatever it is handed is not asked again for so
/// long. Whoever puts it right starts the agent anew.
const BROKEN_REST: Duration = Duration::from_secs(3600);

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
    /// Times in a row that the box could not.
    unfit: u32,
    /// Ways to die met since the last success, and how often.
    met: BTreeMap<&'static str, u32>,
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
            Fault::Disk | Fault::Box | Fault::TooLarge | Fault::NoRoom => {
                let pause = BOX_REST.saturating_mul(1 << self.unfit.min(16)).min(BOX_REST_MAX);
                self.unfit = self.unfit.saturating_add(1);
                return rest(pause, message.to_owned());
            }
            Fault::Broken => {
                let trouble = format!("in quarantine until it is started anew: {message}");
                return Rest { pause: BROKEN_REST, trouble, quarantine: true };
            }
            Fault::Passing(class) => {
                let times = self.met.entry(class).or_default();
                *times = times.saturating_add(1);
                if *times > 1 {
                    return suspect(class, *times, message, lease);
                }
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

/// It rests for twice as long each time: it may be the only box there is.
fn suspect(class: &str, times: u32, message: &str, lease: Duration) -> Rest {
    let leases = 1 << (times - 1).min(16);
    Rest {
        pause: lease.saturating_mul(leases).min(BROKEN_REST),
        trouble: format!("in quarantine: {class} {times} times on this box, now: {message}"),
        quarantine: true,
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
        for fault in [Fault::Content, Fault::Away, Fault::Disk, Fault::Box, Fault::Company] {
            for job in ["a", "b", "c"] {
                assert!(!fail(&mut temper, job, fault).quarantine);
            }
        }
        assert!(!fail(&mut temper, "d", Fault::Work).quarantine);
    }

    #[test]
    fn the_same_way_to_die_twice_on_a_box_is_a_quarantine_and_different_ones_are_not() {
        let mut temper = Temper::default();
        assert!(!fail(&mut temper, "a", Fault::Passing("hang")).quarantine);
        assert!(!fail(&mut temper, "a", Fault::Passing("gpu_mem_fault")).quarantine);
        let rest = fail(&mut temper, "a", Fault::Passing("hang"));
        assert!(rest.quarantine && rest.pause == 2 * LEASE, "{rest:?}");
        assert!(rest.trouble.contains("hang 2 times"), "{}", rest.trouble);
        let third = fail(&mut temper, "a", Fault::Passing("hang"));
        assert!(third.quarantine && third.pause == 4 * LEASE, "{third:?}");
        let rests = (0..99).map(|_| fail(&mut temper, "a", Fault::Passing("hang")).pause);
        assert_eq!(rests.max(), Some(BROKEN_REST));
        temper.done();
        assert!(!fail(&mut temper, "b", Fault::Passing("hang")).quarantine, "it passed");
    }

    #[test]
    fn a_broken_box_takes_nothing_for_an_hour() {
        let mut temper = Temper::default();
        let rest = fail(&mut temper, "a", Fault::Broken);
        assert!(rest.quarantine && rest.pause == BROKEN_REST, "{rest:?}");
    }

    #[test]
    fn a_box_with_too_little_room_lets_others_try_first() {
        let mut temper = Temper::default();
        let rests: Vec<Rest> = (0..3).map(|_| fail(&mut temper, "a", Fault::TooLarge)).collect();
        assert!(rests.iter().all(|rest| !rest.quarantine && rest.pause >= BOX_REST));
        assert!(rests[0].pause < rests[2].pause);
    }

    #[test]
    fn a_box_that_cannot_looks_again_ever_less_often_and_says_so() {
        let mut temper = Temper::default();
        let rests: Vec<Duration> =
            (0..10).map(|_| fail(&mut temper, "a", Fault::Disk).pause).collect();
        assert!(rests.windows(2).all(|pair| pair[1] == (2 * pair[0]).min(BOX_REST_MAX)));
        assert_eq!(fail(&mut temper, "a", Fault::Disk).trouble, "no");
        assert_eq!(fail(&mut temper, "b", Fault::Box).trouble, "no");
        let looks: Duration = (0..).map_while(Temper::away).sum();
        assert!(looks > Duration::from_secs(3000) && looks < Duration::from_secs(4000));
    }
}
