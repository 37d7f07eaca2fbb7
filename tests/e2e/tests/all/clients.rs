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

use e2e::{ChildGuard, Fleet, PythonEnv, Sampling, SpecFiles, pages::blocks_in_language};
use requirements::require_program;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

fn gateway_address(fleet: &Fleet) -> String {
    fleet.read_fleet_file()["gateway"].as_str().expect("an address").to_owned()
}

/// `client.py` with the address of a fleet.
struct Client<'a> {
    python: &'a PythonEnv,
    fleet: &'a Fleet,
    gateway: String,
}

impl<'a> Client<'a> {
    fn new(python: &'a PythonEnv, fleet: &'a Fleet) -> Self {
        Self { python, fleet, gateway: gateway_address(fleet) }
    }

    /// Runs a command and returns the JSON lines that it prints.
    fn run(&self, arguments: &[&str]) -> Vec<Value> {
        let arguments = [&["--server", &self.gateway], arguments].concat();
        let printed = self.python.run_script("client.py", &arguments);
        printed.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    fn submit(&self, files: &SpecFiles, spec: &str, attached: &[&str]) -> String {
        let paths: Vec<String> = [&[spec], attached]
            .concat()
            .iter()
            .map(|name| files.path(name).display().to_string())
            .collect();
        let arguments: Vec<&str> =
            ["submit"].into_iter().chain(paths.iter().map(|p| &**p)).collect();
        self.run(&arguments)[0]["run"].as_str().expect("a run").to_owned()
    }

    /// Downloads a file and compares it with the export of the command line and with the manifest.
    fn download(&self, run: &str, file: &str) -> String {
        let at = |name: &str| self.fleet.path().join(format!("{run}-{name}"));
        let (out, export) = (at(file).display().to_string(), at("export").display().to_string());
        self.run(&["download", run, file, &out]);
        let exported = self.fleet.run(&["checkpoint", "export", run, "--out", &export]);
        assert_eq!(exported.code, 0, "{}", exported.stderr);
        let bytes = std::fs::read(&out).expect(file);
        assert!(bytes == std::fs::read(at("export").join(file)).expect(file), "{file} differs");
        let info = self.fleet.run_json(&["checkpoint", "get", run]).expect("a checkpoint");
        let listed = info["files"].as_array().expect("files");
        let listed = listed.iter().find(|listed| listed["path"] == file).expect(file);
        assert_eq!(listed["digest"], format!("b3:{}", blake3::hash(&bytes).to_hex()));
        out
    }
}

#[test]
fn a_python_client_misses_no_eval_though_the_gateway_is_killed() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let client = Client::new(&python, &fleet);
    files.write_sft_spec(300, 30);
    let attached = ["config.json", "tokenizer.json", "data.jsonl", "heldout.txt"];
    let run = client.submit(&files, "sft.yaml", &attached);

