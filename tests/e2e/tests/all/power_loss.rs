//! Power losses: the disks of a fleet forget what was not fsynced, and all its processes end. The
//! results of each run must equal those without faults, and nothing that a user saw may be missing.
//!
//! `POWER_LOSSES` and `POWER_LOSS_SEED` set the number of losses and the seed. `make chaos` runs a
//! long test.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use e2e::{
    Client, FactReader, Fleet, Member, NatsServer, Random, ReferenceResults, SpecFiles, wait_until,
};
use power_loss_fs::{EntryDurability, LostChanges, PowerLossDisk, UnsyncedChanges};
use requirements::free_ports;
use tempfile::TempDir;

use crate::chaos::{SAMPLING, env_number};

/// The limit for one run, including all restarts.
const LIMIT: Duration = Duration::from_secs(600);

/// The shortest and longest time from a start of the fleet to the next power loss, in seconds. A
/// start takes about 3 s.
const GAP_S: (f64, f64) = (0.5, 15.0);

/// Few enough that no job is delivered 20 times, after which it would be set aside.
const LOSSES_PER_RUN: u64 = 6;

/// Draws what survives of unsynced changes: nothing, or a random part.
fn draw_survivors(random: &mut Random) -> UnsyncedChanges {
    let seed = random.next_u64();
    if seed.is_multiple_of(4) {
        UnsyncedChanges::Lost
    } else {
        UnsyncedChanges::PartlyKept { seed }
    }
}

#[test]
fn runs_have_the_same_results_and_lose_no_fact_if_the_power_is_lost() {
    if !requirements::require_fuse() {
        return;
    }
    let (losses, seed) = (env_number("POWER_LOSSES", 2), env_number("POWER_LOSS_SEED", 1));
    println!("POWER_LOSSES={losses} POWER_LOSS_SEED={seed}");
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let mut test = PowerLossTest::start(seed, &reference);
    while test.losses < losses {
        test.run_once(losses, &reference);
    }
    assert!(test.facts_seen > 0, "no fact was seen before a loss of power");
}

/// A fleet whose directory forgets names until their directory is synced. That of its nats-server,
/// which syncs new files but not the directories they are in, keeps them as ext4 and XFS do.
struct PowerLossTest {
    random: Random,
    losses: u64,
    /// Before a loss of power.
    facts_seen: usize,
    spec: PathBuf,
    fleet: Fleet,
    nats_disk: PowerLossDisk,
    fleet_disk: PowerLossDisk,
    /// The last field, because it must be dropped after the mounts in it.
    _directory: TempDir,
}

impl PowerLossTest {
    fn start(seed: u64, reference: &ReferenceResults) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mount = |name: &str, durability| {
            let path = directory.path().join(name);
            fs::create_dir(&path).expect("a directory");
            PowerLossDisk::mount(&path, durability).expect("a mount")
        };
        let nats_disk = mount("nats", EntryDurability::AnySync);
        let fleet_disk = mount("fleet", EntryDurability::OwnDirectory);
        let home = TempDir::new_in(fleet_disk.path()).expect("a directory");
        // Not a mount in a mount: after a power loss, the kernel forgets what it knew of the outer.
        symlink(nats_disk.path(), home.path().join("nats")).expect("a symbolic link");
        for directory in [home.path(), fleet_disk.path()] {
            sync_directory(directory);
        }
        // The log keeps all cycles, so that each fact can be looked for at the end.
        let arguments = ["--keep-cycles", "100"];
        let agents = "trainer,generator=2,verifier,evaluator";
        let fleet = Fleet::start_in(home, agents, &arguments, []);
        let spec = reference.write_spec(&fleet, directory.path());
        let random = Random::new(seed);
        Self {
            random,
            losses: 0,
            facts_seen: 0,
            spec,
            fleet,
            nats_disk,
            fleet_disk,
            _directory: directory,
        }
    }

    /// Submits a run, cuts the power at most [`LOSSES_PER_RUN`] times, until there are `losses` in
    /// total, and waits for its end.
    fn run_once(&mut self, losses: u64, reference: &ReferenceResults) {
        let began = Instant::now();
        self.fleet.await_agents();
        let run = self.fleet.submit(&self.spec);
        let waiting = self.fleet.wait_in_background(&run);
        let mut seen = BTreeSet::new();
        let losses = losses.min(self.losses + LOSSES_PER_RUN);
        while self.losses < losses && !waiting.is_finished() {
            let reader = FactReader::start(&self.fleet, &run);
            let gap = self.random.next_in_range(GAP_S.0, GAP_S.1);
            std::thread::sleep(Duration::from_secs_f64(gap));
            seen.extend(reader.stop());
            let lost = self.lose_power();
            self.losses += 1;
            println!("{run}: power loss {} after {gap:.1} s: {lost:?}", self.losses);
            self.fleet.restart();
            assert!(began.elapsed() < LIMIT, "{run} does not end: {}", self.fleet.log_tails());
        }
        self.fleet.await_agents();
        reference.assert_same_results(&self.fleet, &run, LIMIT);
        let audit = self.fleet.run_json(&["audit", "--deep", &run]).expect("a clean audit");
        assert_eq!(audit["findings"], serde_json::json!([]));
        let facts = self.fleet.run(&["run", "watch", &run, "--json"]).stdout;
        let facts: BTreeSet<String> = facts.lines().map(str::to_owned).collect();
        let missing: Vec<_> = seen.difference(&facts).collect();
        assert!(missing.is_empty(), "of {} facts: {missing:?}", seen.len());
        let wall_s = began.elapsed().as_secs_f64().round();
        println!("{run}: {} facts seen before the losses; ended after {wall_s} s", seen.len());
        self.facts_seen += seen.len();
    }

    /// Cuts the power of the server first, so that nothing is acknowledged later.
    fn lose_power(&mut self) -> [LostChanges; 2] {
        let survivors = draw_survivors(&mut self.random);
        let lost = [&self.nats_disk, &self.fleet_disk].map(|disk| disk.cut_power(survivors));
        self.fleet.kill_all();
        self.nats_disk.restore_power();
        self.fleet_disk.restore_power();
        lost
    }
}

