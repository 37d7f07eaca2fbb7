//! Failed attempts at a job: the failure fact to write, and whether to retry.

use std::{collections::BTreeSet, time::Duration};

use wire::{FactKey, RunId, SuiteName, TrainPart, WorkKind, v1};

/// Agents on which a job may fail before it is given up: the cause is then not the agents.
const FAILED_AGENTS_MAX: usize = 3;

/// Failures after which a job is given up even if they are all on one agent: a fleet may have only
/// one.
const JOB_FAILURES_MAX: usize = 5;

/// Delay before a retry, multiplied by the number of failures so far.
const RETRY_BACKOFF_MS: u64 = 1000;

/// First delay before the redelivery of a job whose needs a host does not meet; doubled with each
/// delivery.
const HAND_BACK_DELAY: Duration = Duration::from_secs(1);
/// Maximum of that delay: a suitable host that joins later waits at most this long.
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
    DiskFull,
    /// This host would produce wrong results, or cannot do the work at the moment.
    HostUnfit,
    /// This host lacks what this job needs; it can do other jobs.
    NeedsUnmet,
    /// Another host has published other bytes for the same result: one of the two computes wrong.
    ResultDiffers,
    /// A known crash caused by this host's driver, libraries or GPU: every job would crash.
    HostBroken,
    /// A known crash that may be transient, by its name; the second one is the host's.
    Transient(&'static str),
    /// The job ran out of this host's memory.
    OutOfMemory,
    /// The job needs more memory than any online host has.
    Unschedulable,
}

impl JobFault {
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
            | Self::ResultDiffers
            | Self::HostBroken
            | Self::Unschedulable => v1::failure::Cause::Surroundings,
        }
    }

    /// Returns true if a failure is written even for results that are in the log.
    pub fn concerns_written_results(self) -> bool {
        self == Self::ResultDiffers
    }

    /// Returns true for faults rare enough to be reported after any other failure.
    fn is_always_reported(self) -> bool {
        matches!(self, Self::HostBroken | Self::Unschedulable | Self::ResultDiffers)
    }
}

/// One failed attempt at a job.
#[derive(Debug, Clone, Copy)]
pub struct FailedAttempt<'a> {
    pub run: &'a RunId,
    pub kind: WorkKind,
    pub agent: &'a str,
    pub fault: JobFault,
    pub message: &'a str,
    /// The last lines of the worker's log.
    pub log_tail: &'a str,
}

/// The decision on a failed job: it ends after enough failures, or is redelivered to any agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryDecision {
    GiveUp,
    RetryAfter { delay_ms: u64 },
}

