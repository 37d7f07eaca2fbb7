//! Base models from this machine, from the store, or from a hub.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use e2e::{Fleet, Output, Sampling, SpecFiles, run_flotilla, wait_until};
use hub_server::{COMMIT, HubServer};
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);

/// A machine with one model and its own cache directories.
struct Home {
    directory: TempDir,
    model: PathBuf,
}

impl Home {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let written = SpecFiles::create(directory.path()).write_model();
        let model = directory.path().join("models/tiny");
        fs::create_dir_all(model.parent().unwrap()).unwrap();
        fs::rename(written, &model).unwrap();
        Self { directory, model }
    }

    fn environment(&self, more: &[(&str, &str)]) -> Vec<(String, String)> {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let mut environment = vec![
            ("HF_HOME".to_owned(), path("hf")),
            ("XDG_CACHE_HOME".to_owned(), path("cache")),
            ("HF_HUB_CACHE".to_owned(), path("hf/hub")),
            // No server listens there.
            ("HF_ENDPOINT".to_owned(), "http://127.0.0.1:9".to_owned()),
        ];
        environment.extend(more.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        environment
    }

    fn spec(&self, base: &str) -> PathBuf {
        let path = self.directory.path().join("specs/tuned.yaml");
        let spec = format!(
            "\
name: tuned
base: {{ {base} }}
evals: [{{ name: heldout, text: heldout.txt, n_ctx: 64 }}]
sft:
  data: data.jsonl
  training: {{ max_steps: 2, batch_size: 4, max_tokens: 64 }}
  lora: {{ r: 2, alpha: 4 }}
"
        );
        fs::write(&path, spec).unwrap();
        path
    }

    fn write_raft_spec(&self, base: &str) -> PathBuf {
        let sampling = Sampling { prompts: 1, per_prompt: 1, max_new_tokens: 1, cycles: 1 };
        let path = SpecFiles::create(self.directory.path()).write_raft_spec("BASE", sampling);
        let spec = fs::read_to_string(&path).unwrap();
        fs::write(&path, spec.replace("checkpoint: BASE", base)).unwrap();
        path
    }

    fn submit(&self, fleet: &Fleet, base: &str, more: &[(&str, &str)]) -> Output {
        self.run("submit", fleet, base, more)
    }

    fn run(&self, command: &str, fleet: &Fleet, base: &str, more: &[(&str, &str)]) -> Output {
        let spec = self.spec(base).display().to_string();
        let dir = fleet.path().display().to_string();
        run_flotilla(&["run", command, &spec, "--dir", &dir], self.environment(more))
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns the directories of base models in the fleet's store.
fn stored_bases(fleet: &Fleet) -> Vec<String> {
    names_in(&fleet.path().join("store/models"))
}

#[test]
fn a_base_that_is_not_in_the_store_is_found_on_the_host_and_never_used_after_it_changed() {
    let home = Home::new();
    let models = home.model.parent().unwrap().display().to_string();
    let environment = home.environment(&[("FLOTILLA_MODELS", &models)]);
    let fleet = Fleet::start_with("trainer,evaluator", &[], environment);
    let run = fleet.submit(&home.spec("model: ../models/tiny, upload: never"));
    fleet.await_success(&run, LIMIT);
    let stored = stored_bases(&fleet);
    assert_eq!(stored.len(), 1);
    let base = fleet.path().join("store/models").join(&stored[0]);
    assert_eq!(names_in(&base), ["B3SUMS", "manifest.json"]);
    let audit = fleet.run_json(&["audit", &run, "--deep"]).unwrap();
    assert_eq!(audit["findings"], serde_json::json!([]));
    assert_eq!(audit["not_checked"], serde_json::json!([]));
    let note = audit["notes"][0].as_str().unwrap();
    assert!(note.starts_with("3 files of the base") && note.contains(&stored[0]), "{note}");

    // Cycle 0 of such a run is the base itself, and its files are not in the store.
    let reward = fleet.submit(&home.write_raft_spec("model: ../models/tiny, upload: never"));
    wait_until("the base is the run's first checkpoint", LIMIT, || {
        let listed = fleet.run_json(&["checkpoint", "list", &reward]).ok()?;
        listed.as_array().is_some_and(|list| !list.is_empty()).then_some(())
    });
    let export = fleet.path().join("out").display().to_string();
    fleet
        .run(&["checkpoint", "export", &format!("{reward}/0/0"), "--out", &export])
        .assert_refused(&["not in the store, by choice", "base.upload: always"]);
    assert_eq!(fleet.run(&["run", "cancel", &reward]).code, 0);

    // Changes the file in place, with the same size and modification time.
    let weights = home.model.join("model.safetensors");
    let before = fs::metadata(&weights).unwrap().modified().unwrap();
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    fs::File::options().write(true).open(&weights).unwrap().set_modified(before).unwrap();
    let second = fleet.submit(&home.spec(&format!("model: 'store:models/{}'", stored[0])));
    let message = wait_until("an agent reports the failure", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", &second]).ok()?;
        Some(shown["failures"].as_array()?.first()?["message"].as_str()?.to_owned())
    });
    for words in ["model.safetensors", "cannot be found", models.as_str(), "base.upload: always"] {
        assert!(message.contains(words), "{words}: {message}");
    }
}

#[test]
fn a_model_of_the_hub_is_downloaded_once_and_named_by_its_commit() {
    let home = Home::new();
    let hub = home.directory.path().join("hub");
    fs::create_dir_all(hub.join("org")).unwrap();
    fs::rename(&home.model, hub.join("org/tiny")).unwrap();
    let fleet = Fleet::start_with("trainer,evaluator", &[], home.environment(&[]));
    home.submit(&fleet, "model: org/tiny", &[]).assert_refused(&[
        "base.model",
        "org/tiny is not a directory here",
        "`hf download org/tiny`",
    ]);
    let server = HubServer::start(&hub).unwrap();
    let online = [("HF_ENDPOINT", server.url())];
    let online = online.each_ref().map(|(name, url)| (*name, url.as_str()));
    home.submit(&fleet, "model: org/none", &online).assert_refused(&["the hub has no config.json"]);
    // A conversation needs the small files, of which a download was cut off.
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    fs::write(hub.join("org/tiny/chat_template.jinja"), template).unwrap();
    let spec = home.spec("model: org/tiny");
    let chat = fs::read_to_string(&spec).unwrap().replace("sft:\n", "sft:\n  chat: true\n");
    fs::write(&spec, chat).unwrap();
    let (spec, dir) = (spec.display().to_string(), fleet.path().display().to_string());
    let check = || run_flotilla(&["run", "check", &spec, "--dir", &dir], home.environment(&online));
    server.refuse_next("tokenizer_config.json", 1, 503, "");
    check().assert_refused(&["tokenizer_config.json", "H105"]);
    check().assert_success();
    let submitted = home.submit(&fleet, "model: org/tiny", &online);
    assert_eq!(submitted.code, 0, "{submitted:?}");
    fleet.await_success(submitted.stdout.trim(), LIMIT);
    let stored = stored_bases(&fleet);
    let manifest = fleet.path().join("store/models").join(&stored[0]).join("manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    assert_eq!(manifest["about"], serde_json::json!({"repo": "org/tiny", "revision": COMMIT}));
    // A model on this machine needs no hub. The snapshot directory is the same base.
    let snapshot = home.directory.path().join("hf/hub/models--org--tiny");
    for base in ["model: org/tiny".to_owned(), format!("model: {}", snapshot.display())] {
        let submitted = home.submit(&fleet, &base, &[]);
        assert_eq!(submitted.code, 0, "{submitted:?}");
    }
    assert_eq!(stored_bases(&fleet), stored);
}

#[test]
fn a_base_outside_of_the_table_waits_for_agents_that_take_it() {
    let home = Home::new();
    let fleet = Fleet::start_with("trainer,evaluator", &[], home.environment(&[]));
    let path = home.model.join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    let config = config.replace("Qwen2", "Arcee").replace("qwen2", "arcee");
    let coded = config.replacen('{', r#"{"auto_map": {"AutoConfig": "own.Config"}, "#, 1);
    let base = "model: ../models/tiny";
    fs::write(&path, coded).unwrap();
    home.run("check", &fleet, base, &[]).assert_refused(&["auto_map", "own.py", "never run"]);
    fs::write(&path, config).unwrap();
    let waits = "waits: pool default has no trainer and no evaluator for arcee models";
    let spec = home.spec(base);
    let named = fs::read_to_string(&spec).unwrap();
    fs::write(&spec, named.replace("r: 2", "r: 2, target_modules: [their_proj]")).unwrap();
    fleet.run(&["run", "check", &spec.display().to_string()]).assert_success();
    let checked = home.run("check", &fleet, base, &[]);
    checked.assert_success();
    let text = format!("{}{}", checked.stdout, checked.stderr);
    assert!(text.contains(waits) && text.contains("--llama-cpp-sources DIR"), "{text}");
    let run = fleet.submit(&home.spec(base));
    let shown = fleet.run_json(&["run", "show", &run]).unwrap();
    assert!(shown["message"].as_str().is_some_and(|it| it.starts_with(waits)), "{shown:#}");
    assert_eq!(fleet.run(&["run", "cancel", &run]).code, 0);
}

#[test]
fn invalid_bases_are_refused_before_anything_is_stored() {
    let home = Home::new();
    let fleet = Fleet::start_with("verifier", &[], home.environment(&[]));
    let at = |name: &str| {
        let to = home.directory.path().join("models").join(name);
        fs::create_dir_all(&to).unwrap();
        for file in names_in(&home.model) {
            fs::copy(home.model.join(&file), to.join(&file)).unwrap();
        }
        to
    };
    let images = at("images").join("config.json");
    let config = fs::read_to_string(&images).unwrap().replace("qwen2", "qwen2_vl");
    fs::write(images, config.replace("ForCausalLM", "ForConditionalGeneration")).unwrap();
    let quantized = at("quantized").join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&quantized).unwrap()).unwrap();
    config["quantization_config"] = serde_json::json!({ "quant_method": "gptq", "bits": 4 });
    fs::write(quantized, config.to_string()).unwrap();
    fs::remove_file(at("mute").join("tokenizer.json")).unwrap();
    let cut = at("cut").join("model.safetensors");
    let bytes = fs::read(&cut).unwrap();
    fs::write(cut, &bytes[..bytes.len() - 1]).unwrap();
    let index = serde_json::json!({"weight_map": {"a": "model-1.safetensors"}});
    fs::write(at("torn").join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::write(home.directory.path().join("models/tiny.gguf"), "GGUF").unwrap();
    for (base, names) in [
        ("model: ../models/images", ["model_type `qwen2_vl`", "use a model of qwen2, qwen3"]),
        ("model: ../models/quantized", ["`quantization_config`", "quantised (gptq)"]),
        ("model: ../models/mute", ["has no tokenizer.json", "models/mute"]),
        ("model: ../models/cut", ["its header says", "download it again"]),
        ("model: ../models/torn", ["model-1.safetensors", "absent"]),
        ("model: ../models/tiny.gguf", ["a run trains", "flotilla eval local"]),
        ("model: ../models/none", ["is not a directory", "org/name"]),
        ("model: 'store:models/none'", ["the store has no", "models/none"]),
        ("model: 'store:../x'", ["'..'", "store"]),
        ("model: 'store:x', upload: never", ["base.upload", "omit it"]),
        ("model: ../models/tiny, upload: perhaps", ["perhaps", "never"]),
        ("checkpoint: base-7", ["there is no run base-7", "R101"]),
        ("model: org/typo", ["org/typo is not a directory here", "hf download"]),
    ] {
        home.run("check", &fleet, base, &[]).assert_refused(&names);
        home.submit(&fleet, base, &[]).assert_refused(&names);
    }
    home.run("check", &fleet, "model: ../models/tiny", &[]).assert_success();
    assert!(!fleet.path().join("store/models").exists());
}

#[test]
fn a_model_copied_into_the_store_is_used_in_place() {
    let home = Home::new();
    let fleet = Fleet::start_with("trainer,evaluator", &[], home.environment(&[]));
    let mirror = fleet.path().join("store/mirror/tiny");
    fs::create_dir_all(&mirror).unwrap();
    for file in names_in(&home.model) {
        fs::copy(home.model.join(&file), mirror.join(&file)).unwrap();
    }
    fs::write(mirror.join("README.md"), "theirs").unwrap();
    let run = fleet.submit(&home.spec("model: 'store:mirror/tiny'"));
    fleet.await_success(&run, LIMIT);
    assert!(!fleet.path().join("store/models").exists(), "a copy was made");
    let audit = fleet.run_json(&["audit", &run, "--deep"]).unwrap();
    assert_eq!(
        (&audit["findings"], &audit["notes"]),
        (&serde_json::json!([]), &serde_json::json!([]))
    );
    let before = fs::metadata(mirror.join("manifest.json")).unwrap().modified().unwrap();
    assert!(before <= SystemTime::now());
    let second = fleet.submit(&home.spec("model: 'store:mirror/tiny/'"));
    let base = |run: &str| fleet.read_facts(run)[0]["fact"]["base"]["tree"].clone();
    fleet.await_success(&second, LIMIT);
    assert_eq!(base(&run), base(&second));
    assert_eq!(fs::metadata(mirror.join("manifest.json")).unwrap().modified().unwrap(), before);
}
