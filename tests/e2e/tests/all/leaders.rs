//! Fleets with several coordinators, and with none.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use async_nats::jetstream;
use e2e::{Fleet, Member, ReferenceResults, Sampling, journal, wait_until};
use futures::TryStreamExt;
use rustix::process::{Pid, Signal, kill_process};

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

/// The log, read with a plain NATS client.
struct RawLog {
    runtime: tokio::runtime::Runtime,
    log: jetstream::stream::Stream,
}

impl RawLog {
    fn open(fleet: &Fleet) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let log = runtime.block_on(async {
            let client = async_nats::connect(fleet.nats_url()).await.expect("the bus");
            jetstream::new(client).get_stream("FLOTILLA").await.expect("the log")
        });
        Self { runtime, log }
    }

    /// Returns the names of the jobs of cycle 1 that have facts with this subject filter.
    fn job_names(&self, filter: &str, word: usize) -> BTreeSet<String> {
        let subjects: Vec<(String, usize)> = self.runtime.block_on(async {
            let subjects = self.log.info_with_subjects(filter).await.expect("the log");
            subjects.try_collect().await.expect("its subjects")
        });
        let name = |(subject, _): (String, usize)| subject.split('.').nth(word).map(str::to_owned);
        subjects.into_iter().filter_map(name).collect()
    }

    fn ordered_jobs(&self, run: &str) -> BTreeSet<String> {
        self.job_names(&format!("flotilla.{run}.order.generate.*.1.*.*"), 6)
    }

    fn sampled_jobs(&self, run: &str) -> BTreeSet<String> {
        self.job_names(&format!("flotilla.{run}.samples.1.*"), 4)
    }
}

#[test]
fn generators_complete_all_orders_without_a_coordinator() {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let fleet = Fleet::start_open("trainer,generator=2,verifier,evaluator");
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    let log = RawLog::open(&fleet);
    wait_until("orders exist", LIMIT, || (log.ordered_jobs(&run).len() >= 8).then_some(()));
    // `flotilla up` would restart the coordinator.
    fleet.signal("up", Signal::STOP);
    fleet.kill("coordinator");
    let killed = Instant::now();
    let (ordered, sampled) = (log.ordered_jobs(&run), log.sampled_jobs(&run));
    let out = ordered.difference(&sampled).count();
    assert!(out > 0, "all that was ordered was done already");
    let (mut done, mut last, mut idle_s) = (sampled.len(), Instant::now(), 0.0_f64);
    wait_until("all orders are done", LIMIT, || {
        let sampled = log.sampled_jobs(&run);
        if sampled.len() > done {
            (done, last) = (sampled.len(), Instant::now());
        }
        idle_s = idle_s.max(last.elapsed().as_secs_f64());
        ordered.is_subset(&sampled).then_some(())
    });
    assert_eq!(log.ordered_jobs(&run), ordered, "nobody was there to order more");
    let after_s = killed.elapsed().as_secs_f64();
    println!(
        "{out} jobs out, done in {after_s:.2} s without coordinator; longest pause {idle_s:.2} s"
    );
    assert!(idle_s < 2.0, "generators stood idle for {idle_s} s with work out");
    fleet.signal("up", Signal::CONT);
    reference.assert_same_results(&fleet, &run, LIMIT);
}