/// Returns the results that a job must produce: each with the id of its failure facts
/// (`failure.<kind>.<id>.<attempt>`), and, for evaluations only, with its fact key. `place` is
/// the key of the fact that requests the job, `suites` are the run's; empty for a fact that
/// requests no job.
///
/// All orders of one job have the same id. A checkpoint has one evaluation per suite.
pub fn expected_results(place: &FactKey, suites: &[v1::Suite]) -> Vec<(String, Option<FactKey>)> {
    match place {
        FactKey::GenerateOrder { cycle, job, .. } | FactKey::Samples { cycle, job } => {
            vec![(format!("{cycle}-{job}"), None)]
        }
        FactKey::TrainOrder { cycle, .. } => vec![(cycle.to_string(), None)],
        FactKey::TrainPartOrder { cycle, outer, part, .. } => {
            let (cycle, outer) = (*cycle, *outer);
            let result = match *part {
                TrainPart::Slice(slice) => FactKey::Delta { cycle, outer, slice },
                TrainPart::Merge => FactKey::Merge { cycle, outer },
            };
            vec![(format!("{cycle}-{outer}-{part}"), Some(result))]
        }
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

/// Builds the failure fact to write after `last`, the newest one with the same `id` (see
/// [`expected_results`]).
///
/// `None` if it adds no information: `last` already blames the surroundings (store, bus or host),
/// with the same agent and message, or the new fault is a frequent one. The failure is final if the
/// input is invalid, or if the work has failed on 3 agents or 5 times.
pub fn build_failure(
    attempt: &FailedAttempt<'_>,
    id: &str,
    last: Option<&v1::Failure>,
) -> Option<v1::Failure> {
    use v1::failure::Cause;
    let cause = attempt.fault.failure_cause();
    let as_before = |last: &v1::Failure| {
        // Boxes of one kind differ from the log alike.
        let same_agent = attempt.fault == JobFault::ResultDiffers || last.agent == attempt.agent;
        let same = same_agent && last.message == attempt.message;
        last.cause() == Cause::Surroundings && (same || !attempt.fault.is_always_reported())
    };
    if cause == Cause::Surroundings && last.is_some_and(as_before) {
        return None;
    }
    let mut agents = last.map_or_else(Vec::new, |last| last.agents.clone());
    if cause == Cause::Work {
        agents.push(attempt.agent.to_owned());
    }
    let hosts: BTreeSet<&String> = agents.iter().collect();
    let exhausted = hosts.len() >= FAILED_AGENTS_MAX || agents.len() >= JOB_FAILURES_MAX;
    Some(v1::Failure {
        run: attempt.run.to_string(),
        kind: attempt.kind.to_string(),
        id: id.to_owned(),
        attempt: last.map_or(1, |last| last.attempt.saturating_add(1)),
        agent: attempt.agent.to_owned(),
        message: attempt.message.to_owned(),
        log_tail: attempt.log_tail.to_owned(),
        r#final: attempt.fault == JobFault::InvalidInput || (cause == Cause::Work && exhausted),
        cause: cause.into(),
        agents,
    })
}

/// Returns true if a result with errors of its host is written nevertheless, because enough agents
/// or all suitable ones have tried. Otherwise the attempt counts as failed. `last` is the job's
/// newest failure, `agent` this agent, `others` the other suitable agents that are online.
pub fn errors_are_final(last: Option<&v1::Failure>, agent: &str, others: &[String]) -> bool {
    let before = last.map_or(&[][..], |last| &last.agents);
    let tried: BTreeSet<&str> = before.iter().map(String::as_str).chain([agent]).collect();
    let all = !before.is_empty() && others.iter().all(|other| tried.contains(other.as_str()));
    all || tried.len() >= FAILED_AGENTS_MAX || before.len() + 1 >= JOB_FAILURES_MAX
}

/// Decides on a failed delivery. `failures` contains, for each missing result, its newest failure
/// fact, which [`build_failure`] has marked as final or not and which lists the agents of all
/// failures of the work so far.
///
/// The delivery is given up when all facts are final. Otherwise, also without facts, it is
/// redelivered to any agent after 1 s times the number of failures of the work (the largest one
/// among the facts, at least 1):
///
/// ```text
/// work failed on a           redelivered after 1 s
/// work failed on a, b        redelivered after 2 s
/// work failed on a, b, c     given up, as after 5 failures on one agent
/// store or bus down          redelivered, not counted, never given up
/// invalid input              given up at once
/// ```
pub fn decide_retry(failures: &[v1::Failure]) -> RetryDecision {
    if !failures.is_empty() && failures.iter().all(|failure| failure.r#final) {
        return RetryDecision::GiveUp;
    }
    let most = failures.iter().map(|failure| failure.agents.len()).max().unwrap_or(0);
    RetryDecision::RetryAfter { delay_ms: RETRY_BACKOFF_MS * (most.max(1) as u64) }
}

/// Returns the delay before a job whose needs this host does not meet is redelivered: 1 s, doubled
/// with each delivery, at most 60 s. `delivered` is the number of deliveries including this one.
pub fn hand_back_delay(delivered: u64) -> Duration {
    let doublings = delivered.saturating_sub(1).min(16);
    HAND_BACK_DELAY.saturating_mul(1 << doublings).min(HAND_BACK_DELAY_MAX)
}

#[cfg(test)]
mod tests {
    use wire::Subject;

    use super::*;

    fn fail(fault: JobFault, agents: &[&str]) -> Option<v1::Failure> {
        let run = RunId::new("r1").unwrap();
        let mut last = None;
        let mut written = None;
        for agent in agents {
            let attempt = FailedAttempt {
                run: &run,
                kind: WorkKind::Generate,
                agent,
                fault,
                message: "no",
                log_tail: "",
            };
            written = build_failure(&attempt, "1-t1", last.as_ref());
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
    fn each_job_has_one_result_and_a_checkpoint_one_per_suite() {
        let suites = ["heldout", "No Name", "math"];
        let suites = suites.map(|name| v1::Suite { name: name.into(), ..Default::default() });
        let expected = |subject: &str| {
            let subject: Subject = format!("flotilla.r1.{subject}").parse().unwrap();
            let results = expected_results(&subject.key, &suites).into_iter();
            let key = |key: FactKey| Subject { key, ..subject.clone() }.to_string();
            results.map(|(id, eval)| (id, eval.map(key))).collect::<Vec<_>>()
        };
        let one = |id: &str| vec![(id.to_owned(), None)];
        assert_eq!(expected("order.generate.default.2.t1.3"), one("2-t1"));
        assert_eq!(expected("samples.2.t1"), one("2-t1"));
        assert_eq!(expected("order.train.default.2.1"), one("2"));
        let eval =
            |suite| (format!("2-40-{suite}"), Some(format!("flotilla.r1.eval.2.40.{suite}")));
        assert_eq!(expected("checkpoint.2.40"), ["heldout", "math"].map(eval));
        assert_eq!(expected("done"), []);
    }

    #[test]
    fn surroundings_are_reported_once_and_never_counted() {
        let first = fail(JobFault::DependencyDown, &["a"]).unwrap();
        assert!(!first.r#final && first.agents.is_empty());
        assert_eq!(fail(JobFault::DiskFull, &["a"; 9]), None);
        assert_eq!(fail(JobFault::HostUnfit, &["a"; 9]), None);
        assert_eq!(fail(JobFault::NeedsUnmet, &["a"; 9]), None);
        assert_eq!(fail(JobFault::SharedWorker, &["a", "b", "c"]), None);
    }

    #[test]
    fn a_job_with_unmet_needs_waits_longer_each_time_up_to_a_minute() {
        let seconds = |delivered| hand_back_delay(delivered).as_secs();
        assert_eq!([1, 2, 3, 6, 7, 8, u64::MAX].map(seconds), [1, 2, 4, 32, 60, 60, 60]);
    }

    #[test]
    fn a_broken_host_counts_against_no_job_and_is_reported_once() {
        let all = fail(JobFault::HostBroken, &["a", "b", "c", "d"]).unwrap();
        assert!(!all.r#final && all.agents.is_empty());
        assert_eq!((all.attempt, &*all.agent), (4, "d"));
        assert_eq!(fail(JobFault::HostBroken, &["a", "b", "b"]), None);
    }

    #[test]
    fn an_unschedulable_job_is_reported_even_after_an_outage() {
        let down = fail(JobFault::DependencyDown, &["a"]).unwrap();
        let run = RunId::new("r1").unwrap();
        let (kind, agent, fault) = (WorkKind::Train, "a", JobFault::Unschedulable);
        let attempt =
            |message| FailedAttempt { run: &run, kind, agent, fault, message, log_tail: "" };
        let written = build_failure(&attempt("no trainer has room"), "1", Some(&down)).unwrap();
        assert!(!written.r#final && written.agents.is_empty());
        assert_eq!(build_failure(&attempt("no trainer has room"), "1", Some(&written)), None);
    }

    #[test]
    fn a_result_that_differs_is_reported_once_even_after_an_outage_and_if_it_is_written() {
        let fault = JobFault::ResultDiffers;
        assert!(
            fault.concerns_written_results() && !JobFault::NeedsUnmet.concerns_written_results()
        );
        let down = fail(JobFault::DependencyDown, &["a"]).unwrap();
        let run = RunId::new("r1").unwrap();
        let (kind, agent) = (WorkKind::Train, "a");
        let attempt =
            FailedAttempt { run: &run, kind, agent, fault, message: "differs", log_tail: "" };
        let written = build_failure(&attempt, "0-1-merge", Some(&down)).unwrap();
        assert!(!written.r#final && written.agents.is_empty());
        for agent in ["a", "b"] {
            let attempt = FailedAttempt { agent, ..attempt };
            assert_eq!(build_failure(&attempt, "0-1-merge", Some(&written)), None, "{agent}");
        }
    }

    #[test]
    fn transient_crashes_and_out_of_memory_count_as_failures_of_the_work() {
        for fault in [JobFault::Transient("gpu_hang"), JobFault::OutOfMemory] {
            let third = fail(fault, &["a", "b", "c"]).unwrap();
            assert!(third.r#final, "{fault:?}");
        }
    }

    #[test]
    fn errors_are_final_once_enough_or_all_suitable_agents_have_tried() {
        let is_final = |before: &[&str], others: &[&str]| {
            let agents = before.iter().map(|&agent| agent.to_owned()).collect();
            let last = v1::Failure { agents, ..Default::default() };
            let others: Vec<String> = others.iter().map(|&other| other.to_owned()).collect();
            errors_are_final(Some(&last).filter(|_| !before.is_empty()), "a", &others)
        };
        assert!(!is_final(&[], &[]), "it may have been a mishap");
        assert!(is_final(&["a"], &[]));
        assert!(!is_final(&["a"], &["b"]) && is_final(&["b"], &["b"]));
        assert!(!is_final(&["b"], &["b", "c"]) && is_final(&["b", "c"], &["b", "c", "d"]));
        assert!(!is_final(&["a"; 3], &["b"]) && is_final(&["a"; 4], &["b"]));
    }

    #[test]
    fn a_job_is_retried_until_all_its_results_are_given_up() {
        let failure = |r#final, tries| v1::Failure {
            r#final,
            agents: vec!["a".into(); tries],
            ..Default::default()
        };
        assert_eq!(decide_retry(&[failure(true, 5), failure(true, 1)]), RetryDecision::GiveUp);
        let retry = decide_retry(&[failure(true, 5), failure(false, 2)]);
        assert_eq!(retry, RetryDecision::RetryAfter { delay_ms: 5000 });
        assert_eq!(decide_retry(&[]), RetryDecision::RetryAfter { delay_ms: 1000 });
    }
}
