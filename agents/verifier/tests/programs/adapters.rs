//! The verifiers of `examples/verifiers`, with the libraries that they are for.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command as Process, Stdio},
    time::Duration,
};

use line_programs::{CommandLauncher, LineBounds, LineProgram};
use requirements::{require_python_environment, require_torch_python};
use serde_json::{Value, json};
use wire::v1::verifier::{Command, How};

use crate::{
    command::{Place, open_to_all},
    rig::{item, judge_all, told},
};

/// A tiny reward model with random weights and a tokenizer of a few words.
const WRITE_MODEL: &str = "\
import sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
words = ['[PAD]', '[UNK]', 'two', 'and', 'four', 'five', 'is', 'the', 'sum']
known = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='[UNK]'))
known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
known = PreTrainedTokenizerFast(tokenizer_object=known, pad_token='[PAD]', unk_token='[UNK]')
known.save_pretrained(sys.argv[1])
torch.manual_seed(1)
config = BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1,
                    num_attention_heads=2, intermediate_size=16, num_labels=1)
BertForSequenceClassification(config).save_pretrained(sys.argv[1])
";

/// Judges with an adapter in this Python, outside of any sandbox: the environments of tests may lie
/// where only their owner can read. Returns the verdicts as they were written.
fn judge(python: &Path, adapter: &str, arguments: &[&str], requests: &[Value]) -> Vec<Value> {
    let adapter = adapter_path(adapter);
    let arguments: Vec<String> = arguments.iter().map(|it| (*it).to_owned()).collect();
    let python = python.to_owned();
    let launcher = CommandLauncher::new(move || {
        let mut command = Process::new(&python);
        command.arg(&adapter).args(&arguments);
        command.env("HF_HUB_OFFLINE", "1").env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("PYTHONPATH", test_modules());
        command
    });
    let bounds = LineBounds { start_timeout: Duration::from_secs(300), ..LineBounds::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let program = LineProgram::start(&launcher, bounds).await.expect("it starts");
        let mut verdicts = Vec::new();
        for request in requests {
            let request = request.as_object().expect("an object").clone();
            let answer = program.request_answer(request, Duration::from_secs(60)).await;
            verdicts.push(answer.expect("a verdict").into());
        }
        verdicts
    })
}

fn adapter_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/verifiers").join(name)
}

/// Returns the directory of the Python modules of tests.
fn test_modules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/python")
}

/// A server that ends with the test.
struct TestServer(Child);