fn sync_directory(path: &Path) {
    File::open(path).and_then(|directory| directory.sync_all()).expect("a directory");
}

/// A server that the test configures, and a coordinator on it.
struct LazyFleet {
    coordinator: Member,
    server: NatsServer,
    client: Client,
}

impl LazyFleet {
    /// Starts a nats-server without `sync_interval`, and a coordinator that can ask for it.
    fn start(streams: &Path, home: &Path) -> Self {
        let [monitor, gateway] = free_ports().map(|port| port.to_string());
        let server =
            NatsServer::start(&["-js", "-sd", &streams.display().to_string(), "-m", &monitor]);
        let client = Client::new([("FLOTILLA_NATS".to_owned(), server.url())], home);
        let store = format!("file://{}", home.join("store").display());
        let (monitor, gateway) =
            (format!("http://127.0.0.1:{monitor}"), format!("127.0.0.1:{gateway}"));
        let url = server.url();
        let arguments = ["coordinator", "--nats", &url, "--monitor", &monitor];
        let more = ["--store", &store, "--gateway", &gateway];
        let arguments = [&arguments[..], &more].concat();
        let mut coordinator = Member::start("coordinator", &[], &arguments, [], &home.join("logs"));
        wait_until("the fleet can be used", LIMIT, || {
            coordinator.restart_exited();
            client.run_json(&["run", "list"]).ok()
        });
        Self { coordinator, server, client }
    }

    fn list_runs(&self) -> BTreeSet<String> {
        let listed = self.client.run_json(&["run", "list"]).expect("a list");
        let name = |run: &serde_json::Value| run["run"].as_str().expect("a run").to_owned();
        listed.as_array().expect("a list").iter().map(name).collect()
    }
}

#[test]
fn a_server_with_default_settings_loses_acknowledged_runs_and_the_coordinator_warned() {
    if !requirements::require_fuse() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let streams = directory.path().join("streams");
    fs::create_dir(&streams).expect("a directory");
    let disk = PowerLossDisk::mount(&streams, EntryDurability::AnySync).expect("a mount");
    let fleet = LazyFleet::start(&streams, directory.path());
    let log = fs::read_to_string(fleet.coordinator.log()).expect("a log");
    assert!(log.contains("a power loss can lose what was acknowledged"), "{log}");

    let spec = SpecFiles::create(directory.path()).write_sft_spec(5, 0);
    let submitted: BTreeSet<String> = (0..8).map(|_| fleet.client.submit(&spec)).collect();
    assert_eq!(fleet.list_runs(), submitted);
    disk.cut_power(UnsyncedChanges::Lost);
    let LazyFleet { coordinator, server, .. } = fleet;
    drop(coordinator);
    server.kill();
    disk.restore_power();

    let fleet = LazyFleet::start(&streams, directory.path());
    let left = fleet.list_runs();
    let lost = submitted.difference(&left).count();
    println!("lost {lost} of {} acknowledged runs", submitted.len());
    assert!(lost > 0, "{left:?}");
}
