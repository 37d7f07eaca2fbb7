//! A chaos test: kills and stops random processes of a fleet while runs are in progress. The
//! results of each run must equal those without faults.
//!
//! `CHAOS_KILLS` and `CHAOS_SEED` set the number of kills and the seed. `make chaos` runs a long
//! test.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use e2e::{ChaosEvidence, FaultInjector, Fleet, Member, ReferenceResults, Sampling, journal};
use serde_json::{Value, json};

/// The limit for one run, including all restarts.
const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 2 };

/// The shortest and longest time between two faults, in seconds.
const GAP_S: (f64, f64) = (0.2, 1.8);

fn env_number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: write a number")),
        Err(_) => default,
    }
}

#[test]
fn runs_have_the_same_results_while_processes_are_killed_and_stopped() {
    let (kills, seed) = (env_number("CHAOS_KILLS", 12), env_number("CHAOS_SEED", 1));
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
    assert_eq!((&report["lost_samples"], &report["duplicate_samples"]), (&json!(0), &json!(0)));
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
        let audit = reference.assert_same_results(&self.fleet, &run, LIMIT);
        for fact in self.fleet.read_facts(&run) {
            let at_s = fact["time_ms"].as_f64().expect("a time") / 1000.0;
            self.written.insert(fact["subject"].as_str().expect("a subject").to_owned(), at_s);
        }
        let kills = self.injector.kills() - before;
        let wall_s = began.elapsed().as_secs_f64().round();
        println!("{run}: {kills} kills in {wall_s} s, as in peace");
        self.runs.push(json!({ "run": run, "kills": kills, "wall_s": wall_s, "audit": audit }));
    }

    /// Restarts `flotilla up` and the second coordinator if they exited, like an init system.
    fn restart_exited(&mut self) {
        if self.fleet.exit_status().is_some() {
            self.fleet.restart();
        }
        self.second_coordinator.restart_exited();
    }

    fn report(&self, seed: u64) -> Value {
        let sum = |of: &dyn Fn(&Value) -> u64| -> u64 {
            self.runs.iter().map(|run| of(&run["audit"])).sum()
        };
        let count = |audit: &Value, key: &str| audit[key].as_u64().expect("a count");
        let lost = |audit: &Value| {
            count(audit, "planned_samples").saturating_sub(count(audit, "judged_samples"))
        };
        let duplicate = |audit: &Value| {
            count(audit, "judged_samples").saturating_sub(count(audit, "planned_samples"))
        };
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
            "samples": sum(&|audit| count(audit, "planned_samples")),
            "lost_samples": sum(&lost),
            "duplicate_samples": sum(&duplicate),
            "lease_s": 3,
            "figures": evidence.to_json(),
            "each_run": self.runs,
        })
    }
}

fn start_second_coordinator(fleet: &Fleet) -> Member {
    let keys = fleet.path().join("keys").display().to_string();
    let (nats, kit) = (fleet.nats_url(), format!("{keys}/coordinator"));
    let fixed = ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0", "--lease", "3"];
    let arguments = [&fixed[..], &["--dir", &kit, "--keys", &keys]].concat();
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
