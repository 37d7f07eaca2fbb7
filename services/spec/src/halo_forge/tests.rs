use serde_json::Value;

use super::*;

fn imported(yaml: &str) -> (Value, ImportedSpec) {
    let imported = import_halo_forge(yaml, "old", None).unwrap();
    (serde_saphyr::from_str(&imported.spec).unwrap(), imported)
}

fn fate(imported: &ImportedSpec, key: &str) -> (KeyStatus, String) {
    let note = imported.notes.iter().find(|note| note.key == key);
    let note = note.unwrap_or_else(|| panic!("{key} is not told of: {:#?}", imported.notes));
    (note.status, note.explanation.clone())
}

const WHOLE: &str = "
base_model: Qwen/Qwen2.5-Coder-0.5B
prompts: data/mbpp.jsonl
output_dir: models/raft
system_prompt: 'Say \"yes\".'
num_cycles: 6
reward_shaping_strategy: annealing
curriculum_strategy: progressive
curriculum_progressive_start: 0.2
lr_decay_per_cycle: 0.9
raft: { num_cycles: 5, samples_per_prompt: 16, reward_threshold: 0.7, keep_top_percent: 0.3, min_samples: 100 }
generation: { max_new_tokens: 512, temperature: 0.8, top_p: 0.95, batch_size: 4 }
training:
  learning_rate: '5e-5'
  batch_size: 8
  gradient_accumulation_steps: 4
  warmup_steps: 0
  dataloader_num_workers: 4
  epochs: 1
lora: { r: 8, alpha: 16, dropout: 0 }
hardware: { dtype: bf16 }
verifier: { type: gcc, run_after_compile: true, host: win }
colour: blue
";

#[test]
fn every_key_is_used_ignored_or_unknown_and_the_spec_can_run() {
    let (spec, imported) = imported(WHOLE);
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
    assert_eq!(raft["lora"]["dropout"].as_f64(), Some(0.0), "0 stays 0");
    assert_eq!(
        (raft["verifier"]["compile"]["run"].as_bool(), &raft["lora"]["r"]),
        (Some(true), &8.into())
    );
    for (key, expected) in [
        ("raft.num_cycles", KeyStatus::Used),
        ("num_cycles", KeyStatus::Ignored),
        ("training.learning_rate", KeyStatus::Used),
        ("output_dir", KeyStatus::Ignored),
        ("hardware.dtype", KeyStatus::Ignored),
        ("lora.dropout", KeyStatus::Used),
        ("verifier.host", KeyStatus::Ignored),
        ("training.dataloader_num_workers", KeyStatus::Ignored),
        ("curriculum_strategy", KeyStatus::Ignored),
        ("curriculum_progressive_start", KeyStatus::Ignored),
        ("colour", KeyStatus::Unknown),
    ] {
        assert_eq!(fate(&imported, key).0, expected, "{key}");
    }
}

#[test]
fn what_is_not_said_is_halo_forge_s_default_but_for_its_system_prompt() {
    let (spec, imported) = imported("prompts: p.jsonl");
    let raft = &spec["raft"];
    assert_eq!(raft["chat"], true);
    assert_eq!(raft["training"]["learning_rate"]["decay"]["from"].as_f64(), Some(5e-5));
    assert_eq!(raft["selection"]["policy"], "top_percent");
    assert_eq!(raft["verifier"]["compile"]["language"], "c++");
    assert_eq!(fate(&imported, "system_prompt").0, KeyStatus::Default);
}

#[test]
fn verifiers_become_ours_or_are_told_of() {
    for (kind, ours) in [
        ("mbpp", "python"),
        ("rust", "compile"),
        ("unittest", "pytest"),
        ("execution", "stdio"),
        ("math", "numeric"),
        ("msvc", "command"),
    ] {
        let yaml = format!("prompts: p.jsonl\nverifier: {{ type: {kind} }}");
        let (spec, imported) = imported(&yaml);
        assert!(spec["raft"]["verifier"].get(ours).is_some(), "{kind}: {}", imported.spec);
        assert!(fate(&imported, "verifier.type").1.len() > 10);
    }
}

#[test]
fn each_shaping_becomes_a_schedule() {
    for (shaping, expected) in [
        ("adaptive", "adaptive"),
        ("warmup", "min_reward: [0.1, 0.5]"),
        ("fixed", "min_reward: 0.5"),
    ] {
        let yaml = format!("prompts: p.jsonl\nreward_shaping_strategy: {shaping}");
        let (_, imported) = imported(&yaml);
        assert!(imported.spec.contains(expected), "{}", imported.spec);
    }
}

#[test]
fn what_cannot_be_read_names_its_key() {
    let error = |yaml: &str| import_halo_forge(yaml, "old", None).unwrap_err().to_string();
    assert!(error("raft: { num_cycles: 2 }").contains("--prompts"));
    assert!(
        error("prompts: p\ntraining: { learning_rate: fast }").contains("training.learning_rate")
    );
    assert!(error("prompts: p\nraft: { num_cycles: 2.5 }").contains("raft.num_cycles"));
    assert!(error("- a").contains("expected keys"));
    assert!(import_halo_forge("a: 1", "old", Some("p.jsonl")).unwrap().spec.contains("p.jsonl"));
}
