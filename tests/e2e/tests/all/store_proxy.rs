//! Agents without the store's keys and without its file system. They read and write files through
//! the gateway, or directly with presigned URLs.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use e2e::{Client, Member, Sampling, SpecFiles, run_flotilla, wait_until};
use requirements::skip_test;
use s3_server::S3Server;
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);
const SAMPLING: Sampling = Sampling { prompts: 12, per_prompt: 4, max_new_tokens: 24, cycles: 1 };

/// A closed fleet and agents that joined it. The fields are dropped in this order.
struct ClosedFleet {
    agents: Vec<Member>,
    _up: Member,
    /// The words before a program on a joined host.
    prefix: Vec<String>,
    /// A client of an admin, on the host of `flotilla up`.
    admin: Client,
    root: TempDir,
}

impl ClosedFleet {
    fn start(arguments: &[&str], environment: BTreeMap<String, String>) -> Self {
        let root = tempfile::tempdir().unwrap();
        let fleet = root.path().join("fleet").display().to_string();
        let up = [&["up", "--dir", &fleet, "--lease", "3"][..], arguments];
        let up = Member::start("up", &[], &up.concat(), environment, root.path());
        let admin = Client::new([("FLOTILLA_DIR".to_owned(), fleet)], root.path());
        let closed = Self { agents: Vec::new(), _up: up, prefix: Vec::new(), admin, root };
        wait_until("the fleet is up", LIMIT, || closed.admin.run_json(&["agents", "list"]).ok());
        closed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Joins the fleet with a token and starts an agent.
    fn join(&mut self, name: &str, roles: &str) {
        let created = self.admin.run_json(&["token", "create", "--roles", roles]).unwrap();
        let token = ("FLOTILLA_TOKEN".to_owned(), created["line"].as_str().unwrap().to_owned());
        let (credentials, own) =
            (self.path(&format!("{name}-credentials")), self.path(&format!("{name}-own")));
        let (credentials, own) = (credentials.display().to_string(), own.display().to_string());
        let join = [
            "join",
            "--name",
            name,
            "--dir",
            &credentials,
            "--",
            "--roles",
            roles,
            "--agent-dir",
            &own,
        ];
        let home = ("HOME".to_owned(), own.clone());
        let logs = self.root.path().to_owned();
        self.agents.push(Member::start(name, &self.prefix, &join, [token, home], &logs));
    }

    fn await_agents(&self) {
        wait_until("the boxes are ready", LIMIT, || {
            let listed = self.admin.run_json(&["agents", "list"]).ok()?;
            let ready = |agent: &&Value| agent["state"] == "READY";
            let count = listed.as_array()?.iter().filter(ready).count();
            (count >= self.agents.len()).then_some(())
        });
    }

    /// Creates a user and returns the credentials and a client that uses it.
    fn create_user(&self, name: &str, scope: &str) -> (String, Client) {
        let credentials = self.path(name).display().to_string();
        let created =
            self.admin.run(&["user", "create", name, "--scope", scope, "--out", &credentials]);
        assert_eq!(created.code, 0, "{created:?}");
        let client =
            Client::new([("FLOTILLA_DIR".to_owned(), credentials.clone())], self.root.path());
        (credentials, client)
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }
}

/// Makes a whole run with joined agents, submitted and read by users elsewhere.
fn check_run_through_gateway(closed: &mut ClosedFleet, elsewhere: &[String]) {
    for (name, roles) in [
        ("box-1", "trainer"),
        ("box-2", "generator"),
        ("box-3", "verifier"),
        ("box-4", "evaluator"),
    ] {
        closed.join(name, roles);
    }
    closed.await_agents();
    let files = SpecFiles::create(closed.root.path());
    let (operators, _) = closed.create_user("olga", "operator");
    let (readers, _) = closed.create_user("rita", "reader");
    let run_as = |credentials: &str, arguments: &[&str]| {
        let at = [("FLOTILLA_DIR", credentials)];
        let (first, rest) = elsewhere.split_first().map_or((None, &[][..]), |(f, r)| (Some(f), r));
        let mut command = match first {
            Some(first) => {
                let mut command = Command::new(first);
                command.args(rest).arg(e2e::program_path());
                command
            }
            None => Command::new(e2e::program_path()),
        };
        let output = command.args(arguments).envs(at).env_remove("FLOTILLA_NATS").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        (
            output.status.code().unwrap(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr,
        )
    };
    let submit = |spec: &Path| {
        let (code, run, stderr) =
            run_as(&operators, &["run", "submit", &spec.display().to_string()]);
        assert_eq!(code, 0, "{stderr}\n{}", closed.log("up"));
        run.trim().to_owned()
    };
    let base = submit(&files.write_sft_spec(20, 10));
    closed.admin.await_success(&base, LIMIT);
    let raft = submit(&files.write_raft_spec(&base, SAMPLING));
    closed.admin.await_success(&raft, LIMIT);
    for run in [&base, &raft] {
        let (code, stdout, stderr) = run_as(&readers, &["audit", run, "--deep"]);
        assert_eq!(code, 0, "{stdout}{stderr}");
    }
    let out = closed.path("exported").display().to_string();
    let (code, _, stderr) = run_as(&readers, &["checkpoint", "export", &raft, "--out", &out]);
    assert_eq!(code, 0, "{stderr}");
    assert!(Path::new(&out).join("adapter_model.safetensors").exists());
    // Requests are refused, and the error names the remedy.
    let spec = files.write_sft_spec(20, 10).display().to_string();
    let (code, _, stderr) = run_as(&readers, &["run", "submit", &spec]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("K104") && stderr.contains("--scope operator"), "{stderr}");
    let (_, agents, _) = run_as(&readers, &["agents", "list", "--json"]);
    let agents: serde_json::Value = serde_json::from_str(&agents).unwrap();
    let agent = agents[0]["agent"].as_str().unwrap();
    let (code, _, stderr) = run_as(&readers, &["agents", "drain", agent]);
    assert_eq!(code, 1, "{stderr}");
    // Without the server's own words.
    assert!(stderr.contains("K104") && !stderr.contains("Permissions Violation"), "{stderr}");
}

#[test]
fn agents_and_users_without_the_fleets_directory_work_through_its_gateway() {
    let mut closed = ClosedFleet::start(&[], BTreeMap::new());
    let store = closed.path("fleet/store");
    // On the joined host that directory exists, but it is another one.
    let mount = format!("mount -t tmpfs none {} && exec \"$@\"", store.display());
    let prefix = ["unshare", "-m", "sh", "-c", &mount, "sh"].map(str::to_owned).to_vec();
    let possible = Command::new(&prefix[0]).args(&prefix[1..]).arg("true").status();
    if !possible.is_ok_and(|status| status.success()) {
        skip_test("mounts", "run the tests as root, and permit mounts in the container");
        return;
    }
    closed.prefix.clone_from(&prefix);
    check_run_through_gateway(&mut closed, &prefix);
    let left: Vec<_> = std::fs::read_dir(store.join("runs"))
        .unwrap()
        .flat_map(|run| std::fs::read_dir(run.unwrap().path().join("resume")).into_iter().flatten())
        .collect();
    assert!(left.is_empty(), "no state is left of trainings that are over: {left:?}");
}

#[test]
fn agents_and_users_without_a_buckets_keys_use_presigned_urls() {
    let server = S3Server::start().unwrap();
    let url = server.url();
    let mut closed = ClosedFleet::start(&["--store", &url], server.env());
    check_run_through_gateway(&mut closed, &[]);
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
fn agents_fetch_a_checkpoint_from_the_agent_that_trained_it_and_report_the_bytes() {
    let server = S3Server::start().unwrap();
    let url = server.url();
    let mut closed = ClosedFleet::start(&["--store", &url], server.env());
    for (name, roles) in [("box-1", "trainer"), ("box-2", "evaluator")] {
        closed.join(name, roles);
    }
    closed.await_agents();
    let files = SpecFiles::create(closed.root.path());
    files.enlarge_model();
    let run = closed.admin.submit(&files.write_sft_spec(4, 2));
    closed.admin.await_success(&run, LIMIT);
    let of = |agents: &Value, name: &str, count: &str| -> Option<u64> {
        let agent = agents.as_array()?.iter().find(|agent| agent["agent"] == name)?;
        // JSON contains 64-bit numbers as strings.
        agent["exchange"][count].as_str()?.parse().ok()
    };
    // Each agent reports by itself, once a second.
    wait_until("the agents report the exchanged bytes", LIMIT, || {
        let agents = closed.admin.run_json(&["agents", "list"]).ok()?;
        let sent = of(&agents, "box-1", "bytesToPeers")?;
        let received = of(&agents, "box-2", "bytesFromPeers")?;
        (received > 1 << 20 && sent >= received).then_some(())
    });
}

#[test]
fn a_fleet_that_is_announced_is_found_and_joined_without_an_address() {
    // A different port, because other fleets may announce themselves on this network.
    let port = (30_000 + std::process::id() % 20_000).to_string();
    let multicast = BTreeMap::from([("FLOTILLA_MDNS_PORT".to_owned(), port)]);
    let closed = ClosedFleet::start(&["--announce"], multicast.clone());
    let other = ClosedFleet::start(&["--announce"], multicast.clone());
    let found = wait_until("both are found", LIMIT, || {
        let output = run_flotilla(&["discover", "--wait", "2", "--json"], multicast.clone());
        assert_eq!(output.code, 0, "{output:?}");
        let found: Value = serde_json::from_str(&output.stdout).unwrap();
        (found.as_array()?.len() >= 2).then_some(found)
    });
    assert_ne!(found[0]["authority"], found[1]["authority"], "{found:#}");
    let token = ["token", "create", "--roles", "evaluator", "--gateway", "discover"];
    let created = closed.admin.run_json(&token).unwrap();
    let credentials = closed.path("credentials").display().to_string();
    let line = ("FLOTILLA_TOKEN".to_owned(), created["line"].as_str().unwrap().to_owned());
    let join = ["join", "--name", "box-9", "--dir", &credentials, "--no-agent"];
    let joined = run_flotilla(&join, multicast.into_iter().chain([line]));
    assert_eq!(joined.code, 0, "{joined:?}");
    let members = closed.admin.run_json(&["members", "list"]).unwrap();
    assert!(members.to_string().contains("box-9"), "{members:#}");
    drop(other);
}
