//! The circuit breaker of a role: backs off after a failure so that another agent gets the job,
//! avoids work that the host cannot do (for example with a full disk), and quarantines the role
//! after repeated failures.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::JobFault;

/// Number of different jobs failed in a row after which the role is quarantined.
const FAILED_JOBS_MAX: usize = 3;

/// Duration of that quarantine in leases. The first successful job ends it.
const QUARANTINE_LEASES: u32 = 10;

/// Extra backoff after a failed job, added to the delay of its redelivery so that another agent
/// gets it.
const FAILURE_MARGIN: Duration = Duration::from_millis(500);

/// First backoff of a host that cannot do the work; doubled each time.
const UNFIT_BACKOFF: Duration = Duration::from_secs(2);
/// Maximum backoff of a host that cannot do the work.
const UNFIT_BACKOFF_MAX: Duration = Duration::from_secs(300);

/// Backoff of a host whose driver, libraries or GPU crash any job. Repairing it includes a restart
/// of the agent.
const BROKEN_BACKOFF: Duration = Duration::from_secs(3600);

/// First backoff while a shared dependency is down; doubled each time.
const DEPENDENCY_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum backoff while a shared dependency is down.
const DEPENDENCY_BACKOFF_MAX: Duration = Duration::from_secs(15);

/// Number of retries, about an hour in total, after which an unavailable dependency is a failure.
const DEPENDENCY_RETRIES_MAX: u32 = 240;

/// The failure counters of one role of an agent. They decide how long the role takes no jobs.
///
/// ```text
/// state         entered by                                            takes no jobs for
/// closed        start, record_success                                 -
/// backing off   record_failure: job failed                            redelivery delay + 0.5 s
///               record_failure: host unfit, disk full, no memory      2 s, 4 s, ... 300 s
/// quarantined   record_failure: 3 different jobs failed in a row      10 leases
///               record_failure: same transient crash again            2 leases, 4 leases, ... 1 h
///               record_failure: host broken                           1 h
/// ```
///
/// A job that needs something this host lacks causes no pause: the job is redelivered later and
/// later (`hand_back_delay`), while the role takes other jobs.
///
/// After the pause the role tries the next job; `record_success` resets all counters. While a
/// shared dependency is down, [`CircuitBreaker::dependency_backoff`] applies instead and the job is
/// kept.
#[derive(Debug, Clone, Default)]
pub struct CircuitBreaker {
    /// Jobs failed since the last success, by the subject of their fact.
    failed_jobs: BTreeSet<String>,
    /// Number of times in a row that the host could not do the work.
    unfit_count: u32,
    /// Number of transient crashes since the last success, by name.
    crash_counts: BTreeMap<&'static str, u32>,
}

/// A pause before the role takes the next job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleBackoff {
    /// Duration of the pause.
    pub pause: Duration,
    /// Message for users; may be empty.
    pub message: String,
    /// True if the pause is a quarantine.
    pub is_quarantine: bool,
}

impl CircuitBreaker {
    /// Resets all counters after a successful job.
    pub fn record_success(&mut self) {
        *self = Self::default();
    }

    /// Records a failed job and returns the backoff of the role. `delay` is the time until the job
    /// is redelivered, `lease` the duration of a lease.
    ///
    /// Invalid input and unmet needs cause no backoff. A worker shared by several jobs and an unavailable
    /// dependency cause a backoff but do not count as failures of the role.
    pub fn record_failure(
        &mut self,
        job: &str,
        fault: JobFault,
        message: &str,
        delay: Duration,
        lease: Duration,
    ) -> RoleBackoff {
        let rest = |pause, trouble| RoleBackoff { pause, message: trouble, is_quarantine: false };
        match fault {
            // Only the job is at fault.
            JobFault::InvalidInput => return rest(Duration::ZERO, String::new()),
            // Only this job waits, and users see why.
            JobFault::NeedsUnmet => return rest(Duration::ZERO, message.to_owned()),
            JobFault::SharedWorker | JobFault::DependencyDown => {
                return rest(delay + FAILURE_MARGIN, String::new());
            }
            JobFault::DiskFull
            | JobFault::HostUnfit
            | JobFault::OutOfMemory
            | JobFault::Unschedulable => {
                let pause = UNFIT_BACKOFF
                    .saturating_mul(1 << self.unfit_count.min(16))
                    .min(UNFIT_BACKOFF_MAX);
                self.unfit_count = self.unfit_count.saturating_add(1);
                return rest(pause, message.to_owned());
            }
            JobFault::HostBroken => {
                let trouble = format!("in quarantine until it is started anew: {message}");
                return RoleBackoff {
                    pause: BROKEN_BACKOFF,
                    message: trouble,
                    is_quarantine: true,
                };
            }
            JobFault::Transient(class) => {
                let times = self.crash_counts.entry(class).or_default();
                *times = times.saturating_add(1);
                if *times > 1 {
                    return quarantine_suspect(class, *times, message, lease);
                }
            }
            JobFault::WorkFailed => {}
        }
        // Bounded: no more entries are needed to trigger a quarantine.
        if self.failed_jobs.len() < FAILED_JOBS_MAX {
            self.failed_jobs.insert(job.to_owned());
        }
        if self.failed_jobs.len() < FAILED_JOBS_MAX {
            return rest(delay + FAILURE_MARGIN, String::new());
        }
        RoleBackoff {
            pause: lease.saturating_mul(QUARANTINE_LEASES),
            message: format!(
                "in quarantine: {FAILED_JOBS_MAX} jobs in a row failed, the last: {message}"
            ),
            is_quarantine: true,
        }
    }

