//! Verifiers in a fleet: sandboxed programs, hosts without a toolchain, and verifiers that fail.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};

use e2e::{Fleet, Sampling, SpecFiles, write_script};
use requirements::{require_namespaces, require_program};
use serde_json::{Value, json};

use crate::environments::{create_public_directory, facts_of_kind};

const LIMIT: Duration = Duration::from_secs(240);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 2, max_new_tokens: 8, cycles: 1 };

/// Starts a fleet and a run with this verifier. The run keeps all judged samples.
fn start_run(verifier: &str) -> (Fleet, String) {
    start_run_with(None, verifier)
}

/// Like `start`, with a variable of the host's owner in the environment of the agents.
fn start_run_with(owner: Option<(String, String)>, verifier: &str) -> (Fleet, String) {
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &[], owner);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(10, 0));
    fleet.await_success(&base, LIMIT);
    let spec = files.write_raft_spec(&base, SMALL);
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let judged = text.replace(
        "verifier: { regex: { pattern: '[0-9]' } }",
        &format!("verifier: {verifier}\n  selection: {{ min_reward: 0 }}"),
    );
    assert_ne!(judged, text);
    std::fs::write(&spec, judged).expect("the spec");
    let prompt = |n: u32| {
        let fields = json!({
            "id": format!("p{n}"), "prompt": format!("def f{n}(x):\n    return {n}"),
            "entry_point": format!("f{n}"),
            "test": format!("def check(candidate):\n    assert candidate(1) == -{n} - 1\n"),
        });
        format!("{fields}\n")
    };
    std::fs::write(files.path("prompts.jsonl"), (0..8).map(prompt).collect::<String>())
        .expect("the prompts");
    std::fs::write(files.path("heldout.jsonl"), prompt(9)).expect("the prompts");
    let run = fleet.submit(&spec);
    (fleet, run)
}

/// Lets commands in the sandbox read this directory.
fn readable_path_env(directory: &Path) -> Option<(String, String)> {
    Some(("FLOTILLA_VERIFIER_PATH".to_owned(), directory.display().to_string()))
}

/// Lets this executable run outside of the sandbox.
fn allowed_command_env(program: &Path) -> Option<(String, String)> {
    Some(("FLOTILLA_ALLOW_COMMAND".to_owned(), program.display().to_string()))
}

fn assert_can(fleet: &Fleet, ability: &str) {
    // Its first status may follow the submission.
    let verifier = e2e::wait_until("a verifier is listed", LIMIT, || find_verifier(fleet));
    let abilities = verifier["abilities"].as_array().expect("abilities");
    assert!(abilities.contains(&json!(ability)), "{verifier:#}");
}

fn find_verifier(fleet: &Fleet) -> Option<Value> {
    let listed = fleet.run_json(&["agents", "list"]).ok()?;
    let verifies = |agent: &&Value| {
        agent["roles"].as_array().is_some_and(|all| all.contains(&json!("verifier")))
    };
    listed.as_array()?.iter().find(verifies).cloned()
}

#[test]
fn programs_written_by_models_are_run_and_judged() {
    if require_program("python3").is_none() || !require_namespaces() {
        return;
    }
    let (fleet, run) = start_run("{ python: {} }");
    assert_can(&fleet, "verifier:python");
    let ended = fleet.await_success(&run, LIMIT);
    let [_, cycle] = &ended["cyclesDone"].as_array().expect("cycles")[..] else {
        panic!("{ended:#}")
    };
    assert_eq!(cycle["sampled"], 16, "{cycle:#}");
    assert_eq!(cycle["train"]["samples"], 16, "judged, every one: {cycle:#}");
    fleet.assert_clean_audit(&run);
}

#[test]
fn a_host_without_the_executable_reports_it_and_continues_when_it_is_installed() {
    let directory = create_public_directory();
    let grader = directory.path().join("grader");
    let (fleet, run) = start_run_with(
        readable_path_env(directory.path()),
        &format!("{{ command: {{ argv: ['{}'] }} }}", grader.display()),
    );
    e2e::wait_until("the verifier reports what is missing", LIMIT, || {
        let trouble = find_verifier(&fleet)?["trouble"].as_str()?.to_owned();
        (trouble.contains("lacks the executable") && trouble.contains("no connected verifier"))
            .then_some(())
    });
    let waits = "waits: verifier-1 cannot verify: this box lacks the executable";
    await_listed_message(&fleet, &run, waits);
    write_script(&grader, "cat >/dev/null; echo '{\"outcome\":\"pass\"}'");
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["train"]["mean"], 1.0, "{ended:#}");
    fleet.assert_clean_audit(&run);
    check_served(&fleet, &grader);
}

