//! Runs on conversations: rendered with the chat template of the model, trained, sampled and
//! judged.

use std::{path::Path, time::Duration};

use e2e::{Fleet, SpecFiles};
use requirements::{require_namespaces, require_program};
use serde_json::{Value, json};

use crate::environments::{COUNTING, create_environment, create_public_directory, facts_of_kind};

const LIMIT: Duration = Duration::from_secs(240);

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' \
                        + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
}

/// Gives the byte-level model a chat template and a different end-of-turn token.
fn add_chat_template(files: &SpecFiles) {
    let write = |name: &str, value: &Value| {
        std::fs::write(files.path(name), value.to_string()).expect("a file");
    };
    let mut config = read_json(&files.path("config.json"));
    config["eos_token_id"] = json!([256, 258]);
    write("config.json", &config);
    let mut tokenizer = read_json(&files.path("tokenizer.json"));
    let tokens = tokenizer["added_tokens"].as_array_mut().expect("tokens");
    for (id, text) in [(257, "<|im_start|>"), (258, "<|im_end|>")] {
        let mut token = tokens[0].clone();
        token["id"] = json!(id);
        token["content"] = json!(text);
        tokens.push(token);
    }
    write("tokenizer.json", &tokenizer);
    write("tokenizer_config.json", &json!({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}));
}

fn write_lines(path: &Path, lines: impl Iterator<Item = Value>) {
    std::fs::write(path, lines.map(|line| format!("{line}\n")).collect::<String>())
        .expect("a file");
}

fn question(n: u32) -> Value {
    json!({"role": "user", "content": format!("Is it {n}?")})
}

const SFT: &str = "
name: chat
base: { init: { config: config.json, tokenizer: tokenizer.json, tokenizer_config: tokenizer_config.json } }
evals: [{ name: answers, text: answers.jsonl }]
sft:
  data: chats.jsonl
  training: { max_steps: 120, batch_size: 8, learning_rate: 0.005, max_tokens: 128 }
";

const RAFT: &str = "
name: raft
base: { checkpoint: BASE }
raft:
  prompts: questions.jsonl
  heldout: { share: 0.3 }
  cycles: 1
  samples_per_prompt: 2
  sampling: { temperature: 0.7, max_new_tokens: 12 }
  verifier: { exact: {} }
  training: { epochs: 1, batch_size: 8, learning_rate: 0.0005, max_tokens: 128 }
  lora: { r: 4, alpha: 8 }
";