    /// Returns the pause before retry number `look` (from 0) while a dependency is down; `None`
    /// after [`DEPENDENCY_RETRIES_MAX`] retries.
    pub fn dependency_backoff(look: u32) -> Option<Duration> {
        let pause =
            DEPENDENCY_BACKOFF.saturating_mul(1 << look.min(16)).min(DEPENDENCY_BACKOFF_MAX);
        (look < DEPENDENCY_RETRIES_MAX).then_some(pause)
    }
}

/// Returns the quarantine of a host with a repeated transient crash. It doubles each time instead
/// of being permanent, because the host may be the only one of the fleet.
fn quarantine_suspect(class: &str, times: u32, message: &str, lease: Duration) -> RoleBackoff {
    let leases = 1 << (times - 1).min(16);
    RoleBackoff {
        pause: lease.saturating_mul(leases).min(BROKEN_BACKOFF),
        message: format!("in quarantine: {class} {times} times on this box, now: {message}"),
        is_quarantine: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn fail(temper: &mut CircuitBreaker, job: &str, fault: JobFault) -> RoleBackoff {
        temper.record_failure(job, fault, "no", Duration::from_secs(1), LEASE)
    }

    #[test]
    fn three_different_jobs_in_a_row_are_a_quarantine_that_one_success_ends() {
        let mut temper = CircuitBreaker::default();
        for job in ["a", "a", "a", "b"] {
            assert!(!fail(&mut temper, job, JobFault::WorkFailed).is_quarantine);
        }
        let rest = fail(&mut temper, "c", JobFault::WorkFailed);
        assert!(rest.is_quarantine && rest.pause == 10 * LEASE, "{rest:?}");
        assert!(fail(&mut temper, "d", JobFault::WorkFailed).is_quarantine, "still");
        temper.record_success();
        assert!(!fail(&mut temper, "e", JobFault::WorkFailed).is_quarantine);
    }

    #[test]
    fn what_is_not_the_agents_fault_does_not_count_against_it() {
        let mut temper = CircuitBreaker::default();
        for fault in [
            JobFault::InvalidInput,
            JobFault::DependencyDown,
            JobFault::DiskFull,
            JobFault::HostUnfit,
            JobFault::NeedsUnmet,
            JobFault::SharedWorker,
        ] {
            for job in ["a", "b", "c"] {
                assert!(!fail(&mut temper, job, fault).is_quarantine);
            }
        }
        assert!(!fail(&mut temper, "d", JobFault::WorkFailed).is_quarantine);
    }

    #[test]
    fn the_same_way_to_die_twice_on_a_box_is_a_quarantine_and_different_ones_are_not() {
        let mut temper = CircuitBreaker::default();
        assert!(!fail(&mut temper, "a", JobFault::Transient("hang")).is_quarantine);
        assert!(!fail(&mut temper, "a", JobFault::Transient("gpu_mem_fault")).is_quarantine);
        let rest = fail(&mut temper, "a", JobFault::Transient("hang"));
        assert!(rest.is_quarantine && rest.pause == 2 * LEASE, "{rest:?}");
        assert!(rest.message.contains("hang 2 times"), "{}", rest.message);
        let third = fail(&mut temper, "a", JobFault::Transient("hang"));
        assert!(third.is_quarantine && third.pause == 4 * LEASE, "{third:?}");
        let rests = (0..99).map(|_| fail(&mut temper, "a", JobFault::Transient("hang")).pause);
        assert_eq!(rests.max(), Some(BROKEN_BACKOFF));
        temper.record_success();
        assert!(!fail(&mut temper, "b", JobFault::Transient("hang")).is_quarantine, "it passed");
    }

    #[test]
    fn a_broken_box_takes_nothing_for_an_hour() {
        let mut temper = CircuitBreaker::default();
        let rest = fail(&mut temper, "a", JobFault::HostBroken);
        assert!(rest.is_quarantine && rest.pause == BROKEN_BACKOFF, "{rest:?}");
    }

    #[test]
    fn a_box_with_too_little_room_lets_others_try_first() {
        let mut temper = CircuitBreaker::default();
        let rests: Vec<RoleBackoff> =
            (0..3).map(|_| fail(&mut temper, "a", JobFault::OutOfMemory)).collect();
        assert!(rests.iter().all(|rest| !rest.is_quarantine && rest.pause >= UNFIT_BACKOFF));
        assert!(rests[0].pause < rests[2].pause);
    }

    #[test]
    fn a_job_that_a_box_lacks_something_for_keeps_no_other_job_waiting() {
        let mut temper = CircuitBreaker::default();
        for job in ["a", "b", "c", "d"] {
            let rest = fail(&mut temper, job, JobFault::NeedsUnmet);
            assert_eq!((rest.pause, &*rest.message), (Duration::ZERO, "no"));
        }
        assert_eq!(fail(&mut temper, "e", JobFault::DiskFull).pause, UNFIT_BACKOFF);
    }

    #[test]
    fn a_box_that_cannot_looks_again_ever_less_often_and_says_so() {
        let mut temper = CircuitBreaker::default();
        let rests: Vec<Duration> =
            (0..10).map(|_| fail(&mut temper, "a", JobFault::DiskFull).pause).collect();
        assert!(rests.windows(2).all(|pair| pair[1] == (2 * pair[0]).min(UNFIT_BACKOFF_MAX)));
        assert_eq!(fail(&mut temper, "a", JobFault::DiskFull).message, "no");
        assert_eq!(fail(&mut temper, "b", JobFault::HostUnfit).message, "no");
        let looks: Duration = (0..).map_while(CircuitBreaker::dependency_backoff).sum();
        assert!(looks > Duration::from_secs(3000) && looks < Duration::from_secs(4000));
    }
}
