//! The agent's unit under a real systemd: what it starts, what it keeps from it, how it ends.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    time::Duration,
};

use e2e::{Fleet, Systemd, until};
use s3_server::S3Server;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const UNIT: &str = "flotilla-agent";

fn deployed(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd").join(name);
    std::fs::read_to_string(path).expect("a file")
}

/// A fleet that other boxes can work for.
struct Rack {
    fleet: Fleet,
    store: S3Server,
}

impl Rack {
    fn up() -> Self {
        let store = S3Server::start().expect("an S3 server");
        let fleet = Fleet::up_with("evaluator", &["--open", "--store", &store.url()], store.env());
        Self { fleet, store }
    }

    /// A box whose agent does this, with the unit's drop-ins and more of the test's own.
    fn boot(&self, roles: &str, drop_ins: &[&str], own: &str) -> Option<Systemd> {
        let mut units =
            vec![("flotilla-agent.service".to_owned(), deployed("flotilla-agent.service"))];
        units.extend(drop_ins.iter().map(|name| {
            let path = format!("flotilla-agent.service.d/{name}");
            (path.clone(), deployed(&path))
        }));
        units.push(("flotilla-agent.service.d/test.conf".into(), format!("[Service]\n{own}\n")));
        let units: Vec<(&str, String)> =
            units.iter().map(|(name, text)| (name.as_str(), text.clone())).collect();
        let nats = self.fleet.nats();
        let mut settings =
            format!("FLOTILLA_NATS={nats}\nFLOTILLA_ROLES={roles}\nFLOTILLA_NAME=unit\n");
        for (name, value) in self.store.env() {
            settings += &format!("{name}={value}\n");
        }
        Systemd::boot(&units, &[("etc/flotilla/agent.env", settings)])
    }
}

fn agent(fleet: &Fleet) -> Option<Value> {
    let listed = fleet.json(&["agents", "list"]).ok()?;
    listed.as_array()?.iter().find(|agent| agent["agent"] == "unit").cloned()
}

#[test]
fn a_box_s_agent_works_as_a_user_of_its_own_that_can_change_nothing_else() {
    let rack = Rack::up();
    let fleet = &rack.fleet;
    let Some(systemd) = rack.boot("generator", &[], "") else { return };
    // Returns when the agent says that it is ready.
    systemd.must(&["systemctl", "start", UNIT]);
    let found = agent(fleet).expect("it is in the fleet");
    assert_eq!((&found["state"], &found["roles"][0]), (&"READY".into(), &"generator".into()));
    until("its status is told", LIMIT, || {
        (systemd.property(UNIT, "StatusText") == "idle").then_some(())
    });
    assert_ne!(systemd.property(UNIT, "WatchdogTimestampMonotonic"), "0");

    let pid = systemd.property(UNIT, "MainPID");
    let status = systemd.must(&["cat", &format!("/proc/{pid}/status")]);
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let uid: u32 = line("Uid:").split_whitespace().next().unwrap().parse().unwrap();
    assert!((61_184..=65_519).contains(&uid), "a dynamic user, not {uid}");
    assert_eq!(line("CapBnd:"), "0000000000000000");
    assert_eq!((line("NoNewPrivs:"), line("Seccomp:")), ("1".into(), "2".into()));
    assert_eq!(systemd.must(&["cat", &format!("/proc/{pid}/oom_score_adj")]).trim(), "500");

    let inside = |command: &[&str]| {
        let enter = ["nsenter", "-t", &pid, "-m", "--setuid", &uid.to_string()];
        let enter = [&enter[..], &["--"], command].concat();
        systemd.run(&enter).code
    };
    assert_eq!(inside(&["touch", "/var/lib/flotilla/agent/own"]), 0);
    for other in ["/etc/other", "/usr/bin/other", "/root/other", "/var/other", "/sys/kernel/other"]
    {
        assert_ne!(inside(&["touch", other]), 0, "{other} can be written");
    }
    // In order: SIGTERM, a clean end, nothing left.
    systemd.must(&["systemctl", "stop", UNIT]);
    assert_eq!(systemd.property(UNIT, "Result"), "success");
    assert_eq!(agent(fleet).unwrap()["state"], "STOPPED");
}

