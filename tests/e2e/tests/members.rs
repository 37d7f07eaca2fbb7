//! A closed fleet as those who join it have it: in by one line, out at once, and no secret anywhere
//! that it does not belong.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use e2e::{Files, Fleet, Process, Python, binary, until};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// A box that joined with a token, and works.
struct Joined {
    child: Child,
    log: PathBuf,
}

impl Joined {
    fn start(fleet: &Fleet, name: &str, token: &str) -> Self {
        let log = fleet.path().join(format!("{name}.log"));
        let child = join(fleet, name, token)
            .args(["--", "--agent-dir"])
            .arg(fleet.path().join(name))
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("flotilla starts");
        Self { child, log }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kit(fleet: &Fleet, name: &str) -> PathBuf {
    fleet.path().join("kits").join(name)
}

/// `flotilla join`, as it is told where nobody looks on.
fn join(fleet: &Fleet, name: &str, token: &str) -> Command {
    let mut command = Command::new(binary());
    command
        .args(["join", "--name", name, "--dir"])
        .arg(kit(fleet, name))
        .env("FLOTILLA_TOKEN", token)
        .env_remove("FLOTILLA_DIR")
        .env_remove("FLOTILLA_NATS")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn token(fleet: &Fleet, roles: &str, uses: &str) -> String {
    let made = fleet.run(&["token", "create", "--roles", roles, "--uses", uses]);
    assert_eq!(made.code, 0, "{}", made.stderr);
    assert_eq!(made.stdout.lines().count(), 1, "{}", made.stdout);
    assert!(made.stderr.contains("flotilla join"), "{}", made.stderr);
    made.stdout.trim().to_owned()
}

fn ready(fleet: &Fleet, name: &str) {
    until(&format!("{name} is there: {}", fleet.logs()), PATIENCE, || {
        let listed = fleet.json(&["agents", "list"]).ok()?;
        let is_ready = |agent: &Value| agent["agent"] == name && agent["state"] == "READY";
        listed.as_array()?.iter().any(is_ready).then_some(())
    });
}

/// Who wrote the run's facts of a kind.
fn authors(fleet: &Fleet, run: &str, kind: &str) -> Vec<String> {
    let is_of_kind = |fact: &&Value| {
        fact["subject"].as_str().expect("a subject").split('.').nth(2) == Some(kind)
    };
    let facts = fleet.facts(run);
    let by = |fact: &Value| fact["fact"]["agent"].as_str().unwrap_or_default().to_owned();
    facts.iter().filter(is_of_kind).map(by).collect()
}

#[test]
fn boxes_join_in_one_line_and_the_one_that_is_revoked_is_out_at_once() {
    // As a store in S3 would have it: nobody looks at these here, and nobody may repeat them.
    let aws = [("AWS_SECRET_ACCESS_KEY".to_owned(), "aws-secret-of-this-test".to_owned())];
    let fleet = Fleet::up_with("trainer", &[], aws);
    let files = Files::create(fleet.path());
    files.sft(60, 20);
    let run = fleet.submit(&files.path("sft.yaml"));
    until("there is something to evaluate", PATIENCE, || {
        let shown = fleet.json(&["run", "show", &run]).ok()?;
        shown["checkpoints"].as_array()?.first().cloned()
    });
    let token = token(&fleet, "evaluator", "2");
    let began = Instant::now();
    let mut first = Joined::start(&fleet, "eval-1", &token);
    until("eval-1 works", PATIENCE, || first.said().contains("job begins").then_some(()));
    println!("from `flotilla join` to the first job: {:?}", began.elapsed());
    let second = Joined::start(&fleet, "eval-2", &token);
    ready(&fleet, "eval-2");
    fleet.finish(&run, RUN_LIMIT);
    assert_eq!(authors(&fleet, &run, "eval").len(), 3);
    fleet.audit_clean(&run);
    let refused = join(&fleet, "eval-3", &token).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("used up"), "{said}");

    let began = Instant::now();
    let revoked = fleet.run(&["agents", "revoke", "eval-1"]);
    assert_eq!(revoked.code, 0, "{}", revoked.stderr);
    let told = began.elapsed();
    until("eval-1 is cut off", PATIENCE, || first.said().contains("Revoked").then_some(()));
    println!("revoked: told after {told:?}, seen cut off after {:?}", began.elapsed());
    let status = until("eval-1 ends", PATIENCE, || first.child.try_wait().unwrap());
    let said = first.said();
    assert!(!status.success() && said.contains("eval-1 was revoked"), "{status}: {said}");
    let again = Command::new(binary()).args(["agent", "--dir"]).arg(kit(&fleet, "eval-1")).output();
    let said = String::from_utf8_lossy(&again.unwrap().stderr).into_owned();
    assert!(said.contains("refused") || said.contains("revoked"), "{said}");

    let run = fleet.submit(&files.path("sft.yaml"));
    fleet.finish(&run, RUN_LIMIT);
    assert_eq!(authors(&fleet, &run, "eval"), ["eval-2"; 3], "{}", second.said());
    no_secret_is_where_it_does_not_belong(&fleet, &token, &run);
}

/// What a join token keeps to those who have it.
fn secret(token: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for digit in token.split_once('.').expect("a token").1.bytes() {
        let value = DIGITS.iter().position(|known| *known == digit).expect("base64url");
        (bits, count) = ((bits << 6) | u32::try_from(value).expect("six bits"), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from((bits >> count) & 0xff).expect("eight bits"));
        }
    }
    let content: Value = serde_json::from_slice(&bytes).expect("JSON");
    content["s"].as_str().expect("a secret").to_owned()
}

/// Looks for every secret of a fleet in all that it wrote and all that it runs.
fn no_secret_is_where_it_does_not_belong(fleet: &Fleet, token: &str, run: &str) {
    let mut secrets = BTreeMap::from([
        ("the join token".to_owned(), token.to_owned()),
        ("the join token's secret".to_owned(), secret(token)),
        ("the store's secret".to_owned(), "aws-secret-of-this-test".to_owned()),
    ]);
    let mut files = Vec::new();
    collect(fleet.path(), &mut files);
    for path in &files {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let is_key = |end: &str| name.ends_with(end);
        if is_key(".nk") || name == "bearer.jwt" {
            let text = std::fs::read_to_string(path).expect("text");
            secrets.insert(path.display().to_string(), text.trim().to_owned());
        } else if is_key("-key.pem") {
            let text = std::fs::read_to_string(path).expect("text");
            let line = text.lines().nth(1).expect("PEM");
            secrets.insert(path.display().to_string(), line.to_owned());
        }
    }
    assert!(secrets.len() > 10, "{:?}", secrets.keys());
    assert!(secrets.values().all(|secret| secret.len() > 20), "{:?}", secrets.keys());
    let look = |place: &str, bytes: &[u8]| {
        for (what, secret) in &secrets {
            let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!found, "{what} is in {place}");
        }
    };
    for path in &files {
        // What is a secret's own file; and NATS's form of the fleet's own two kits.
        let own = secrets.contains_key(&path.display().to_string());
        if !own && path.extension().is_none_or(|extension| extension != "creds") {
            look(&path.display().to_string(), &std::fs::read(path).unwrap_or_default());
        }
    }
    let ours = fleet.path().display().to_string();
    let processes: Vec<Process> = Process::all()
        .into_iter()
        .filter(|one| one.arguments.iter().any(|argument| argument.contains(&ours)))
        .collect();
    assert!(processes.len() >= 4, "{processes:?}");
    for process in &processes {
        look("arguments", process.arguments.join(" ").as_bytes());
        let environ = std::fs::read(format!("/proc/{}/environ", process.id)).unwrap_or_default();
        let environ = String::from_utf8_lossy(&environ).into_owned();
        let is_worker = process.arguments.iter().any(|argument| argument == "worker");
        let known =
            if is_worker { environ } else { environ.replace("aws-secret-of-this-test", "") };
        look(&format!("the environment of {:?}", process.arguments), known.as_bytes());
    }
    for arguments in [
        &["token", "list", "--json"][..],
        &["members", "list", "--json"],
        &["user", "list", "--json"],
        &["keys", "show", "--json"],
        &["agents", "list", "--json"],
        &["run", "show", run, "--json"],
        &["run", "watch", run, "--json"],
        &["up", "--print-config"],
        &["join", token, "--print-config", "--json"],
    ] {
        let output = fleet.run(arguments);
        assert_eq!(output.code, 0, "{arguments:?}: {}", output.stderr);
        assert!(output.stdout.len() > 2, "{arguments:?}");
        look(&format!("{arguments:?}"), format!("{}{}", output.stdout, output.stderr).as_bytes());
    }
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            collect(&path, found);
        } else if path.is_file() {
            found.push(path);
        }
    }
}

