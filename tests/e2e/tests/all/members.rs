//! Members of a closed fleet: they join with one token, lose access at once when they are revoked,
//! and no secret leaks.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use e2e::{Fleet, Process, PythonEnv, SpecFiles, program_path, wait_until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// An agent that joined with a token.
struct JoinedAgent {
    child: Child,
    log: PathBuf,
}

impl JoinedAgent {
    fn start(fleet: &Fleet, name: &str, token: &str) -> Self {
        let log = fleet.path().join(format!("{name}.log"));
        let child = join_command(fleet, name, token)
            .args(["--", "--agent-dir"])
            .arg(fleet.path().join(name))
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("flotilla starts");
        Self { child, log }
    }

    fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for JoinedAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn credentials_directory(fleet: &Fleet, name: &str) -> PathBuf {
    fleet.path().join("credentials").join(name)
}

/// `flotilla join` without a terminal.
fn join_command(fleet: &Fleet, name: &str, token: &str) -> Command {
    let mut command = Command::new(program_path());
    command
        .args(["join", "--name", name, "--dir"])
        .arg(credentials_directory(fleet, name))
        .env("FLOTILLA_TOKEN", token)
        .env_remove("FLOTILLA_DIR")
        .env_remove("FLOTILLA_NATS")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn create_token(fleet: &Fleet, roles: &str, uses: &str) -> String {
    let created = fleet.run(&["token", "create", "--roles", roles, "--uses", uses]);
    assert_eq!(created.code, 0, "{}", created.stderr);
    assert_eq!(created.stdout.lines().count(), 1, "{}", created.stdout);
    assert!(created.stderr.contains("flotilla join"), "{}", created.stderr);
    created.stdout.trim().to_owned()
}

fn await_ready(fleet: &Fleet, name: &str) {
    wait_until(&format!("{name} is ready: {}", fleet.log_tails()), LIMIT, || {
        let listed = fleet.run_json(&["agents", "list"]).ok()?;
        let is_ready = |agent: &Value| agent["agent"] == name && agent["state"] == "READY";
        listed.as_array()?.iter().any(is_ready).then_some(())
    });
}

/// Returns the agents that wrote the run's facts of a kind.
fn fact_authors(fleet: &Fleet, run: &str, kind: &str) -> Vec<String> {
    let is_of_kind = |fact: &&Value| {
        fact["subject"].as_str().expect("a subject").split('.').nth(2) == Some(kind)
    };
    let facts = fleet.read_facts(run);
    let by = |fact: &Value| fact["fact"]["agent"].as_str().unwrap_or_default().to_owned();
    facts.iter().filter(is_of_kind).map(by).collect()
}

#[test]
fn agents_join_with_one_token_and_a_revoked_one_loses_access_at_once() {
    // The credentials of a store in S3. This store does not use them, and no output may contain
    // them.
    let aws = [("AWS_SECRET_ACCESS_KEY".to_owned(), "aws-secret-of-this-test".to_owned())];
    let fleet = Fleet::start_with("trainer", &[], aws);
    let files = SpecFiles::create(fleet.path());
    files.write_sft_spec(60, 20);
    let run = fleet.submit(&files.path("sft.yaml"));
    wait_until("there is something to evaluate", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", &run]).ok()?;
        shown["checkpoints"].as_array()?.first().cloned()
    });
    let token = create_token(&fleet, "evaluator", "2");
    let began = Instant::now();
    let mut first = JoinedAgent::start(&fleet, "eval-1", &token);
    wait_until("eval-1 works", LIMIT, || first.log_text().contains("job begins").then_some(()));
    println!("from `flotilla join` to the first job: {:?}", began.elapsed());
    let second = JoinedAgent::start(&fleet, "eval-2", &token);
    await_ready(&fleet, "eval-2");
    fleet.await_success(&run, RUN_LIMIT);
    assert_eq!(fact_authors(&fleet, &run, "eval").len(), 3);
    fleet.assert_clean_audit(&run);
    let refused = join_command(&fleet, "eval-3", &token).output().unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("used up"), "{stderr}");

