//! A chaos test: kills and stops random processes of a fleet while runs are in progress, at least
//! one of each kind. The results of each run must equal those without faults, and no worker
//! outlives its agent.
//!
//! `CHAOS_KILLS` and `CHAOS_SEED` set the number of kills and the seed, which by default comes from
//! the commit. `make chaos` runs a long test.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use e2e::{
    ChaosEvidence, FaultInjector, Fleet, Member, Process, ReferenceResults, Sampling, journal,
    wait_until,
};
use serde_json::{Value, json};

/// The limit for one run, including all restarts.
const LIMIT: Duration = Duration::from_secs(240);

/// The kernel ends a worker with its agent.
const ORPHAN_LIMIT: Duration = Duration::from_secs(2);

pub(crate) const SAMPLING: Sampling =
    Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 2 };

/// The training samples of a run.
const SAMPLES: usize = (SAMPLING.prompts * SAMPLING.per_prompt * SAMPLING.cycles) as usize;

/// The shortest and longest time between two faults, in seconds.
const GAP_S: (f64, f64) = (0.2, 1.8);

pub(crate) fn env_number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: write a number")),
        Err(_) => default,
    }
}

/// Returns a number that differs from commit to commit; 1 outside of a checkout.
fn commit_seed() -> u64 {
    let here = env!("CARGO_MANIFEST_DIR");
    let commit = Command::new("git").args(["-C", here, "rev-parse", "--short=8", "HEAD"]).output();
    let commit = commit.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    commit.ok().and_then(|commit| u64::from_str_radix(commit.trim(), 16).ok()).unwrap_or(1)
}

#[test]
fn runs_have_the_same_results_while_processes_are_killed_and_stopped() {
    let (kills, seed) = (env_number("CHAOS_KILLS", 12), env_number("CHAOS_SEED", commit_seed()));
    println!("CHAOS_KILLS={kills} CHAOS_SEED={seed}");
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let mut test = ChaosTest::start(seed, &reference);
    let kills = usize::try_from(kills).expect("a number of kills");
    while test.injector.kills() < kills {
        test.run_once(kills, &reference);
    }
    let report = test.report(seed);
    println!("{report:#}");
    write_report(&report);
    for (kind, (kills, _)) in test.injector.counts() {
        assert!(kills > 0, "no {kind} was killed; CHAOS_KILLS must be at least 5");
    }
    let directory = test.fleet.path().to_owned();
    drop(test);
    wait_until("all processes of the fleet have ended", ORPHAN_LIMIT, || {
        let all = Process::all();
        all.iter().all(|process| !process.uses_directory(&directory)).then_some(())
    });
}

struct ChaosTest {
    injector: FaultInjector,
    second_coordinator: Member,
    fleet: Fleet,
    spec: PathBuf,
    runs: Vec<Value>,
    written: BTreeMap<String, f64>,
    began: Instant,
}

impl ChaosTest {
    fn start(seed: u64, reference: &ReferenceResults) -> Self {
        let fleet = Fleet::start("trainer,generator=2,verifier=2,evaluator=2");
        let second_coordinator = start_second_coordinator(&fleet);
        let spec = reference.write_spec(&fleet, fleet.path());
        let injector = FaultInjector::new(seed, GAP_S);
        let (runs, written) = (Vec::new(), BTreeMap::new());
        Self { injector, second_coordinator, fleet, spec, runs, written, began: Instant::now() }
    }

