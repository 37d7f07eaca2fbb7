//! Notifications to a service manager (`sd_notify`), over a real socket.

use std::{
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use e2e::{Fleet, Member, wait_until};
use rustix::process::Signal;

const LIMIT: Duration = Duration::from_secs(60);

/// Services notify at half of it, every second.
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

    fn receive(&self) -> Option<String> {
        let mut buffer = [0; 4096];
        let length = self.socket.recv(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    /// Receives messages up to and including one that contains `what`.
    fn receive_until(&self, what: &str) -> Vec<String> {
        let mut received = Vec::new();
        wait_until(&format!("the service sends {what}"), LIMIT, || {
            received.extend(self.receive());
            received.last().filter(|message| message.contains(what)).map(drop)
        });
        received
    }

    fn receives_within(&self, what: &str, limit: Duration) -> bool {
        let began = Instant::now();
        while began.elapsed() < limit {
            if self.receive().is_some_and(|message| message.contains(what)) {
                return true;
            }
        }
        false
    }
}

#[test]
fn a_fleet_is_ready_when_it_can_be_joined_and_its_children_send_no_notifications() {
    let directory = tempfile::tempdir().unwrap();
    let manager = ServiceManager::in_directory(directory.path());
    let fleet = Fleet::start_with("evaluator", &[], manager.environment());
    let received = manager.receive_until("READY=1");
    assert!(
        !received[..received.len() - 1].iter().any(|message| message.contains("WATCHDOG")),
        "{received:?}"
    );
    let received = manager.receive_until("WATCHDOG=1");
    assert!(received.iter().any(|message| message.contains("STATUS=NATS at ")), "{received:?}");
    // A started child would have sent READY or a status.
    let received: Vec<String> = (0..20).filter_map(|_| manager.receive()).collect();
    assert!(
        !received.iter().any(|message| message.contains("READY") || message.contains("idle")),
        "{received:?}"
    );
    fleet.terminate();
    manager.receive_until("STOPPING=1");
}

#[test]
fn an_agent_notifies_that_it_is_ready_and_alive_and_a_hanging_one_does_not() {
    let fleet = Fleet::start_open("evaluator");
    let manager = ServiceManager::in_directory(fleet.path());
    let (nats, home) = (fleet.nats_url(), fleet.path().join("box").display().to_string());
    let arguments = ["agent", "--nats", &nats, "--roles", "generator", "--name", "box"];
    let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
    let agent =
        Member::start("box", &[], &arguments, manager.environment(), &fleet.path().join("logs"));
    let received = manager.receive_until("READY=1");
    assert_eq!(received.len(), 1, "ready comes first: {received:?}");
    fleet.run_json(&["agents", "list"]).unwrap();
    let received = manager.receive_until("WATCHDOG=1");
    assert!(received.iter().any(|message| message.contains("STATUS=idle")), "{received:?}");
    agent.signal(Signal::STOP);
    // Drops earlier messages.
    while manager.receive().is_some() {}
    assert!(!manager.receives_within("WATCHDOG=1", Duration::from_secs(4)), "it hangs");
    agent.signal(Signal::CONT);
    manager.receive_until("WATCHDOG=1");
    // A lost connection is not a hang: the agent reconnects.
    fleet.signal("coordinator", Signal::KILL);
    manager.receive_until("WATCHDOG=1");
    agent.signal(Signal::TERM);
    manager.receive_until("STOPPING=1");
}

#[test]
fn an_agent_without_its_bus_is_alive() {
    let mut fleet = Fleet::start_open("evaluator");
    let manager = ServiceManager::in_directory(fleet.path());
    let (nats, home) = (fleet.nats_url(), fleet.path().join("box").display().to_string());
    let arguments = ["agent", "--nats", &nats, "--roles", "evaluator", "--name", "box"];
    let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
    let mut agent =
        Member::start("box", &[], &arguments, manager.environment(), &fleet.path().join("logs"));
    manager.receive_until("READY=1");
    fleet.terminate();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status());
    while manager.receive().is_some() {}
    for _ in 0..5 {
        assert!(manager.receives_within("WATCHDOG=1", Duration::from_secs(2)), "it reconnects");
    }
    assert!(agent.is_alive());
}

#[test]
fn a_coordinator_is_ready_when_it_has_replayed_the_log() {
    let fleet = Fleet::start_open("evaluator");
    let manager = ServiceManager::in_directory(fleet.path());
    let nats = fleet.nats_url();
    let arguments = ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0"];
    let logs = fleet.path().join("logs");
    let second = Member::start("second", &[], &arguments, manager.environment(), &logs);
    manager.receive_until("READY=1");
    let log = std::fs::read_to_string(second.log()).unwrap();
    assert!(log.contains("replayed the log") && log.contains("the gateway answers"), "{log}");
    let received = manager.receive_until("WATCHDOG=1");
    assert!(
        received.iter().any(|message| message.contains("STATUS=stands by, 0 open runs")),
        "{received:?}"
    );
    second.signal(Signal::TERM);
    manager.receive_until("STOPPING=1");
}