    let began = Instant::now();
    let revoked = fleet.run(&["agents", "revoke", "eval-1"]);
    assert_eq!(revoked.code, 0, "{}", revoked.stderr);
    let revoke_time = began.elapsed();
    wait_until("eval-1 is cut off", LIMIT, || first.log_text().contains("Revoked").then_some(()));
    println!("revoked: command took {revoke_time:?}, cut off after {:?}", began.elapsed());
    let status = wait_until("eval-1 ends", LIMIT, || first.child.try_wait().unwrap());
    let stderr = first.log_text();
    assert!(!status.success() && stderr.contains("eval-1 was revoked"), "{status}: {stderr}");
    let restarted = Command::new(program_path())
        .args(["agent", "--dir"])
        .arg(credentials_directory(&fleet, "eval-1"))
        .output();
    let stderr = String::from_utf8_lossy(&restarted.unwrap().stderr).into_owned();
    assert!(stderr.contains("refused") || stderr.contains("revoked"), "{stderr}");

    let run = fleet.submit(&files.path("sft.yaml"));
    fleet.await_success(&run, RUN_LIMIT);
    assert_eq!(fact_authors(&fleet, &run, "eval"), ["eval-2"; 3], "{}", second.log_text());
    assert_no_secret_leaks(&fleet, &token, &run);
}

/// Returns the secret part of a join token.
fn token_secret(token: &str) -> String {
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

/// Searches all files, processes and outputs of a fleet for its secrets.
fn assert_no_secret_leaks(fleet: &Fleet, token: &str, run: &str) {
    let mut secrets = BTreeMap::from([
        ("the join token".to_owned(), token.to_owned()),
        ("the join token's secret".to_owned(), token_secret(token)),
        ("the store's secret".to_owned(), "aws-secret-of-this-test".to_owned()),
    ]);
    let mut files = Vec::new();
    collect_files(fleet.path(), &mut files);
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
    let assert_absent = |place: &str, bytes: &[u8]| {
        for (what, secret) in &secrets {
            let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!found, "{what} is in {place}");
        }
    };
    for path in &files {
        // Skips the files of the secrets themselves, and the NATS credentials of the fleet's own
        // two sets of credentials.
        let own = secrets.contains_key(&path.display().to_string());
        if !own && path.extension().is_none_or(|extension| extension != "creds") {
            assert_absent(&path.display().to_string(), &std::fs::read(path).unwrap_or_default());
        }
    }
    let directory = fleet.path().display().to_string();
    let processes: Vec<Process> = Process::all()
        .into_iter()
        .filter(|one| one.arguments.iter().any(|argument| argument.contains(&directory)))
        .collect();
    assert!(processes.len() >= 4, "{processes:?}");
    for process in &processes {
        assert_absent("arguments", process.arguments.join(" ").as_bytes());
        let environ = std::fs::read(format!("/proc/{}/environ", process.id)).unwrap_or_default();
        let environ = String::from_utf8_lossy(&environ).into_owned();
        let is_worker = process.arguments.iter().any(|argument| argument == "worker");
        let known =
            if is_worker { environ } else { environ.replace("aws-secret-of-this-test", "") };
        assert_absent(&format!("the environment of {:?}", process.arguments), known.as_bytes());
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
        assert_absent(
            &format!("{arguments:?}"),
            format!("{}{}", output.stdout, output.stderr).as_bytes(),
        );
    }
}

fn collect_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            collect_files(&path, found);
        } else if path.is_file() {
            found.push(path);
        }
    }
}

/// How many killed joins left these behind.
#[derive(Debug, Default)]
struct HalfDoneJoins {
    /// A key, but no complete credentials.
    keys: u32,
    /// The same, and the token was used.
    spent: u32,
}

