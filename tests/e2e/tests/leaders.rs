//! Several coordinators, and none.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use async_nats::jetstream;
use e2e::{Fleet, Member, Sampling, Undisturbed, journal, until};
use futures::TryStreamExt;
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

/// What a takeover may take with one server: the leader's lease of 3 s, and a bit.
const TAKEOVER: Duration = Duration::from_secs(5);

/// A fleet whose coordinators are all the test's own.
struct Coordinators {
    members: BTreeMap<String, Member>,
    /// The supervised one: held still, so that it never leads.
    still: Pid,
    fleet: Fleet,
}

impl Coordinators {
    fn up() -> Self {
        let fleet = Fleet::open("trainer,generator=2,verifier,evaluator");
        let (nats, logs) = (fleet.nats(), fleet.path().join("logs"));
        let start = |name: &str| {
            let gateway = ["--gateway", "127.0.0.1:0", "--lease", "3"];
            let arguments = [&["coordinator", "--nats", &nats][..], &gateway].concat();
            (name.to_owned(), Member::start(name, &[], &arguments, [], &logs))
        };
        let members = BTreeMap::from(["coordinator-2", "coordinator-3"].map(start));
        let still = fleet.pid("coordinator");
        kill_process(still, Signal::STOP).expect("our own process can be told");
        Self { members, still, fleet }
    }

    /// Who leads now, among those that could.
    fn leader(&self) -> Option<String> {
        let logs = self.members.iter();
        let logs = logs.map(|(name, one)| (name.clone(), one.log().to_owned())).collect();
        let last = journal::leads(&logs).pop()?;
        last.leads.then_some(last.coordinator)
    }

    /// Waits until another leads than `before`, and says how long that took.
    fn takeover(&self, before: &str) -> f64 {
        let began = Instant::now();
        until("another coordinator leads", LIMIT, || {
            self.leader().filter(|leader| leader != before)
        });
        began.elapsed().as_secs_f64()
    }

    fn first_leader(&self) -> String {
        until("a coordinator leads", LIMIT, || self.leader())
    }
}

impl Drop for Coordinators {
    fn drop(&mut self) {
        // It could not be ended in order.
        let _ = kill_process(self.still, Signal::CONT);
    }
}

#[test]
fn a_killed_leader_is_replaced_within_five_seconds_and_one_that_wakes_does_no_harm() {
    let undisturbed = Undisturbed::of(SAMPLING);
    let mut coordinators = Coordinators::up();
    let fleet = &coordinators.fleet;
    let run = fleet.submit(&undisturbed.spec(fleet, fleet.path()));
    fleet.await_samples(&run, 16, LIMIT);

    let killed = coordinators.first_leader();
    coordinators.members.get_mut(&killed).expect("it is ours").kill();
    let takeover_s = coordinators.takeover(&killed);
    println!("{killed} killed: another leads after {takeover_s:.2} s");
    assert!(takeover_s < TAKEOVER.as_secs_f64(), "{takeover_s}");
    coordinators.members.values_mut().for_each(Member::revive);

    let frozen = coordinators.first_leader();
    coordinators.members[&frozen].signal(Signal::STOP);
    let takeover_s = coordinators.takeover(&frozen);
    println!("{frozen} frozen: another leads after {takeover_s:.2} s");
    assert!(takeover_s < TAKEOVER.as_secs_f64(), "{takeover_s}");
    // It wakes in the middle of what it was about to write.
    coordinators.members[&frozen].signal(Signal::CONT);
    undisturbed.assert_same(&coordinators.fleet, &run, LIMIT);
}

/// The log, as any program has it that speaks NATS.
struct RawLog {
    runtime: tokio::runtime::Runtime,
    log: jetstream::stream::Stream,
}

impl RawLog {
    fn open(fleet: &Fleet) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let log = runtime.block_on(async {
            let client = async_nats::connect(fleet.nats()).await.expect("the bus");
            jetstream::new(client).get_stream("FLOTILLA").await.expect("the log")
        });
        Self { runtime, log }
    }

    /// The jobs of cycle 1 that a kind of fact is there of, by name.
    fn jobs(&self, filter: &str, word: usize) -> BTreeSet<String> {
        let subjects: Vec<(String, usize)> = self.runtime.block_on(async {
            let subjects = self.log.info_with_subjects(filter).await.expect("the log");
            subjects.try_collect().await.expect("its subjects")
        });
        let name = |(subject, _): (String, usize)| subject.split('.').nth(word).map(str::to_owned);
        subjects.into_iter().filter_map(name).collect()
    }

    fn ordered(&self, run: &str) -> BTreeSet<String> {
        self.jobs(&format!("flotilla.{run}.order.generate.*.1.*.*"), 6)
    }

    fn sampled(&self, run: &str) -> BTreeSet<String> {
        self.jobs(&format!("flotilla.{run}.samples.1.*"), 4)
    }
}

#[test]
fn generators_do_all_that_was_ordered_when_there_is_no_coordinator() {
    let undisturbed = Undisturbed::of(SAMPLING);
    let fleet = Fleet::open("trainer,generator=2,verifier,evaluator");
    let run = fleet.submit(&undisturbed.spec(&fleet, fleet.path()));
    let log = RawLog::open(&fleet);
    until("orders are out", LIMIT, || (log.ordered(&run).len() >= 8).then_some(()));
    // Its supervisor would bring it back.
    fleet.signal("up", Signal::STOP);
    fleet.kill("coordinator");
    let killed = Instant::now();
    let (ordered, sampled) = (log.ordered(&run), log.sampled(&run));
    let out = ordered.difference(&sampled).count();
    assert!(out > 0, "all that was ordered was done already");
    let (mut done, mut last, mut idle_s) = (sampled.len(), Instant::now(), 0.0_f64);
    until("all that was ordered is done", LIMIT, || {
        let sampled = log.sampled(&run);
        if sampled.len() > done {
            (done, last) = (sampled.len(), Instant::now());
        }
        idle_s = idle_s.max(last.elapsed().as_secs_f64());
        ordered.is_subset(&sampled).then_some(())
    });
    assert_eq!(log.ordered(&run), ordered, "nobody was there to order more");
    let after_s = killed.elapsed().as_secs_f64();
    println!(
        "{out} jobs out, done in {after_s:.2} s without coordinator; longest pause {idle_s:.2} s"
    );
    assert!(idle_s < 2.0, "generators stood idle for {idle_s} s with work out");
    fleet.signal("up", Signal::CONT);
    undisturbed.assert_same(&fleet, &run, LIMIT);
}
