//! The systemd units under a real systemd: what they start, how they restrict it, and how they end
//! it.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    time::Duration,
};

use e2e::{Fleet, Systemd, wait_until};
use s3_server::S3Server;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const UNIT: &str = "flotilla-agent";

fn read_unit(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd").join(name);
    std::fs::read_to_string(path).expect("a file")
}

/// A fleet that agents on other hosts can join.
struct OpenFleet {
    fleet: Fleet,
    store: S3Server,
}

impl OpenFleet {
    fn start() -> Self {
        let store = S3Server::start().expect("an S3 server");
        let fleet =
            Fleet::start_with("evaluator", &["--open", "--store", &store.url()], store.env());
        Self { fleet, store }
    }

    /// Boots a systemd with an agent unit, these drop-ins, and more lines of the test.
    fn boot(&self, roles: &str, drop_ins: &[&str], own: &str) -> Option<Systemd> {
        let mut units =
            vec![("flotilla-agent.service".to_owned(), read_unit("flotilla-agent.service"))];
        units.extend(drop_ins.iter().map(|name| {
            let path = format!("flotilla-agent.service.d/{name}");
            (path.clone(), read_unit(&path))
        }));
        units.push(("flotilla-agent.service.d/test.conf".into(), format!("[Service]\n{own}\n")));
        let units: Vec<(&str, String)> =
            units.iter().map(|(name, text)| (name.as_str(), text.clone())).collect();
        let nats = self.fleet.nats_url();
        let mut settings =
            format!("FLOTILLA_NATS={nats}\nFLOTILLA_ROLES={roles}\nFLOTILLA_NAME=unit\n");
        for (name, value) in self.store.env() {
            settings += &format!("{name}={value}\n");
        }
        Systemd::boot(&units, &[("etc/flotilla/agent.env", settings)])
    }
}

fn find_agent(fleet: &Fleet) -> Option<Value> {
    let listed = fleet.run_json(&["agents", "list"]).ok()?;
    listed.as_array()?.iter().find(|agent| agent["agent"] == "unit").cloned()
}

#[test]
fn an_agent_runs_as_its_own_user_without_other_rights() {
    let open_fleet = OpenFleet::start();
    let fleet = &open_fleet.fleet;
    let Some(systemd) = open_fleet.boot("generator", &[], "") else { return };
    // Returns when the agent is ready.
    systemd.run_checked(&["systemctl", "start", UNIT]);
    let found = find_agent(fleet).expect("it is in the fleet");
    assert_eq!((&found["state"], &found["roles"][0]), (&"READY".into(), &"generator".into()));
    wait_until("its status is shown", LIMIT, || {
        (systemd.property(UNIT, "StatusText") == "idle").then_some(())
    });
    assert_ne!(systemd.property(UNIT, "WatchdogTimestampMonotonic"), "0");

    let pid = systemd.property(UNIT, "MainPID");
    let status = systemd.run_checked(&["cat", &format!("/proc/{pid}/status")]);
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let uid: u32 = line("Uid:").split_whitespace().next().unwrap().parse().unwrap();
    assert!((61_184..=65_519).contains(&uid), "a dynamic user, not {uid}");
    assert_eq!(line("CapBnd:"), "0000000000000000");
    assert_eq!((line("NoNewPrivs:"), line("Seccomp:")), ("1".into(), "2".into()));
    assert_eq!(systemd.run_checked(&["cat", &format!("/proc/{pid}/oom_score_adj")]).trim(), "500");

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
    // Clean shutdown: SIGTERM, exit, no process left.
    systemd.run_checked(&["systemctl", "stop", UNIT]);
    assert_eq!(systemd.property(UNIT, "Result"), "success");
    assert_eq!(find_agent(fleet).unwrap()["state"], "STOPPED");
}

