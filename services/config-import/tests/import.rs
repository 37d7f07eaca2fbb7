//! Imports configurations of each program, as its users write them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use config_import::{
    ImportError, ImportOptions, ImportedSpec, KeyStatus, SourceProgram, TrainingTask, import_config,
};
use serde_json::Value;
use spec::RunSpec;

const OPTIONS: ImportOptions<'static> = ImportOptions {
    name: "imported",
    program: None,
    task: None,
    data: None,
    verifier: None,
    read_file: &|_| None,
};

fn read_config(name: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    fs::read_to_string(directory.join(name)).expect("a configuration")
}

fn import_file(name: &str, options: &ImportOptions<'_>) -> ImportedSpec {
    let imported = import_config(&read_config(name), options);
    imported
        .unwrap_or_else(|error| panic!("{name}: {error}: {:?}", std::error::Error::source(&error)))
}

fn spec_of(imported: &ImportedSpec) -> Value {
    RunSpec::parse(&imported.spec).unwrap_or_else(|error| panic!("{error}\n{}", imported.spec));
    spec::parse_yaml(&imported.spec).expect("YAML")
}

fn note_of<'a>(imported: &'a ImportedSpec, key: &str) -> (KeyStatus, &'a str) {
    let found = imported.notes.iter().find(|note| note.key == key);
    let note = found.unwrap_or_else(|| panic!("no note on {key}: {:#?}", imported.notes));
    (note.status, &note.explanation)
}

fn import_error(text: &str, options: &ImportOptions<'_>) -> String {
    let mut error: &dyn std::error::Error = &import_config(text, options).expect_err("a mistake");
    let mut chain = error.to_string();
    while let Some(source) = error.source() {
        chain = format!("{chain}: {source}");
        error = source;
    }
    chain
}

