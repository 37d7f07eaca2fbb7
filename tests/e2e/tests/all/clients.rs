//! Clients of the control API in other languages.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    ffi::OsString,
    io::{BufRead, BufReader, Write},
    num::NonZero,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{ChildGuard, Fleet, PythonEnv, SpecFiles, pages::blocks_in_language};
use requirements::require_program;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

fn gateway_address(fleet: &Fleet) -> String {
    fleet.read_fleet_file()["gateway"].as_str().expect("an address").to_owned()
}

#[test]
fn the_shell_commands_of_the_docs_control_and_watch_a_run() {
    if ["bash", "curl", "jq"].into_iter().any(|program| require_program(program).is_none()) {
        return;
    }
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(3000, 1500));
    let commands = &blocks_in_language("API.md", "sh")[0];
    let commands = commands.replace("fleet/fleet.json", "fleet.json");
    let shell = Command::new("bash")
        .args(["-euo", "pipefail", "-c", &commands])
        .current_dir(fleet.path())
        .output()
        .expect("bash, curl and jq");
    let (out, err) =
        (String::from_utf8_lossy(&shell.stdout), String::from_utf8_lossy(&shell.stderr));
    assert!(shell.status.success(), "{out}{err}\n{}", fleet.log_tails());
    let lines: Vec<&str> = out.lines().collect();
    // A run's state is a JSON string. Pause and resume return nothing.
    assert!(lines[0].starts_with('"'), "{out}");
    let subjects = &lines[1..];
    assert!(subjects[0].ends_with(&format!("flotilla.{run}.spec")), "{out}");
    for suffix in ["control.1", "control.2", "checkpoint.0.3000", "eval.0.3000.heldout", "done"] {
        assert!(subjects.iter().any(|subject| subject.ends_with(suffix)), "{suffix}: {out}");
    }
}

#[test]
fn a_terminal_shows_the_fleet_until_q_and_a_script_has_its_lines() {
    let Some(script) = require_program("script") else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(30, 10));
    let shown = fleet.path().join("screen");
    let watch = format!("stty cols 120 rows 40; exec {} watch", e2e::program_path().display());
    let mut terminal = Command::new(script)
        .args(["--quiet", "--flush", "--return", "--command", &watch])
        .arg(&shown)
        .env("FLOTILLA_DIR", fleet.path())
        .env("TERM", "xterm-256color")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("script, of util-linux");
    let words = ["2 agents", "trainer-1", "evaluator-1", &run, "perplexity", "q quit"];
    e2e::wait_until("the terminal shows the fleet", LIMIT, || {
        let [rows, columns] = [40, 120].map(|count| NonZero::new(count).unwrap());
        let mut screen = vt100::Parser::new(rows, columns, 0);
        screen.process(&std::fs::read(&shown).unwrap_or_default());
        let screen = screen.screen().contents();
        words.iter().all(|word| screen.contains(word)).then_some(())
    });
    let mut keys = terminal.stdin.take().unwrap();
    keys.write_all(b"q").unwrap();
    let ended = e2e::wait_until("q ends it", LIMIT, || terminal.try_wait().unwrap());
    assert!(ended.success(), "{ended}");

    let without_terminal = fleet.run(&["watch"]);
    assert_eq!(without_terminal.code, 1);
    assert!(without_terminal.stderr.contains("--json"), "{}", without_terminal.stderr);
    let lines = Command::new(e2e::program_path())
        .args(["watch", &run, "--json"])
        .env("FLOTILLA_DIR", fleet.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = ChildGuard(lines);
    let read = BufReader::new(lines.0.stdout.take().unwrap()).lines();
    let mut read = read.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert!(read.any(|line| line["run"]["run"] == *run && line["run"]["evals"].is_array()));
    assert!(read.any(|line| line["agent"]["agent"] == "trainer-1"));
}

#[test]
fn the_api_describes_itself() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start_open("verifier");
    let services = python.run_script("check.py", &["services", &gateway_address(&fleet)]);
    for line in [
        "flotilla.v1.Runs Submit Fork Get List Pause Resume Cancel Audit Watch Board Samples",
        "flotilla.v1.Evals History Watch",
        "flotilla.v1.Checkpoints List Get Download",
        "flotilla.v1.Fleet Agents Drain Watch Hello",
        "grpc.health.v1.Health Check Watch",
    ] {
        assert!(services.lines().any(|service| service.starts_with(line)), "{line}: {services}");
    }
    // Validated by an independent implementation.
    let validated = python.run_script("check.py", &["openapi", &gateway_address(&fleet)]);
    assert!(validated.starts_with("3.1.1 "), "{validated}");
}

/// Runs a block and returns what it printed.
fn run_block(mut command: Command, block: &str) -> String {
    let output = command.output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{block}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Returns PATH with the directory of a program before it.
fn path_with(program: &Path) -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = program.parent().expect("a directory").to_owned();
    std::env::join_paths([own].into_iter().chain(std::env::split_paths(&path))).unwrap()
}

#[test]
fn the_grpcurl_and_nats_commands_of_the_docs_work() {
    let installed = ["grpcurl", "nats"].map(require_program);
    if installed == [None, None] {
        return;
    }
    let blocks = blocks_in_language("SCRIPTS.md", "sh");
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(60, 30));
    fleet.await_success(&run, LIMIT);
    let shell = |program: &Path, block: &str| {
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", block]).env("PATH", path_with(program));
        command.env("GATEWAY", gateway_address(&fleet)).env("NATS", fleet.nats_url());
        run_block(command, block)
    };
    let [grpcurl, nats] = installed;
    if let Some(grpcurl) = grpcurl {
        let output = shell(&grpcurl, &blocks[1]);
        assert!(output.contains("flotilla.v1.Runs") && output.contains("trainer-1"), "{output}");
        assert!(output.contains("perplexity"), "{output}");
    }
    if let Some(nats) = nats {
        let output = shell(&nats, &blocks[2]);
        assert!(
            output.contains("FLOTILLA") && output.contains(&format!("flotilla.{run}.eval")),
            "{output}"
        );
    }
}
