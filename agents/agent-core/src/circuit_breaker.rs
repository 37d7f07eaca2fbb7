//! The circuit breaker of a role: how long the role takes no jobs after a failure, and when it is
//! quarantined.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::JobFault;

/// Different jobs failed in a row after which the role is quarantined.
const FAILED_JOBS_MAX: usize = 3;

/// Duration of that quarantine in leases.
const QUARANTINE_LEASES: u32 = 10;

/// Added to the delay of a failed job's redelivery, so that another agent gets it.
const FAILURE_MARGIN: Duration = Duration::from_millis(500);

/// First pause of a host that cannot do the work; doubled each time.
const UNFIT_BACKOFF: Duration = Duration::from_secs(2);
const UNFIT_BACKOFF_MAX: Duration = Duration::from_secs(300);

/// Pause of a host that crashes any job; its repair includes a restart of the agent.
const BROKEN_BACKOFF: Duration = Duration::from_secs(3600);

/// First pause while a shared dependency is down; doubled each time.
const DEPENDENCY_BACKOFF: Duration = Duration::from_secs(1);
const DEPENDENCY_BACKOFF_MAX: Duration = Duration::from_secs(15);

/// Retries, about an hour in total, after which an unavailable dependency is a failure.
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
/// After the pause the role tries the next job. A job whose needs the host does not meet causes no
/// pause: it is redelivered later (`hand_back_delay`) while the role takes other jobs. While a
/// shared dependency is down, the job is kept and [`CircuitBreaker::dependency_backoff`] applies.
///
/// ```
/// use std::time::Duration;
///
/// use agent_core::{CircuitBreaker, JobFault};
///
/// let (delay, lease) = (Duration::from_secs(1), Duration::from_secs(30));
/// let mut breaker = CircuitBreaker::default();
/// let mut fail = |job| breaker.record_failure(job, JobFault::WorkFailed, "no", delay, lease);
/// assert_eq!(fail("a").pause, Duration::from_millis(1500));
/// fail("b");
/// assert!(fail("c").is_quarantine);
/// ```
#[derive(Debug, Clone, Default)]
pub struct CircuitBreaker {
    /// Subjects of the facts whose jobs failed since the last success.
    failed_jobs: BTreeSet<String>,
    /// Times in a row that the host could not do the work.
    unfit_count: u32,
    /// Transient crashes since the last success, by name.
    crash_counts: BTreeMap<&'static str, u32>,
}

/// A pause before the role takes the next job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleBackoff {
    pub pause: Duration,
    /// Message for users; may be empty.
    pub message: String,
    pub is_quarantine: bool,
}

impl CircuitBreaker {
    /// Resets all counters after a successful job. A pause that was returned before still applies.
    pub fn record_success(&mut self) {
        *self = Self::default();
    }

    /// Counts a failed job, and returns the pause before the role takes the next one. `job` is the
    /// subject of its fact, `message` the failure's text for users, `delay` the time until the job
    /// is redelivered, `lease` the duration of a lease.
    ///
    /// Invalid input and unmet needs cause no pause. A worker shared by several jobs and an
    /// unavailable dependency cause a pause but do not count as failures of the role.
    pub fn record_failure(
        &mut self,
        job: &str,
        fault: JobFault,
        message: &str,
        delay: Duration,
        lease: Duration,
    ) -> RoleBackoff {
        let backoff =
            |pause, trouble| RoleBackoff { pause, message: trouble, is_quarantine: false };
        match fault {
            // Only the job is at fault.
            JobFault::InvalidInput => return backoff(Duration::ZERO, String::new()),
            // Only this job waits, and users see the reason.
            JobFault::NeedsUnmet | JobFault::ResultDiffers => {
                return backoff(Duration::ZERO, message.to_owned());
            }
            JobFault::SharedWorker | JobFault::DependencyDown => {
                return backoff(delay + FAILURE_MARGIN, String::new());
            }
            JobFault::DiskFull
            | JobFault::HostUnfit
            | JobFault::OutOfMemory
            | JobFault::Unschedulable => {
                let pause = UNFIT_BACKOFF
                    .saturating_mul(1 << self.unfit_count.min(16))
                    .min(UNFIT_BACKOFF_MAX);
                self.unfit_count = self.unfit_count.saturating_add(1);
                return backoff(pause, message.to_owned());
            }
            JobFault::HostBroken => {
                let trouble = format!("in quarantine until restarted: {message}");
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
            return backoff(delay + FAILURE_MARGIN, String::new());
        }
        RoleBackoff {
            pause: lease.saturating_mul(QUARANTINE_LEASES),
            message: format!(
                "in quarantine: {FAILED_JOBS_MAX} jobs in a row failed, the last: {message}"
            ),
            is_quarantine: true,
        }
    }

    /// Returns the pause before retry number `retry` (from 0) while a dependency is down: 1 s,
    /// doubled up to 15 s. `None` after 240 retries, about an hour.
    pub fn dependency_backoff(retry: u32) -> Option<Duration> {
        let pause =
            DEPENDENCY_BACKOFF.saturating_mul(1 << retry.min(16)).min(DEPENDENCY_BACKOFF_MAX);
        (retry < DEPENDENCY_RETRIES_MAX).then_some(pause)
    }
}

/// Doubles each time instead of being permanent, because the host may be the only one of the fleet.
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