/// Lists the keys of a configuration as the report names them.
fn list_keys(path: &str, value: &Value, keys: &mut Vec<String>) {
    match value {
        Value::Object(section) if !section.is_empty() => {
            for (name, value) in section {
                let dot = if path.is_empty() { "" } else { "." };
                list_keys(&format!("{path}{dot}{name}"), value, keys);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (index, value) in items.iter().enumerate() {
                list_keys(&format!("{path}[{index}]"), value, keys);
            }
        }
        _ => keys.push(path.to_owned()),
    }
}

/// Each file with its program, its task, and the fields that it lacks.
const FILES: [(&str, SourceProgram, TrainingTask, &[&str]); 12] = [
    ("axolotl-qlora.yml", SourceProgram::Axolotl, TrainingTask::Sft, &[]),
    ("axolotl-full.yml", SourceProgram::Axolotl, TrainingTask::Sft, &[]),
    ("axolotl-grpo.yaml", SourceProgram::Axolotl, TrainingTask::Grpo, &["raft.verifier"]),
    (
        "axolotl-kto.yaml",
        SourceProgram::Axolotl,
        TrainingTask::Kto,
        &["raft.prompts", "raft.verifier"],
    ),
    ("trl-sft.yaml", SourceProgram::Trl, TrainingTask::Sft, &[]),
    ("trl-dpo.yaml", SourceProgram::Trl, TrainingTask::Dpo, &["raft.verifier"]),
    ("trl-grpo.json", SourceProgram::Trl, TrainingTask::Grpo, &[]),
    ("llama-factory-sft.yaml", SourceProgram::LlamaFactory, TrainingTask::Sft, &["sft.data"]),
    (
        "llama-factory-simpo.yaml",
        SourceProgram::LlamaFactory,
        TrainingTask::Simpo,
        &["raft.prompts", "raft.verifier"],
    ),
    ("unsloth-studio.yaml", SourceProgram::Unsloth, TrainingTask::Sft, &[]),
    ("unsloth-cli.json", SourceProgram::Unsloth, TrainingTask::Sft, &[]),
    ("halo-forge.yaml", SourceProgram::HaloForge, TrainingTask::Raft, &[]),
];

#[test]
fn each_configuration_is_recognized_and_becomes_a_valid_spec() {
    for (file, program, task, missing) in FILES {
        let imported = import_file(file, &OPTIONS);
        assert_eq!((imported.program, imported.task), (program.as_str(), task.as_str()), "{file}");
        let fields: Vec<&str> = imported.missing.iter().map(|it| it.field.as_str()).collect();
        assert_eq!(fields, missing, "{file}");
        assert_eq!(imported.check_complete().is_ok(), missing.is_empty(), "{file}");
        let options =
            ImportOptions { data: Some("all.jsonl"), verifier: Some("numeric"), ..OPTIONS };
        let complete = import_file(file, &options);
        assert_eq!(complete.missing, [], "{file}");
        let spec = spec_of(&complete);
        let section = if task == TrainingTask::Sft { "sft" } else { "raft" };
        assert!(spec[section].is_object(), "{file}: {}", complete.spec);
        let unknown = complete.notes.iter().find(|note| note.status == KeyStatus::Unknown);
        assert_eq!(unknown, None, "{file}");
    }
}

#[test]
fn every_key_is_in_the_report_once() {
    for (file, ..) in FILES {
        let mut keys = Vec::new();
        list_keys(
            "",
            &spec::parse_yaml(&read_config(file))
                .unwrap_or_else(|_| serde_json::from_str(&read_config(file)).unwrap()),
            &mut keys,
        );
        let imported = import_file(file, &OPTIONS);
        let mut count: BTreeMap<&str, usize> = BTreeMap::new();
        for note in &imported.notes {
            *count.entry(&note.key).or_default() += 1;
            assert!(note.explanation.len() > 5, "{file}: {note:?}");
        }
        assert!(count.values().all(|count| *count == 1), "{file}: {count:?}");
        for key in &keys {
            assert!(count.contains_key(key.as_str()), "{file}: no note on {key}");
        }
        let keys: BTreeSet<&str> = keys.iter().map(String::as_str).collect();
        for note in &imported.notes {
            let is_written = keys.contains(note.key.as_str());
            // Without this key all weights would be trained, which a RAFT run does not do.
            let is_default = note.status == KeyStatus::Default || note.key == "use_peft";
            assert!(is_written || is_default, "{file}: {note:?} is not in the file");
        }
    }
}

#[test]
fn an_adapter_of_axolotl_keeps_its_settings() {
    let imported = import_file("axolotl-qlora.yml", &OPTIONS);
    let spec = spec_of(&imported);
    let [sft, training, lora] = [&spec["sft"], &spec["sft"]["training"], &spec["sft"]["lora"]];
    assert_eq!(spec["base"]["model"], "mistralai/Mistral-7B-v0.3");
    assert_eq!((&spec["seed"], &sft["data"]), (&7.into(), &"data/support.jsonl".into()));
    assert_eq!((&sft["chat"], &lora["r"]), (&true.into(), &64.into()));
    assert_eq!(lora["alpha"], 128, "16 times the root of 64");
    assert_eq!((lora["dropout"].as_f64(), &lora["quantize"]), (Some(0.1), &"nf4".into()));
    assert_eq!((&training["epochs"], &training["batch_size"]), (&3.into(), &8.into()));
    assert_eq!((&training["max_tokens"], &training["packing"]), (&4096.into(), &true.into()));
    assert_eq!(training["learning_rate"].as_f64(), Some(2e-4));
    assert_eq!(
        (&training["schedule"], training["final_ratio"].as_f64()),
        (&"cosine".into(), Some(0.1))
    );
    for (key, status, words) in [
        ("load_in_4bit", KeyStatus::Used, "sft.lora.quantize: \"nf4\"; needs"),
        ("load_in_8bit", KeyStatus::Ignored, "same"),
        ("peft_use_dora", KeyStatus::Differs, "no DoRA"),
        ("peft_use_rslora", KeyStatus::Used, "square root"),
        ("warmup_steps", KeyStatus::Differs, "warmup_ratio: 0.1"),
        ("val_set_size", KeyStatus::Differs, "evals"),
        ("deepspeed", KeyStatus::Ignored, "ACROSS.md"),
        ("wandb_project", KeyStatus::Ignored, "TRACKERS.md"),
        ("wandb_entity", KeyStatus::Ignored, "no value"),
        ("hub_model_id", KeyStatus::Ignored, "checkpoint push"),
        ("train_on_inputs", KeyStatus::Ignored, "only answers"),
        ("optimizer", KeyStatus::Ignored, "AdamW"),
        ("lora_r", KeyStatus::Used, "sft.lora.r: 64"),
        ("datasets[0].path", KeyStatus::Used, "sft.data"),
        ("datasets[0].field_messages", KeyStatus::Ignored, "same"),
    ] {
        let (found, said) = note_of(&imported, key);
        assert!(found == status && said.contains(words), "{key}: {found:?}: {said}");
    }
}

#[test]
fn a_base_in_four_bits_stays_in_four_bits_under_an_adapter() {
    let axolotl = "base_model: a/b\nsequence_len: 512\ndatasets: [{ path: d.jsonl }]\n";
    let trl = "model_name_or_path: a/b\nmax_length: 512\ndataset_name: d.jsonl\n";
    let factory = "model_name_or_path: a/b\ncutoff_len: 512\n";
    let copy = factory.replace("a/b", "a/b-unsloth-bnb-4bit");
    let (used, ignored, differs) = (KeyStatus::Used, KeyStatus::Ignored, KeyStatus::Differs);
    for (text, quantize, key, status) in [
        (format!("{axolotl}adapter: qlora\n"), Some("nf4"), "adapter", used),
        (format!("{axolotl}adapter: lora\nload_in_4bit: true\n"), Some("nf4"), "adapter", used),
        (format!("{axolotl}adapter: lora\nload_in_8bit: true\n"), None, "load_in_8bit", differs),
        (format!("{axolotl}load_in_4bit: true\n"), None, "load_in_4bit", differs),
        (format!("{axolotl}load_in_4bit: false\n"), None, "load_in_4bit", ignored),
        (
            format!("{trl}use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4\n"),
            Some("nf4"),
            "bnb_4bit_quant_type",
            differs,
        ),
        (
            format!("{factory}quantization_bit: 4\nquantization_method: hqq\n"),
            Some("nf4"),
            "quantization_method",
            differs,
        ),
        (format!("{factory}quantization_bit: 8\n"), None, "quantization_bit", differs),
        (format!("{copy}lora_rank: 8\n"), Some("nf4"), "lora_rank", used),
        (format!("{copy}quantization_bit: 0\n"), None, "quantization_bit", ignored),
    ] {
        let imported =
            import_config(&text, &ImportOptions { data: Some("d.jsonl"), ..OPTIONS }).unwrap();
        let spec = spec_of(&imported);
        assert_eq!(spec["base"]["model"], "a/b", "{text}");
        assert_eq!(spec["sft"]["lora"]["quantize"].as_str(), quantize, "{text}");
        assert_eq!(note_of(&imported, key).0, status, "{text}");
    }
    let config = read_config("axolotl-grpo.yaml") + "load_in_4bit: true\n";
    let options = ImportOptions { verifier: Some("numeric"), ..OPTIONS };
    let imported = import_config(&config, &options).unwrap();
    assert_eq!(spec_of(&imported)["raft"]["lora"]["quantize"], "nf4");
}

#[test]
fn adapters_are_on_the_modules_that_a_program_chooses_by_default() {
    let trl = "model_name_or_path: a/b\nmax_length: 512\ndataset_name: d.jsonl\nuse_peft: true\n";
    let modules =
        |imported: &ImportedSpec| spec_of(imported)["sft"]["lora"]["target_modules"].clone();
    let few = serde_json::json!(["q_proj", "v_proj"]);
    for tail in ["", "lora_target_modules:\n"] {
        let imported = import_config(&format!("{trl}{tail}"), &OPTIONS).unwrap();
        assert_eq!(modules(&imported), few, "PEFT's default");
        let (status, said) = note_of(&imported, "lora_target_modules");
        assert!(status == KeyStatus::Default && said.ends_with("(the default of TRL)"), "{said}");
    }
    let linear = format!("{trl}lora_target_modules: all-linear\n");
    assert_eq!(modules(&import_config(&linear, &OPTIONS).unwrap()), Value::Null, "all modules");
    let imported = import_file("trl-grpo.json", &OPTIONS);
    let lora = &spec_of(&imported)["raft"]["lora"];
    assert_eq!(lora["target_modules"], Value::Null, "all, in place of all weights: {lora}");
    let other = "model_name_or_path: a/b\ncutoff_len: 512\nfinetuning_type: lora\n";
    let options = ImportOptions { data: Some("d.jsonl"), ..OPTIONS };
    assert_eq!(modules(&import_config(other, &options).unwrap()), Value::Null, "lora_target: all");
    let both = "base_model: a/b\nadapter: lora\nlora_target_linear: true\n\
                lora_target_modules: [q_proj]\n";
    assert_eq!(modules(&import_config(both, &options).unwrap()), Value::Null, "Axolotl adds both");
}

#[test]
fn only_implementations_of_adamw_are_the_same_optimizer() {
    let head = "model_name_or_path: a/b\nmax_length: 512\ndataset_name: d.jsonl\noptim: ";
    for (status, names) in [
        (KeyStatus::Ignored, "adamw_torch_fused adamw_8bit paged_adamw_8bit bnb_adamw8bit adamw"),
        (KeyStatus::Ignored, "AdamW_HF ao_adamw_8bit optimi_adamw"),
        (KeyStatus::Differs, "schedule_free_adamw galore_adamw apollo_adamw stable_adamw"),
        (KeyStatus::Differs, "grokadamw q_galore_adamw8bit adopt_adamw paged_lion_8bit sgd"),
    ] {
        for name in names.split(' ') {
            let imported = import_config(&format!("{head}{name}\n"), &OPTIONS).unwrap();
            assert_eq!(note_of(&imported, "optim").0, status, "{name}");
        }
    }
}

#[test]
fn answers_that_are_scored_in_another_way_are_reported() {
    let trl = "model_name_or_path: a/b\nmax_length: 512\ndataset_name: d.jsonl\n";
    for written in ["true", "false"] {
        let text = format!("{trl}assistant_only_loss: {written}\n");
        let imported = import_config(&text, &OPTIONS).unwrap();
        let (status, said) = note_of(&imported, "assistant_only_loss");
        assert_eq!(status, KeyStatus::Differs, "{written}");
        assert!(said.ends_with("neither all of it (false) nor all answers (true)"), "{said}");
    }
    let factory = "model_name_or_path: a/b\ncutoff_len: 512\n";
    for (tail, status) in [
        ("mask_history: true\n", KeyStatus::Ignored),
        ("mask_history: false\n", KeyStatus::Differs),
        ("mask_history: false\nstage: dpo\n", KeyStatus::Ignored),
    ] {
        let imported = import_config(&format!("{factory}{tail}"), &OPTIONS).unwrap();
        assert_eq!(note_of(&imported, "mask_history").0, status, "{tail}");
    }
}

#[test]
fn a_program_that_cuts_long_examples_differs_from_a_run() {
    for (file, key, cuts) in [
        ("trl-sft.yaml", "max_length", true),
        ("trl-dpo.yaml", "max_length", true),
        ("llama-factory-sft.yaml", "cutoff_len", true),
        ("unsloth-cli.json", "max_seq_length", true),
        ("axolotl-qlora.yml", "sequence_len", false),
    ] {
        let imported = import_file(file, &OPTIONS);
        let (status, said) = note_of(&imported, key);
        assert_eq!(status, KeyStatus::Used, "{file}");
        assert_eq!(said.ends_with("longer examples are skipped, not cut"), cuts, "{file}: {said}");
    }
    let trl = "model_name_or_path: a/b\ndataset_name: d.jsonl\ntruncation_mode: keep_end\n";
    let imported = import_config(&format!("{trl}max_length: 512\n"), &OPTIONS).unwrap();
    assert_eq!(note_of(&imported, "truncation_mode").0, KeyStatus::Differs);
}

#[test]
fn a_limit_without_a_value_differs_from_the_default() {
    let trl = "model_name_or_path: a/b\ndataset_name: d.jsonl\n";
    let options = ImportOptions { verifier: Some("numeric"), ..OPTIONS };
    let import = |tail: &str| import_config(&format!("{trl}{tail}"), &options).unwrap();
    for (tail, key, field, limit) in [
        ("packing: true\nmax_length:\n", "max_length", "sft.training.max_tokens", 1024),
        (
            "num_generations: 4\nmax_completion_length: null\n",
            "max_completion_length",
            "raft.sampling.max_new_tokens",
            256,
        ),
    ] {
        let imported = import(tail);
        let (status, said) = note_of(&imported, key);
        assert_eq!(status, KeyStatus::Differs, "{key}: {said}");
        assert!(said.starts_with(&format!("{field}: {limit};")), "{said}");
        assert!(said.ends_with("null is no limit, but a run has one"), "{said}");
        let spec = spec_of(&imported);
        let value = field.split('.').fold(&spec, |section, name| &section[name]);
        assert_eq!(*value, Value::from(limit), "{field}");
    }
    let imported = import("packing: true\n");
    assert_eq!(note_of(&imported, "max_length").0, KeyStatus::Default);
}

#[test]
fn a_full_training_has_no_adapter_and_names_what_differs() {
    let imported = import_file("axolotl-full.yml", &OPTIONS);
    let spec = spec_of(&imported);
    assert!(spec["sft"].get("lora").is_none(), "{}", imported.spec);
    assert_eq!(spec["sft"]["data"], "hub:tatsu-lab/alpaca");
    assert_eq!(spec["sft"]["training"]["warmup_ratio"].as_f64(), Some(0.05), "20 of 400 steps");
    assert_eq!(spec["sft"]["training"]["save_every"], 100);
    assert!(spec["sft"].get("chat").is_none(), "alpaca's prompts are plain");
    for key in ["optimizer", "lr_scheduler"] {
        assert_eq!(note_of(&imported, key).0, KeyStatus::Differs, "{key}");
    }
    assert_eq!(note_of(&imported, "adapter").0, KeyStatus::Default);
    assert_eq!(note_of(&imported, "fsdp").0, KeyStatus::Ignored);
}

#[test]
fn rewards_and_samples_become_those_of_a_raft_run() {
    let imported = import_file("trl-grpo.json", &OPTIONS);
    let spec = spec_of(&imported);
    let raft = &spec["raft"];
    assert_eq!(raft["prompts"], "prompts/math.jsonl");
    assert_eq!((&raft["samples_per_prompt"], &raft["cycles"]), (&16.into(), &3.into()));
    let sampling = &raft["sampling"];
    assert_eq!((&sampling["max_new_tokens"], &sampling["top_k"]), (&1024.into(), &0.into()));
    let dapo = &raft["objective"]["dapo"];
    assert_eq!((dapo["kl"].as_f64(), dapo["clip_high"].as_f64()), (Some(0.04), Some(0.28)));
    let stages = raft["verifier"]["chain"]["stages"].as_array().unwrap();
    assert_eq!((stages.len(), stages[1]["weight"].as_f64()), (2, Some(0.2)));
    let training = &raft["training"];
    assert_eq!((&training["epochs"], &training["max_tokens"]), (&2.into(), &1280.into()));
    assert_eq!(note_of(&imported, "use_peft").0, KeyStatus::Differs, "a LoRA adapter is trained");

    let imported =
        import_file("axolotl-grpo.yaml", &ImportOptions { verifier: Some("numeric"), ..OPTIONS });
    let raft = &spec_of(&imported)["raft"];
    assert!(raft["objective"]["dr_grpo"].is_object(), "rewards are not scaled: {raft}");
    assert_eq!(raft["selection"]["finished"], true);
    assert_eq!(raft["lora"]["target_modules"], serde_json::json!(["q_proj", "v_proj"]));
    assert!(note_of(&imported, "lora_target_modules").1.contains("lm_head"));
    assert_eq!(raft["prompts"], "hub:openai/gsm8k:main/train");
    assert_eq!(note_of(&imported, "datasets[0].name").0, KeyStatus::Used);
    assert_eq!(note_of(&imported, "trl.vllm_server_port").0, KeyStatus::Ignored);
}

#[test]
fn objectives_clip_and_scale_as_trl_does_by_default() {
    let trl = "model_name_or_path: a/b\ndataset_name: p.jsonl\nnum_generations: 4\n";
    let axolotl = "base_model: a/b\nrl: grpo\ndatasets: [{ path: p.jsonl }]\nsequence_len: 512\n";
    let options = ImportOptions { verifier: Some("numeric"), ..OPTIONS };
    let import = |text: &str| import_config(text, &options).unwrap();
    let clip = |low: f64, high: f64| serde_json::json!({ "clip_low": low, "clip_high": high });
    for (text, name, expected) in [
        (trl.to_owned(), "dapo", clip(0.2, 0.2)),
        (format!("{trl}epsilon: 0.1\n"), "dapo", clip(0.1, 0.1)),
        (format!("{trl}epsilon_high: 0.28\n"), "dapo", clip(0.2, 0.28)),
        (format!("{trl}importance_sampling_level: sequence\n"), "gspo", clip(0.2, 0.2)),
        (format!("{trl}loss_type: cispo\n"), "cispo", serde_json::json!({ "max_ratio": 0.2 })),
        (
            format!("{trl}loss_type: cispo\nepsilon: 0.1\nepsilon_high: 5\n"),
            "cispo",
            serde_json::json!({ "max_ratio": 5 }),
        ),
        (axolotl.to_owned(), "dapo", clip(0.2, 0.2)),
    ] {
        let imported = import(&text);
        assert_eq!(spec_of(&imported)["raft"]["objective"][name], expected, "{text}");
    }
    let imported = import(trl);
    let (status, said) = note_of(&imported, "epsilon");
    assert!(status == KeyStatus::Default && said.contains("dapo.clip_low: 0.2"), "{said}");
    assert_eq!(note_of(&imported, "scale_rewards").0, KeyStatus::Default);
    for (text, key) in [(trl, "scale_rewards"), (axolotl, "trl.scale_rewards")] {
        let loss =
            if text == trl { "loss_type: dr_grpo\n" } else { "trl: { loss_type: dr_grpo }\n" };
        let imported = import(&format!("{text}{loss}"));
        let (status, said) = note_of(&imported, key);
        assert!(status == KeyStatus::Differs && said.contains("does not divide"), "{key}: {said}");
    }
    let imported = import(&format!("{trl}loss_type: dr_grpo\nscale_rewards: none\n"));
    assert_eq!(note_of(&imported, "scale_rewards").0, KeyStatus::Used);
}

#[test]
fn preferences_become_objectives_of_the_runs_own_pairs() {
    let options = ImportOptions { verifier: Some("numeric"), data: Some("p.jsonl"), ..OPTIONS };
    for (file, objective) in [
        ("trl-dpo.yaml", serde_json::json!({ "dpo": { "beta": 0.05 } })),
        ("llama-factory-simpo.yaml", serde_json::json!({ "simpo": { "beta": 2, "gamma": 1 } })),
        ("axolotl-kto.yaml", serde_json::json!({ "kto": { "beta": 0.3, "desirable": 0.8 } })),
    ] {
        let imported = import_file(file, &options);
        assert_eq!(spec_of(&imported)["raft"]["objective"], objective, "{file}");
    }
    let imported = import_file("trl-dpo.yaml", &OPTIONS);
    let (status, said) = note_of(&imported, "dataset_name");
    assert!(status == KeyStatus::Differs && said.contains("only prompts are read"), "{said}");
    assert!(
        imported.spec.contains("  # verifier: { numeric: {} }   # missing:"),
        "{}",
        imported.spec
    );
    let imported = import_file("axolotl-kto.yaml", &OPTIONS);
    assert!(note_of(&imported, "datasets[1].path").1.contains("combine the 2"));
}

#[test]
fn data_sets_of_the_hub_are_named_with_subset_and_split() {
    let head = "model_name_or_path: a/b\nmax_length: 512\n";
    for (tail, data, status) in [
        ("dataset_name: org/set", "hub:org/set", KeyStatus::Used),
        ("dataset_name: org/set\ndataset_train_split: test", "hub:org/set:test", KeyStatus::Used),
        (
            "dataset_name: org/set\ndataset_train_split: 'train[:9]'",
            "hub:org/set",
            KeyStatus::Differs,
        ),
        ("dataset_name: d/x.csv.gz\ndataset_train_split: test", "d/x.csv.gz", KeyStatus::Differs),
    ] {
        let imported = import_config(&format!("{head}{tail}\n"), &OPTIONS).unwrap();
        assert_eq!(spec_of(&imported)["sft"]["data"], data, "{tail}");
        let key = if tail.contains("split") { "dataset_train_split" } else { "dataset_name" };
        assert_eq!(note_of(&imported, key).0, status, "{tail}");
    }
    let imported = import_config(&format!("{head}dataset_name: imdb\n"), &OPTIONS).unwrap();
    assert_eq!(imported.missing[0].field, "sft.data");
    assert!(note_of(&imported, "dataset_name").1.contains("hub:ORG/NAME"));
}

#[test]
fn columns_with_other_names_are_mapped() {
    let head = "base_model: a/b\nadapter: lora\nsequence_len: 512\n";
    let two = "field_instruction: question\n    field_output: reply\n    field_input: input\n";
    let text = format!("{head}datasets:\n  - path: d.jsonl\n    type: alpaca\n    {two}");
    let imported = import_config(&text, &OPTIONS).unwrap();
    let columns = serde_json::json!({ "instruction": "question", "output": "reply" });
    assert_eq!(spec_of(&imported)["sft"]["columns"], columns);
    let (status, said) = note_of(&imported, "datasets[0].field_output");
    assert!(status == KeyStatus::Used && said == "sft.columns.output: \"reply\"", "{said}");
    assert_eq!(note_of(&imported, "datasets[0].field_input").0, KeyStatus::Ignored);
    let other = format!("{text}  - path: e.jsonl\n    field_messages: turns\n");
    let imported = import_config(&other, &ImportOptions { data: Some("all.jsonl"), ..OPTIONS });
    let imported = imported.unwrap();
    assert_eq!(spec_of(&imported)["sft"]["columns"], Value::Null, "their columns differ");
    for key in ["datasets[0].field_output", "datasets[1].field_messages"] {
        assert_eq!(note_of(&imported, key).0, KeyStatus::Differs, "{key}");
    }
    let nested = "type: { field_instruction: q, format: '[{instruction}]' }";
    let nested = format!("{head}datasets:\n  - path: d.jsonl\n    {nested}\n");
    let imported = import_config(&nested, &OPTIONS).unwrap();
    assert_eq!(spec_of(&imported)["sft"]["columns"]["instruction"], "q");
    assert_eq!(note_of(&imported, "datasets[0].type.format").0, KeyStatus::Differs);
    let trl = "model_name_or_path: a/b\nmax_length: 512\ndataset_name: a.csv\n";
    let imported = import_config(&format!("{trl}dataset_text_field: body\n"), &OPTIONS).unwrap();
    assert_eq!(spec_of(&imported)["sft"]["columns"], serde_json::json!({ "text": "body" }));
    let registry = r#"{"tickets": {"hf_hub_url": "org/set", "subset": "main", "split": "old",
        "columns": {"prompt": "q", "response": "a", "query": "", "history": null}}, "pairs":
        {"file_name": "p.json", "columns": {"prompt": "q", "query": "r", "chosen": "c"}}}"#;
    let registry = |path: &str| path.ends_with("dataset_info.json").then(|| registry.to_owned());
    let options = ImportOptions { read_file: &registry, ..OPTIONS };
    let imported = import_file("llama-factory-sft.yaml", &options);
    let sft = &spec_of(&imported)["sft"];
    assert_eq!(sft["data"], "hub:org/set:main/old");
    assert_eq!(sft["columns"], serde_json::json!({ "instruction": "q", "output": "a" }));
    assert!(note_of(&imported, "dataset").1.contains("columns { instruction: \"q\""));
    let pairs = read_config("llama-factory-sft.yaml").replace("tickets", "pairs");
    let imported = import_config(&pairs, &options).unwrap();
    let (status, said) = note_of(&imported, "dataset");
    assert!(status == KeyStatus::Differs && said.contains("prompts in two columns"), "{said}");
}

