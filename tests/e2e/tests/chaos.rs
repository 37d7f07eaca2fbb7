//! A campaign: everything a fleet consists of is killed and stopped at random, again and
//! again, and every run comes to what it comes to in peace.
//!
//! `CHAOS_KILLS` and `CHAOS_SEED` set how long and how; `make chaos` is the long one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use e2e::{Evidence, Fleet, Member, Sampling, Storm, Undisturbed, journal};
use serde_json::{Value, json};

/// For one run, all its deaths and restarts included.
const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 2 };

/// Seconds from one strike to the next.
const GAP_S: (f64, f64) = (0.2, 1.8);

fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: write a number")),
        Err(_) => default,
    }
}

#[test]
fn whatever_is_killed_or_stopped_the_runs_come_to_the_same() {
    let (kills, seed) = (setting("CHAOS_KILLS", 12), setting("CHAOS_SEED", 1));
    println!("CHAOS_KILLS={kills} CHAOS_SEED={seed}");
    let undisturbed = Undisturbed::of(SAMPLING);
    let mut campaign = Campaign::begin(seed, &undisturbed);
    let kills = usize::try_from(kills).expect("a number of kills");
    while campaign.storm.kills() < kills {
        campaign.run(kills, &undisturbed);
    }
    let report = campaign.report(seed);
    println!("{report:#}");
    write_report(&report);
    assert_eq!((&report["lost_samples"], &report["duplicate_samples"]), (&json!(0), &json!(0)));
}

struct Campaign {
    storm: Storm,
    second: Member,
    fleet: Fleet,
    spec: PathBuf,
    runs: Vec<Value>,
    written: BTreeMap<String, f64>,
    began: Instant,
}

impl Campaign {
    fn begin(seed: u64, undisturbed: &Undisturbed) -> Self {
        let fleet = Fleet::up("trainer,generator=2,verifier=2,evaluator=2");
        let second = second_coordinator(&fleet);
        let spec = undisturbed.spec(&fleet, fleet.path());
        let storm = Storm::new(seed, GAP_S);
        let (runs, written) = (Vec::new(), BTreeMap::new());
        Self { storm, second, fleet, spec, runs, written, began: Instant::now() }
    }

    /// One run, struck until there were so many kills in all, then left alone.
    fn run(&mut self, kills: usize, undisturbed: &Undisturbed) {
        let (began, before) = (Instant::now(), self.storm.kills());
        self.fleet.await_agents();
        let run = self.fleet.submit(&self.spec);
        let watch = self.fleet.watch(&run);
        while !watch.is_finished() {
            if self.storm.kills() < kills {
                self.storm.blow(&self.fleet, &self.second);
            } else {
                self.storm.calm();
            }
            self.revive();
            assert!(began.elapsed() < LIMIT, "{run} does not end: {}", self.fleet.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.storm.calm();
        self.revive();
        self.fleet.await_agents();
        let audit = undisturbed.assert_same(&self.fleet, &run, LIMIT);
        for fact in self.fleet.facts(&run) {
            let at_s = fact["time_ms"].as_f64().expect("a time") / 1000.0;
            self.written.insert(fact["subject"].as_str().expect("a subject").to_owned(), at_s);
        }
        let kills = self.storm.kills() - before;
        let wall_s = began.elapsed().as_secs_f64().round();
        println!("{run}: {kills} kills in {wall_s} s, as in peace");
        self.runs.push(json!({ "run": run, "kills": kills, "wall_s": wall_s, "audit": audit }));
    }

    /// What a box's init does for `flotilla up` and for a coordinator.
    fn revive(&mut self) {
        if self.fleet.ended().is_some() {
            self.fleet.up_again();
        }
        self.second.revive();
    }

    fn report(&self, seed: u64) -> Value {
        let sum = |of: &dyn Fn(&Value) -> u64| -> u64 {
            self.runs.iter().map(|run| of(&run["audit"])).sum()
        };
        let count = |audit: &Value, key: &str| audit[key].as_u64().expect("a count");
        let lost = |audit: &Value| {
            count(audit, "planned_samples").saturating_sub(count(audit, "judged_samples"))
        };
        let more = |audit: &Value| {
            count(audit, "judged_samples").saturating_sub(count(audit, "planned_samples"))
        };
        let logs = ["coordinator", "coordinator-2"];
        let logs = logs.map(|name| (name.to_owned(), log_of(self.fleet.path(), name)));
        let evidence = Evidence {
            strikes: &self.storm.strikes,
            begins: &journal::begins(self.fleet.path()),
            leads: &journal::leads(&BTreeMap::from(logs)),
            written: &self.written,
        };
        let counts = self.storm.counts().into_iter();
        let counts: BTreeMap<_, _> = counts
            .map(|(kind, (kills, stops))| (kind, json!({ "kills": kills, "stops": stops })))
            .collect();
        json!({
            "seed": seed,
            "runs": self.runs.len(),
            "wall_s": self.began.elapsed().as_secs_f64().round(),
            "kills": self.storm.kills(),
            "stops": self.storm.strikes.len() - self.storm.kills(),
            "by_kind": counts,
            "samples": sum(&|audit| count(audit, "planned_samples")),
            "lost_samples": sum(&lost),
            "duplicate_samples": sum(&more),
            "lease_s": 3,
            "figures": evidence.figures(),
            "each_run": self.runs,
        })
    }
}

fn second_coordinator(fleet: &Fleet) -> Member {
    let keys = fleet.path().join("keys").display().to_string();
    let (nats, kit) = (fleet.nats(), format!("{keys}/coordinator"));
    let fixed = ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0", "--lease", "3"];
    let arguments = [&fixed[..], &["--dir", &kit, "--keys", &keys]].concat();
    Member::start("coordinator-2", &[], &arguments, [], &fleet.path().join("logs"))
}

fn log_of(directory: &Path, coordinator: &str) -> PathBuf {
    directory.join("logs").join(format!("{coordinator}.log"))
}

/// Where `make chaos` finds it.
fn write_report(report: &Value) {
    let program = e2e::binary();
    let target = program.ancestors().nth(2).expect("programs lie in target/PROFILE");
    let path = target.join("chaos-report.json");
    std::fs::write(&path, format!("{report:#}\n")).expect("a report");
    println!("wrote {}", path.display());
}