#[test]
fn a_join_that_is_killed_at_any_moment_goes_on_where_it_was_and_costs_one_use() {
    let fleet = Fleet::up_with("verifier", &[], []);
    let token = token(&fleet, "generator", "1");
    let key = || std::fs::read_to_string(kit(&fleet, "box-1").join("key.nk")).ok();
    let mut keys = Vec::new();
    for delay_ms in [1, 3, 6, 9, 12, 15, 20, 25, 30, 40, 60] {
        let mut joining = join(&fleet, "box-1", &token).arg("--no-agent").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        let _ = joining.kill();
        joining.wait().unwrap();
        keys.extend(key());
    }
    let joined = join(&fleet, "box-1", &token).arg("--no-agent").output().unwrap();
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    keys.extend(key());
    keys.dedup();
    assert_eq!(keys.len(), 1, "the key stayed what it was");
    let members = fleet.json(&["members", "list"]).unwrap();
    let joined = members.as_array().unwrap().iter().filter(|member| member["name"] == "box-1");
    assert_eq!(joined.count(), 1, "{members}");
    assert_eq!(fleet.json(&["token", "list"]).unwrap()[0]["usedBy"], serde_json::json!(["box-1"]));
    // The kit works.
    let at = kit(&fleet, "box-1").display().to_string();
    let listed = e2e::flotilla(&["run", "list", "--dir", &at], []);
    assert_eq!(listed.code, 0, "{}", listed.stderr);
}