#[test]
fn data_to_measure_on_becomes_evals_or_held_out_prompts() {
    let trl = "model_name_or_path: a/b\nmax_length: 512\ndataset_name: org/set\n";
    let options = ImportOptions { verifier: Some("numeric"), ..OPTIONS };
    let import = |text: &str| import_config(&format!("{trl}{text}"), &options).unwrap();
    let imported = import("dataset_config: main\ndataset_test_split: validation\n");
    let suite = serde_json::json!([{ "name": "eval", "text": "hub:org/set:main/validation" }]);
    assert_eq!(spec_of(&imported)["evals"], suite);
    assert_eq!(note_of(&imported, "dataset_test_split").0, KeyStatus::Used);
    let imported = import("dataset_test_split: test\nnum_generations: 4\n");
    assert_eq!(spec_of(&imported)["raft"]["heldout"], "hub:org/set:test");
    let imported = import("dataset_test_split: 'train[90%:]'\n");
    assert_eq!(note_of(&imported, "dataset_test_split").0, KeyStatus::Differs);
    assert_eq!(spec_of(&imported)["evals"], Value::Null);
    let imported = import_config(
        &format!("{trl}dataset_test_split: test\n").replace("org/set", "d.jsonl"),
        &OPTIONS,
    );
    assert_eq!(note_of(&imported.unwrap(), "dataset_test_split").0, KeyStatus::Ignored);

    let axolotl = "base_model: a/b\nsequence_len: 512\ndatasets: [{ path: d.jsonl }]\n\
                   test_datasets:\n  - path: json\n    split: train\n    data_files: [e.csv]\n  \
                   - path: org/held\n    split: test\n    field_messages: turns\n";
    let imported = import_config(axolotl, &OPTIONS).unwrap();
    let suites = serde_json::json!([
        { "name": "eval-1", "text": "e.csv" },
        { "name": "eval-2", "text": "hub:org/held:test", "columns": { "conversations": "turns" } },
    ]);
    assert_eq!(spec_of(&imported)["evals"], suites);
    assert_eq!(note_of(&imported, "test_datasets[0].split").0, KeyStatus::Ignored);
    let raft = format!("{axolotl}rl: grpo\n");
    let imported = import_config(&raft, &OPTIONS).unwrap();
    let (status, said) = note_of(&imported, "test_datasets[1].path");
    assert!(status == KeyStatus::Differs && said.contains("takes one file"), "{said}");

    let registry = |path: &str| {
        let list = r#"{"tickets": {"file_name": "t.json"}, "held": {"file_name": "h.parquet"}}"#;
        path.ends_with("dataset_info.json").then(|| list.to_owned())
    };
    let config =
        read_config("llama-factory-sft.yaml").replace("val_size: 0.1", "eval_dataset: held");
    let imported = import_config(&config, &ImportOptions { read_file: &registry, ..OPTIONS });
    assert_eq!(spec_of(&imported.unwrap())["evals"][0]["text"], "data/h.parquet");
    let alone = import_config(&config, &OPTIONS).unwrap();
    assert!(note_of(&alone, "eval_dataset").1.contains("cannot be read"));
}