    let watch = ["--server", &client.gateway, "watch-evals", "--run", &run];
    let mut watching = python
        .script_command("client.py")
        .args([&watch[..], &["--count", "10"]].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut live = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let mut seen: Vec<Value> = live.by_ref().take(2).collect();
    assert_eq!(fleet.run_json(&["run", "show", &run]).unwrap()["state"], "RUNNING", "it streams");
    fleet.kill("coordinator");
    seen.extend(live);
    assert!(watching.wait().unwrap().success());
    let steps: Vec<u64> = seen.iter().map(|e| e["eval"]["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=10).map(|n| n * 30).collect::<Vec<u64>>());

    let cursor = |event: &Value| event["cursor"].as_str().unwrap().to_owned();
    let mut resumed = client.run(&["watch-evals", "--run", &run, "--count", "3"]);
    let after = cursor(&resumed[2]);
    resumed.extend(client.run(&["watch-evals", "--run", &run, "--after", &after, "--count", "7"]));
    assert_eq!(resumed, seen);
    let history = fleet.run_json(&["eval", "history", &run]).unwrap();
    let history: Vec<String> = history.as_array().unwrap().iter().map(cursor).collect();
    assert_eq!(history, seen.iter().map(cursor).collect::<Vec<String>>());
    assert_eq!(client.run(&["wait", &run])[0]["state"], "SUCCEEDED");
}

#[test]
fn a_python_client_trains_an_adapter_and_loads_it() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start_open("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let client = Client::new(&python, &fleet);
    files.write_sft_spec(20, 0);
    let attached = ["config.json", "tokenizer.json", "data.jsonl", "heldout.txt"];
    let base = client.submit(&files, "sft.yaml", &attached);
    assert_eq!(client.run(&["wait", &base])[0]["state"], "SUCCEEDED");
    files.write_raft_spec(
        &base,
        Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 },
    );
    let run =
        client.submit(&files, "raft.yaml", &["prompts.jsonl", "heldout.jsonl", "heldout.txt"]);
    let ended = client.run(&["wait", &run]).remove(0);
    assert_eq!(ended["state"], "SUCCEEDED");
    assert_eq!(ended["cycles_done"][1]["sampled"], 16 * 4);
    // An agent that had nothing to do may still be starting.
    e2e::wait_until("all agents are listed", LIMIT, || {
        (client.run(&["agents"]).len() == 4).then_some(())
    });

    client.download(&base, "model.safetensors");
    let adapter = client.download(&run, "adapter_model.safetensors");
    let tensors = python.run_script("check.py", &["tensors", &adapter]);
    assert_eq!(tensors.lines().collect::<Vec<&str>>(), peft_tensors());
}

/// Returns names, types and shapes of the adapter's tensors, as PEFT names them.
fn peft_tensors() -> Vec<String> {
    let modules = [
        ("mlp.down_proj", 64, 32),
        ("mlp.gate_proj", 32, 64),
        ("mlp.up_proj", 32, 64),
        ("self_attn.k_proj", 32, 16),
        ("self_attn.o_proj", 32, 32),
        ("self_attn.q_proj", 32, 32),
        ("self_attn.v_proj", 32, 16),
    ];
    let mut names = Vec::new();
    for layer in 0..2 {
        for (module, inputs, outputs) in modules {
            let name = format!("base_model.model.model.layers.{layer}.{module}");
            names.push(format!("{name}.lora_A.weight float32 4x{inputs}"));
            names.push(format!("{name}.lora_B.weight float32 {outputs}x4"));
        }
    }
    names
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
        "flotilla.v1.Runs Submit Get List Pause Resume Cancel Audit Watch Board Samples",
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

/// Returns a directory with the files that the blocks of docs/SCRIPTS.md name.
fn create_script_directory(fleet: &Fleet, files: &SpecFiles) -> std::path::PathBuf {
    let directory = files.path("config.json").parent().expect("a directory").to_owned();
    let proto = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    std::os::unix::fs::symlink(proto.canonicalize().expect("proto"), directory.join("proto"))
        .expect("a link");
    assert!(directory.starts_with(fleet.path()));
    directory
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
fn the_python_code_of_the_docs_works() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let directory = create_script_directory(&fleet, &files);
    files.write_sft_spec(60, 30);
    let mut make = Command::new("bash");
    let stubs = &blocks_in_language("SCRIPTS.md", "sh")[0];
    let path = path_with(python.command("python").get_program().as_ref());
    make.args(["-euo", "pipefail", "-c", stubs]).current_dir(&directory).env("PATH", path);
    run_block(make, stubs);
    let blocks = blocks_in_language("SCRIPTS.md", "python");
    let run = |block: &str| {
        let mut command = python.command("python");
        command.args(["-c", block]).current_dir(&directory).env("FLOTILLA_DIR", fleet.path());
        run_block(command, block)
    };
    let submitted = run(&blocks[1]);
    let last = submitted.lines().last().expect("a line");
    assert!(last.starts_with("base-1 succeeded"), "{submitted}");
    let evals = run(&blocks[2]);
    assert!(evals.starts_with("base-1 0/30: perplexity "), "{evals}");
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let raft = fleet.submit(&files.write_raft_spec("base-1", sampling));
    fleet.await_success(&raft, LIMIT);
    let kept = run(&blocks[3]);
    assert!(kept.lines().any(|line| line.starts_with("p0 '0+1='")), "{kept}");
}

#[test]
fn the_first_script_of_the_docs_prints_results_of_a_closed_fleet() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let directory = create_script_directory(&fleet, &files);
    let base = fleet.submit(&files.write_sft_spec(10, 10));
    fleet.await_success(&base, LIMIT);
    let user = fleet.path().join("eve");
    let credentials = user.display().to_string();
    fleet
        .run(&["user", "create", "eve", "--scope", "reader", "--out", &credentials])
        .assert_success();
    for place in [fleet.path(), &user] {
        let printed = directory.join("printed");
        let mut command = python.command("python");
        command.args(["-u", "-c", &blocks_in_language("SCRIPTS.md", "python")[0]]);
        command.current_dir(&directory).env("FLOTILLA_DIR", place);
        command.stdout(std::fs::File::create(&printed).unwrap());
        let _guard = ChildGuard(command.spawn().unwrap());
        let await_words = |words: &str| {
            e2e::wait_until("the script prints results", LIMIT, || {
                std::fs::read_to_string(&printed).unwrap().contains(words).then_some(())
            });
        };
        await_words("perplexity: ");
        let sampling = Sampling { prompts: 4, per_prompt: 2, max_new_tokens: 8, cycles: 1 };
        let raft = fleet.submit(&files.write_raft_spec(&base, sampling));
        await_words(&format!("run: \"{raft}\""));
        await_words("pass_rates {");
    }
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