#[test]
fn an_agent_renews_before_its_time_is_over_though_the_gateway_is_killed() {
    let hours = ("FLOTILLA_MEMBER_TTL".to_owned(), "0.005".to_owned());
    let fleet = Fleet::up_with("verifier", &[], [hours]);
    let token = token(&fleet, "evaluator", "1");
    let mut joined = Joined::start(&fleet, "eval-1", &token);
    ready(&fleet, "eval-1");
    let bearer = || std::fs::read_to_string(kit(&fleet, "eval-1").join("bearer.jwt")).unwrap();
    let mut seen = vec![bearer()];
    until("the kit was renewed three times", Duration::from_secs(90), || {
        assert!(joined.child.try_wait().unwrap().is_none(), "{}", joined.said());
        let now = bearer();
        if seen.last() != Some(&now) {
            seen.push(now);
            if seen.len() == 2 {
                fleet.kill("coordinator");
            }
        }
        (seen.len() == 4).then_some(())
    });
    assert!(!joined.said().contains("panicked"), "{}", joined.said());
    ready(&fleet, "eval-1");
}

#[test]
fn a_python_client_with_a_kit_may_what_its_scope_says() {
    let Some(python) = Python::find() else { return };
    let fleet = Fleet::up_with("verifier", &[], []);
    let mut kits = BTreeMap::new();
    for scope in ["reader", "operator"] {
        let kit = fleet.path().join(scope).display().to_string();
        let made = fleet.run(&["user", "create", scope, "--scope", scope, "--out", &kit]);
        assert_eq!(made.code, 0, "{}", made.stderr);
        kits.insert(scope, kit);
    }
    let agents = python.run("client.py", &["--kit", &kits["reader"], "agents"]);
    assert!(agents.contains("verifier-1"), "{agents}");
    let services = python.run("check.py", &["closed", &kits["reader"]]);
    assert!(services.contains("flotilla.v1.Members CreateToken"), "{services}");

    let files = Files::create(fleet.path());
    files.sft(10, 0);
    let submit = |scope: &str| {
        let attached = ["sft.yaml", "config.json", "tokenizer.json", "data.jsonl", "heldout.txt"];
        let mut command = python.script("client.py");
        command.args(["--kit", &kits[scope], "submit"]);
        command.args(attached.map(|name| files.path(name))).output().unwrap()
    };
    let refused = submit("reader");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("PERMISSION_DENIED") && said.contains("needs operator"), "{said}");
    let submitted = submit("operator");
    assert!(submitted.status.success(), "{}", String::from_utf8_lossy(&submitted.stderr));

    let server = fleet.file()["gateway"].as_str().unwrap().to_owned();
    let plain = python.script("client.py").args(["--server", &server, "agents"]).output().unwrap();
    assert!(!plain.status.success(), "without TLS nothing is answered");
    let revoked = fleet.run(&["user", "revoke", "reader"]);
    assert_eq!(revoked.code, 0, "{}", revoked.stderr);
    let refused = python.script("client.py").args(["--kit", &kits["reader"], "agents"]).output();
    let said = String::from_utf8_lossy(&refused.unwrap().stderr).into_owned();
    assert!(said.contains("UNAUTHENTICATED") && said.contains("reader was revoked"), "{said}");
}