#[test]
fn data_sets_of_llama_factory_are_looked_up() {
    let registry = |path: &str| {
        (path == "data/dataset_info.json")
            .then(|| r#"{"tickets": {"file_name": "tickets.json"}}"#.to_owned())
    };
    let imported =
        import_file("llama-factory-sft.yaml", &ImportOptions { read_file: &registry, ..OPTIONS });
    let spec = spec_of(&imported);
    let sft = &spec["sft"];
    assert_eq!(sft["data"], "data/tickets.json");
    assert_eq!(sft["chat"]["system"], "You answer in one sentence.");
    assert_eq!(sft["training"]["epochs"], 3, "2.5 are rounded up");
    assert_eq!(sft["lora"]["alpha"], 16, "twice the rank");
    for (key, status) in [
        ("quantization_bit", KeyStatus::Used),
        ("quantization_method", KeyStatus::Ignored),
        ("max_samples", KeyStatus::Differs),
        ("report_to", KeyStatus::Ignored),
        ("num_train_epochs", KeyStatus::Used),
    ] {
        assert_eq!(note_of(&imported, key).0, status, "{key}");
    }
    let alone = import_file("llama-factory-sft.yaml", &OPTIONS);
    assert!(note_of(&alone, "dataset").1.contains("data/dataset_info.json cannot be read"));
}

#[test]
fn an_entry_of_llama_factory_s_list_is_read_as_it_reads_it() {
    let list = r#"{
        "tickets": {"hf_hub_url": "org/set", "ms_hub_url": "other/set", "file_name": "t.json",
            "subset": "main", "tags": {"role_tag": "role", "user_tag": "user"}},
        "some": {"file_name": "t.json", "num_samples": 100, "folder": "f", "formatting": "sharegpt",
            "tags": {"role_tag": "from", "user_tag": "customer", "assistant_tag": "gpt"}},
        "slice": {"hf_hub_url": "org/set", "split": "train[:9]"},
        "elsewhere": {"ms_hub_url": "org/set", "file_name": "t.json"},
        "plain": {"file_name": "p.json"}}"#;
    let registry = |path: &str| (path == "data/dataset_info.json").then(|| list.to_owned());
    let options = ImportOptions { read_file: &registry, verifier: Some("numeric"), ..OPTIONS };
    let config = |name: &str| read_config("llama-factory-sft.yaml").replace("tickets", name);
    for (name, data, status, words) in [
        ("tickets", "hub:org/set:main/train", KeyStatus::Used, "hub:org/set:main/train"),
        ("some", "data/t.json", KeyStatus::Differs, "num_samples, folder, tags.user_tag of some"),
        ("slice", "hub:org/set", KeyStatus::Differs, "split of slice in data/dataset_info.json"),
    ] {
        let imported = import_config(&config(name), &options).unwrap();
        assert_eq!(spec_of(&imported)["sft"]["data"], data, "{name}");
        let (found, said) = note_of(&imported, "dataset");
        assert!(found == status && said.contains(words), "{name}: {found:?}: {said}");
    }
    let imported = import_config(&config("elsewhere"), &options).unwrap();
    assert!(note_of(&imported, "dataset").1.contains("has no file for elsewhere"));
    let two = import_config(&config("plain, some, plain"), &options).unwrap();
    let (_, said) = note_of(&two, "dataset");
    assert!(said.contains("combine the 3") && said.contains("num_samples"), "{said}");
    let evals = config("plain").replace("val_size: 0.1", "eval_dataset: some, plain");
    let imported = import_config(&evals, &options).unwrap();
    let (status, said) = note_of(&imported, "eval_dataset");
    assert!(status == KeyStatus::Differs && said.contains("num_samples"), "{said}");
    let pairs = read_config("llama-factory-simpo.yaml").replace("chosen_and_rejected", "some");
    let imported = import_config(&pairs, &options).unwrap();
    let (_, said) = note_of(&imported, "dataset");
    assert!(said.contains("only prompts are read") && said.contains("num_samples"), "{said}");
}

