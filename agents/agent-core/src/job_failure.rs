//! Job failures: the failure fact to write, and the decision between retrying and giving up.

use std::{collections::BTreeSet, time::Duration};

use wire::{FactKey, RunId, SuiteName, WorkKind, v1};

/// Number of different agents on which a job may fail before the job is given up: the cause is then
/// not the agents.
const FAILED_AGENTS_MAX: usize = 3;

/// Number of failures after which a job is given up even if they are all on one agent: a fleet may
/// have only one.
const JOB_FAILURES_MAX: usize = 5;

/// Delay in milliseconds before a retry, multiplied by the number of failures so far.
const RETRY_BACKOFF_MS: u64 = 1000;

/// First delay before the redelivery of a job whose needs a host does not meet; doubled with each
/// delivery.
const HAND_BACK_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay of such a redelivery: a suitable host that comes later waits at most this long.
const HAND_BACK_DELAY_MAX: Duration = Duration::from_secs(60);

/// The cause of a failed attempt. It decides whether the failure counts against the job, how long
/// the agent backs off, and whether the job is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobFault {
    /// The order, the data or the model is invalid: no attempt can succeed.
    InvalidInput,
    /// The work or the host failed; another attempt, perhaps on another agent, may succeed.
    WorkFailed,
    /// The worker died while it had several jobs: the job that caused it is unknown.
    SharedWorker,
    /// A shared dependency is unavailable: the store or the bus.
    DependencyDown,
    /// The disk of this host is full.
    DiskFull,
    /// This host would produce wrong results, or cannot do the work at the moment.
    HostUnfit,
    /// This host lacks what this job needs; it can do other jobs.
    NeedsUnmet,
    /// A known crash caused by this host's driver, libraries or GPU: any job would end the same
    /// way.
    HostBroken,
    /// A known crash that may be transient, by its name; a second occurrence is attributed to the
    /// host.
    Transient(&'static str),
    /// The job turned out to need more memory than this host has.
    OutOfMemory,
    /// The job needs more memory than any online host has.
    Unschedulable,
}

impl JobFault {
    /// Returns the cause to write: whether the failure counts against the work or the surroundings.
    fn failure_cause(self) -> v1::failure::Cause {
        match self {
            Self::InvalidInput | Self::WorkFailed | Self::Transient(_) | Self::OutOfMemory => {
                v1::failure::Cause::Work
            }
            Self::SharedWorker
            | Self::DependencyDown
            | Self::DiskFull
            | Self::HostUnfit
            | Self::NeedsUnmet
            | Self::HostBroken
            | Self::Unschedulable => v1::failure::Cause::Surroundings,
        }
    }

    /// Returns true for faults that are reported even if the last failure was of the surroundings
    /// too, because they are rare.
    fn is_always_reported(self) -> bool {
        matches!(self, Self::HostBroken | Self::Unschedulable)
    }
}

/// One failed attempt at a job.
#[derive(Debug, Clone, Copy)]
pub struct FailedAttempt<'a> {
    /// Run of the job.
    pub run: &'a RunId,
    /// Kind of work.
    pub kind: WorkKind,
    /// Id of the agent that tried.
    pub agent: &'a str,
    /// Cause of the failure.
    pub fault: JobFault,
    /// Error message.
    pub message: &'a str,
    /// End of the worker's log.
    pub log_tail: &'a str,
}

/// The decision on a failed job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryDecision {
    /// The job is not retried.
    GiveUp,
    /// The job is redelivered, to any agent, after this many milliseconds.
    RetryAfter { delay_ms: u64 },
}

/// Returns the results that a job must produce, each with the id that its failures have
/// (`failure.<kind>.<id>.<attempt>`) and its fact key if that is known in advance. All orders of
/// one job have the same id. A checkpoint has one eval per suite.
pub fn expected_results(place: &FactKey, suites: &[v1::Suite]) -> Vec<(String, Option<FactKey>)> {
    match place {
        FactKey::GenerateOrder { cycle, job, .. } | FactKey::Samples { cycle, job } => {
            vec![(format!("{cycle}-{job}"), None)]
        }
        FactKey::TrainOrder { cycle, .. } => vec![(cycle.to_string(), None)],
        _ => {
            let Some((cycle, step)) = place.checkpoint_position() else { return Vec::new() };
            let names = suites.iter().filter_map(|suite| SuiteName::new(suite.name.as_str()).ok());
            let eval = |suite: SuiteName| {
                let id = format!("{cycle}-{step}-{suite}");
                (id, Some(FactKey::Eval { cycle, step, suite }))
            };
            names.map(eval).collect()
        }
    }
}

