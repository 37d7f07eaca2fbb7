use std::collections::BTreeSet;

use wire::{AgentId, Fact, Subject};

use super::*;
use crate::RunSet;

/// A log of runs whose queue decides at each step.
#[derive(Default)]
struct QueueLog {
    set: RunSet,
    sequence: u64,
}

impl QueueLog {
    fn new() -> Self {
        let mut log = Self::default();
        log.set.mark_caught_up();
        log
    }

    fn write(&mut self, run: &str, key: FactKey, body: FactBody, author: Option<&str>) {
        self.sequence += 1;
        let subject = Subject::new(&RunId::new(run).unwrap(), key);
        let author = author.map(|name| AgentId::new(name).unwrap());
        let (sequence, time_ms) = (self.sequence, self.sequence * 1000);
        let fact = Fact { subject, body };
        self.set.fold_record(&Record { sequence, time_ms, author, fact });
    }

    fn submit(&mut self, run: &str, user: &str, queue: v1::spec::Queue) {
        let spec = v1::Spec {
            run: run.into(),
            pool: "default".into(),
            queue: Some(queue),
            kind: Some(v1::spec::Kind::Watched(v1::spec::Watched::default())),
            ..v1::Spec::default()
        };
        self.write(run, FactKey::Spec, FactBody::Spec(spec), Some(user));
    }

    fn steer(&mut self, run: &str, action: v1::control::Action) {
        let number = self.run(run).last_control + 1;
        let control = v1::Control { action: action.into(), ..v1::Control::default() };
        self.write(run, FactKey::Control { number }, FactBody::Control(control), Some("ann"));
    }

    fn end(&mut self, run: &str) {
        self.write(run, FactKey::Done, FactBody::Done(v1::Done::default()), None);
    }

    fn run(&self, run: &str) -> &Run {
        self.set.find_run(&RunId::new(run).unwrap()).unwrap()
    }

    /// Lets the queue decide at a minute of the day, and returns the runs that work then.
    fn decide(&mut self, minute: u32) -> Vec<String> {
        self.set.mark_dirty();
        for WriteCommand { fact: Fact { subject, body }, .. } in self.set.queue_commands(minute) {
            self.write(subject.run.as_str(), subject.key.clone(), body, Some("coordinator"));
        }
        self.set.mark_dirty();
        assert_eq!(self.set.queue_commands(minute), [], "a decision stands");
        let is_active = |run: &&Run| run.is_queued() && run.queue == QueueStatus::Active;
        let works = self.set.iter_open().filter(is_active);
        works.map(|run| run.id.to_string()).collect()
    }

    fn messages(&self, minute: u32) -> Vec<(String, String)> {
        let places = queue_places(self.set.iter_open(), &self.set_turns(), minute);
        places.into_iter().map(|it| (it.run.to_string(), it.message)).collect()
    }

    fn set_turns(&self) -> QueueTurns {
        self.set.queue_turns().clone()
    }
}

fn priority(priority: i32) -> v1::spec::Queue {
    v1::spec::Queue { priority, ..v1::spec::Queue::default() }
}

fn window(from: u32, until: u32) -> v1::spec::Queue {
    let (from_minute, until_minute) = (Some(from), Some(until));
    v1::spec::Queue { from_minute, until_minute, ..v1::spec::Queue::default() }
}

#[test]
fn runs_work_one_after_another_by_priority_and_then_by_submission() {
    let mut log = QueueLog::new();
    for (run, high) in [("a-1", 0), ("b-1", 5), ("c-1", 0), ("d-1", -1)] {
        log.submit(run, "ann", priority(high));
        assert!(log.run(run).is_halted());
    }
    let message = |run: &str, text: &str| (run.to_owned(), text.to_owned());
    assert_eq!(
        log.messages(0),
        [
            message("b-1", "is next in the queue"),
            message("a-1", "waits in the queue behind b-1"),
            message("c-1", "waits in the queue behind a-1"),
            message("d-1", "waits in the queue behind c-1"),
        ]
    );
    for run in ["b-1", "a-1", "c-1", "d-1"] {
        assert_eq!(log.decide(0), [run]);
        assert!(!log.run(run).is_halted() && log.run(run).round == 1);
        assert_eq!(log.messages(0)[0], message(run, ""));
        log.end(run);
    }
    assert!(log.decide(0).is_empty());
}

#[test]
fn a_higher_priority_pauses_a_lower_one_and_an_equal_one_waits() {
    let mut log = QueueLog::new();
    log.submit("a-1", "ann", priority(0));
    assert_eq!(log.decide(0), ["a-1"]);
    log.submit("b-1", "bob", priority(0));
    assert_eq!(log.decide(0), ["a-1"]);
    log.submit("c-1", "bob", priority(1));
    assert_eq!(log.decide(0), ["c-1"]);
    let paused = log.run("a-1");
    assert_eq!(paused.current_state(), v1::run::State::Queued);
    assert_eq!(paused.state_reason(), "waits: c-1 goes first in the queue");
    log.end("c-1");
    // Both were released for bob's run and ann's; ann's was longer ago.
    assert_eq!(log.decide(0), ["a-1"]);
    assert_eq!(log.run("a-1").round, 2);
}