#[test]
fn a_4_bit_copy_of_unsloth_becomes_its_original() {
    let imported = import_file("unsloth-studio.yaml", &OPTIONS);
    let spec = spec_of(&imported);
    assert_eq!(spec["base"]["model"], "unsloth/Qwen2.5-7B-Instruct");
    let training = &spec["sft"]["training"];
    assert_eq!((&training["max_steps"], &training["epochs"]), (&60.into(), &0.into()));
    let lora = &spec["sft"]["lora"];
    assert_eq!(lora["target_modules"].as_array().unwrap().len(), 4);
    assert_eq!(lora["quantize"], "nf4");
    assert!(note_of(&imported, "model").1.contains("check that it exists"));
    let imported = import_file("unsloth-cli.json", &OPTIONS);
    assert_eq!(spec_of(&imported)["sft"]["lora"]["alpha"], 256, "32 times the root of 64");
}

#[test]
fn a_run_of_halo_forge_keeps_its_schedules() {
    let imported = import_file("halo-forge.yaml", &OPTIONS);
    let spec = spec_of(&imported);
    assert_eq!(spec["base"]["model"], "Qwen/Qwen2.5-Coder-0.5B");
    let raft = &spec["raft"];
    assert_eq!(raft["prompts"], "data/mbpp.jsonl");
    assert_eq!(raft["chat"]["system"], "Say \"yes\".");
    assert_eq!((&raft["cycles"], &raft["samples_per_prompt"]), (&5.into(), &16.into()));
    let rate = &raft["training"]["learning_rate"]["decay"];
    assert_eq!((rate["from"].as_f64(), rate["factor"].as_f64()), (Some(5e-5), Some(0.9)));
    assert_eq!(raft["training"]["batch_size"], 32);
    assert_eq!(raft["training"]["warmup_ratio"].as_f64(), Some(0.0), "0 stays 0");
    assert_eq!(raft["selection"]["min_reward"]["linear"][1].as_f64(), Some(0.7));
    assert_eq!(raft["selection"]["keep_share"]["linear"][0].as_f64(), Some(0.8));
    assert_eq!(raft["selection"]["at_least"], 100);
    assert_eq!(raft["lora"]["dropout"].as_f64(), Some(0.0), "0 stays 0");
    assert_eq!(raft["verifier"]["compile"]["run"].as_bool(), Some(true));
    for (key, expected) in [
        ("raft.num_cycles", KeyStatus::Used),
        ("num_cycles", KeyStatus::Differs),
        ("training.learning_rate", KeyStatus::Used),
        ("output_dir", KeyStatus::Ignored),
        ("hardware.dtype", KeyStatus::Ignored),
        ("lora.dropout", KeyStatus::Used),
        ("verifier.host", KeyStatus::Ignored),
        ("curriculum_strategy", KeyStatus::Differs),
        ("curriculum_progressive_start", KeyStatus::Ignored),
    ] {
        assert_eq!(note_of(&imported, key).0, expected, "{key}");
    }
}