#[test]
fn a_host_joins_a_closed_fleet_with_one_token_and_runs_as_a_service() {
    let store = S3Server::start().unwrap();
    let fleet = Fleet::start_with("evaluator", &["--store", &store.url()], store.env());
    let created = fleet.run(&["token", "create", "--roles", "generator", "--uses", "1"]);
    assert_eq!(created.code, 0, "{created:?}");
    let mut settings = String::new();
    for (name, value) in store.env() {
        settings += &format!("{name}={value}\n");
    }
    let files = [("etc/flotilla/agent.env", settings), ("etc/token", created.stdout)];
    let Some(systemd) = Systemd::boot(&[], &files) else { return };
    let program = "/usr/local/bin/flotilla";
    systemd.run_checked(&["cp", "/usr/bin/flotilla", program]);
    let join = [program, "join", "--token-file", "/etc/token", "--name", "unit", "--service"];
    systemd.run_checked(&join);
    assert_eq!(find_agent(&fleet).expect("it is in the fleet")["state"], "READY");
    assert_eq!(systemd.run(&["systemctl", "is-enabled", UNIT]).stdout.trim(), "enabled");
    // Only the service can read its credentials.
    let credentials =
        systemd.run_checked(&["stat", "-c", "%U %a", "/var/lib/flotilla/credentials/key.nk"]);
    assert_eq!(credentials.trim(), "flotilla-agent 600");
    // The upgrade uses the service's own credentials, and the right of root to drain its agent.
    let another = format!("cp {program} /tmp/new && echo another build >> /tmp/new");
    systemd.run_checked(&["sh", "-c", &another]);
    let before = systemd.property(UNIT, "MainPID");
    let credentials = "/var/lib/flotilla/credentials";
    systemd.run_checked(&[
        program,
        "upgrade",
        "--binary",
        "/tmp/new",
        "--service",
        "--dir",
        credentials,
    ]);
    assert_ne!(systemd.property(UNIT, "MainPID"), before);
    systemd.run_checked(&["cmp", "/tmp/new", program]);
    assert_eq!(find_agent(&fleet).expect("it is in the fleet")["state"], "READY");
}

#[test]
fn a_hanging_agent_is_restarted_and_a_drained_one_is_not() {
    let open_fleet = OpenFleet::start();
    let fleet = &open_fleet.fleet;
    let Some(systemd) = open_fleet.boot("generator", &[], "WatchdogSec=2\nRestartSec=0") else {
        return;
    };
    systemd.run_checked(&["systemctl", "start", UNIT]);
    let pid = systemd.property(UNIT, "MainPID");
    systemd.run_checked(&["kill", "-STOP", &pid]);
    wait_until("it is restarted", LIMIT, || {
        (systemd.property(UNIT, "NRestarts") == "1").then_some(())
    });
    wait_until("the new one is ready", LIMIT, || {
        (systemd.property(UNIT, "ActiveState") == "active").then_some(())
    });
    assert_ne!(systemd.property(UNIT, "MainPID"), pid);
    assert_eq!(fleet.run(&["agents", "drain", "unit"]).code, 0);
    wait_until("it has stopped", LIMIT, || {
        (systemd.property(UNIT, "ActiveState") == "inactive").then_some(())
    });
    assert_eq!(systemd.property(UNIT, "Result"), "success");
    // RestartSec= is 0 here.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(systemd.property(UNIT, "ActiveState"), "inactive");
}

#[test]
fn a_verifier_sandboxes_programs_with_its_drop_in_and_reports_why_not_without() {
    let open_fleet = OpenFleet::start();
    let Some(systemd) = open_fleet.boot("verifier", &["verifier.conf"], "") else { return };
    systemd.run_checked(&["systemctl", "start", UNIT]);
    let with = find_agent(&open_fleet.fleet).expect("it is in the fleet");
    drop(systemd);
    let Some(systemd) = open_fleet.boot("verifier", &[], "") else { return };
    systemd.run_checked(&["systemctl", "start", UNIT]);
    let without = find_agent(&open_fleet.fleet).expect("it is in the fleet");
    assert!(with["engines"].to_string().contains("python"), "{with}");
    assert!(without["engines"].to_string().contains("cannot be contained"), "{without}");
}

#[test]
fn a_fleet_runs_as_a_service_with_a_private_directory() {
    let store = S3Server::start().unwrap();
    let mut settings = format!("FLOTILLA_STORE={}\n", store.url());
    for (name, value) in store.env() {
        settings += &format!("{name}={value}\n");
    }
    let units = [("flotilla-up.service", read_unit("flotilla-up.service"))];
    let files = [("etc/flotilla/up.env", settings)];
    let Some(systemd) = Systemd::boot(&units, &files) else { return };
    // Returns when the fleet can be joined.
    systemd.run_checked(&["systemctl", "start", "flotilla-up"]);
    let directory = "/var/lib/flotilla-fleet";
    let listed = systemd.run_checked(&["flotilla", "--dir", directory, "--json", "agents", "list"]);
    assert_eq!(listed.trim(), "[]");
    let mode = systemd.run_checked(&["stat", "-L", "-c", "%a", directory]);
    assert_eq!(mode.trim(), "700");
    systemd.run_checked(&["systemctl", "restart", "flotilla-up"]);
    systemd.run_checked(&["flotilla", "--dir", directory, "agents", "list"]);
    systemd.run_checked(&["systemctl", "stop", "flotilla-up"]);
    assert_eq!(systemd.property("flotilla-up", "Result"), "success");
}