/// Kills the joins of a box later and later, until one ends by itself. Checks that all of them used
/// the same key and the token once.
fn kill_joins(fleet: &Fleet, name: &str, found: &mut HalfDoneJoins) {
    let created = fleet.run_json(&["token", "create", "--roles", "generator"]).unwrap();
    let (id, token) = (&created["token"]["id"], created["line"].as_str().expect("a token"));
    let used_by = || {
        let tokens = fleet.run_json(&["token", "list"]).unwrap();
        let is_own = |one: &&Value| one["id"] == *id;
        tokens.as_array().unwrap().iter().find(is_own).expect("the token")["usedBy"].clone()
    };
    let credentials = credentials_directory(fleet, name);
    let key = || std::fs::read_to_string(credentials.join("key.nk")).ok();
    let mut keys = Vec::new();
    for delay_ms in std::iter::successors(Some(0), |ms| Some(ms + 3 + ms / 10)) {
        let mut joining = join_command(fleet, name, token).arg("--no-agent").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        let has_ended = joining.try_wait().unwrap().is_some();
        let _ = joining.kill();
        joining.wait().unwrap();
        keys.extend(key());
        if has_ended || credentials.join("fleet.json").exists() {
            break;
        }
        if key().is_some() {
            found.keys += 1;
            found.spent += u32::from(used_by() == serde_json::json!([name]));
        }
    }
    let joined = join_command(fleet, name, token).arg("--no-agent").output().unwrap();
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    // The box has joined, so it needs no token any more.
    let again = join_command(fleet, name, "").arg("--no-agent").output().unwrap();
    let text = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success() && text.contains("is already a member"), "{text}");
    keys.extend(key());
    keys.dedup();
    assert_eq!(keys.len(), 1, "the key stayed what it was");
    let members = fleet.run_json(&["members", "list"]).unwrap();
    let joined = members.as_array().unwrap().iter().filter(|member| member["name"] == name);
    assert_eq!(joined.count(), 1, "{members}");
    assert_eq!(used_by(), serde_json::json!([name]));
    // The credentials work.
    let at = credentials.display().to_string();
    let listed = e2e::run_flotilla(&["run", "list", "--dir", &at], []);
    assert_eq!(listed.code, 0, "{}", listed.stderr);
}

#[test]
fn a_join_that_is_killed_at_any_moment_resumes_and_costs_one_use() {
    let fleet = Fleet::start_with("verifier", &[], []);
    let (began, mut found) = (Instant::now(), HalfDoneJoins::default());
    for number in 1.. {
        kill_joins(&fleet, &format!("box-{number}"), &mut found);
        println!("{number} boxes: {found:?}");
        if found.keys > 0 && found.spent > 0 {
            break;
        }
        assert!(began.elapsed() < LIMIT, "no kill met a half-done join: {found:?}");
    }
}

#[test]
fn an_agent_renews_its_bearer_in_time_although_the_gateway_is_killed() {
    let hours = ("FLOTILLA_MEMBER_TTL".to_owned(), "0.005".to_owned());
    let fleet = Fleet::start_with("verifier", &[], [hours]);
    let token = create_token(&fleet, "evaluator", "1");
    let mut joined = JoinedAgent::start(&fleet, "eval-1", &token);
    await_ready(&fleet, "eval-1");
    let bearer = || {
        std::fs::read_to_string(credentials_directory(&fleet, "eval-1").join("bearer.jwt")).unwrap()
    };
    let mut seen = vec![bearer()];
    wait_until("the credentials were renewed three times", Duration::from_secs(90), || {
        assert!(joined.child.try_wait().unwrap().is_none(), "{}", joined.log_text());
        let now = bearer();
        if seen.last() != Some(&now) {
            seen.push(now);
            if seen.len() == 2 {
                fleet.kill("coordinator");
            }
        }
        (seen.len() == 4).then_some(())
    });
    assert!(!joined.log_text().contains("panicked"), "{}", joined.log_text());
    await_ready(&fleet, "eval-1");
}

