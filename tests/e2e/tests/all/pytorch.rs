//! Fleets with PyTorch trainers. They need torch, transformers, peft and accelerate: `make
//! test-torch`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use e2e::{Fleet, Process, SpecFiles, find_llama_cpp, run_flotilla, wait_until};
use requirements::{require_llama_cpp_sources, require_torch_python};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(600);

const STEPS: u32 = 120;
const SAVE_EVERY: u32 = 10;

fn environment(python: &Path) -> [(String, String); 4] {
    [
        // Of a tiny model, two threads mostly wait for each other.
        ("FLOTILLA_THREADS".to_owned(), "1".to_owned()),
        ("FLOTILLA_TRAINER_ENGINE".to_owned(), "pytorch".to_owned()),
        ("FLOTILLA_PYTHON".to_owned(), python.display().to_string()),
        ("FLOTILLA_PROFILE".to_owned(), "cpu".to_owned()),
    ]
}

fn trainers(fleet: &Fleet) -> Vec<Process> {
    let is_trainer = |process: &Process| {
        let program =
            process.arguments.iter().any(|argument| argument.ends_with("pytorch/train.py"));
        program && process.is_alive()
    };
    fleet.processes().into_iter().filter(is_trainer).collect()
}

/// Returns the agent of a worker, from the path of its program.
fn agent_of(worker: &Process) -> Option<String> {
    let program =
        worker.arguments.iter().find(|argument| argument.ends_with("pytorch/train.py"))?;
    Some(program.split_once("/agents/")?.1.split('/').next()?.to_owned())
}

fn await_step(fleet: &Fleet, run: &str, step: u64) -> u64 {
    wait_until(&format!("a checkpoint at step {step}"), LIMIT, || {
        let listed = fleet.run_json(&["checkpoint", "list", run]).ok()?;
        let newest = listed.as_array()?.last()?["checkpoint"]["step"].as_u64()?;
        assert!(newest < u64::from(STEPS), "too fast to be disturbed");
        (newest >= step).then_some(newest)
    })
}