#[test]
fn a_box_joins_a_closed_fleet_by_one_line_and_works_as_a_service() {
    let store = S3Server::start().unwrap();
    let fleet = Fleet::up_with("evaluator", &["--store", &store.url()], store.env());
    let made = fleet.run(&["token", "create", "--roles", "generator", "--uses", "1"]);
    assert_eq!(made.code, 0, "{made:?}");
    let mut settings = String::new();
    for (name, value) in store.env() {
        settings += &format!("{name}={value}\n");
    }
    let files = [("etc/flotilla/agent.env", settings), ("etc/token", made.stdout)];
    let Some(systemd) = Systemd::boot(&[], &files) else { return };
    let program = "/usr/local/bin/flotilla";
    systemd.must(&["cp", "/usr/bin/flotilla", program]);
    let join = [program, "join", "--token-file", "/etc/token", "--name", "unit", "--service"];
    systemd.must(&join);
    assert_eq!(agent(&fleet).expect("it is in the fleet")["state"], "READY");
    assert_eq!(systemd.run(&["systemctl", "is-enabled", UNIT]).stdout.trim(), "enabled");
    // The kit is the service's own, and nobody else's.
    let kit = systemd.must(&["stat", "-c", "%U %a", "/var/lib/flotilla/kit/key.nk"]);
    assert_eq!(kit.trim(), "flotilla-agent 600");
    // It is upgraded by what it has itself: its kit, and root's right to tell it to leave.
    let another = format!("cp {program} /tmp/new && echo another build >> /tmp/new");
    systemd.must(&["sh", "-c", &another]);
    let before = systemd.property(UNIT, "MainPID");
    let kit = "/var/lib/flotilla/kit";
    systemd.must(&[program, "upgrade", "--binary", "/tmp/new", "--service", "--dir", kit]);
    assert_ne!(systemd.property(UNIT, "MainPID"), before);
    systemd.must(&["cmp", "/tmp/new", program]);
    assert_eq!(agent(&fleet).expect("it is in the fleet")["state"], "READY");
}

#[test]
fn an_agent_that_hangs_is_started_anew_and_one_that_was_drained_is_not() {
    let rack = Rack::up();
    let fleet = &rack.fleet;
    let Some(systemd) = rack.boot("generator", &[], "WatchdogSec=2\nRestartSec=0") else { return };
    systemd.must(&["systemctl", "start", UNIT]);
    let pid = systemd.property(UNIT, "MainPID");
    systemd.must(&["kill", "-STOP", &pid]);
    until("it is started anew", LIMIT, || {
        (systemd.property(UNIT, "NRestarts") == "1").then_some(())
    });
    until("the new one is ready", LIMIT, || {
        (systemd.property(UNIT, "ActiveState") == "active").then_some(())
    });
    assert_ne!(systemd.property(UNIT, "MainPID"), pid);
    assert_eq!(fleet.run(&["agents", "drain", "unit"]).code, 0);
    until("it has left", LIMIT, || {
        (systemd.property(UNIT, "ActiveState") == "inactive").then_some(())
    });
    assert_eq!(systemd.property(UNIT, "Result"), "success");
    // RestartSec= is 0 here.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(systemd.property(UNIT, "ActiveState"), "inactive");
}

#[test]
fn a_verifier_contains_programs_with_its_drop_in_and_says_why_not_without() {
    let rack = Rack::up();
    let Some(systemd) = rack.boot("verifier", &["verifier.conf"], "") else { return };
    systemd.must(&["systemctl", "start", UNIT]);
    let with = agent(&rack.fleet).expect("it is in the fleet");
    drop(systemd);
    let Some(systemd) = rack.boot("verifier", &[], "") else { return };
    systemd.must(&["systemctl", "start", UNIT]);
    let without = agent(&rack.fleet).expect("it is in the fleet");
    assert!(with["engines"].to_string().contains("python"), "{with}");
    assert!(without["engines"].to_string().contains("cannot be contained"), "{without}");
}

#[test]
fn a_fleet_comes_up_as_a_service_that_keeps_its_directory_to_itself() {
    let store = S3Server::start().unwrap();
    let mut settings = format!("FLOTILLA_STORE={}\n", store.url());
    for (name, value) in store.env() {
        settings += &format!("{name}={value}\n");
    }
    let units = [("flotilla-up.service", deployed("flotilla-up.service"))];
    let files = [("etc/flotilla/up.env", settings)];
    let Some(systemd) = Systemd::boot(&units, &files) else { return };
    // Returns when the fleet can be joined.
    systemd.must(&["systemctl", "start", "flotilla-up"]);
    let directory = "/var/lib/flotilla-fleet";
    let listed = systemd.must(&["flotilla", "--dir", directory, "--json", "agents", "list"]);
    assert_eq!(listed.trim(), "[]");
    let mode = systemd.must(&["stat", "-L", "-c", "%a", directory]);
    assert_eq!(mode.trim(), "700");
    systemd.must(&["systemctl", "restart", "flotilla-up"]);
    systemd.must(&["flotilla", "--dir", directory, "agents", "list"]);
    systemd.must(&["systemctl", "stop", "flotilla-up"]);
    assert_eq!(systemd.property("flotilla-up", "Result"), "success");
}

/// NATS server and coordinator, each a unit of its own.
struct Services {
    store: S3Server,
    /// Of the NATS server, of its monitoring, and of the gateway.
    ports: [u16; 3],
}

impl Services {
    fn new() -> Self {
        let held = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
        let ports = held.map(|one| one.local_addr().expect("an address").port());
        Self { store: S3Server::start().expect("an S3 server"), ports }
    }

