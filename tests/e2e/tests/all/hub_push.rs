//! Checkpoints that are pushed to a hub, read there by the hub's own library, and used again.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use e2e::{Fleet, Output, Sampling, SpecFiles, run_flotilla};
use hub_server::{COMMIT, HubServer};
use requirements::require_torch_python;
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);
const TOKEN: &str = "hf_writer";
const ADAPTER: &str = "adapter_model.safetensors";

/// A fleet, and a hub with the model `org/tiny`.
struct Hub {
    fleet: Fleet,
    server: HubServer,
    directory: TempDir,
}

impl Hub {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let model = SpecFiles::create(directory.path()).write_model();
        let models = directory.path().join("hub");
        fs::create_dir_all(models.join("org")).unwrap();
        fs::rename(model, models.join("org/tiny")).unwrap();
        fs::write(models.join("org/tiny/README.md"), "---\nlicense: apache-2.0\n---\n").unwrap();
        let server = HubServer::start(&models).unwrap();
        server.require_token(TOKEN);
        let environment = environment(&directory, &server, "fleet");
        let roles = "trainer,generator,verifier,evaluator";
        let fleet = Fleet::start_with(roles, &[], environment);
        Self { fleet, server, directory }
    }

    fn model_path(&self, name: &str) -> PathBuf {
        self.directory.path().join("hub/org").join(name)
    }

    /// Submits a RAFT run of one cycle and returns its id.
    fn train(&self, base: &str) -> String {
        let small = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 1 };
        let files = SpecFiles::create(self.fleet.path());
        let path = files.write_raft_spec("BASE", small);
        let spec = fs::read_to_string(&path).unwrap();
        fs::write(&path, spec.replace("checkpoint: BASE", base)).unwrap();
        let run = self.fleet.submit(&path);
        self.fleet.await_success(&run, LIMIT);
        run
    }

    fn push_as(&self, token: &str, arguments: &[&str]) -> Output {
        let dir = self.fleet.path().display().to_string();
        let mut environment = environment(&self.directory, &self.server, "fleet");
        environment.push(("HF_TOKEN".to_owned(), token.to_owned()));
        run_flotilla(&[&["checkpoint", "push", "--dir", &dir], arguments].concat(), environment)
    }

    fn push(&self, arguments: &[&str]) -> Value {
        let output = self.push_as(TOKEN, &[arguments, &["--json"]].concat());
        output.assert_success();
        serde_json::from_str(&output.stdout).unwrap()
    }

    fn export(&self, run: &str, more: &[&str]) -> PathBuf {
        let out = self.directory.path().join(format!("exported{}", more.len()));
        let path = out.display().to_string();
        let arguments = [&["checkpoint", "export", run, "--out", &path], more].concat();
        self.fleet.run(&arguments).assert_success();
        out
    }

    /// Returns the bytes of a file of a tree that a fact names.
    fn stored_file(&self, tree: &Value, name: &str) -> Vec<u8> {
        let path = tree["path"].as_str().unwrap();
        fs::read(self.fleet.path().join("store").join(path).join(name)).unwrap()
    }
}