/// A NATS server and a coordinator as separate units.
struct Services {
    store: S3Server,
    /// Ports of the NATS server, of its monitoring, and of the gateway.
    ports: [u16; 3],
}

impl Services {
    fn new() -> Self {
        let listeners =
            [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
        let ports = listeners.map(|one| one.local_addr().expect("an address").port());
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
            let text = read_unit(&format!("../nats/{name}"));
            let text = text.replace("0.0.0.0:4222", &format!("127.0.0.1:{nats}"));
            text.replace("127.0.0.1:8222", &format!("127.0.0.1:{monitor}"))
        };
        let units = ["nats-server.service", "flotilla-coordinator.service"];
        let units = units.map(|name| (name, read_unit(name)));
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
    systemd.run_checked(&["systemctl", "start", "nats-server"]);
    wait_until("the coordinator is ready", LIMIT, || {
        // The server sends no notification, so the coordinator is started until the server listens.
        (systemd.run(&["systemctl", "start", "flotilla-coordinator"]).code == 0).then_some(())
    });
}

#[test]
fn a_coordinator_uses_a_nats_server_in_another_unit() {
    let services = Services::new();
    let nats = format!("nats://127.0.0.1:{}", services.ports[0]);
    let Some(systemd) = services.boot(&format!("FLOTILLA_NATS={nats}\n")) else { return };
    start_both(&systemd);
    systemd.run_checked(&["flotilla", "--nats", &nats, "run", "list"]);
    let log = systemd.run_checked(&["journalctl", "--no-pager", "-u", "flotilla-coordinator"]);
    assert!(!log.contains("acknowledges before"), "what is acknowledged is on disk: {log}");
    wait_until("its status is shown", LIMIT, || {
        systemd.property("flotilla-coordinator", "StatusText").starts_with("leads").then_some(())
    });
    systemd.run_checked(&["systemctl", "stop", "flotilla-coordinator", "nats-server"]);
    assert_eq!(systemd.property("nats-server", "Result"), "success");
}

/// Follows docs/DEPLOY.md.
#[test]
fn a_closed_fleets_nats_server_and_coordinator_run_as_units_and_only_accept_members() {
    const AT: &str = "/var/lib/flotilla-coordinator";
    let services = Services::new();
    let [port, _, gateway] = services.ports;
    let more = format!(
        "FLOTILLA_DIR={AT}/keys/coordinator\nFLOTILLA_KEYS={AT}/keys\nFLOTILLA_HOST=localhost\n"
    );
    let Some(systemd) = services.boot(&more) else { return };
    let (gateway, nats) = (format!("localhost:{gateway}"), format!("tls://127.0.0.1:{port}"));
    let init = ["flotilla", "init", "--dir", AT, "--gateway", &gateway, "--host", "localhost"];
    systemd.run_checked(&[&init[..], &["--nats", &nats]].concat());
    systemd.run_checked(&["rm", "-r", "/var/lib/nats/keys"]);
    systemd.run_checked(&["cp", "-a", &format!("{AT}/keys/nats"), "/var/lib/nats/keys"]);
    start_both(&systemd);
    let admin = ["flotilla", "--dir", AT];
    let credentials = "/tmp/credentials";
    let created =
        systemd.run_checked(&[&admin[..], &["token", "create", "--roles", "generator"]].concat());
    let token = created.lines().last().unwrap();
    systemd.run_checked(&[
        "flotilla",
        "join",
        token,
        "--name",
        "box",
        "--dir",
        credentials,
        "--no-agent",
    ]);
    systemd.run_checked(&["flotilla", "--dir", credentials, "run", "list"]);
    let members = systemd.run_checked(&[&admin[..], &["members", "list"]].concat());
    assert!(members.contains("box"), "{members}");
    let stranger = systemd.run(&["flotilla", "--nats", &nats, "run", "list"]);
    assert_ne!(stranger.code, 0, "{stranger:?}");
    systemd.run_checked(&[&admin[..], &["agents", "revoke", "box"]].concat());
    let revoked = systemd.run(&["flotilla", "--dir", credentials, "run", "list"]);
    assert!(revoked.code != 0 && revoked.stderr.contains("refused"), "{revoked:?}");
    systemd.run_checked(&["systemctl", "restart", "nats-server"]);
    wait_until("the coordinator is back", LIMIT, || {
        (systemd.run(&[&admin[..], &["members", "list"]].concat()).code == 0).then_some(())
    });
}