/// Returns the failure fact to write, given the last one with the same id.
///
/// `None` if it adds no information: the surroundings were already reported as the cause, by this
/// agent with the same message or by a fault that is not always reported. The failure is final if
/// the input is invalid, or if the work has failed on 3 agents or 5 times.
pub fn build_failure(
    blow: &FailedAttempt<'_>,
    id: &str,
    last: Option<&v1::Failure>,
) -> Option<v1::Failure> {
    use v1::failure::Cause;
    let cause = blow.fault.failure_cause();
    let as_before = |last: &v1::Failure| {
        let same = last.agent == blow.agent && last.message == blow.message;
        last.cause() == Cause::Surroundings && (same || !blow.fault.is_always_reported())
    };
    if cause == Cause::Surroundings && last.is_some_and(as_before) {
        return None;
    }
    let mut agents = last.map_or_else(Vec::new, |last| last.agents.clone());
    if cause == Cause::Work {
        agents.push(blow.agent.to_owned());
    }
    let boxes: BTreeSet<&String> = agents.iter().collect();
    let worn_out = boxes.len() >= FAILED_AGENTS_MAX || agents.len() >= JOB_FAILURES_MAX;
    Some(v1::Failure {
        run: blow.run.to_string(),
        kind: blow.kind.to_string(),
        id: id.to_owned(),
        attempt: last.map_or(1, |last| last.attempt.saturating_add(1)),
        agent: blow.agent.to_owned(),
        message: blow.message.to_owned(),
        log_tail: blow.log_tail.to_owned(),
        r#final: blow.fault == JobFault::InvalidInput || (cause == Cause::Work && worn_out),
        cause: cause.into(),
        agents,
    })
}

/// Returns true if a result that contains errors of its verifier's host is to be written
/// nevertheless, because enough agents or all suitable ones have tried. Otherwise the attempt
/// counts as failed. `others` are the other agents that are online and suitable.
pub fn errors_are_final(last: Option<&v1::Failure>, agent: &str, others: &[String]) -> bool {
    let before = last.map_or(&[][..], |last| &last.agents);
    let tried: BTreeSet<&str> = before.iter().map(String::as_str).chain([agent]).collect();
    let all = !before.is_empty() && others.iter().all(|other| tried.contains(other.as_str()));
    all || tried.len() >= FAILED_AGENTS_MAX || before.len() + 1 >= JOB_FAILURES_MAX
}

/// Decides what to do with the delivery once these failures are written, one per expected result:
/// give up if all of them are final, otherwise retry with linear backoff.
pub fn decide_retry(failures: &[v1::Failure]) -> RetryDecision {
    if !failures.is_empty() && failures.iter().all(|failure| failure.r#final) {
        return RetryDecision::GiveUp;
    }
    let most = failures.iter().map(|failure| failure.agents.len()).max().unwrap_or(0);
    RetryDecision::RetryAfter { delay_ms: RETRY_BACKOFF_MS * (most.max(1) as u64) }
}