#[test]
fn halo_forge_s_defaults_and_verifiers_are_used() {
    let import = |text: &str| import_config(text, &OPTIONS).unwrap();
    let imported = import("prompts: p.jsonl");
    let raft = &spec_of(&imported)["raft"];
    assert_eq!(raft["chat"], true);
    assert_eq!(raft["training"]["learning_rate"]["decay"]["from"].as_f64(), Some(5e-5));
    assert_eq!(raft["selection"]["policy"], "top_percent");
    assert_eq!(raft["verifier"]["compile"]["language"], "c++");
    assert_eq!(note_of(&imported, "system_prompt").0, KeyStatus::Default);
    for (kind, ours) in [
        ("mbpp", "python"),
        ("rust", "compile"),
        ("unittest", "pytest"),
        ("execution", "stdio"),
        ("math", "numeric"),
        ("msvc", "command"),
    ] {
        let imported = import(&format!("prompts: p.jsonl\nverifier: {{ type: {kind} }}"));
        let verifier = &spec_of(&imported)["raft"]["verifier"];
        assert!(verifier.get(ours).is_some(), "{kind}: {}", imported.spec);
    }
    for (shaping, expected) in [
        ("adaptive", "adaptive"),
        ("warmup", "min_reward: [0.1, 0.5]"),
        ("fixed", "min_reward: 0.5"),
    ] {
        let imported = import(&format!("prompts: p.jsonl\nreward_shaping_strategy: {shaping}"));
        assert!(imported.spec.contains(expected), "{}", imported.spec);
    }
}