    fn boot(&self, more: &str) -> Option<Systemd> {
        let [nats, monitor, gateway] = self.ports;
        let mut settings = format!(
            "FLOTILLA_STORE={}\nFLOTILLA_GATEWAY=127.0.0.1:{gateway}\n\
             FLOTILLA_MONITOR=http://127.0.0.1:{monitor}\n{more}",
            self.store.url()
        );
        for (name, value) in self.store.env() {
            settings += &format!("{name}={value}\n");
        }
        let config = |name: &str| {
            let text = deployed(&format!("../nats/{name}"));
            let text = text.replace("0.0.0.0:4222", &format!("127.0.0.1:{nats}"));
            text.replace("127.0.0.1:8222", &format!("127.0.0.1:{monitor}"))
        };
        let units = ["nats-server.service", "flotilla-coordinator.service"];
        let units = units.map(|name| (name, deployed(name)));
        let files = [
            ("etc/flotilla/coordinator.env", settings),
            ("var/lib/nats/nats-server.conf", config("single.conf")),
            ("var/lib/nats/common.conf", config("common.conf")),
            ("var/lib/nats/log.conf", config("log.conf")),
            ("var/lib/nats/keys/nats.conf", String::new()),
        ];
        Systemd::boot(&units, &files)
    }
}

fn start_both(systemd: &Systemd) {
    systemd.must(&["systemctl", "start", "nats-server"]);
    until("the coordinator is ready", LIMIT, || {
        // The server says nothing when it listens; the coordinator is started until it does.
        (systemd.run(&["systemctl", "start", "flotilla-coordinator"]).code == 0).then_some(())
    });
}

#[test]
fn a_coordinator_serves_a_nats_server_of_its_own_unit() {
    let services = Services::new();
    let nats = format!("nats://127.0.0.1:{}", services.ports[0]);
    let Some(systemd) = services.boot(&format!("FLOTILLA_NATS={nats}\n")) else { return };
    start_both(&systemd);
    systemd.must(&["flotilla", "--nats", &nats, "run", "list"]);
    let log = systemd.must(&["journalctl", "--no-pager", "-u", "flotilla-coordinator"]);
    assert!(!log.contains("acknowledges before"), "what is acknowledged is on disk: {log}");
    until("its status is told", LIMIT, || {
        systemd.property("flotilla-coordinator", "StatusText").starts_with("leads").then_some(())
    });
    systemd.must(&["systemctl", "stop", "flotilla-coordinator", "nats-server"]);
    assert_eq!(systemd.property("nats-server", "Result"), "success");
}

/// As docs/DEPLOY.md has it.
#[test]
fn a_closed_fleets_nats_server_and_coordinator_are_units_that_let_in_members_alone() {
    const AT: &str = "/var/lib/flotilla-coordinator";
    let services = Services::new();
    let [port, _, gateway] = services.ports;
    let more = format!(
        "FLOTILLA_DIR={AT}/keys/coordinator\nFLOTILLA_KEYS={AT}/keys\nFLOTILLA_HOST=localhost\n"
    );
    let Some(systemd) = services.boot(&more) else { return };
    let (gateway, nats) = (format!("localhost:{gateway}"), format!("tls://127.0.0.1:{port}"));
    let init = ["flotilla", "init", "--dir", AT, "--gateway", &gateway, "--host", "localhost"];
    systemd.must(&[&init[..], &["--nats", &nats]].concat());
    systemd.must(&["rm", "-r", "/var/lib/nats/keys"]);
    systemd.must(&["cp", "-a", &format!("{AT}/keys/nats"), "/var/lib/nats/keys"]);
    start_both(&systemd);
    let admin = ["flotilla", "--dir", AT];
    let kit = "/tmp/kit";
    let made = systemd.must(&[&admin[..], &["token", "create", "--roles", "generator"]].concat());
    let token = made.lines().last().unwrap();
    systemd.must(&["flotilla", "join", token, "--name", "box", "--dir", kit, "--no-agent"]);
    systemd.must(&["flotilla", "--dir", kit, "run", "list"]);
    let members = systemd.must(&[&admin[..], &["members", "list"]].concat());
    assert!(members.contains("box"), "{members}");
    let stranger = systemd.run(&["flotilla", "--nats", &nats, "run", "list"]);
    assert_ne!(stranger.code, 0, "{stranger:?}");
    systemd.must(&[&admin[..], &["agents", "revoke", "box"]].concat());
    let revoked = systemd.run(&["flotilla", "--dir", kit, "run", "list"]);
    assert!(revoked.code != 0 && revoked.stderr.contains("refused"), "{revoked:?}");
    systemd.must(&["systemctl", "restart", "nats-server"]);
    until("the coordinator is back", LIMIT, || {
        (systemd.run(&[&admin[..], &["members", "list"]].concat()).code == 0).then_some(())
    });
}
