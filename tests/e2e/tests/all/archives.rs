//! Archives of done cycles, while coordinators are killed and the store fails.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use e2e::{Fleet, Member, Random, ReferenceResults, Sampling, wait_until};
use rustix::process::Signal;
use s3_server::{Faults, S3Server};

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 48, cycles: 4 };

const SEED: u64 = 11;

/// The pauses between two kills, in seconds. Some end in the middle of an archive or a purge.
const GAP_S: (f64, f64) = (0.5, 3.0);

fn start_coordinator(fleet: &Fleet, server: &S3Server, name: &str) -> Member {
    let nats = fleet.nats_url();
    let fixed = ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0", "--lease", "3"];
    let arguments = [&fixed[..], &["--keep-cycles", "0"]].concat();
    Member::start(name, &[], &arguments, server.env(), &fleet.path().join("logs"))
}

fn archived_cycles(log: &RawLog, run: &str) -> BTreeSet<String> {
    let subjects = log.subjects(&format!("flotilla.{run}.cycle.*.archived"));
    let cycle = |subject: &String| subject.split('.').nth(3).expect("a cycle").to_owned();
    subjects.iter().map(cycle).collect()
}

#[test]
fn cycles_are_archived_and_purged_while_coordinators_are_killed_and_the_store_fails() {
    println!("seed {SEED}");
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let server = S3Server::start().unwrap();
    let arguments = ["--open", "--store", &server.url(), "--keep-cycles", "0"];
    let agents = "trainer,generator=2,verifier,evaluator";
    let fleet = Fleet::start_with(agents, &arguments, server.env());
    let spec = reference.write_spec(&fleet, fleet.path());
    // `flotilla up` would wait ever longer before it restarts its coordinator.
    fleet.signal("up", Signal::STOP);
    fleet.kill("coordinator");
    let mut coordinators =
        ["coordinator-2", "coordinator-3"].map(|name| start_coordinator(&fleet, &server, name));
    let delay = Duration::from_millis(5);
    server.set_faults(Faults { seed: SEED, refused: 0.1, cut: 0.05, flipped: 0.05, delay });
    let run = fleet.submit(&spec);
    let (waiting, log) = (fleet.wait_in_background(&run), RawLog::open(&fleet));
    let (began, mut random, mut kills) = (Instant::now(), Random::new(SEED), 0);
    while !waiting.is_finished() {
        assert!(began.elapsed() < LIMIT, "{run} does not end: {}", fleet.log_tails());
        std::thread::sleep(Duration::from_secs_f64(random.next_in_range(GAP_S.0, GAP_S.1)));
        let target = random.next_u64() % 3;
        for (number, coordinator) in (0..).zip(&mut coordinators) {
            // In the third case both are killed.
            if target == number || target == 2 {
                coordinator.kill();
                coordinator.restart_exited();
                kills += 1;
            }
        }
    }
    let archived = archived_cycles(&log, &run);
    println!("{kills} kills; archived at the end of the run: {archived:?}");
    let all: BTreeSet<String> = (0..=SAMPLING.cycles).map(|cycle| cycle.to_string()).collect();
    wait_until("all cycles are archived and purged", LIMIT, || {
        let is_done = archived_cycles(&log, &run) == all
            && log.subjects(&format!("flotilla.{run}.samples.>")).is_empty()
            && log.subjects(&format!("flotilla.{run}.verdicts.>")).is_empty();
        is_done.then_some(())
    });
    let counts = server.fault_counts();
    assert!(counts.refused > 0 && counts.cut > 0 && counts.flipped > 0, "{counts:?}");
    // An audit with a damaged listing of the store could not check anything.
    server.set_faults(Faults::default());
    reference.assert_same_results(&fleet, &run, LIMIT);
    fleet.signal("up", Signal::CONT);
}