#[test]
fn a_model_learns_to_chat_and_answers_what_its_template_asks() {
    let directory = create_public_directory();
    let readable = ("FLOTILLA_VERIFIER_PATH".to_owned(), directory.path().display().to_string());
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &[], [readable]);
    let files = SpecFiles::create(fleet.path());
    add_chat_template(&files);
    let chat = |n: u32| json!({"messages": [question(n), {"role": "assistant", "content": "yes"}]});
    write_lines(&files.path("chats.jsonl"), (0..64).map(chat));
    write_lines(&files.path("answers.jsonl"), (64..72).map(chat));
    std::fs::write(files.path("chat.yaml"), SFT).expect("a spec");
    let base = fleet.submit(&files.path("chat.yaml"));
    fleet.await_success(&base, LIMIT);

    let ask = |n: u32| json!({"messages": [question(n)], "answer": "yes", "level": n});
    write_lines(&files.path("questions.jsonl"), (100..120).map(ask));
    let spec = files.path("raft.yaml");
    std::fs::write(&spec, RAFT.replace("BASE", &base)).expect("a spec");
    let spec_path = spec.display().to_string();
    let checked = fleet.run_json(&["run", "check", &spec_path]).expect("it can be checked");
    let lines: Vec<_> = checked["files"]
        .as_array()
        .expect("files")
        .iter()
        .map(|file| {
            let count = |name: &str| file[name].as_str().and_then(|n| n.parse::<u64>().ok());
            (file["field"].as_str().expect("a field").to_owned(), count("lines").unwrap_or(0))
        })
        .collect();
    let [(prompts, trained), (heldout, held)] = &lines[..] else { panic!("{checked:#}") };
    assert_eq!((prompts.as_str(), heldout.as_str()), ("raft.prompts", "raft.heldout"));
    assert!(*held > 0 && trained + held == 20, "{checked:#}");

    let run = fleet.submit(&spec);
    let ended = fleet.await_success(&run, LIMIT);
    let cycle = &ended["cyclesDone"][1];
    assert_eq!(cycle["sampled"].as_u64(), Some(2 * trained), "{cycle:#}");
    let mean = cycle["train"]["mean"].as_f64().unwrap_or(0.0);
    assert!(mean > 0.5, "most answers are \"yes\" and end there: {cycle:#}");
    let facts = fleet.read_facts(&run);
    let of = |kind: &str| -> String {
        let kind = format!(".{kind}.");
        let facts = facts.iter().filter(|fact| fact["subject"].to_string().contains(&kind));
        facts.map(Value::to_string).collect()
    };
    let rendered =
        json!("<|im_start|>user\nIs it 100?<|im_end|>\n<|im_start|>assistant\n").to_string();
    assert!(of("generate").contains(rendered.trim_matches('"')), "{}", of("generate"));
    assert!(!of("samples").contains("im_end"), "what ends a turn is none of its text");
    fleet.assert_clean_audit(&run);
    if require_program("python3").is_some() && require_namespaces() {
        let environment = create_environment(directory.path(), COUNTING);
        check_observations(&fleet, &files, &base, &environment);
    }
}

/// Checks that the model reads the observations of an environment as messages of its chat template.
fn check_observations(fleet: &Fleet, files: &SpecFiles, base: &str, environment: &str) {
    let environment = format!("environment: {{ argv: ['{environment}'], max_turns: 2 }}");
    let spec = files.path("episodes.yaml");
    let played = RAFT.replace("BASE", base).replace("exact: {}", &environment);
    std::fs::write(&spec, played.replace("max_new_tokens: 12", "max_new_tokens: 80"))
        .expect("a spec");
    let run = fleet.submit(&spec);
    fleet.await_success(&run, LIMIT);
    let facts = fleet.read_facts(&run);
    let samples = facts_of_kind(&facts, ".samples.").filter_map(|job| job["samples"].as_array());
    let turns = samples.flatten().filter_map(|sample| sample["turns"].as_array()).flatten();
    let mut read = 0;
    // The model does not read the observation after its last turn.
    for turn in
        turns.filter(|turn| turn["observationIds"].as_array().is_some_and(|ids| !ids.is_empty()))
    {
        let observation = turn["observation"].as_str().expect("an observation");
        // A token is a byte or a special token.
        let mut expected = vec![u32::from(b'\n'), 257];
        expected.extend(format!("tool\n{observation}").bytes().map(u32::from));
        expected.extend([258, u32::from(b'\n'), 257]);
        expected.extend("assistant\n".bytes().map(u32::from));
        assert_eq!(turn["observationIds"], json!(expected), "{turn:#}");
        read += 1;
    }
    assert!(read > 0, "no episode has two turns");
    fleet.assert_clean_audit(&run);
}