#[test]
fn a_value_of_another_form_is_an_error_with_its_line_and_key() {
    let config = read_config("axolotl-qlora.yml");
    for (from, to, words) in [
        ("lora_r: 64", "lora_r: many", ["key lora_r: expected a whole number", "\"many\" (R102)"]),
        ("num_epochs: 3", "num_epochs: [3]", ["key num_epochs: expected a number", "[3]"]),
        ("sample_packing: true", "sample_packing: 1", ["key sample_packing", "true or false"]),
        ("path: data/support.jsonl", "path: 7", ["key datasets[0].path", "a text"]),
        ("learning_rate: 2e-4", "learning_rate: 20", ["key learning_rate", "from 1e-12 to 10"]),
        ("lora_dropout: 0.1", "lora_dropout: 2", ["key lora_dropout", "from 0 to 0.99"]),
    ] {
        let line = 1 + config.lines().position(|line| line.contains(from)).expect(from);
        let error = import_error(&config.replace(from, to), &OPTIONS);
        for words in words.iter().copied().chain([format!("line {line}: ").as_str()]) {
            assert!(error.contains(words), "no {words:?} in {error}");
        }
    }
    let error = import_error("rl: ppo\nbase_model: a/b\nsequence_len: 8", &OPTIONS);
    assert!(error.contains("line 1: key rl") && error.contains("--task"), "{error}");
    let options = ImportOptions { verifier: Some("{"), ..OPTIONS };
    assert!(import_error(&read_config("trl-dpo.yaml"), &options).contains("--verifier"));
    let options = ImportOptions { verifier: Some("nothing: {}"), ..OPTIONS };
    assert!(import_error(&read_config("trl-dpo.yaml"), &options).contains("nothing"));
}