/// Keeps running and passes completions, but does not answer one and answers another under an
/// unknown id.
const SERVED: &str = r#"while read -r line; do
    id=${line##*\"id\":}; id=${id%%[,\}]*}
    case $line in *'"index":0'*)
        case $line in *'"prompt_id":"p0"'*) sleep 600;; *'"prompt_id":"p1"'*) id=99999;; esac;;
    esac
    echo "{\"id\":$id,\"outcome\":\"pass\"}"
done"#;

/// Checks that a run succeeds whose verifier keeps running, hangs and lies: the other completions are
/// judged.
fn check_served(fleet: &Fleet, grader: &Path) {
    write_script(grader, SERVED);
    let spec = fleet.path().join("specs/raft.yaml");
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let argv = format!("argv: ['{}']", grader.display());
    let limits = "serve: true, timeout_s: 3, start_timeout_s: 5";
    let served = text.replace(&argv, &format!("{argv}, {limits}"));
    assert_ne!(served, text);
    std::fs::write(&spec, served).expect("the spec");
    let run = fleet.submit(&spec);
    fleet.await_success(&run, LIMIT);
    let facts = fleet.read_facts(&run);
    let judged = facts_of_kind(&facts, ".verdicts.1.").filter(|it| it["purpose"] == "TRAIN");
    let verdicts: Vec<&Value> =
        judged.filter_map(|it| it["verdicts"].as_array()).flatten().collect();
    assert_eq!(verdicts.len(), 16, "{verdicts:#?}");
    for verdict in verdicts {
        let first = verdict["index"].as_u64().unwrap_or(0) == 0;
        let is_wrong = first && (verdict["promptId"] == "p0" || verdict["promptId"] == "p1");
        assert_eq!(verdict["outcome"], if is_wrong { "ERROR" } else { "PASS" }, "{verdict:#}");
    }
    fleet.assert_clean_audit(&run);
}

#[test]
fn a_verifier_that_always_fails_is_retried_and_its_errors_are_not_rewards() {
    let directory = create_public_directory();
    let (grader, calls) = (directory.path().join("grader"), directory.path().join("calls"));
    // It runs as user `nobody` if the agent is root.
    std::fs::write(&calls, "").expect("a file");
    std::fs::set_permissions(&calls, PermissionsExt::from_mode(0o666)).expect("its mode");
    let script = format!("echo >>'{}'; cat >/dev/null; exit 3", calls.display());
    write_script(&grader, &script);
    let (fleet, run) = start_run_with(
        allowed_command_env(&grader),
        &format!("{{ command: {{ argv: ['{}'] }} }}", grader.display()),
    );
    let ended = e2e::wait_until("the run ends", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", &run]).ok()?;
        (shown["state"] == "FAILED").then_some(shown)
    });
    let text = ended.to_string();
    assert!(text.contains("the verifier failed on every sample"), "{ended:#}");
    let calls = std::fs::read_to_string(&calls).expect("it was called").lines().count();
    assert!(calls >= 32, "each of 16 samples twice: {calls}");
}

#[test]
fn a_command_that_is_not_allowed_is_not_run_and_the_agent_reports_it() {
    let directory = create_public_directory();
    let (grader, ran) = (directory.path().join("grader"), directory.path().join("ran"));
    write_script(&grader, &format!("touch '{}'; echo '{{\"outcome\":\"pass\"}}'", ran.display()));
    let (fleet, _) = start_run(&format!("{{ command: {{ argv: ['{}'] }} }}", grader.display()));
    e2e::wait_until("the verifier reports what is missing", LIMIT, || {
        let trouble = find_verifier(&fleet)?["trouble"].as_str()?.to_owned();
        (trouble.contains("(V104)") && trouble.contains("no connected verifier")).then_some(())
    });
    assert!(!ran.exists());
}

