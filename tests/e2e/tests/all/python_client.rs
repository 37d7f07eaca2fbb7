//! The Python client, with its oldest and its newest packages, and with fleets.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{
    ChildGuard, Fleet, PythonEnv, Sampling, SpecFiles, client_directory, pages::blocks_in_language,
};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// Returns what a command printed, once it has succeeded.
fn stdout_of(mut command: Command) -> String {
    let output = command.output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{command:?}\n{printed}{}", text(&output.stderr));
    printed
}

/// Runs the client's own tests on the package in a directory.
fn run_unit_tests(python: &PythonEnv, package: &Path, directory: &Path) {
    let mut command = python.command("python");
    command.args(["-W", "error", "-m", "unittest", "discover", "-s"]);
    command.arg(client_directory().join("tests"));
    stdout_of({
        command.env("PYTHONPATH", package).current_dir(directory);
        command
    });
}

#[test]
fn the_generated_files_are_current_and_the_oldest_packages_suffice() {
    let Some(python) = PythonEnv::with_stub_compiler() else { return };
    let mut check = python.command("python");
    check.arg(client_directory().join("generate.py")).arg("--check");
    stdout_of(check);
    let directory = tempfile::tempdir().unwrap();
    run_unit_tests(&python, &client_directory(), directory.path());
}

#[test]
fn the_package_is_typed_and_works_where_pip_installs_it() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let repository = client_directory().join("..");
    let directory = tempfile::tempdir().unwrap();
    let mut types = python.command("mypy");
    types.args(["--config-file", "python/pyproject.toml", "--cache-dir"]).arg(directory.path());
    types.args(["python/flotilla", "python/tests"]).args(python_files("examples/python"));
    types.args(["run_client.py", "fleet_tests.py"].map(|it| format!("tests/e2e/python/{it}")));
    types.env("MYPYPATH", "python").current_dir(&repository);
    stdout_of(types);

    let package = directory.path().join("package");
    let program = directory.path().join("program");
    std::fs::write(&program, "#!/bin/sh\n").unwrap();
    let mut install = python.command("python");
    install.args(["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]);
    // Without a program, the wheel would contain one that cargo builds for it.
    install.arg("--target").arg(&package).arg("./python").env("FLOTILLA_PROGRAM", program);
    install.current_dir(&repository);
    stdout_of(install);
    assert!(package.join("bin/flotilla").is_file(), "the wheel has the program");
    assert!(package.join("flotilla/py.typed").is_file(), "it has types");
    run_unit_tests(&python, &package, directory.path());
}

/// Returns the Python files in a directory of the repository, relative to the repository.
fn python_files(directory: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(client_directory().join("..").join(directory)).unwrap();
    let names = entries.map(|entry| Path::new(directory).join(entry.unwrap().file_name()));
    let files: Vec<_> = names.filter(|it| it.extension().is_some_and(|it| it == "py")).collect();
    assert!(files.len() > 3, "these are not all: {files:?}");
    files
}

/// Creates a user with the scope `reader`, and returns the directory with its credentials.
fn create_reader(fleet: &Fleet) -> PathBuf {
    let directory = fleet.path().join("eve");
    let credentials = directory.display().to_string();
    fleet
        .run(&["user", "create", "eve", "--scope", "reader", "--out", &credentials])
        .assert_success();
    directory
}

#[test]
fn the_client_steers_and_reads_the_runs_of_a_closed_fleet() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let spec = files.write_sft_spec(20, 10);
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    files.write_raft_spec("base-1", sampling);
    files.write_model();
    let programs = fleet.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    std::os::unix::fs::symlink(e2e::program_path(), programs.join("flotilla")).unwrap();
    let on_path = std::env::var("PATH").unwrap_or_default();
    let mut tests = python.script_command("fleet_tests.py");
    tests.env("FLOTILLA_DIR", fleet.path()).env("READER", create_reader(&fleet));
    tests.env("PATH", format!("{}:{on_path}", programs.display()));
    stdout_of({
        tests.current_dir(spec.parent().unwrap());
        tests
    });
}

/// Returns a command for an operation of the client on a fleet.
fn client_command(python: &PythonEnv, fleet: &Fleet, arguments: &[&str]) -> Command {
    let mut command = python.script_command("run_client.py");
    command.args(arguments).env("FLOTILLA_DIR", fleet.path());
    command
}

