//! What a service manager is told, over a real socket.

use std::{
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use e2e::{Fleet, Member, until};
use rustix::process::Signal;

const LIMIT: Duration = Duration::from_secs(60);

/// Half of it is one second: the rhythm of a service that is alive.
const WATCHDOG_US: &str = "2000000";

struct ServiceManager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl ServiceManager {
    fn in_directory(directory: &Path) -> Self {
        let path = directory.join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a socket");
        Self { socket, path }
    }

    fn environment(&self) -> [(String, String); 2] {
        let path = self.path.display().to_string();
        [("NOTIFY_SOCKET".into(), path), ("WATCHDOG_USEC".into(), WATCHDOG_US.into())]
    }

    fn hear(&self) -> Option<String> {
        let mut buffer = [0; 4096];
        let length = self.socket.recv(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    /// Everything until this is said, itself included.
    fn hear_until(&self, what: &str) -> Vec<String> {
        let mut heard = Vec::new();
        until(&format!("the service says {what}"), LIMIT, || {
            heard.extend(self.hear());
            heard.last().filter(|said| said.contains(what)).map(drop)
        });
        heard
    }

    fn heard_within(&self, what: &str, limit: Duration) -> bool {
        let began = Instant::now();
        while began.elapsed() < limit {
            if self.hear().is_some_and(|said| said.contains(what)) {
                return true;
            }
        }
        false
    }
}

#[test]
fn a_fleet_is_ready_when_it_can_be_joined_and_its_children_say_nothing_in_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let manager = ServiceManager::in_directory(directory.path());
    let fleet = Fleet::up_with("evaluator", &[], manager.environment());
    let heard = manager.hear_until("READY=1");
    assert!(!heard[..heard.len() - 1].iter().any(|said| said.contains("WATCHDOG")), "{heard:?}");
    let heard = manager.hear_until("WATCHDOG=1");
    assert!(heard.iter().any(|said| said.contains("STATUS=NATS at ")), "{heard:?}");
    // A child that has begun would have said that it is ready, or what it does.
    let heard: Vec<String> = (0..20).filter_map(|_| manager.hear()).collect();
    assert!(!heard.iter().any(|said| said.contains("READY") || said.contains("idle")), "{heard:?}");
    fleet.terminate();
    manager.hear_until("STOPPING=1");
}

#[test]
fn an_agent_says_that_it_is_ready_and_alive_and_one_that_hangs_says_nothing() {
    let fleet = Fleet::open("evaluator");
    let manager = ServiceManager::in_directory(fleet.path());
    let (nats, home) = (fleet.nats(), fleet.path().join("box").display().to_string());
    let arguments = ["agent", "--nats", &nats, "--roles", "generator", "--name", "box"];
    let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
    let agent =
        Member::start("box", &[], &arguments, manager.environment(), &fleet.path().join("logs"));
    let heard = manager.hear_until("READY=1");
    assert_eq!(heard.len(), 1, "ready comes first: {heard:?}");
    fleet.json(&["agents", "list"]).unwrap();
    let heard = manager.hear_until("WATCHDOG=1");
    assert!(heard.iter().any(|said| said.contains("STATUS=idle")), "{heard:?}");
    agent.signal(Signal::STOP);
    // What was said before.
    while manager.hear().is_some() {}
    assert!(!manager.heard_within("WATCHDOG=1", Duration::from_secs(4)), "it hangs");
    agent.signal(Signal::CONT);
    manager.hear_until("WATCHDOG=1");
    // Away is not hung: it reconnects.
    fleet.signal("coordinator", Signal::KILL);
    manager.hear_until("WATCHDOG=1");
    agent.signal(Signal::TERM);
    manager.hear_until("STOPPING=1");
}

#[test]
fn an_agent_whose_bus_is_away_is_alive() {
    let mut fleet = Fleet::open("evaluator");
    let manager = ServiceManager::in_directory(fleet.path());
    let (nats, home) = (fleet.nats(), fleet.path().join("box").display().to_string());
    let arguments = ["agent", "--nats", &nats, "--roles", "evaluator", "--name", "box"];
    let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
    let mut agent =
        Member::start("box", &[], &arguments, manager.environment(), &fleet.path().join("logs"));
    manager.hear_until("READY=1");
    fleet.terminate();
    until("the fleet is down", LIMIT, || fleet.ended());
    while manager.hear().is_some() {}
    for _ in 0..5 {
        assert!(manager.heard_within("WATCHDOG=1", Duration::from_secs(2)), "it reconnects");
    }
    assert!(agent.is_alive());
}

#[test]
fn a_coordinator_is_ready_when_it_has_replayed_the_log() {
    let fleet = Fleet::open("evaluator");
    let manager = ServiceManager::in_directory(fleet.path());
    let nats = fleet.nats();
    let arguments = ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0"];
    let logs = fleet.path().join("logs");
    let second = Member::start("second", &[], &arguments, manager.environment(), &logs);
    manager.hear_until("READY=1");
    let log = std::fs::read_to_string(second.log()).unwrap();
    assert!(log.contains("replayed the log") && log.contains("the gateway answers"), "{log}");
    let heard = manager.hear_until("WATCHDOG=1");
    assert!(heard.iter().any(|said| said.contains("STATUS=stands by, 0 open runs")), "{heard:?}");
    second.signal(Signal::TERM);
    manager.hear_until("STOPPING=1");
}