#[test]
fn a_system_command_is_sandboxed_and_can_read_neither_keys_nor_the_agent() {
    if !require_namespaces() {
        return;
    }
    let directory = create_public_directory();
    let secret = directory.path().join("key");
    std::fs::write(&secret, "secret").expect("a file");
    let probe = r#"cat >/dev/null; outcome=pass
        for own in /proc/[0-9]*; do grep -q "[a]gent-dir" $own/cmdline 2>/dev/null && outcome=fail; done
        cat "$1" >/dev/null 2>&1 && outcome=fail
        echo "{\"outcome\":\"$outcome\"}""#;
    let script = serde_json::to_string(probe).expect("a text");
    let argv = format!("[sh, -c, {script}, sh, '{}']", secret.display());
    let (fleet, run) = start_run(&format!("{{ command: {{ argv: {argv} }} }}"));
    assert_can(&fleet, "verifier:command");
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["train"]["mean"], 1.0, "{ended:#}");
    fleet.assert_clean_audit(&run);
}

/// Waits until the list of runs and the status of the fleet say why a run waits.
fn await_listed_message(fleet: &Fleet, run: &str, message: &str) {
    e2e::wait_until("the list names what a run waits for", LIMIT, || {
        let runs = fleet.run_json(&["run", "list"]).ok()?;
        let listed = runs.as_array()?.iter().find(|listed| listed["run"] == run)?;
        assert_eq!(listed["phase"].as_str().unwrap_or_default(), "", "{listed:#}");
        listed["message"].as_str()?.starts_with(message).then_some(())
    });
}

/// Serves verdicts: refuses the first request and answers the others.
fn serve_verdicts(listener: TcpListener) {
    std::thread::spawn(move || {
        let busy = ["HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"];
        let verdict = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 35\r\n\r\n\
                       {\"outcome\": \"pass\", \"reward\": 0.75}";
        let answers = busy.into_iter().chain(std::iter::repeat(verdict));
        for (connection, answer) in listener.incoming().zip(answers) {
            let Ok(mut connection) = connection else { return };
            std::thread::spawn(move || {
                if read_request(&mut connection).is_some_and(|body| body["completion"].is_string())
                {
                    // The agent may have ended.
                    let _ = connection.write_all(answer.as_bytes());
                }
            });
        }
    });
}

fn verdict_url(listener: &TcpListener) -> String {
    format!("http://{}/verify", listener.local_addr().expect("an address"))
}

/// Returns the body of a request; `None` if the connection ends before it is complete.
fn read_request(connection: &mut TcpStream) -> Option<Value> {
    let (mut request, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let bytes = connection.read(&mut chunk).ok().filter(|bytes| *bytes > 0)?;
        request.extend_from_slice(&chunk[..bytes]);
        let text = String::from_utf8_lossy(&request);
        if let Some((_, body)) = text.split_once("\r\n\r\n")
            && let Ok(body) = serde_json::from_str(body)
        {
            return Some(body);
        }
    }
}

#[test]
fn a_server_judges_and_one_that_is_busy_is_asked_again() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = verdict_url(&listener);
    serve_verdicts(listener);
    let (fleet, run) = start_run(&format!("{{ http: {{ url: '{url}' }} }}"));
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["train"]["mean"], 1.0, "{ended:#}");
    let facts = Value::from(fleet.read_facts(&run)).to_string();
    assert!(facts.contains(r#""reward":0.75"#), "the server's rewards: {facts}");
    fleet.assert_clean_audit(&run);
}

#[test]
fn a_run_whose_server_is_gone_waits_for_it_while_other_runs_are_judged() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (url, address) = (verdict_url(&listener), listener.local_addr().expect("an address"));
    drop(listener);
    let (fleet, run) = start_run(&format!("{{ http: {{ url: '{url}', timeout_s: 3 }} }}"));
    await_listed_message(&fleet, &run, "waits: verifier-1 cannot verify: the verifier at");
    let spec = fleet.path().join("specs/raft.yaml");
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let http = format!("{{ http: {{ url: '{url}', timeout_s: 3 }} }}");
    let other = text.replace(&http, "{ regex: { pattern: '[0-9]' } }");
    assert_ne!(other, text);
    std::fs::write(&spec, other).expect("the spec");
    fleet.await_success(&fleet.submit(&spec), LIMIT);
    serve_verdicts(TcpListener::bind(address).expect("the same port"));
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["train"]["mean"], 1.0, "no reward of 0: {ended:#}");
    fleet.assert_clean_audit(&run);
}