#[test]
fn an_unknown_key_is_named_with_a_suggestion() {
    let config = read_config("axolotl-full.yml") + "\nsequense_len: 7\ncolour: blue\n";
    let imported = import_config(&config, &OPTIONS).unwrap();
    let (status, said) = note_of(&imported, "sequense_len");
    assert!(status == KeyStatus::Unknown && said.ends_with("did you mean sequence_len?"), "{said}");
    assert_eq!(note_of(&imported, "colour"), (KeyStatus::Unknown, "not a known key of Axolotl"));
    let lines = imported.report_lines();
    assert!(lines.contains(&"unknown colour: not a known key of Axolotl".to_owned()), "{lines:?}");
}

#[test]
fn a_program_that_is_not_recognized_must_be_named() {
    let shared = "learning_rate: 1e-4\nseed: 1\nmax_steps: 5\n";
    assert!(import_error(shared, &OPTIONS).contains("name one with --from (A100)"));
    let program = Some(SourceProgram::Trl);
    let named = import_config(shared, &ImportOptions { program, ..OPTIONS }).unwrap();
    let fields: Vec<&str> = named.missing.iter().map(|it| it.field.as_str()).collect();
    assert_eq!(fields, ["base.model", "sft.data"]);
    assert!(import_error("colour: blue", &OPTIONS).contains("no known program"));
    assert!(import_error("- a", &OPTIONS).contains("expected keys"));
    assert!(import_error("a: [", &OPTIONS).contains("neither YAML nor JSON"));
    let error = "axolotel".parse::<SourceProgram>().unwrap_err();
    assert!(matches!(error, ImportError::NoProgram { .. }), "{error}");
    let task = Some("dpo".parse().unwrap());
    let options = ImportOptions { task, data: Some("p.jsonl"), verifier: Some("exact"), ..OPTIONS };
    let imported = import_file("trl-sft.yaml", &options);
    assert_eq!((imported.task, &spec_of(&imported)["raft"]["objective"]), ("dpo", &"dpo".into()));
}
