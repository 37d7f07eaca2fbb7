//! Boxes without the store's keys and without its file system: all of a run's files go through the
//! gateway, or past it by addresses that it signed.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use e2e::{Client, Files, Member, Sampling, flotilla, until};
use s3_server::S3Server;
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);
const SAMPLING: Sampling = Sampling { prompts: 12, per_prompt: 4, max_new_tokens: 24, cycles: 1 };

/// A closed fleet, and boxes that joined it. Ended in this order.
struct Closed {
    boxes: Vec<Member>,
    _up: Member,
    /// What goes before a program on a box.
    on: Vec<String>,
    /// An admin, on the bus host.
    admin: Client,
    root: TempDir,
}

impl Closed {
    fn up(arguments: &[&str], environment: BTreeMap<String, String>) -> Self {
        let root = tempfile::tempdir().unwrap();
        let fleet = root.path().join("fleet").display().to_string();
        let up = [&["up", "--dir", &fleet, "--lease", "3"][..], arguments];
        let up = Member::start("up", &[], &up.concat(), environment, root.path());
        let admin = Client::new([("FLOTILLA_DIR".to_owned(), fleet)], root.path());
        let closed = Self { boxes: Vec::new(), _up: up, on: Vec::new(), admin, root };
        until("the fleet is up", LIMIT, || closed.admin.json(&["agents", "list"]).ok());
        closed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A box joins, and works.
    fn join(&mut self, name: &str, roles: &str) {
        let made = self.admin.json(&["token", "create", "--roles", roles]).unwrap();
        let token = ("FLOTILLA_TOKEN".to_owned(), made["line"].as_str().unwrap().to_owned());
        let (kit, own) = (self.path(&format!("{name}-kit")), self.path(&format!("{name}-own")));
        let (kit, own) = (kit.display().to_string(), own.display().to_string());
        let join =
            ["join", "--name", name, "--dir", &kit, "--", "--roles", roles, "--agent-dir", &own];
        let home = ("HOME".to_owned(), own.clone());
        let logs = self.root.path().to_owned();
        self.boxes.push(Member::start(name, &self.on, &join, [token, home], &logs));
    }

    fn await_boxes(&self) {
        until("the boxes are ready", LIMIT, || {
            let listed = self.admin.json(&["agents", "list"]).ok()?;
            let ready = |agent: &&Value| agent["state"] == "READY";
            let count = listed.as_array()?.iter().filter(ready).count();
            (count >= self.boxes.len()).then_some(())
        });
    }

    /// A kit for somebody, and how he asks with it from a box.
    fn user(&self, name: &str, scope: &str) -> (String, Client) {
        let kit = self.path(name).display().to_string();
        let made = self.admin.run(&["user", "create", name, "--scope", scope, "--out", &kit]);
        assert_eq!(made.code, 0, "{made:?}");
        let client = Client::new([("FLOTILLA_DIR".to_owned(), kit.clone())], self.root.path());
        (kit, client)
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }
}

/// A whole run by boxes that joined, started and looked at by users elsewhere.
fn a_run_is_made_and_looked_at(closed: &mut Closed, elsewhere: &[String]) {
    for (name, roles) in [
        ("box-1", "trainer"),
        ("box-2", "generator"),
        ("box-3", "verifier"),
        ("box-4", "evaluator"),
    ] {
        closed.join(name, roles);
    }
    closed.await_boxes();
    let files = Files::create(closed.root.path());
    let (operators, _) = closed.user("olga", "operator");
    let (readers, _) = closed.user("rita", "reader");
    let ask = |kit: &str, arguments: &[&str]| {
        let at = [("FLOTILLA_DIR", kit)];
        let (first, rest) = elsewhere.split_first().map_or((None, &[][..]), |(f, r)| (Some(f), r));
        let mut command = match first {
            Some(first) => {
                let mut command = Command::new(first);
                command.args(rest).arg(e2e::binary());
                command
            }
            None => Command::new(e2e::binary()),
        };
        let asked = command.args(arguments).envs(at).env_remove("FLOTILLA_NATS").output().unwrap();
        let said = String::from_utf8_lossy(&asked.stderr).into_owned();
        (asked.status.code().unwrap(), String::from_utf8_lossy(&asked.stdout).into_owned(), said)
    };
    let submit = |spec: &Path| {
        let (code, run, said) = ask(&operators, &["run", "submit", &spec.display().to_string()]);
        assert_eq!(code, 0, "{said}\n{}", closed.log("up"));
        run.trim().to_owned()
    };
    let base = submit(&files.sft(20, 10));
    closed.admin.finish(&base, LIMIT);
    let raft = submit(&files.raft(&base, SAMPLING));
    closed.admin.finish(&raft, LIMIT);
    for run in [&base, &raft] {
        let (code, found, said) = ask(&readers, &["audit", run, "--deep"]);
        assert_eq!(code, 0, "{found}{said}");
    }
    let out = closed.path("exported").display().to_string();
    let (code, _, said) = ask(&readers, &["checkpoint", "export", &raft, "--out", &out]);
    assert_eq!(code, 0, "{said}");
    assert!(Path::new(&out).join("adapter_model.safetensors").exists());
    // Which is refused, and by whom, whoever refuses first.
    let spec = files.sft(20, 10).display().to_string();
    let (code, _, said) = ask(&readers, &["run", "submit", &spec]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("rita"), "{said}");
}

#[test]
fn boxes_and_users_that_cannot_see_a_fleets_directory_work_through_its_gateway() {
    let mut closed = Closed::up(&[], BTreeMap::new());
    let store = closed.path("fleet/store");
    // To a box there is a directory of that name, and it is another.
    let mount = format!("mount -t tmpfs none {} && exec \"$@\"", store.display());
    let on = ["unshare", "-m", "sh", "-c", &mount, "sh"].map(str::to_owned).to_vec();
    let possible = Command::new(&on[0]).args(&on[1..]).arg("true").status();
    if !possible.is_ok_and(|status| status.success()) {
        println!("skipped: this machine lets nobody mount anything");
        return;
    }
    closed.on.clone_from(&on);
    a_run_is_made_and_looked_at(&mut closed, &on);
    let left: Vec<_> = std::fs::read_dir(store.join("runs"))
        .unwrap()
        .flat_map(|run| std::fs::read_dir(run.unwrap().path().join("resume")).into_iter().flatten())
        .collect();
    assert!(left.is_empty(), "no state is left of trainings that are over: {left:?}");
}

#[test]
fn boxes_and_users_without_a_buckets_keys_work_by_addresses_that_are_signed() {
    let server = S3Server::start().unwrap();
    let url = server.url();
    let mut closed = Closed::up(&["--store", &url], server.env());
    a_run_is_made_and_looked_at(&mut closed, &[]);
    let requests = server.requests();
    let signed = |method: &str| {
        let is = |line: &&String| line.starts_with(method) && line.contains("X-Amz-Signature");
        requests.iter().filter(is).count()
    };
    assert!(signed("GET") > 0 && server.bearers() == 0);
    for name in ["up", "box-1", "box-2", "box-3", "box-4"] {
        let log = closed.log(name);
        assert!(!log.contains("X-Amz-Signature"), "{name} logged a signed address");
        assert!(!log.contains("test-secret-key"), "{name} logged the bucket's key");
    }
}

#[test]
fn boxes_have_a_checkpoint_from_the_box_that_trained_it_and_tell_how_much() {
    let server = S3Server::start().unwrap();
    let url = server.url();
    let mut closed = Closed::up(&["--store", &url], server.env());
    for (name, roles) in [("box-1", "trainer"), ("box-2", "evaluator")] {
        closed.join(name, roles);
    }
    closed.await_boxes();
    let files = Files::create(closed.root.path());
    files.grow();
    let run = closed.admin.submit(&files.sft(4, 2));
    closed.admin.finish(&run, LIMIT);
    let of = |agents: &Value, name: &str, count: &str| -> Option<u64> {
        let agent = agents.as_array()?.iter().find(|agent| agent["agent"] == name)?;
        // As all numbers of 64 bits are written.
        agent["exchange"][count].as_str()?.parse().ok()
    };
    let (sent, came) = until("the boxes tell what they exchanged", LIMIT, || {
        let agents = closed.admin.json(&["agents", "list"]).ok()?;
        let sent = of(&agents, "box-1", "bytesToPeers")?;
        Some((sent, of(&agents, "box-2", "bytesFromPeers")?))
    });
    assert!(came > 1 << 20 && sent >= came, "{came} came of {sent}\n{}", closed.log("box-2"));
}

#[test]
fn a_fleet_that_is_announced_is_found_and_joined_without_an_address() {
    // A port of its own, for the network has other fleets.
    let port = (30_000 + std::process::id() % 20_000).to_string();
    let multicast = BTreeMap::from([("FLOTILLA_MDNS_PORT".to_owned(), port)]);
    let closed = Closed::up(&["--announce"], multicast.clone());
    let other = Closed::up(&["--announce"], multicast.clone());
    let found = until("both are found", LIMIT, || {
        let said = flotilla(&["discover", "--wait", "2", "--json"], multicast.clone());
        assert_eq!(said.code, 0, "{said:?}");
        let found: Value = serde_json::from_str(&said.stdout).unwrap();
        (found.as_array()?.len() >= 2).then_some(found)
    });
    assert_ne!(found[0]["authority"], found[1]["authority"], "{found:#}");
    let token = ["token", "create", "--roles", "evaluator", "--gateway", "discover"];
    let made = closed.admin.json(&token).unwrap();
    let kit = closed.path("kit").display().to_string();
    let line = ("FLOTILLA_TOKEN".to_owned(), made["line"].as_str().unwrap().to_owned());
    let join = ["join", "--name", "box-9", "--dir", &kit, "--no-agent"];
    let joined = flotilla(&join, multicast.into_iter().chain([line]));
    assert_eq!(joined.code, 0, "{joined:?}");
    let members = closed.admin.json(&["members", "list"]).unwrap();
    assert!(members.to_string().contains("box-9"), "{members:#}");
    drop(other);
}
