//! What is written when a job is not done, and when it is given up.

use std::collections::BTreeSet;

use wire::{Place, RunId, SuiteName, WorkKind, v1};

/// A job that has failed on so many agents is not the agents' fault.
const AGENTS_MAX: usize = 3;

/// So many failures of one job, wherever, and it is given up: a fleet may have one box.
const FAILURES_MAX: usize = 5;

/// Before a failed job is tried again, times the failures so far.
const RETRY_DELAY_MS: u64 = 1000;

/// What is at fault when a job is not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The order, the data or the model: no try will succeed.
    Content,
    /// The work or the box; another try, perhaps elsewhere, may succeed.
    Work,
    /// One of several jobs that a worker had when it died: nobody knows which.
    Company,
    /// What all share is away: the store, the bus.
    Away,
    /// This box's disk is full.
    Disk,
    /// This box would do the work wrongly, and knows it; or cannot just now.
    Box,
    /// A known way to die that this box's driver, libraries or card stand for: whatever it is
    /// handed would end the same.
    Broken,
    /// A known way to die that may pass, by its name; meeting it twice is the box.
    Passing(&'static str),
    /// More than this box has room for, as it turned out.
    TooLarge,
    /// More than any box that is there has room for.
    NoRoom,
}

impl Fault {
    /// What is written of it: whether it counts against the work.
    fn cause(self) -> v1::failure::Cause {
        match self {
            Self::Content | Self::Work | Self::Passing(_) | Self::TooLarge => {
                v1::failure::Cause::Work
            }
            Self::Company | Self::Away | Self::Disk | Self::Box | Self::Broken | Self::NoRoom => {
                v1::failure::Cause::Surroundings
            }
        }
    }

    /// Whether it is told though the last failure was of the surroundings too: who says these
    /// says them rarely.
    fn is_told_again(self) -> bool {
        matches!(self, Self::Broken | Self::NoRoom)
    }
}

/// One failed try.
#[derive(Debug, Clone, Copy)]
pub struct Blow<'a> {
    pub run: &'a RunId,
    pub kind: WorkKind,
    pub agent: &'a str,
    pub fault: Fault,
    pub message: &'a str,
    pub log_tail: &'a str,
}

/// What becomes of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Nobody tries again.
    GiveUp,
    /// It may be handed out again after so many milliseconds.
    HandBack { delay_ms: u64 },
}