/// Returns the delay before the redelivery of a job whose needs this host does not meet. The job
/// waits instead of the role. `delivered` is the number of its deliveries including this one.
pub fn hand_back_delay(delivered: u64) -> Duration {
    let doublings = delivered.saturating_sub(1).min(16);
    HAND_BACK_DELAY.saturating_mul(1 << doublings).min(HAND_BACK_DELAY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(fault: JobFault, agents: &[&str]) -> Option<v1::Failure> {
        let run = RunId::new("r1").unwrap();
        let mut last = None;
        let mut written = None;
        for agent in agents {
            let blow = FailedAttempt {
                run: &run,
                kind: WorkKind::Generate,
                agent,
                fault,
                message: "no",
                log_tail: "",
            };
            written = build_failure(&blow, "1-t1", last.as_ref());
            last = written.clone().or(last);
        }
        written
    }

    #[test]
    fn a_job_is_given_up_after_three_agents_or_five_failures() {
        assert!(!fail(JobFault::WorkFailed, &["a", "b"]).unwrap().r#final);
        let third = fail(JobFault::WorkFailed, &["a", "b", "c"]).unwrap();
        assert!(third.r#final);
        assert_eq!((third.attempt, third.agents), (3, ["a", "b", "c"].map(String::from).into()));
        assert!(!fail(JobFault::WorkFailed, &["a"; 4]).unwrap().r#final);
        assert!(fail(JobFault::WorkFailed, &["a"; 5]).unwrap().r#final);
        assert!(fail(JobFault::InvalidInput, &["a"]).unwrap().r#final);
    }

    #[test]
    fn surroundings_are_told_once_and_never_counted() {
        let first = fail(JobFault::DependencyDown, &["a"]).unwrap();
        assert!(!first.r#final && first.agents.is_empty());
        assert_eq!(fail(JobFault::DiskFull, &["a"; 9]), None);
        assert_eq!(fail(JobFault::HostUnfit, &["a"; 9]), None);
        assert_eq!(fail(JobFault::NeedsUnmet, &["a"; 9]), None);
        assert_eq!(fail(JobFault::SharedWorker, &["a", "b", "c"]), None);
    }

    #[test]
    fn a_job_that_a_box_lacks_something_for_waits_ever_longer_but_never_long() {
        let seconds = |delivered| hand_back_delay(delivered).as_secs();
        assert_eq!([1, 2, 3, 6, 7, 8, u64::MAX].map(seconds), [1, 2, 4, 32, 60, 60, 60]);
    }

    #[test]
    fn a_broken_box_counts_against_no_job_and_each_is_told_once() {
        let all = fail(JobFault::HostBroken, &["a", "b", "c", "d"]).unwrap();
        assert!(!all.r#final && all.agents.is_empty());
        assert_eq!((all.attempt, &*all.agent), (4, "d"));
        assert_eq!(fail(JobFault::HostBroken, &["a", "b", "b"]), None);
    }

    #[test]
    fn that_no_box_has_room_is_told_whatever_was_away_before() {
        let away = fail(JobFault::DependencyDown, &["a"]).unwrap();
        let run = RunId::new("r1").unwrap();
        let (kind, agent, fault) = (WorkKind::Train, "a", JobFault::Unschedulable);
        let blow = |message| FailedAttempt { run: &run, kind, agent, fault, message, log_tail: "" };
        let told = build_failure(&blow("no trainer has room"), "1", Some(&away)).unwrap();
        assert!(!told.r#final && told.agents.is_empty());
        assert_eq!(build_failure(&blow("no trainer has room"), "1", Some(&told)), None);
    }

    #[test]
    fn what_may_pass_and_what_was_too_large_count_as_any_failure() {
        for fault in [JobFault::Transient("gpu_hang"), JobFault::OutOfMemory] {
            let third = fail(fault, &["a", "b", "c"]).unwrap();
            assert!(third.r#final, "{fault:?}");
        }
    }

    #[test]
    fn errors_of_a_box_stand_once_enough_or_all_that_could_have_tried() {
        let stand = |before: &[&str], others: &[&str]| {
            let agents = before.iter().map(|&agent| agent.to_owned()).collect();
            let last = v1::Failure { agents, ..Default::default() };
            let others: Vec<String> = others.iter().map(|&other| other.to_owned()).collect();
            errors_are_final(Some(&last).filter(|_| !before.is_empty()), "a", &others)
        };
        assert!(!stand(&[], &[]), "it may have been a mishap");
        assert!(stand(&["a"], &[]));
        assert!(!stand(&["a"], &["b"]) && stand(&["b"], &["b"]));
        assert!(!stand(&["b"], &["b", "c"]) && stand(&["b", "c"], &["b", "c", "d"]));
        assert!(!stand(&["a"; 3], &["b"]) && stand(&["a"; 4], &["b"]));
    }

    #[test]
    fn a_job_is_handed_back_until_all_it_owes_is_given_up() {
        let failure = |r#final, tries| v1::Failure {
            r#final,
            agents: vec!["a".into(); tries],
            ..Default::default()
        };
        assert_eq!(decide_retry(&[failure(true, 5), failure(true, 1)]), RetryDecision::GiveUp);
        let again = decide_retry(&[failure(true, 5), failure(false, 2)]);
        assert_eq!(again, RetryDecision::RetryAfter { delay_ms: 5000 });
        assert_eq!(decide_retry(&[]), RetryDecision::RetryAfter { delay_ms: 1000 });
    }
}