    /// Submits a run and injects faults until there are `kills` kills in total, then waits for its
    /// end.
    fn run_once(&mut self, kills: usize, reference: &ReferenceResults) {
        let (began, before) = (Instant::now(), self.injector.kills());
        self.fleet.await_agents();
        let run = self.fleet.submit(&self.spec);
        let waiting = self.fleet.wait_in_background(&run);
        while !waiting.is_finished() {
            if self.injector.kills() < kills {
                self.injector.inject_due(&self.fleet, &self.second_coordinator);
            } else {
                self.injector.resume_all();
            }
            self.restart_exited();
            assert!(began.elapsed() < LIMIT, "{run} does not end: {}", self.fleet.log_tails());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.injector.resume_all();
        self.restart_exited();
        self.fleet.await_agents();
        self.assert_no_orphans();
        reference.assert_same_results(&self.fleet, &run, LIMIT);
        let facts = self.fleet.read_facts(&run);
        assert_complete(&facts);
        for fact in &facts {
            let at_s = fact["time_ms"].as_f64().expect("a time") / 1000.0;
            self.written.insert(fact["subject"].as_str().expect("a subject").to_owned(), at_s);
        }
        let kills = self.injector.kills() - before;
        let wall_s = began.elapsed().as_secs_f64().round();
        println!("{run}: {kills} kills in {wall_s} s, as in peace");
        self.runs.push(json!({ "run": run, "kills": kills, "wall_s": wall_s }));
    }

    /// Checks that all workers of the fleet belong to agents that still run.
    fn assert_no_orphans(&self) {
        wait_until("no worker without an agent", ORPHAN_LIMIT, || {
            let owned = self.fleet.processes();
            let is_orphan = |process: &Process| {
                process.arguments.get(1).is_some_and(|word| word == "worker")
                    && process.uses_directory(self.fleet.path())
                    && !owned.contains(process)
            };
            (!Process::all().iter().any(is_orphan)).then_some(())
        });
    }

    /// Restarts `flotilla up` and the second coordinator if they exited, like an init system.
    fn restart_exited(&mut self) {
        if self.fleet.exit_status().is_some() {
            self.fleet.restart();
        }
        self.second_coordinator.restart_exited();
    }

    fn report(&self, seed: u64) -> Value {
        let logs = ["coordinator", "coordinator-2"];
        let logs = logs.map(|name| (name.to_owned(), log_path(self.fleet.path(), name)));
        let evidence = ChaosEvidence {
            faults: &self.injector.faults,
            job_starts: &journal::job_starts(self.fleet.path()),
            leadership: &journal::leadership_changes(&BTreeMap::from(logs)),
            written: &self.written,
        };
        let counts = self.injector.counts().into_iter();
        let counts: BTreeMap<_, _> = counts
            .map(|(kind, (kills, stops))| (kind, json!({ "kills": kills, "stops": stops })))
            .collect();
        json!({
            "seed": seed,
            "runs": self.runs.len(),
            "wall_s": self.began.elapsed().as_secs_f64().round(),
            "kills": self.injector.kills(),
            "stops": self.injector.faults.len() - self.injector.kills(),
            "by_kind": counts,
            "samples": self.runs.len() * SAMPLES,
            "lease_s": 3,
            "figures": evidence.to_json(),
            "each_run": self.runs,
        })
    }
}

/// Checks that the log contains each training sample and its verdict exactly once.
fn assert_complete(facts: &[Value]) {
    for kind in ["samples", "verdicts"] {
        let (mut entries, mut distinct) = (0, BTreeSet::new());
        for entry in facts {
            let (fact, subject) = (&entry["fact"], entry["subject"].as_str().expect("a subject"));
            if subject.split('.').nth(2) != Some(kind) || fact["purpose"] != "TRAIN" {
                continue;
            }
            for one in fact[kind].as_array().expect("a list") {
                entries += 1;
                distinct.insert(
                    [&fact["cycle"], &one["promptId"], &one["index"]].map(Value::to_string),
                );
            }
        }
        assert_eq!((entries, distinct.len()), (SAMPLES, SAMPLES), "{kind}: lost or duplicate");
    }
}

fn start_second_coordinator(fleet: &Fleet) -> Member {
    let keys = fleet.path().join("keys").display().to_string();
    let (nats, credentials) = (fleet.nats_url(), format!("{keys}/coordinator"));
    let fixed = ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0", "--lease", "3"];
    let arguments = [&fixed[..], &["--dir", &credentials, "--keys", &keys]].concat();
    Member::start("coordinator-2", &[], &arguments, [], &fleet.path().join("logs"))
}

fn log_path(directory: &Path, coordinator: &str) -> PathBuf {
    directory.join("logs").join(format!("{coordinator}.log"))
}

/// Writes the report to the target directory.
fn write_report(report: &Value) {
    let program = e2e::program_path();
    let target = program.ancestors().nth(2).expect("programs lie in target/PROFILE");
    let path = target.join("chaos-report.json");
    std::fs::write(&path, format!("{report:#}\n")).expect("a report");
    println!("wrote {}", path.display());
}