/// Returns settings of the hub's client, with a cache of its own.
fn environment(directory: &TempDir, server: &HubServer, name: &str) -> Vec<(String, String)> {
    let home = directory.path().join(name);
    let path = |name: &str| home.join(name).display().to_string();
    [
        ("HF_HOME", path("hf")),
        ("HF_HUB_CACHE", path("hf/hub")),
        ("XDG_CACHE_HOME", path("cache")),
        ("HF_ENDPOINT", server.url()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

fn read_text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_pushed_adapter_has_a_card_and_is_trained_further_with_the_same_files() {
    let hub = Hub::start();
    let run = format!("{}/1", hub.train("model: org/tiny"));
    hub.push_as("", &[&run, "org/mine"]).assert_refused(&["hf auth login", "H108"]);
    hub.push_as("hf_other", &[&run, "org/mine"]).assert_refused(&["HF_TOKEN", "H108"]);
    let printed = hub.push_as("", &[&run, "org/mine", "--card"]);
    printed.assert_success();
    assert!(!hub.model_path("mine").exists());

    let first = hub.push(&[&run, "org/mine"]);
    assert_eq!(first["is_new"], true, "{first}");
    let card = read_text(&hub.model_path("mine/README.md"));
    assert_eq!(printed.stdout.trim_end(), card.trim_end());
    for words in [
        "base_model: \"org/tiny\"",
        "license: \"apache-2.0\"",
        "library_name: \"peft\"",
        "| pass rate, held-out prompts |",
        "| perplexity, heldout |",
        "verifier: `regex`",
        "flotilla run reproduce",
        &format!("base: {{ model: org/tiny@{COMMIT}, adapter: org/mine }}"),
    ] {
        assert!(card.contains(words), "{words}: {card}");
    }
    let agents = ["trainer-1", "generator-1", "verifier-1"];
    assert!(!agents.iter().any(|agent| card.contains(agent)), "{card}");
    let again = hub.push(&[&run, "org/mine"]);
    assert_eq!((&again["is_new"], &again["commit"]), (&false.into(), &first["commit"]));

    // The adapter of the store, back from the hub, has the same bytes.
    let exported = hub.export(&run, &[]);
    let pushed = fs::read(hub.model_path("mine").join(ADAPTER)).unwrap();
    assert_eq!(pushed, fs::read(exported.join(ADAPTER)).unwrap());
    let next = hub.train("model: org/tiny, adapter: org/mine");
    let base = hub.fleet.read_facts(&next)[0]["fact"]["base"].clone();
    for name in [ADAPTER, "adapter_config.json"] {
        let stored = hub.stored_file(&base["adapter"], name);
        assert_eq!(stored, fs::read(exported.join(name)).unwrap(), "{name}");
    }
    hub.fleet.assert_clean_audit(&next);
    check_with_python(&hub, &first);
}

/// Runs a script with the hub's library, and returns what it prints; `None` without PyTorch.
fn run_python(hub: &Hub, script: &str, arguments: &[&str]) -> Option<Value> {
    let output = Command::new(require_torch_python()?)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join(script))
        .args(arguments)
        .envs(environment(&hub.directory, &hub.server, "python"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Downloads the adapter with the hub's library, and loads it with its base.
fn check_with_python(hub: &Hub, pushed: &Value) {
    let out = hub.directory.path().join("downloaded");
    let path = out.display().to_string();
    let arguments = ["org/mine", "org/tiny", &path];
    let Some(found) = run_python(hub, "check_hub_model.py", &arguments) else { return };
    assert_eq!(found["commit"], pushed["commit"]);
    assert_eq!(found["model"], "PeftModelForCausalLM");
    assert_eq!(found["data"]["license"], "apache-2.0");
    let figures = found["figures"].as_array().unwrap();
    let kinds: Vec<&Value> = figures.iter().map(|figure| &figure[0]).collect();
    assert_eq!(kinds, ["pass@1", "perplexity"], "{figures:?}");
    for name in [ADAPTER, "README.md", "adapter_config.json"] {
        let there = fs::read(hub.model_path("mine").join(name)).unwrap();
        assert_eq!(fs::read(out.join(name)).unwrap(), there, "{name}");
    }
}

#[test]
fn a_pushed_model_is_the_base_of_a_run_and_replaces_other_forms() {
    let hub = Hub::start();
    let name = hub.train("model: org/tiny");
    let run = format!("{name}/1");
    hub.push(&[&run, "org/merged", "--private"]);
    let merged = hub.push(&[&run, "org/merged", "--private", "--format", "merged"]);
    let removed: Vec<&str> =
        merged["removed"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(removed, ["adapter_config.json", ADAPTER]);
    let exported = hub.export(&run, &["--format", "merged"]).join(&name);
    let next = hub.train("model: org/merged");
    let tree = hub.fleet.read_facts(&next)[0]["fact"]["base"]["tree"].clone();
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let stored = hub.stored_file(&tree, name);
        assert_eq!(stored, fs::read(exported.join(name)).unwrap(), "{name}");
    }

    // Another form goes to a branch of its own, and leaves the model alone.
    let branch = ["--branch", "gguf", "--format", "gguf", "--type", "q8_0"];
    let gguf = hub.push(&[&[run.as_str(), "org/merged"], &branch[..]].concat());
    let file = format!("{name}-Q8_0.gguf");
    let changed = gguf["changed"].as_array().unwrap();
    assert!(changed.contains(&file.clone().into()), "{gguf}");
    assert!(hub.model_path("merged@gguf").join(&file).is_file());
    assert!(!hub.model_path("merged@gguf/model.safetensors").exists());
    assert!(hub.model_path("merged/model.safetensors").is_file());
    let card = read_text(&hub.model_path("merged@gguf/README.md"));
    assert!(card.contains("library_name: \"gguf\""), "{card}");
    let out = hub.directory.path().join("gguf").display().to_string();
    let arguments = ["org/merged", "gguf", &file, &out];
    if let Some(found) = run_python(&hub, "check_hub_forms.py", &arguments) {
        assert_eq!(found["model"], "Qwen2ForCausalLM");
        assert_eq!(found["magic"], "GGUF");
        let downloaded = fs::read(found["gguf"].as_str().unwrap()).unwrap();
        assert_eq!(downloaded, fs::read(hub.model_path("merged@gguf").join(&file)).unwrap());
    }
    hub.push_as(TOKEN, &[&run, "org/merged@gguf", "--branch", "x"]).assert_refused(&["A102"]);
    hub.push_as(TOKEN, &[&run, "org/tiny", "--private"]).assert_refused(&["is public", "H112"]);
}
