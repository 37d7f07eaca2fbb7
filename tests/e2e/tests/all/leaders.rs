//! Fleets with several coordinators, and with none.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use e2e::{Fleet, Member, ReferenceResults, Sampling, journal, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

/// The limit for a takeover with one server: the leader's lease of 3 s, plus a margin.
const TAKEOVER: Duration = Duration::from_secs(5);

/// A fleet whose active coordinators are started by the test.
struct Coordinators {
    members: BTreeMap<String, Member>,
    /// The coordinator of `flotilla up`, stopped, so that it never leads.
    stopped: Pid,
    fleet: Fleet,
}

impl Coordinators {
    fn start() -> Self {
        let fleet = Fleet::start_open("trainer,generator=2,verifier,evaluator");
        let (nats, logs) = (fleet.nats_url(), fleet.path().join("logs"));
        let start = |name: &str| {
            let gateway = ["--gateway", "127.0.0.1:0", "--lease", "3"];
            let arguments = [&["coordinator", "--nats", &nats][..], &gateway].concat();
            (name.to_owned(), Member::start(name, &[], &arguments, [], &logs))
        };
        let members = BTreeMap::from(["coordinator-2", "coordinator-3"].map(start));
        let stopped = fleet.pid("coordinator");
        kill_process(stopped, Signal::STOP).expect("our own process can be signalled");
        Self { members, stopped, fleet }
    }

    /// Returns the current leader, if one of the test's coordinators leads.
    fn leader(&self) -> Option<String> {
        let logs = self.members.iter();
        let logs = logs.map(|(name, one)| (name.clone(), one.log().to_owned())).collect();
        let last = journal::leadership_changes(&logs).pop()?;
        last.is_leader.then_some(last.coordinator)
    }

    /// Waits until another coordinator than `before` leads and returns the seconds that it took.
    fn await_takeover_s(&self, before: &str) -> f64 {
        let began = Instant::now();
        wait_until("another coordinator leads", LIMIT, || {
            self.leader().filter(|leader| leader != before)
        });
        began.elapsed().as_secs_f64()
    }

    fn await_leader(&self) -> String {
        wait_until("a coordinator leads", LIMIT, || self.leader())
    }
}

impl Drop for Coordinators {
    fn drop(&mut self) {
        // A stopped process cannot shut down.
        let _ = kill_process(self.stopped, Signal::CONT);
    }
}

#[test]
fn a_killed_leader_is_replaced_within_five_seconds_and_a_resumed_one_does_no_harm() {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let mut coordinators = Coordinators::start();
    let fleet = &coordinators.fleet;
    let run = fleet.submit(&reference.write_spec(fleet, fleet.path()));
    fleet.await_samples(&run, 16, LIMIT);

    let killed = coordinators.await_leader();
    coordinators.members.get_mut(&killed).expect("it is ours").kill();
    let takeover_s = coordinators.await_takeover_s(&killed);
    println!("{killed} killed: another leads after {takeover_s:.2} s");
    assert!(takeover_s < TAKEOVER.as_secs_f64(), "{takeover_s}");
    coordinators.members.values_mut().for_each(Member::restart_exited);

    let frozen = coordinators.await_leader();
    coordinators.members[&frozen].signal(Signal::STOP);
    let takeover_s = coordinators.await_takeover_s(&frozen);
    println!("{frozen} frozen: another leads after {takeover_s:.2} s");
    assert!(takeover_s < TAKEOVER.as_secs_f64(), "{takeover_s}");
    // It continues in the middle of a write.
    coordinators.members[&frozen].signal(Signal::CONT);
    reference.assert_same_results(&coordinators.fleet, &run, LIMIT);
}

/// Returns the names of the jobs of cycle 1 that have facts with this subject filter. The name is
/// the word with this number.
fn job_names(log: &RawLog, filter: &str, word: usize) -> BTreeSet<String> {
    let name = |subject: String| subject.split('.').nth(word).map(str::to_owned);
    log.subjects(filter).into_iter().filter_map(name).collect()
}

fn ordered_jobs(log: &RawLog, run: &str) -> BTreeSet<String> {
    job_names(log, &format!("flotilla.{run}.order.generate.*.1.*.*"), 6)
}

fn sampled_jobs(log: &RawLog, run: &str) -> BTreeSet<String> {
    job_names(log, &format!("flotilla.{run}.samples.1.*"), 4)
}

#[test]
fn generators_complete_all_orders_without_a_coordinator() {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let fleet = Fleet::start_open("trainer,generator=2,verifier,evaluator");
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    let log = RawLog::open(&fleet);
    wait_until("orders exist", LIMIT, || (ordered_jobs(&log, &run).len() >= 8).then_some(()));
    // `flotilla up` would restart the coordinator.
    fleet.signal("up", Signal::STOP);
    fleet.kill("coordinator");
    let killed = Instant::now();
    let (ordered, sampled) = (ordered_jobs(&log, &run), sampled_jobs(&log, &run));
    let out = ordered.difference(&sampled).count();
    assert!(out > 0, "all that was ordered was done already");
    let (mut done, mut last, mut idle_s) = (sampled.len(), Instant::now(), 0.0_f64);
    wait_until("all orders are done", LIMIT, || {
        let sampled = sampled_jobs(&log, &run);
        if sampled.len() > done {
            (done, last) = (sampled.len(), Instant::now());
        }
        idle_s = idle_s.max(last.elapsed().as_secs_f64());
        ordered.is_subset(&sampled).then_some(())
    });
    assert_eq!(ordered_jobs(&log, &run), ordered, "nobody was there to order more");
    let after_s = killed.elapsed().as_secs_f64();
    println!(
        "{out} jobs out, done in {after_s:.2} s without coordinator; longest pause {idle_s:.2} s"
    );
    assert!(idle_s < 2.0, "generators stood idle for {idle_s} s with work out");
    fleet.signal("up", Signal::CONT);
    reference.assert_same_results(&fleet, &run, LIMIT);
}
