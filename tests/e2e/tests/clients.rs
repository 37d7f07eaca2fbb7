//! The control API, driven by a client in another language.

use std::{
    io::{BufRead, BufReader, Write},
    num::NonZero,
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{Ended, Files, Fleet, Python, Sampling, pages::in_language};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

fn gateway(fleet: &Fleet) -> String {
    fleet.file()["gateway"].as_str().expect("an address").to_owned()
}

/// `client.py` on a fleet.
struct Client<'a> {
    python: &'a Python,
    fleet: &'a Fleet,
    gateway: String,
}

impl<'a> Client<'a> {
    fn new(python: &'a Python, fleet: &'a Fleet) -> Self {
        Self { python, fleet, gateway: gateway(fleet) }
    }

    /// The JSON lines it prints.
    fn run(&self, arguments: &[&str]) -> Vec<Value> {
        let arguments = [&["--server", &self.gateway], arguments].concat();
        let printed = self.python.run("client.py", &arguments);
        printed.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    fn submit(&self, files: &Files, spec: &str, attached: &[&str]) -> String {
        let paths: Vec<String> = [&[spec], attached]
            .concat()
            .iter()
            .map(|name| files.path(name).display().to_string())
            .collect();
        let arguments: Vec<&str> =
            ["submit"].into_iter().chain(paths.iter().map(|p| &**p)).collect();
        self.run(&arguments)[0]["run"].as_str().expect("a run").to_owned()
    }

    /// Downloads a file and checks it against the command line's export and the manifest.
    fn download(&self, run: &str, file: &str) -> String {
        let at = |name: &str| self.fleet.path().join(format!("{run}-{name}"));
        let (out, export) = (at(file).display().to_string(), at("export").display().to_string());
        self.run(&["download", run, file, &out]);
        let exported = self.fleet.run(&["checkpoint", "export", run, "--out", &export]);
        assert_eq!(exported.code, 0, "{}", exported.stderr);
        let bytes = std::fs::read(&out).expect(file);
        assert!(bytes == std::fs::read(at("export").join(file)).expect(file), "{file} differs");
        let info = self.fleet.json(&["checkpoint", "get", run]).expect("a checkpoint");
        let listed = info["files"].as_array().expect("files");
        let listed = listed.iter().find(|listed| listed["path"] == file).expect(file);
        assert_eq!(listed["digest"], format!("b3:{}", blake3::hash(&bytes).to_hex()));
        out
    }
}

#[test]
fn a_python_client_misses_no_eval_though_the_gateway_is_killed() {
    let Some(python) = Python::find() else { return };
    let fleet = Fleet::open("trainer,evaluator");
    let files = Files::create(fleet.path());
    let client = Client::new(&python, &fleet);
    files.sft(300, 30);
    let attached = ["config.json", "tokenizer.json", "data.jsonl", "heldout.txt"];
    let run = client.submit(&files, "sft.yaml", &attached);

    let watch = ["--server", &client.gateway, "watch-evals", "--run", &run];
    let mut watching = python
        .script("client.py")
        .args([&watch[..], &["--count", "10"]].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut live = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let mut seen: Vec<Value> = live.by_ref().take(2).collect();
    assert_eq!(fleet.json(&["run", "show", &run]).unwrap()["state"], "RUNNING", "it streams");
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
    let history = fleet.json(&["eval", "history", &run]).unwrap();
    let history: Vec<String> = history.as_array().unwrap().iter().map(cursor).collect();
    assert_eq!(history, seen.iter().map(cursor).collect::<Vec<String>>());
    assert_eq!(client.run(&["wait", &run])[0]["state"], "SUCCEEDED");
}

#[test]
fn a_python_client_trains_an_adapter_and_loads_it() {
    let Some(python) = Python::find() else { return };
    let fleet = Fleet::open("trainer,generator,verifier,evaluator");
    let files = Files::create(fleet.path());
    let client = Client::new(&python, &fleet);
    files.sft(20, 0);
    let attached = ["config.json", "tokenizer.json", "data.jsonl", "heldout.txt"];
    let base = client.submit(&files, "sft.yaml", &attached);
    assert_eq!(client.run(&["wait", &base])[0]["state"], "SUCCEEDED");
    files.raft(&base, Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 });
    let run =
        client.submit(&files, "raft.yaml", &["prompts.jsonl", "heldout.jsonl", "heldout.txt"]);
    let ended = client.run(&["wait", &run]).remove(0);
    assert_eq!(ended["state"], "SUCCEEDED");
    assert_eq!(ended["cycles_done"][1]["sampled"], 16 * 4);
    assert_eq!(client.run(&["agents"]).len(), 4);

    client.download(&base, "model.safetensors");
    let adapter = client.download(&run, "adapter_model.safetensors");
    let tensors = python.run("check.py", &["tensors", &adapter]);
    assert_eq!(tensors.lines().collect::<Vec<&str>>(), peft_tensors());
}

/// What PEFT names the tensors of this adapter.
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
fn a_shell_steers_and_watches_a_run_as_the_docs_say() {
    if !are_there(&["bash", "curl", "jq"]) {
        return;
    }
    let fleet = Fleet::open("trainer,evaluator");
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(3000, 1500));
    let commands = &in_language("API.md", "sh")[0];
    let commands = commands.replace("fleet/fleet.json", "fleet.json");
    let shell = Command::new("bash")
        .args(["-euo", "pipefail", "-c", &commands])
        .current_dir(fleet.path())
        .output()
        .expect("bash, curl and jq");
    let (out, err) =
        (String::from_utf8_lossy(&shell.stdout), String::from_utf8_lossy(&shell.stderr));
    assert!(shell.status.success(), "{out}{err}\n{}", fleet.logs());
    let lines: Vec<&str> = out.lines().collect();
    // A run's state is a word; what steers it answers with nothing.
    assert!(lines[0].starts_with('"'), "{out}");
    let subjects = &lines[1..];
    assert!(subjects[0].ends_with(&format!("flotilla.{run}.spec")), "{out}");
    for told in ["control.1", "control.2", "checkpoint.0.3000", "eval.0.3000.heldout", "done"] {
        assert!(subjects.iter().any(|subject| subject.ends_with(told)), "{told}: {out}");
    }
}