/// Runs an operation and returns the JSON lines that it prints.
fn run_client(python: &PythonEnv, fleet: &Fleet, arguments: &[&str]) -> Vec<Value> {
    let printed = stdout_of(client_command(python, fleet, arguments));
    printed.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

#[test]
fn streams_miss_no_eval_though_the_gateway_is_killed() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    // Long enough for the clients to start while it runs.
    let spec = files.write_sft_spec(2000, 200).display().to_string();
    let run = run_client(&python, &fleet, &["submit", &spec]).remove(0);
    let run = run.as_str().expect("a run");

    let mut streams = ["sync", "async"].map(|kind| {
        let mut command = client_command(&python, &fleet, &["evals", run, "0", "10", kind]);
        ChildGuard(command.stdout(Stdio::piped()).spawn().unwrap())
    });
    let mut live = streams.each_mut().map(|stream| {
        let lines = BufReader::new(stream.0.stdout.take().unwrap()).lines();
        lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap())
    });
    let mut seen = live.each_mut().map(|lines| lines.take(2).collect::<Vec<Value>>());
    assert_eq!(fleet.run_json(&["run", "show", run]).unwrap()["state"], "RUNNING", "it streams");
    fleet.kill("coordinator");
    for (seen, lines) in seen.iter_mut().zip(live) {
        seen.extend(lines);
        let steps: Vec<u64> = seen.iter().map(|eval| eval["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, (1..=10).map(|n| n * 200).collect::<Vec<u64>>());
    }
    assert_eq!(seen[0], seen[1], "both clients have the same results");

    let mut resumed = run_client(&python, &fleet, &["evals", run, "0", "3", "sync"]);
    let after = resumed[2]["cursor"].to_string();
    resumed.extend(run_client(&python, &fleet, &["evals", run, &after, "7", "async"]));
    assert_eq!(resumed, seen[0]);
    assert_eq!(run_client(&python, &fleet, &["wait", run])[0]["state"], "succeeded");
}

#[test]
fn a_downloaded_adapter_loads_as_peft_names_it() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start_open("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let run = fleet.submit(&files.write_raft_spec(&base, sampling));
    let ended = run_client(&python, &fleet, &["wait", &run]).remove(0);
    assert_eq!((&ended["state"], &ended["sampled"][1]), (&"succeeded".into(), &(16 * 4).into()));
    // An agent that had nothing to do may still be starting.
    e2e::wait_until("all agents are listed", LIMIT, || {
        let agents = run_client(&python, &fleet, &["agents"]).remove(0);
        (agents.as_array()?.len() == 4).then_some(())
    });
    for run in [&base, &run] {
        assert_download_is_export(&python, &fleet, run);
    }
    let adapter = fleet.path().join(format!("{run}-download/adapter_model.safetensors"));
    let adapter = adapter.display().to_string();
    let tensors = python.run_script("check.py", &["tensors", &adapter]);
    assert_eq!(tensors.lines().collect::<Vec<&str>>(), peft_tensors());
}

/// Downloads a run's best checkpoint and compares each file with the export of the command line.
fn assert_download_is_export(python: &PythonEnv, fleet: &Fleet, run: &str) {
    let at = |name: &str| fleet.path().join(format!("{run}-{name}"));
    let (out, export) = (at("download").display().to_string(), at("export").display().to_string());
    run_client(python, fleet, &["download", run, &out]);
    fleet.run(&["checkpoint", "export", run, "--out", &export]).assert_success();
    let info = fleet.run_json(&["checkpoint", "get", run]).expect("a checkpoint");
    for file in info["files"].as_array().expect("files") {
        let name = file["path"].as_str().expect("a path");
        let bytes = std::fs::read(at("download").join(name)).expect(name);
        assert!(bytes == std::fs::read(at("export").join(name)).expect(name), "{name} differs");
        assert_eq!(file["digest"], format!("b3:{}", blake3::hash(&bytes).to_hex()));
    }
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
fn the_python_code_of_the_docs_works() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let spec = files.write_sft_spec(60, 30);
    let reader = create_reader(&fleet);
    let blocks = blocks_in_language("SCRIPTS.md", "python");
    assert_eq!(blocks.len(), 4, "run each block in this test");
    let run = |block: &str, credentials: &Path| {
        let mut command = python.command("python");
        command.args(["-c", block]).current_dir(spec.parent().unwrap());
        command.env("FLOTILLA_DIR", credentials);
        stdout_of(command)
    };
    let submitted = run(&blocks[0], fleet.path());
    assert!(submitted.contains("base-1: succeeded"), "{submitted}");
    assert!(submitted.contains("step 60, heldout: perplexity "), "{submitted}");
    let evals = run(&blocks[1], &reader);
    assert!(evals.contains(" base-1, cycle 0, step 30, heldout: perplexity "), "{evals}");
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let raft = fleet.submit(&files.write_raft_spec("base-1", sampling));
    fleet.await_success(&raft, LIMIT);
    let long = fleet.submit(&files.write_sft_spec(30_000, 30));
    let samples = run(&blocks[2], fleet.path());
    assert!(samples.contains("kept") && samples.contains("0+1="), "{samples}");
    assert_eq!(fleet.run_json(&["run", "show", &long]).unwrap()["state"], "PAUSED");
    let refused = run(&blocks[3], fleet.path());
    assert!(refused.starts_with("R101 "), "{refused}");
}

#[test]
fn a_notebook_shows_the_progress_of_a_run_as_one_table_and_its_results_below() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start("trainer,evaluator");
    let spec = SpecFiles::create(fleet.path()).write_sft_spec(20, 10);
    let script = blocks_in_language("SCRIPTS.md", "python").remove(0);
    assert!(script.lines().count() <= 10, "{script}");
    let (cell, home) = (fleet.path().join("cell.py"), fleet.path().join("home"));
    std::fs::write(&cell, script).unwrap();
    std::fs::create_dir(&home).unwrap();
    let mut run = python.script_command("run_notebook.py");
    run.arg(&cell).current_dir(spec.parent().unwrap());
    // Kernels keep their files in the home directory.
    run.env("FLOTILLA_DIR", fleet.path()).env("HOME", home);
    let outputs: Value = serde_json::from_str(&stdout_of(run)).unwrap();
    let outputs = outputs.as_array().unwrap();
    let count = |kind: &str| outputs.iter().filter(|it| it["output_type"] == kind).count();
    assert_eq!((count("display_data"), count("error")), (1, 0), "{outputs:#?}");
    let display = outputs.iter().find(|it| it["output_type"] == "display_data").unwrap();
    let table = display["data"]["text/html"].as_str().expect("HTML");
    for words in ["base-1: succeeded", "<table>", "step 20, heldout: perplexity "] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let printed = outputs.iter().filter(|it| it["name"] == "stdout");
    let printed: String = printed.filter_map(|it| it["text"].as_str()).collect();
    let results: Vec<&str> = printed.lines().collect();
    assert_eq!(results.len(), 2, "only the results, not the progress: {printed}");
    assert!(results[0].contains("base-1, cycle 0, step 10, heldout: perplexity "), "{printed}");
}

#[test]
fn a_stream_of_all_runs_shows_pass_rates_of_a_run_that_starts_later() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(10, 10));
    fleet.await_success(&base, LIMIT);
    let printed = fleet.path().join("printed");
    let script = "import flotilla\nfor result in flotilla.connect().watch_evals(): print(result)";
    let mut command = python.command("python");
    command.args(["-u", "-c", script]).env("FLOTILLA_DIR", create_reader(&fleet));
    let _guard = ChildGuard(command.stdout(File::create(&printed).unwrap()).spawn().unwrap());
    let await_words = |words: &str| {
        e2e::wait_until("the script prints results", LIMIT, || {
            std::fs::read_to_string(&printed).unwrap().contains(words).then_some(())
        });
    };
    await_words("heldout: perplexity ");
    let sampling = Sampling { prompts: 4, per_prompt: 2, max_new_tokens: 8, cycles: 1 };
    let raft = fleet.submit(&files.write_raft_spec(&base, sampling));
    await_words(&format!("{raft}, cycle 1"));
    await_words("held out: pass rate ");
}