/// Returns the steps after which trainings began, from the logs of all trainers.
fn start_steps(fleet: &Fleet, run: &str) -> Vec<u64> {
    let logs = ["trainer-1", "trainer-2"].map(|name| {
        let log = fleet.path().join("agents").join(name).join("agent.log");
        std::fs::read_to_string(log).unwrap_or_default()
    });
    let lines = logs.iter().flat_map(|log| log.lines());
    let of_run = lines.filter(|line| {
        line.contains(&format!("run={run} ")) && line.contains("training begins after a step")
    });
    let mut steps: Vec<u64> =
        of_run.filter_map(|line| line.rsplit_once("step=")?.1.trim().parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Returns the digest of the weights without settings, which contain versions.
fn weights_digest(ended: &Value) -> Value {
    let checkpoints = ended["checkpoints"].as_array().expect("a list");
    checkpoints.last().expect("a last one")["checkpoint"]["tree"]["manifest"].clone()
}

#[test]
fn models_that_the_embedded_engine_lacks_are_trained_and_measured() {
    let (Some(python), Some(programs)) = (require_torch_python(), find_llama_cpp()) else {
        return;
    };
    let mut environment = Vec::from(environment(&python));
    environment.push(("FLOTILLA_EVALUATOR_ENGINE".to_owned(), "llama.cpp".to_owned()));
    environment.push(("FLOTILLA_LLAMA_CPP".to_owned(), programs));
    let fleet = Fleet::start_with("trainer,evaluator", &[], environment);
    let files = SpecFiles::create(fleet.path());
    let models = golden::architecture_set();
    for name in ["gemma2-tiny", "gemma3-images-tiny", "phi3-tiny", "qwen3moe-tiny"] {
        let run = fleet.submit(&files.write_adapter_spec(&models.model_path(name), 40, 20));
        let ended = fleet.await_success(&run, LIMIT);
        let evals = ended["evals"].as_array().expect("a list");
        let perplexity = |step: u64| {
            let eval = evals.iter().find(|eval| eval["step"].as_u64().unwrap_or_default() == step);
            let eval = eval.unwrap_or_else(|| panic!("{name} at step {step}: {evals:#?}"));
            assert!(eval["engine"].as_str().is_some_and(|it| it.starts_with("llama.cpp ")));
            eval["perplexity"].as_f64().expect("a number")
        };
        let checkpoints = ended["checkpoints"].as_array().expect("a list").iter();
        let losses: Vec<f64> =
            checkpoints.filter_map(|it| it["checkpoint"]["loss"].as_f64()).collect();
        assert!(losses.len() == 2 && losses[1] < losses[0], "{name} learnt nothing: {losses:?}");
        assert!((perplexity(40) - perplexity(20)).abs() > 0.1, "one adapter, twice: {evals:#?}");
        fleet.assert_clean_audit(&run);
    }
}

/// Runs the script that makes and measures a model outside of the table, and returns its output.
fn run_other_model(python: &Path, arguments: &[&Path]) -> String {
    let mut script = Command::new(python);
    script.arg("-s").arg(golden::other_model_script()).args(arguments).env("HF_HUB_OFFLINE", "1");
    let output = script.output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Writes a profile of a CPU on which llama.cpp computes in f32.
fn write_exact_profile(directory: &Path) -> PathBuf {
    let profiles = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../agents/hardware/profiles");
    let profile = std::fs::read_to_string(profiles.join("cpu.yaml")).expect("a profile");
    let path = directory.join("exact.yaml");
    let exact = profile.replace("devices: [], dtype: bf16", "devices: [], dtype: f32");
    std::fs::write(&path, exact).expect("a file");
    path
}

const OTHER_MODEL_SPEC: &str = "\
name: other
seed: 5
base: { model: other/model }
evals: [{ name: heldout, text: heldout.txt, n_ctx: 64 }]
raft:
  prompts: other.jsonl
  cycles: 1
  samples_per_prompt: 4
  sampling: { temperature: 1.0, max_new_tokens: 8 }
  verifier: { regex: { pattern: '(?s).' } }
  training: { max_steps: 2, batch_size: 4, learning_rate: 0.03, max_tokens: 64 }
  lora: { r: 4, alpha: 8 }
";

#[test]
fn models_outside_of_the_table_are_trained_sampled_and_measured() {
    let (Some(python), Some(programs)) = (require_torch_python(), find_llama_cpp()) else {
        return;
    };
    let Some(sources) = require_llama_cpp_sources() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let profile = write_exact_profile(directory.path()).display().to_string();
    let mut environment = Vec::from(environment(&python));
    environment.retain(|(name, _)| name != "FLOTILLA_PROFILE");
    environment.extend(
        [
            ("FLOTILLA_PROFILE", profile),
            ("FLOTILLA_GENERATOR_ENGINE", "llama.cpp".to_owned()),
            ("FLOTILLA_EVALUATOR_ENGINE", "llama.cpp".to_owned()),
            ("FLOTILLA_LLAMA_CPP", programs),
            ("FLOTILLA_LLAMA_CPP_SOURCES", sources.display().to_string()),
            ("FLOTILLA_SLOTS", "4".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    let variables = environment.clone();
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &[], environment);
    let files = SpecFiles::create(fleet.path());
    let other = files.path("other");
    run_other_model(&python, &[Path::new("make"), &other]);
    let prompts: String = (10..18).map(|n| format!("{{\"prompt\": \"{n}+1=\"}}\n")).collect();
    std::fs::write(files.path("other.jsonl"), prompts).expect("a file");
    let spec = files.path("other.yaml");
    std::fs::write(&spec, OTHER_MODEL_SPEC).expect("a file");

    let run = fleet.submit(&spec);
    let ended = fleet.await_success(&run, LIMIT);
    let out = fleet.path().join("exported");
    let (trained, place) = (format!("{run}/1"), out.display().to_string());
    let exported = fleet.run(&["checkpoint", "export", &trained, "--out", &place]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    let evals = ended["evals"].as_array().expect("a list");
    let (model, text) = (other.join("model"), files.path("heldout.txt"));
    let measured =
        run_other_model(&python, &[Path::new("measure"), &model, &text, Path::new("64"), &out]);
    let losses: Vec<f64> = measured.lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(losses.len(), 2, "{measured}");
    for (cycle, expected) in [0, 1].into_iter().zip(&losses) {
        let of_cycle = |eval: &&Value| eval["cycle"].as_u64().unwrap_or_default() == cycle;
        let eval = evals.iter().find(of_cycle).unwrap_or_else(|| panic!("{evals:#?}"));
        assert!(eval["engine"].as_str().is_some_and(|it| it.ends_with(" CPU f32")), "{eval:#}");
        let found = eval["meanNll"].as_f64().expect("a number");
        assert!((found / expected - 1.0).abs() < 1e-4, "{found} {expected} in cycle {cycle}");
    }
    assert!((losses[1] - losses[0]).abs() > 0.01, "two steps change the losses: {losses:?}");
    fleet.assert_clean_audit(&run);
    let (model, text) = (model.display().to_string(), text.display().to_string());
    let fixed = ["eval", "local", "--json", "--engine", "llama.cpp", "--n-ctx", "64"];
    let named = ["--model", &model, "--text", &text];
    let measured = run_flotilla(&[&fixed[..], &named].concat(), variables);
    assert_eq!(measured.code, 0, "{}", measured.stderr);
    let figures: Value = serde_json::from_str(&measured.stdout).expect("JSON");
    let found = figures["mean_nll"].as_f64().expect("a number");
    assert!((found / losses[0] - 1.0).abs() < 1e-4, "{found} {losses:?}");
}

#[test]
fn killed_and_drained_trainings_end_the_same_and_peft_reads_the_adapter() {
    let Some(python) = require_torch_python() else { return };
    let fleet = Fleet::start_with("trainer=2,evaluator", &[], environment(&python));
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let spec = files.write_adapter_spec(&model, STEPS, SAVE_EVERY);

    let undisturbed = fleet.submit(&spec);
    let expected = fleet.await_success(&undisturbed, LIMIT);
    let listed = fleet.run_json(&["checkpoint", "list", &undisturbed]).expect("checkpoints");
    let engine = listed[0]["checkpoint"]["engine"].as_str().expect("an engine").to_owned();
    assert!(engine.starts_with("pytorch-") && engine.contains("+peft-"), "{engine}");
    fleet.assert_clean_audit(&undisturbed);

    let run = fleet.submit(&spec);
    let first = await_step(&fleet, &run, u64::from(SAVE_EVERY));
    let victim = trainers(&fleet).first().and_then(Process::pid).expect("a trainer");
    kill_process(victim, Signal::KILL).expect("our own process can be killed");
    let second = await_step(&fleet, &run, first + 2 * u64::from(SAVE_EVERY));
    // Drains the agent that trains now, so that the other takes over. Statuses may be out of date.
    let busy = trainers(&fleet).first().and_then(agent_of).expect("a trainer is busy");
    assert_eq!(fleet.run(&["agents", "drain", &busy]).code, 0);
    let ended = fleet.await_success(&run, LIMIT);

    let begun = start_steps(&fleet, &run);
    println!(
        "trained by {engine}; began behind {begun:?}, killed behind {first}, drained behind {second}"
    );
    assert_eq!((begun.len(), begun[0]), (3, 0), "{begun:?}");
    assert!(
        begun[1] >= first && begun[2] >= second,
        "{begun:?} {first} {second}\n{}",
        fleet.log_tails()
    );
    assert_eq!(weights_digest(&ended), weights_digest(&expected));
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "the kill, and not the drain");
    fleet.assert_clean_audit(&run);
    assert!(trainers(&fleet).is_empty());

    let out = fleet.path().join("exported");
    let exported = fleet.run(&["checkpoint", "export", &run, "--out", &out.display().to_string()]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    let load = "import sys, peft, transformers\n\
                base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n\
                print(type(peft.PeftModel.from_pretrained(base, sys.argv[2])).__name__)";
    let loaded = Command::new(&python)
        .args(["-c", load])
        .args([&model, &out])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("python starts");
    let stdout = String::from_utf8_lossy(&loaded.stdout);
    assert_eq!(
        stdout.trim(),
        "PeftModelForCausalLM",
        "{}",
        String::from_utf8_lossy(&loaded.stderr)
    );
    let text = files.path("heldout.txt");
    let (model, out, text) =
        (model.display().to_string(), out.display().to_string(), text.display().to_string());
    let arguments = ["eval", "local", "--model", &model, "--text", &text, "--n-ctx", "64"];
    let tuned = run_flotilla(&[&arguments[..], &["--adapter", &out, "--json"]].concat(), []);
    assert_eq!(tuned.code, 0, "{}", tuned.stderr);
    let figure: Value = serde_json::from_str(&tuned.stdout).expect("JSON");
    assert!(figure["perplexity"].as_f64().is_some_and(f64::is_finite), "{figure}");
}

#[test]
fn an_agent_without_a_usable_pytorch_fails_at_its_start() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let fleet = Fleet::start_open("verifier");
    let nats = fleet.nats_url();
    let agent = |more: &[&str]| {
        let home = directory.path().display().to_string();
        let fixed = ["agent", "--nats", &nats, "--roles", "trainer", "--name", "extra"];
        let arguments = [&fixed[..], &["--agent-dir", &home], more].concat();
        run_flotilla(&arguments, [])
    };
    let absent = agent(&["--trainer-engine", "pytorch", "--python", "/nonexistent/python"]);
    assert_eq!(absent.code, 1, "{}", absent.stderr);
    assert!(absent.stderr.contains("no such file; pass an interpreter"), "{}", absent.stderr);
    let bare = directory.path().join("venv/bin");
    std::fs::create_dir_all(&bare).expect("a directory");
    std::fs::write(bare.join("python"), "").expect("a file");
    let python = bare.join("python").display().to_string();
    let bare = agent(&["--trainer-engine", "pytorch", "--python", &python]);
    assert_eq!(bare.code, 1, "{}", bare.stderr);
    assert!(bare.stderr.contains("torch is not installed beside"), "{}", bare.stderr);
}