#[test]
fn a_python_client_with_a_kit_has_the_rights_of_its_scope() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start_with("verifier", &[], []);
    let mut directories = BTreeMap::new();
    for scope in ["reader", "operator"] {
        let directory = fleet.path().join(scope).display().to_string();
        let created = fleet.run(&["user", "create", scope, "--scope", scope, "--out", &directory]);
        assert_eq!(created.code, 0, "{}", created.stderr);
        directories.insert(scope, directory);
    }
    let client = |directory: &str, arguments: &[&str]| {
        let mut command = python.script_command("run_client.py");
        command.args(arguments).env("FLOTILLA_DIR", directory).output().unwrap()
    };
    let agents = client(&directories["reader"], &["agents"]);
    assert!(String::from_utf8_lossy(&agents.stdout).contains("verifier-1"), "{agents:?}");
    let services = python.run_script("check.py", &["closed", &directories["reader"]]);
    assert!(services.contains("flotilla.v1.Members CreateToken"), "{services}");

    let files = SpecFiles::create(fleet.path());
    let spec = files.write_sft_spec(10, 0).display().to_string();
    let refused = client(&directories["reader"], &["submit", &spec]);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        stderr.contains("PermissionDeniedError") && stderr.contains("needs operator"),
        "{stderr}"
    );
    let submitted = client(&directories["operator"], &["submit", &spec]);
    assert!(submitted.status.success(), "{}", String::from_utf8_lossy(&submitted.stderr));

    let revoked = fleet.run(&["user", "revoke", "reader"]);
    assert_eq!(revoked.code, 0, "{}", revoked.stderr);
    let refused = client(&directories["reader"], &["agents"]);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        stderr.contains("UnauthenticatedError") && stderr.contains("reader was revoked"),
        "{stderr}"
    );
}

#[test]
fn kits_contain_the_public_address_of_the_fleet() {
    let arguments = ["--host", "localhost", "--listen", "0.0.0.0", "--gateway", "0.0.0.0:0"];
    let fleet = Fleet::start_with("verifier", &arguments, []);
    let token = create_token(&fleet, "generator", "1");
    let joined = join_command(&fleet, "box-1", &token).arg("--no-agent").output().unwrap();
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let ada = fleet.path().join("ada");
    let created = fleet.run(&["user", "create", "ada", "--out", &ada.display().to_string()]);
    assert_eq!(created.code, 0, "{}", created.stderr);
    for directory in [ada, credentials_directory(&fleet, "box-1")] {
        let text = std::fs::read(directory.join("fleet.json")).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        assert!(file["nats"].as_str().unwrap().starts_with("tls://localhost:"), "{file}");
        assert!(file["gateway"].as_str().unwrap().starts_with("localhost:"), "{file}");
        let at = directory.display().to_string();
        let listed = e2e::run_flotilla(&["run", "list", "--dir", &at], []);
        assert_eq!(listed.code, 0, "{}", listed.stderr);
    }
    let at = fleet.path().join("ada").display().to_string();
    let listed = e2e::run_flotilla(&["members", "list", "--json", "--dir", &at], []);
    assert!(listed.stdout.contains("box-1"), "{listed:?}");
}

#[test]
fn a_refused_join_names_cause_and_remedy() {
    let fleet = Fleet::start_with("verifier", &[], []);
    let other = Fleet::start_with("verifier", &[], []);
    let token = create_token(&fleet, "generator", "2");
    let error_of = |name: &str, token: &str, arguments: &[&str]| {
        let output =
            join_command(&fleet, name, token).arg("--no-agent").args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        stderr
    };
    let cut = &token[..token.len() - 7];
    assert!(error_of("box-1", cut, &[]).contains("copy the whole line"));
    assert!(error_of("box-1", "rubbish", &[]).contains("flotilla token create"));
    assert!(error_of("box-1", &token, &["--roles", "trainer"]).contains("it is for generator"));
    assert!(error_of("box-1", &token, &["--roles", "cook"]).contains("cook"));
    assert!(error_of("verifier-1", &token, &[]).contains("another member's"));
    // The token of one fleet with the address of another.
    let other_gateway = other.read_fleet_file()["gateway"].as_str().unwrap().to_owned();
    let created =
        fleet.run(&["token", "create", "--roles", "generator", "--gateway", &other_gateway]);
    let wrong = error_of("box-2", created.stdout.trim(), &[]);
    assert!(wrong.contains("another fleet:") && wrong.contains("interception"), "{wrong}");
    let created = fleet.run(&["token", "create", "--roles", "generator", "--expires", "1s"]);
    std::thread::sleep(Duration::from_millis(2100));
    assert!(error_of("box-2", created.stdout.trim(), &[]).contains("expired"));
    let uses = fleet.run_json(&["token", "list"]).unwrap();
    let is_unused = |one: &Value| one["usedBy"].as_array().is_none_or(Vec::is_empty);
    assert!(uses.as_array().unwrap().iter().all(is_unused), "{uses}");
}