#[test]
fn a_terminal_shows_the_fleet_until_q_and_a_script_has_its_lines() {
    if !are_there(&["script"]) {
        return;
    }
    let fleet = Fleet::open("trainer,evaluator");
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(30, 10));
    let shown = fleet.path().join("screen");
    let watch = format!("stty cols 120 rows 40; exec {} watch", e2e::binary().display());
    let mut terminal = Command::new("script")
        .args(["--quiet", "--flush", "--return", "--command", &watch])
        .arg(&shown)
        .env("FLOTILLA_DIR", fleet.path())
        .env("TERM", "xterm-256color")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("script, of util-linux");
    let words = ["2 agents", "trainer-1", "evaluator-1", &run, "perplexity", "q quit"];
    e2e::until("the terminal shows the fleet", LIMIT, || {
        let [rows, columns] = [40, 120].map(|count| NonZero::new(count).unwrap());
        let mut screen = vt100::Parser::new(rows, columns, 0);
        screen.process(&std::fs::read(&shown).unwrap_or_default());
        let screen = screen.screen().contents();
        words.iter().all(|word| screen.contains(word)).then_some(())
    });
    let mut keys = terminal.stdin.take().unwrap();
    keys.write_all(b"q").unwrap();
    let ended = e2e::until("q ends it", LIMIT, || terminal.try_wait().unwrap());
    assert!(ended.success(), "{ended}");

    let nobody_looks = fleet.run(&["watch"]);
    assert_eq!(nobody_looks.code, 1);
    assert!(nobody_looks.stderr.contains("--json"), "{}", nobody_looks.stderr);
    let lines = Command::new(e2e::binary())
        .args(["watch", &run, "--json"])
        .env("FLOTILLA_DIR", fleet.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = Ended(lines);
    let read = BufReader::new(lines.0.stdout.take().unwrap()).lines();
    let mut read = read.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert!(read.any(|line| line["run"]["run"] == *run && line["run"]["evals"].is_array()));
    assert!(read.any(|line| line["agent"]["agent"] == "trainer-1"));
}

/// Says which is not.
fn are_there(programs: &[&str]) -> bool {
    let lacks = programs.iter().find(|program| {
        let asked = Command::new(program).arg("--version").stdout(Stdio::null()).status();
        !asked.is_ok_and(|status| status.success())
    });
    if let Some(program) = lacks {
        eprintln!("skipped: there is no {program}");
    }
    lacks.is_none()
}