#[test]
fn examples_that_cannot_be_rendered_or_are_held_out_twice_are_refused_with_their_line() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(1, 0));
    fleet.await_success(&base, LIMIT);
    let spec = files.path("raft.yaml");
    let submit = |raft: &str| {
        std::fs::write(&spec, raft.replace("BASE", &base)).expect("a spec");
        let output = fleet.run(&["run", "submit", &spec.display().to_string()]);
        assert_ne!(output.code, 0, "{}", output.stdout);
        output.stderr
    };
    write_lines(&files.path("questions.jsonl"), (0..9).map(|n| json!({"messages": [question(n)]})));
    let stderr = submit(RAFT);
    for words in ["raft.prompts", "questions.jsonl", "the base has no chat template"] {
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
    let plain = |n: u32| json!({"prompt": format!("{n}?"), "answer": "a"});
    write_lines(&files.path("questions.jsonl"), (0..9).map(plain));
    write_lines(&files.path("held.jsonl"), [json!({"prompt": "x"}), plain(4)].into_iter());
    let overlapping = RAFT.replace("{ share: 0.3 }", "held.jsonl");
    let stderr = submit(&overlapping);
    for words in ["raft.heldout", "line 2 repeats line 5 of questions.jsonl", "allow_overlap"] {
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
    write_lines(&files.path("others.jsonl"), [plain(77)].into_iter());
    let others = RAFT.replace("{ share: 0.3 }", "others.jsonl");
    let suite = "{ name: held, prompts: held.jsonl, verifier: { exact: {} } }";
    let stderr = submit(&format!("evals: [{suite}]\n{others}"));
    for words in ["evals[0].prompts", "line 2 repeats line 5 of questions.jsonl"] {
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
    let allowed = overlapping.replace("cycles: 1", "allow_overlap: true\n  cycles: 1");
    std::fs::write(&spec, allowed.replace("BASE", &base)).expect("a spec");
    let checked =
        fleet.run_json(&["run", "check", &spec.display().to_string()]).expect("it passes");
    let warnings = checked["warnings"].to_string();
    for words in ["1 prompts are also trained on", "held.jsonl: 1 of 2 prompts have no"] {
        assert!(warnings.contains(words), "no {words:?} in {warnings}");
    }
}

#[test]
fn files_are_split_and_configurations_are_imported_without_a_fleet() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    let client = e2e::Client::new([], directory.path());
    let plain = |n: u32| json!({"prompt": format!("{n}?"), "tests": "assert True"});
    write_lines(&directory.path().join("all.jsonl"), (0..100).chain(0..10).map(plain));
    let (all, train, heldout) = (path("all.jsonl"), path("train.jsonl"), path("heldout.jsonl"));
    let stats = client.run_json(&["data", "stats", &all]).expect("statistics");
    assert_eq!(
        (&stats["files"][0]["lines"], &stats["files"][0]["duplicates"]),
        (&json!("110"), &json!("10"))
    );
    let split = ["data", "split", &all, "--share", "0.2", "--seed", "3"];
    let split = [&split[..], &["--out-train", &train, "--out-heldout", &heldout]].concat();
    let sides = client.run_json(&split).expect("two sides");
    let count = |side: &str| sides[side].as_u64().unwrap_or(0);
    assert!(count("heldout") > 5 && count("train") + count("heldout") == 110, "{sides}");
    let once = path("once.jsonl");
    let removed =
        client.run_json(&["data", "dedup", &all, "--out", &once]).expect("duplicates are removed");
    assert_eq!(removed["removed"], 10);

    let config =
        "prompts: all.jsonl\nnum_cycles: 2\nverifier: { type: mbpp }\nlogging: { level: x }\n";
    std::fs::write(path("old.yaml"), config).expect("a file");
    let import = ["run", "import", &path("old.yaml"), "--out", &path("new.yaml")];
    let notes = client.run_json(&import).expect("it is imported")["notes"].to_string();
    for words in ["raft.cycles: 2", "logging.level", "ignored"] {
        assert!(notes.contains(words), "no {words:?} in {notes}");
    }
    let spec = std::fs::read_to_string(path("new.yaml")).expect("a spec");
    assert!(spec.contains("\nname: \"old\"\n") && spec.contains("python: {}"), "{spec}");
    let wrong = "base_model: a/b\nsequence_len: 512\nlora_r: many\n";
    std::fs::write(path("wrong.yaml"), wrong).expect("a file");
    let output = client.run(&["run", "import", &path("wrong.yaml")]);
    let error = output.stderr;
    assert_eq!(output.code, 1, "{error}");
    for words in ["wrong.yaml", "line 3: key lora_r: expected a whole number", "R102"] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
}