    fn fail(breaker: &mut CircuitBreaker, job: &str, fault: JobFault) -> RoleBackoff {
        breaker.record_failure(job, fault, "no", Duration::from_secs(1), LEASE)
    }

    #[test]
    fn three_different_jobs_in_a_row_are_a_quarantine_that_one_success_ends() {
        let mut breaker = CircuitBreaker::default();
        for job in ["a", "a", "a", "b"] {
            let backoff = fail(&mut breaker, job, JobFault::WorkFailed);
            let pause = Duration::from_millis(1500);
            assert_eq!((backoff.pause, backoff.is_quarantine), (pause, false));
        }
        let backoff = fail(&mut breaker, "c", JobFault::WorkFailed);
        assert!(backoff.is_quarantine && backoff.pause == 10 * LEASE, "{backoff:?}");
        assert!(fail(&mut breaker, "d", JobFault::WorkFailed).is_quarantine, "still");
        assert_eq!(breaker.failed_jobs.len(), FAILED_JOBS_MAX, "the memory is bounded");
        breaker.record_success();
        assert!(!fail(&mut breaker, "e", JobFault::WorkFailed).is_quarantine);
    }

    #[test]
    fn faults_of_others_do_not_count_against_the_agent() {
        let mut breaker = CircuitBreaker::default();
        for fault in [
            JobFault::InvalidInput,
            JobFault::DependencyDown,
            JobFault::DiskFull,
            JobFault::HostUnfit,
            JobFault::NeedsUnmet,
            JobFault::ResultDiffers,
            JobFault::SharedWorker,
        ] {
            for job in ["a", "b", "c"] {
                assert!(!fail(&mut breaker, job, fault).is_quarantine);
            }
        }
        assert!(!fail(&mut breaker, "d", JobFault::WorkFailed).is_quarantine);
        let shared = fail(&mut breaker, "e", JobFault::SharedWorker);
        assert_eq!(shared.pause, Duration::from_millis(1500));
    }

    #[test]
    fn the_same_crash_twice_is_a_quarantine_and_different_ones_are_not() {
        let mut breaker = CircuitBreaker::default();
        assert!(!fail(&mut breaker, "a", JobFault::Transient("hang")).is_quarantine);
        assert!(!fail(&mut breaker, "a", JobFault::Transient("gpu_mem_fault")).is_quarantine);
        let backoff = fail(&mut breaker, "a", JobFault::Transient("hang"));
        assert!(backoff.is_quarantine && backoff.pause == 2 * LEASE, "{backoff:?}");
        assert!(backoff.message.contains("hang 2 times"), "{}", backoff.message);
        let third = fail(&mut breaker, "a", JobFault::Transient("hang"));
        assert!(third.is_quarantine && third.pause == 4 * LEASE, "{third:?}");
        let backoffs = (0..99).map(|_| fail(&mut breaker, "a", JobFault::Transient("hang")).pause);
        assert_eq!(backoffs.max(), Some(BROKEN_BACKOFF));
        breaker.record_success();
        assert!(!fail(&mut breaker, "b", JobFault::Transient("hang")).is_quarantine, "it passed");
    }

    #[test]
    fn a_broken_host_takes_no_job_for_an_hour() {
        let mut breaker = CircuitBreaker::default();
        let backoff = fail(&mut breaker, "a", JobFault::HostBroken);
        assert!(backoff.is_quarantine && backoff.pause == BROKEN_BACKOFF, "{backoff:?}");
    }

    #[test]
    fn a_host_without_enough_memory_lets_others_try_first() {
        let mut breaker = CircuitBreaker::default();
        let backoffs: Vec<RoleBackoff> =
            (0..3).map(|_| fail(&mut breaker, "a", JobFault::OutOfMemory)).collect();
        assert!(
            backoffs.iter().all(|backoff| !backoff.is_quarantine && backoff.pause >= UNFIT_BACKOFF)
        );
        assert!(backoffs[0].pause < backoffs[2].pause);
    }

    #[test]
    fn a_job_with_unmet_needs_delays_no_other_job() {
        let mut breaker = CircuitBreaker::default();
        for job in ["a", "b", "c", "d"] {
            let backoff = fail(&mut breaker, job, JobFault::NeedsUnmet);
            assert_eq!((backoff.pause, &*backoff.message), (Duration::ZERO, "no"));
        }
        assert_eq!(fail(&mut breaker, "e", JobFault::DiskFull).pause, UNFIT_BACKOFF);
    }

    #[test]
    fn an_unfit_host_retries_less_and_less_often_and_reports_it() {
        let mut breaker = CircuitBreaker::default();
        let backoffs: Vec<Duration> =
            (0..10).map(|_| fail(&mut breaker, "a", JobFault::DiskFull).pause).collect();
        assert!(backoffs.windows(2).all(|pair| pair[1] == (2 * pair[0]).min(UNFIT_BACKOFF_MAX)));
        assert_eq!(fail(&mut breaker, "a", JobFault::DiskFull).message, "no");
        assert_eq!(fail(&mut breaker, "b", JobFault::HostUnfit).message, "no");
        let pauses: Vec<Duration> =
            (0..999).map_while(CircuitBreaker::dependency_backoff).collect();
        assert_eq!(pauses[..5], [1, 2, 4, 8, 15].map(Duration::from_secs));
        assert_eq!((pauses.len(), pauses.iter().max()), (240, pauses.last()));
    }
}