#[test]
fn users_take_turns_among_equal_priorities() {
    let mut log = QueueLog::new();
    for run in ["a-1", "a-2", "a-3"] {
        log.submit(run, "ann", priority(0));
    }
    log.submit("b-1", "bob", priority(0));
    log.submit("b-2", "bob", priority(0));
    let foreseen: Vec<String> = log.messages(0).into_iter().map(|it| it.0).collect();
    let mut order = Vec::new();
    while let [run] = &log.decide(0)[..] {
        order.push(run.clone());
        log.end(run);
    }
    assert_eq!(order, ["a-1", "b-1", "a-2", "b-2", "a-3"]);
    assert_eq!(foreseen, order);
}

#[test]
fn a_run_works_only_in_its_window_which_may_cross_midnight() {
    let mut log = QueueLog::new();
    log.submit("night-1", "ann", window(22 * 60, 7 * 60));
    log.submit("day-1", "ann", window(9 * 60, 17 * 60));
    let works = [(21, ""), (22, "night-1"), (6, "night-1"), (7, ""), (9, "day-1"), (17, "")];
    for (hour, run) in works {
        assert_eq!(log.decide(hour * 60).join(""), run, "at {hour}");
    }
    assert_eq!(log.messages(20 * 60)[1].1, "waits until 09:00");
    assert_eq!(log.run("night-1").state_reason(), "waits: its window ended at 07:00");
}

#[test]
fn a_users_pause_and_resume_win_over_the_queue() {
    use v1::{control::Action, run::State};
    let mut log = QueueLog::new();
    log.submit("a-1", "ann", priority(0));
    log.submit("b-1", "ann", priority(0));
    assert_eq!(log.decide(0), ["a-1"]);
    log.steer("a-1", Action::Pause);
    assert_eq!(log.decide(0), ["b-1"], "a paused run holds up no other");
    assert_eq!(log.run("a-1").current_state(), State::Paused);
    log.steer("a-1", Action::Resume);
    assert_eq!(log.decide(0), ["b-1"]);
    assert_eq!(log.run("a-1").current_state(), State::Running, "it left the queue");
    log.submit("c-1", "ann", priority(9));
    log.steer("c-1", Action::Pause);
    assert_eq!(log.decide(0), ["b-1"]);
    log.steer("c-1", Action::Resume);
    assert_eq!((log.run("c-1").round, log.run("c-1").is_halted()), (2, false));
    log.steer("b-1", Action::Cancel);
    assert!(log.decide(0).is_empty());
}

#[test]
fn the_time_that_a_run_worked_has_no_pauses_and_no_queue() {
    use v1::control::Action;
    let mut log = QueueLog::new();
    log.submit("a-1", "ann", priority(0));
    log.submit("b-1", "ann", priority(1));
    assert_eq!(log.decide(0), ["b-1"]);
    log.end("b-1");
    assert_eq!(log.run("a-1").worked_ms(9000), 0);
    // Released by entry 5.
    assert_eq!(log.decide(0), ["a-1"]);
    log.steer("a-1", Action::Pause);
    log.steer("a-1", Action::Resume);
    assert_eq!(log.run("a-1").worked_ms(9000), 1000 + 2000);
    log.end("a-1");
}

/// Random submissions, controls, ends and times of the day, against what a queue must hold.
#[test]
fn at_most_one_run_works_and_none_waits_in_vain_or_forever() {
    use v1::control::Action;
    for seed in 0..200 {
        let mut random = seed;
        let mut next = |below: u64| {
            random = wire::derive_seed(random, &["next"]);
            random % below
        };
        let (mut log, mut minute, mut count) = (QueueLog::new(), 0, 0);
        for _ in 0..60 {
            let open: Vec<String> = log.set.iter_open().map(|run| run.id.to_string()).collect();
            let some = open.get(usize::try_from(next(8)).unwrap());
            match (next(7), some) {
                (0..3, _) => {
                    count += 1;
                    let queue = match next(3) {
                        0 => window(22 * 60, 6 * 60),
                        high => priority(i32::try_from(high).unwrap()),
                    };
                    let user = ["ann", "bob", "cid"][usize::try_from(next(3)).unwrap()];
                    log.submit(&format!("r-{count}"), user, queue);
                }
                (3, Some(run)) => log.end(run),
                (4, Some(run)) => log.steer(run, Action::Pause),
                (5, Some(run)) => log.steer(run, Action::Resume),
                _ => minute = u32::try_from(next(1440)).unwrap(),
            }
            let works: BTreeSet<String> = log.decide(minute).into_iter().collect();
            let eligible = |run: &&Run| run.is_queued() && is_open(run, minute);
            let best = log.set.iter_open().filter(eligible).map(run_priority).max();
            assert!(works.len() <= 1, "seed {seed}: {works:?} work at once");
            let found = works.iter().map(|run| run_priority(log.run(run))).next();
            assert_eq!(found, best, "seed {seed}: the highest priority works");
        }
        // Runs that end let all others work, but for those that a user has paused.
        minute = 0;
        while let Some(run) = log.decide(minute).into_iter().next() {
            log.end(&run);
        }
        assert!(log.set.iter_open().all(|run| !run.queue.is_waiting()), "seed {seed}");
    }
}