#[test]
fn kits_name_the_fleet_as_it_is_reached_from_elsewhere() {
    let arguments = ["--host", "localhost", "--listen", "0.0.0.0", "--gateway", "0.0.0.0:0"];
    let fleet = Fleet::up_with("verifier", &arguments, []);
    let token = token(&fleet, "generator", "1");
    let joined = join(&fleet, "box-1", &token).arg("--no-agent").output().unwrap();
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let ada = fleet.path().join("ada");
    let made = fleet.run(&["user", "create", "ada", "--out", &ada.display().to_string()]);
    assert_eq!(made.code, 0, "{}", made.stderr);
    for directory in [ada, kit(&fleet, "box-1")] {
        let text = std::fs::read(directory.join("fleet.json")).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        assert!(file["nats"].as_str().unwrap().starts_with("tls://localhost:"), "{file}");
        assert!(file["gateway"].as_str().unwrap().starts_with("localhost:"), "{file}");
        let at = directory.display().to_string();
        let listed = e2e::flotilla(&["run", "list", "--dir", &at], []);
        assert_eq!(listed.code, 0, "{}", listed.stderr);
    }
    let at = fleet.path().join("ada").display().to_string();
    let listed = e2e::flotilla(&["members", "list", "--json", "--dir", &at], []);
    assert!(listed.stdout.contains("box-1"), "{listed:?}");
}

#[test]
fn refusals_of_a_join_name_what_is_wrong_and_what_helps() {
    let fleet = Fleet::up_with("verifier", &[], []);
    let other = Fleet::up_with("verifier", &[], []);
    let token = token(&fleet, "generator", "2");
    let said = |name: &str, token: &str, arguments: &[&str]| {
        let output = join(&fleet, name, token).arg("--no-agent").args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(!said.contains("panicked"), "{said}");
        said
    };
    let cut = &token[..token.len() - 7];
    assert!(said("box-1", cut, &[]).contains("copy the whole line"));
    assert!(said("box-1", "rubbish", &[]).contains("flotilla token create"));
    assert!(said("box-1", &token, &["--roles", "trainer"]).contains("it is for generator"));
    assert!(said("box-1", &token, &["--roles", "cook"]).contains("cook"));
    assert!(said("verifier-1", &token, &[]).contains("another member's"));
    // The token of one fleet at the address of another.
    let theirs = other.file()["gateway"].as_str().unwrap().to_owned();
    let made = fleet.run(&["token", "create", "--roles", "generator", "--gateway", &theirs]);
    let wrong = said("box-2", made.stdout.trim(), &[]);
    assert!(wrong.contains("another fleet:") && wrong.contains("interception"), "{wrong}");
    let made = fleet.run(&["token", "create", "--roles", "generator", "--expires", "1s"]);
    std::thread::sleep(Duration::from_millis(2100));
    assert!(said("box-2", made.stdout.trim(), &[]).contains("expired"));
    let uses = fleet.json(&["token", "list"]).unwrap();
    let left = |one: &Value| one["usedBy"].as_array().is_none_or(Vec::is_empty);
    assert!(uses.as_array().unwrap().iter().all(left), "{uses}");
}