/// What a job owes, as failures name it (`failure.<kind>.<id>.<attempt>`): the id is the same
/// for every order of one job. Of a checkpoint, an eval a suite.
pub fn owed(place: &Place, suites: &[v1::Suite]) -> Vec<(String, Option<Place>)> {
    match place {
        Place::GenerateOrder { cycle, job, .. } | Place::Samples { cycle, job } => {
            vec![(format!("{cycle}-{job}"), None)]
        }
        Place::TrainOrder { cycle, .. } => vec![(cycle.to_string(), None)],
        Place::Checkpoint { cycle, step } => suites
            .iter()
            .filter_map(|suite| SuiteName::new(suite.name.as_str()).ok())
            .map(|suite| {
                let id = format!("{cycle}-{step}-{suite}");
                (id, Some(Place::Eval { cycle: *cycle, step: *step, suite }))
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// The failure to write, given the last one of the same id. `None` when it says nothing new:
/// what surrounds the work is still as it was.
pub fn failure(blow: &Blow<'_>, id: &str, last: Option<&v1::Failure>) -> Option<v1::Failure> {
    use v1::failure::Cause;
    let cause = blow.fault.cause();
    let as_before = |last: &v1::Failure| {
        let same = last.agent == blow.agent && last.message == blow.message;
        last.cause() == Cause::Surroundings && (same || !blow.fault.is_told_again())
    };
    if cause == Cause::Surroundings && last.is_some_and(as_before) {
        return None;
    }
    let mut agents = last.map_or_else(Vec::new, |last| last.agents.clone());
    if cause == Cause::Work {
        agents.push(blow.agent.to_owned());
    }
    let boxes: BTreeSet<&String> = agents.iter().collect();
    let worn_out = boxes.len() >= AGENTS_MAX || agents.len() >= FAILURES_MAX;
    Some(v1::Failure {
        run: blow.run.to_string(),
        kind: blow.kind.to_string(),
        id: id.to_owned(),
        attempt: last.map_or(1, |last| last.attempt.saturating_add(1)),
        agent: blow.agent.to_owned(),
        message: blow.message.to_owned(),
        log_tail: blow.log_tail.to_owned(),
        r#final: blow.fault == Fault::Content || (cause == Cause::Work && worn_out),
        cause: cause.into(),
        agents,
    })
}

/// Whether a result that holds errors of the box that made it is written nevertheless: enough have
/// tried by now, or all that could. Otherwise the try has failed. `others` are there and could.
pub fn errors_stand(last: Option<&v1::Failure>, agent: &str, others: &[String]) -> bool {
    let before = last.map_or(&[][..], |last| &last.agents);
    let tried: BTreeSet<&str> = before.iter().map(String::as_str).chain([agent]).collect();
    let all = !before.is_empty() && others.iter().all(|other| tried.contains(other.as_str()));
    all || tried.len() >= AGENTS_MAX || before.len() + 1 >= FAILURES_MAX
}

/// What to do with the delivery once these failures are written, one for each fact owed.
pub fn then(failures: &[v1::Failure]) -> Then {
    if !failures.is_empty() && failures.iter().all(|failure| failure.r#final) {
        return Then::GiveUp;
    }
    let most = failures.iter().map(|failure| failure.agents.len()).max().unwrap_or(0);
    Then::HandBack { delay_ms: RETRY_DELAY_MS * (most.max(1) as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(fault: Fault, agents: &[&str]) -> Option<v1::Failure> {
        let run = RunId::new("r1").unwrap();
        let mut last = None;
        let mut written = None;
        for agent in agents {
            let blow = Blow {
                run: &run,
                kind: WorkKind::Generate,
                agent,
                fault,
                message: "no",
                log_tail: "",
            };
            written = failure(&blow, "1-t1", last.as_ref());
            last = written.clone().or(last);
        }
        written
    }

    #[test]
    fn a_job_is_given_up_after_three_agents_or_five_failures() {
        assert!(!fail(Fault::Work, &["a", "b"]).unwrap().r#final);
        let third = fail(Fault::Work, &["a", "b", "c"]).unwrap();
        assert!(third.r#final);
        assert_eq!((third.attempt, third.agents), (3, ["a", "b", "c"].map(String::from).into()));
        assert!(!fail(Fault::Work, &["a"; 4]).unwrap().r#final);
        assert!(fail(Fault::Work, &["a"; 5]).unwrap().r#final);
        assert!(fail(Fault::Content, &["a"]).unwrap().r#final);
    }

    #[test]
    fn surroundings_are_told_once_and_never_counted() {
        let first = fail(Fault::Away, &["a"]).unwrap();
        assert!(!first.r#final && first.agents.is_empty());
        assert_eq!(fail(Fault::Disk, &["a"; 9]), None);
        assert_eq!(fail(Fault::Box, &["a"; 9]), None);
        assert_eq!(fail(Fault::Company, &["a", "b", "c"]), None);
    }

    #[test]
    fn a_broken_box_counts_against_no_job_and_each_is_told_once() {
        let all = fail(Fault::Broken, &["a", "b", "c", "d"]).unwrap();
        assert!(!all.r#final && all.agents.is_empty());
        assert_eq!((all.attempt, &*all.agent), (4, "d"));
        assert_eq!(fail(Fault::Broken, &["a", "b", "b"]), None);
    }

    #[test]
    fn that_no_box_has_room_is_told_whatever_was_away_before() {
        let away = fail(Fault::Away, &["a"]).unwrap();
        let run = RunId::new("r1").unwrap();
        let (kind, agent, fault) = (WorkKind::Train, "a", Fault::NoRoom);
        let blow = |message| Blow { run: &run, kind, agent, fault, message, log_tail: "" };
        let told = failure(&blow("no trainer has room"), "1", Some(&away)).unwrap();
        assert!(!told.r#final && told.agents.is_empty());
        assert_eq!(failure(&blow("no trainer has room"), "1", Some(&told)), None);
    }

    #[test]
    fn what_may_pass_and_what_was_too_large_count_as_any_failure() {
        for fault in [Fault::Passing("gpu_hang"), Fault::TooLarge] {
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
            errors_stand(Some(&last).filter(|_| !before.is_empty()), "a", &others)
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
        assert_eq!(then(&[failure(true, 5), failure(true, 1)]), Then::GiveUp);
        let again = then(&[failure(true, 5), failure(false, 2)]);
        assert_eq!(again, Then::HandBack { delay_ms: 5000 });
        assert_eq!(then(&[]), Then::HandBack { delay_ms: 1000 });
    }
}