impl TestServer {
    /// Starts a Python program that prints its address, and returns the address as well.
    fn start(python: &Path, program: &str) -> (Self, String) {
        let mut command = Process::new(python);
        command.arg(test_modules().join(program)).env("PYTHONDONTWRITEBYTECODE", "1");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("Python starts");
        let output = child.stdout.take().expect("its output");
        let server = Self(child);
        let mut address = String::new();
        BufReader::new(output).read_line(&mut address).expect("an address");
        (server, address.trim().to_owned())
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn request(prompt: &str, completion: &str, answer: Option<&str>) -> Value {
    let mut request =
        json!({ "prompt_id": "p", "index": 0, "prompt": prompt, "completion": completion });
    if let Some(answer) = answer {
        request["answer"] = answer.into();
    }
    request
}

#[test]
fn math_verify_compares_mathematical_answers() {
    let requirements = ["requirements-math-verify.txt"];
    let Some(python) = require_python_environment("math-verify", &requirements) else { return };
    let cases = [
        ("So it is \\boxed{\\frac{1}{2}}.", "1/2", "pass"),
        ("The answer is $0.5$.", "\\frac{1}{2}", "pass"),
        ("$(x+1)^2$", "x^2+2x+1", "pass"),
        ("so $x = 3$", "Therefore $x=3$", "pass"),
        ("I think 13", "12", "fail"),
        ("no idea", "12", "fail"),
        ("12", "", "error"),
    ];
    let asked: Vec<_> =
        cases.iter().map(|(text, answer, _)| request("", text, Some(answer))).collect();
    let verdicts = judge(&python, "math_answers.py", &[], &asked);
    for ((text, answer, outcome), verdict) in cases.iter().zip(verdicts) {
        assert_eq!(verdict["outcome"], *outcome, "{text} for {answer}: {verdict}");
    }
}

/// Copies the adapter to the place of judges, to be run by this Python instead of uv, as
/// docs/VERIFIERS.md describes. Returns its path.
fn install_math_answers(place: &Place, python: &Path) -> String {
    for name in ["line_server.py", "math_answers.py"] {
        let text = std::fs::read_to_string(adapter_path(name)).expect("an adapter");
        let text = match text.strip_prefix("#!/usr/bin/env -S uv run --script\n") {
            Some(program) => format!("#!{}\n{program}", python.display()),
            None => text,
        };
        let path = place.path("judges").join(name);
        std::fs::write(&path, text).expect("it is written");
        open_to_all(&path);
    }
    place.path("judges/math_answers.py").display().to_string()
}

#[test]
fn math_verify_runs_in_the_sandbox_with_an_environment_that_the_owner_opened() {
    let requirements = ["requirements-math-verify.txt"];
    let Some(python) = require_python_environment("math-verify", &requirements) else { return };
    let place = Place::create();
    let adapter = install_math_answers(&place, &python);
    // The environment's Python is a link to one that may lie anywhere.
    let real = python.canonicalize().expect("an interpreter");
    let prefixes = [&python, &real].map(|it| it.ancestors().nth(2).expect("a prefix").to_owned());
    let opened: Vec<PathBuf> = [place.path("judges")].into_iter().chain(prefixes.clone()).collect();
    let Some(toolchain) = place.tested(&opened, &[]) else { return };
    let command = Command {
        argv: vec![adapter],
        serve: true,
        processes: 1,
        timeout_s: 60.0,
        start_timeout_s: 300.0,
        paths: prefixes.map(|it| it.display().to_string()).into(),
        ..Command::default()
    };
    let cases = [
        ("So it is \\boxed{\\frac{1}{2}}.", "1/2", "pass"),
        ("I think 13", "12", "fail"),
        ("12", "", "error"),
    ];
    let items = cases.map(|(text, answer, _)| {
        let mut item = item("", text, json!({}));
        item.answer = Some(answer.into());
        item
    });
    let verdicts = judge_all(toolchain, How::Command(command), &items);
    for ((text, answer, outcome), verdict) in cases.iter().zip(verdicts) {
        assert_eq!(told(&verdict).0, *outcome, "{text} for {answer}: {verdict:?}");
    }
}

#[test]
fn a_taskset_of_verifiers_prints_its_prompts_and_judges_their_answers() {
    let requirements = ["requirements-verifiers.txt"];
    let Some(python) = require_python_environment("verifiers", &requirements) else { return };
    let printed = Process::new(&python)
        .arg(adapter_path("verifiers_taskset.py"))
        .args(["sums_taskset", "--prompts"])
        .env("PYTHONPATH", test_modules())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("Python starts");
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let prompts: Vec<Value> = String::from_utf8_lossy(&printed.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let conversation =
        |sum| json!([{ "role": "system", "content": "Add." }, { "role": "user", "content": sum }]);
    let expected = [("task-0", 0, "1+2="), ("task-1", 1, "3+4=")]
        .map(|(id, task, sum)| json!({ "id": id, "task": task, "messages": conversation(sum) }));
    assert_eq!(prompts, expected);
    let cases = [
        (0, "3", "pass", 1.0),
        (1, "8", "fail", 0.5),
        (1, " 7\n", "pass", 1.0),
        (0, "x", "fail", 0.0),
    ];
    let of_task = |(task, text, ..): &(u32, &str, &str, f64)| {
        let mut request = request("", text, None);
        request["task"] = (*task).into();
        request
    };
    let asked: Vec<Value> = cases.iter().map(of_task).collect();
    let verdicts = judge(&python, "verifiers_taskset.py", &["sums_taskset"], &asked);
    for ((task, text, outcome, reward), verdict) in cases.iter().zip(verdicts) {
        let judged = (verdict["outcome"].as_str(), verdict["reward"].as_f64());
        assert_eq!(judged, (Some(*outcome), Some(*reward)), "{text} for task {task}: {verdict}");
    }
}

#[test]
fn an_environment_of_openenv_rewards_a_completion_as_its_action() {
    let requirements = ["requirements-openenv.txt"];
    let Some(python) = require_python_environment("openenv", &requirements) else { return };
    let (_server, address) = TestServer::start(&python, "openenv_server.py");
    let cases = [
        ("8", json!({}), "pass", Some(1.0)),
        ("9", json!({}), "fail", Some(0.5)),
        ("8 kg", json!({ "unit": " kg" }), "pass", Some(1.0)),
        ("no idea", json!({}), "fail", Some(0.0)),
        ("8", json!({ "no_field": 1 }), "error", None),
    ];
    let of_episode = |(text, action, ..): &(&str, Value, &str, Option<f64>)| {
        let mut request = request("", text, None);
        request["reset"] = json!({ "seed": 4 });
        request["action"] = action.clone();
        request
    };
    let asked: Vec<Value> = cases.iter().map(of_episode).collect();
    let verdicts = judge(&python, "openenv_step.py", &[&address], &asked);
    for ((text, action, outcome, reward), verdict) in cases.iter().zip(verdicts) {
        let judged = (verdict["outcome"].as_str(), verdict["reward"].as_f64());
        assert_eq!(judged, (Some(*outcome), *reward), "{text} with {action}: {verdict}");
    }
}

fn write_reward_model(python: &Path) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let written = Process::new(python).args(["-c", WRITE_MODEL]).arg(directory.path()).output();
    let written = written.expect("Python starts");
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    directory
}

#[test]
fn a_reward_model_with_code_of_its_own_is_refused_without_a_question() {
    let Some(python) = require_torch_python() else { return };
    let model = write_reward_model(&python);
    let path = model.path().join("config.json");
    let text = std::fs::read(&path).expect("a configuration");
    let mut config: Value = serde_json::from_slice(&text).expect("JSON");
    config["model_type"] = "own".into();
    config["auto_map"] = json!({
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForSequenceClassification": "modeling_own.OwnModel",
    });
    std::fs::write(&path, config.to_string()).expect("it is written");
    let mut command = Process::new(&python);
    command.arg(adapter_path("reward_model.py")).arg(model.path());
    command.env("HF_HUB_OFFLINE", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    // The requests come later, so a question would wait for its answer.
    let (requests, sender) = std::io::pipe().expect("a pipe");
    let ended = command.stdin(requests).output().expect("Python starts");
    drop(sender);
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success(), "{error}");
    assert!(error.contains("trust_remote_code") && !error.contains("[y/N]"), "{error}");
}

#[test]
fn a_reward_model_gives_equal_texts_equal_rewards() {
    let Some(python) = require_torch_python() else { return };
    let directory = write_reward_model(&python);
    let model = directory.path().display().to_string();
    let texts = ["four", "five", "the sum is four", "four"];
    let asked = texts.map(|text| request("two and two", text, None));
    let arguments = [&model, "--sigmoid", "--pass-at", "0"];
    let verdicts = judge(&python, "reward_model.py", &arguments, &asked);
    let rewards: Vec<f64> = verdicts.iter().filter_map(|it| it["reward"].as_f64()).collect();
    assert_eq!(rewards.len(), texts.len(), "{verdicts:?}");
    assert!(verdicts.iter().all(|it| it["outcome"] == "pass"), "{verdicts:?}");
    assert!(rewards.iter().all(|reward| *reward > 0.0 && *reward < 1.0), "{rewards:?}");
    assert_eq!(rewards[0].to_bits(), rewards[3].to_bits(), "{rewards:?}");
    assert!(rewards[0] != rewards[1] && rewards[1] != rewards[2], "{rewards:?}");
}