#[test]
fn the_api_describes_itself_to_whoever_asks() {
    let Some(python) = Python::find() else { return };
    let fleet = Fleet::open("verifier");
    let services = python.run("check.py", &["services", &gateway(&fleet)]);
    for line in [
        "flotilla.v1.Runs Submit Get List Pause Resume Cancel Audit Watch Board Samples",
        "flotilla.v1.Evals History Watch",
        "flotilla.v1.Checkpoints List Get Download",
        "flotilla.v1.Fleet Agents Drain Watch Hello",
        "grpc.health.v1.Health Check Watch",
    ] {
        assert!(services.lines().any(|service| service.starts_with(line)), "{line}: {services}");
    }
    // As the specification of OpenAPI has it, in the eyes of others.
    let judged = python.run("check.py", &["openapi", &gateway(&fleet)]);
    assert!(judged.starts_with("3.1.1 "), "{judged}");
}

/// Where the blocks of docs/SCRIPTS.md find what they name.
fn desk(fleet: &Fleet, files: &Files) -> std::path::PathBuf {
    let desk = files.path("config.json").parent().expect("a directory").to_owned();
    let proto = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    std::os::unix::fs::symlink(proto.canonicalize().expect("proto"), desk.join("proto"))
        .expect("a link");
    assert!(desk.starts_with(fleet.path()));
    desk
}

/// Runs a block and returns what it printed.
fn ran(mut command: Command, block: &str) -> String {
    let output = command.output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{block}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn python_does_what_the_docs_say() {
    let Some(python) = Python::find() else { return };
    let fleet = Fleet::open("trainer,generator,verifier,evaluator");
    let files = Files::create(fleet.path());
    let desk = desk(&fleet, &files);
    files.sft(60, 30);
    let mut make = Command::new("bash");
    let stubs = &in_language("SCRIPTS.md", "sh")[0];
    let bin = python.program("python").get_program().to_owned();
    let bin = std::path::Path::new(&bin).parent().expect("a directory").to_owned();
    let path = std::env::join_paths(
        [bin]
            .into_iter()
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    make.args(["-euo", "pipefail", "-c", stubs]).current_dir(&desk).env("PATH", path.unwrap());
    ran(make, stubs);
    let blocks = in_language("SCRIPTS.md", "python");
    let run = |block: &str, name: &str, value: &str| {
        let mut command = python.program("python");
        command.args(["-c", block]).current_dir(&desk).env(name, value);
        ran(command, block)
    };
    let gateway = gateway(&fleet);
    let submitted = run(&blocks[0], "GATEWAY", &gateway);
    let last = submitted.lines().last().expect("a line");
    assert!(last.starts_with("base-1 succeeded"), "{submitted}");
    let evals = run(&blocks[1], "GATEWAY", &gateway);
    assert!(evals.starts_with("base-1 0/30 heldout: "), "{evals}");
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let raft = fleet.submit(&files.raft("base-1", sampling));
    fleet.finish(&raft, LIMIT);
    let kept = run(&blocks[2], "GATEWAY", &gateway);
    assert!(kept.lines().any(|line| line.starts_with("p0 '0+1='")), "{kept}");

    let closed = Fleet::up("verifier");
    let agents = run(&blocks[3], "KIT", &closed.path().display().to_string());
    assert!(agents.starts_with("verifier-1 verifier "), "{agents}");
}

#[test]
fn grpcurl_and_the_nats_command_do_what_the_docs_say() {
    let there = ["grpcurl", "nats"].map(|program| are_there(&[program]));
    if there == [false, false] {
        return;
    }
    let blocks = in_language("SCRIPTS.md", "sh");
    let fleet = Fleet::open("trainer,evaluator");
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(60, 30));
    fleet.finish(&run, LIMIT);
    let shell = |block: &str| {
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", block]);
        command.env("GATEWAY", gateway(&fleet)).env("NATS", fleet.nats());
        ran(command, block)
    };
    let [grpcurl, nats] = there;
    if grpcurl {
        let said = shell(&blocks[1]);
        assert!(said.contains("flotilla.v1.Runs") && said.contains("trainer-1"), "{said}");
        assert!(said.contains("perplexity"), "{said}");
    }
    if nats {
        let said = shell(&blocks[2]);
        assert!(
            said.contains("FLOTILLA") && said.contains(&format!("flotilla.{run}.eval")),
            "{said}"
        );
    }
}
