//! Mistakes in specs, for tests of the parser and of the program.

pub(crate) const SPEC: &str = "\
name: mine
seed: 1
base: { model: Qwen/Qwen2.5-0.5B-Instruct }
evals:
  - { name: text, text: heldout.txt }
raft:
  prompts: prompts.jsonl
  heldout: { share: 0.1 }
  cycles: 3
  samples_per_prompt: 8
  sampling: { temperature: 0.8, max_new_tokens: 256 }
  verifier: { numeric: {} }
  training:
    epochs: 1
    learning_rate: 0.0002
  lora: { r: 16, alpha: 32 }
";

pub(crate) const JSON: &str = r#"{
  "name": "mine",
  "base": { "model": "Qwen/Qwen2.5-0.5B-Instruct" },
  "raft": {
    "prompts": "prompts.jsonl",
    "cycles": 3,
    "verifier": { "numeric": {} },
    "lora": { "r": 16, "alpha": 32 }
  }
}
"#;

/// A change that breaks a spec, the line and the column of the error, and words in it.
pub(crate) type Mistake = ((&'static str, &'static str), (usize, usize), &'static [&'static str]);

const LORA: &str = "  lora: { r: 16, alpha: 32 }\n";
const RATE: &str = "learning_rate: 0.0002";

/// Names that are none of the known ones.
pub(crate) const UNKNOWN_NAMES: [Mistake; 18] = [
    (("cycles:", "cycels:"), (9, 3), &["unknown key cycels in raft; did you mean cycles?"]),
    (("evals:", "evels:"), (4, 1), &["unknown key evels; did you mean evals?"]),
    (
        ("epochs:", "gradient_steps:"),
        (14, 5),
        &["unknown key gradient_steps in raft.training. The"],
    ),
    (("numeric", "numerc"), (12, 15), &["numerc in raft.verifier; did you mean numeric?"]),
    (("learning_rate", "learningrate"), (15, 5), &["did you mean learning_rate?"]),
    (("text: heldout", "txt: heldout"), (5, 19), &["txt in evals[0]; did you mean text?"]),
    ((RATE, "schedule: cosin"), (15, 15), &["must be one of constant,", "did you mean cosine?"]),
    ((RATE, "across: { merge: nestrov }"), (15, 22), &["merge: must", "did you mean nesterov?"]),
    ((LORA, "  selection: { policy: rest_me }"), (16, 24), &["policy:", "did you mean rest_em?"]),
    (
        (LORA, "  gates: { pass_rate: { margin: 0.1, then: rollback } }"),
        (16, 44),
        &["then: must be one of tell, roll_back, stop", "did you mean roll_back?"],
    ),
    ((LORA, "  objective: grppo"), (16, 14), &["raft.objective: must be", "did you mean grpo?"]),
    ((LORA, "  objective: { dapoo: { kl: 1 } }"), (16, 14), &["did you mean dapo?"]),
    ((LORA, "  objective: { grpo: { kll: 1 } }"), (16, 22), &["not kll; did you mean kl?"]),
    (
        (LORA, "  lora: { target_modules: [q_proj, v-proj] }"),
        (16, 36),
        &["raft.lora.target_modules[1]: must be one of", "did you mean v_proj?"],
    ),
    (("numeric: {}", "stdio: { language: pyton }"), (12, 34), &["did you mean python?"]),
    (
        (LORA, "  gates: { perplexity: [{ suite: txt, margin: 0.1 }] }"),
        (16, 34),
        &["raft.gates.perplexity[0].suite: must be one of text", "did you mean text?"],
    ),
    (("Instruct }", "Instruct, upload: alway }"), (3, 52), &["did you mean always?"]),
    (
        (LORA, "sweep: { learning_rat: [0.1, 0.2] }"),
        (16, 24),
        &["sweep.learning_rat: is not in the spec; did you mean learning_rate?"],
    ),
];

/// Values of another form, or out of range.
pub(crate) const WRONG_VALUES: [Mistake; 24] = [
    (("cycles: 3", "cycles: two"), (9, 11), &["raft.cycles: must be from 0 to 10000, not two"]),
    (("cycles: 3", "cycles: -2"), (9, 11), &["raft.cycles: must be from 0 to 10000, not -2"]),
    (("cycles: 3", "cycles: 99999999999"), (9, 11), &["from 0 to 10000, not 99999999999"]),
    (("cycles: 3", "cycles: 1.5"), (9, 11), &["from 0 to 10000, not 1.5"]),
    (("cycles: 3", "cycles: [3]"), (9, 11), &["raft.cycles: must be one value, not a list"]),
    (("cycles: 3", "cycles:"), (9, 9), &["raft.cycles: has no value"]),
    (("0.0002", "1e9"), (15, 20), &["learning_rate: must be from 1e-12 to 10, not 1000000000"]),
    (("0.0002", "fast"), (15, 20), &["learning_rate: expected a number, a list", "{linear: "]),
    (("0.0002", "{ lineal: [1, 2] }"), (15, 20), &["learning_rate: expected", "{linear: "]),
    (("r: 16", "r: 100000"), (16, 14), &["raft.lora.r: must be from 1 to 4096, not 100000"]),
    ((RATE, "packing: maybe"), (15, 14), &["packing: must be true or false, not maybe"]),
    (
        (RATE, "across: { workers: all }"),
        (15, 24),
        &["workers: expected a number of boxes, or auto"],
    ),
    (("numeric: {}", r"exact: { extract: '#(\d+$' }"), (12, 33), &["extract: not a regular"]),
    (("seed: 1", "queue: { from: '25:00', until: '07:00' }"), (2, 16), &["queue.from: must be a"]),
    (("share: 0.1", "share: 1.0"), (8, 21), &["raft.heldout.share: must be from 1e-6 to 0.999"]),
    (("share: 0.1", "shar: 0.1"), (8, 12), &["raft.heldout: expected a file, {share: 0.1}"]),
    (("seed: 1", "chat: { sistem: a }"), (2, 1), &["unknown key chat"]),
    ((LORA, "  chat: { sistem: a }"), (16, 9), &["raft.chat: expected true, false or {system"]),
    ((LORA, "  objective: { grpo: { kl: -1 } }"), (16, 28), &["grpo.kl: must be from 0 to 1000"]),
    (("{ model: Qwen/Qwen2.5-0.5B-Instruct }", "base-1"), (3, 7), &["base: must be a section"]),
    (("{ numeric: {} }", "numeric"), (12, 13), &["must be a section", "verifier: { numeric: {} }"]),
    (("prompts.jsonl", "[a, b]"), (7, 12), &["raft.prompts: must be one value, not a list"]),
    (("{ r: 16, alpha: 32 }", "[16, 32]"), (16, 9), &["section of keys", "r: 16", "not a list"]),
    (("name: mine", "name: My Run"), (1, 7), &["name: must be 1 to 48 of a-z, 0-9"]),
];

/// Keys that are missing, or exclude each other.
pub(crate) const WRONG_SECTIONS: [Mistake; 18] = [
    (("  verifier: { numeric: {} }\n", ""), (6, 1), &["raft.verifier: is missing", "name the"]),
    (("base: { model: Qwen/Qwen2.5-0.5B-Instruct }\n", ""), (1, 1), &["the key base is missing"]),
    (("  prompts: prompts.jsonl\n", ""), (6, 1), &["the key prompts is missing in raft, such as"]),
    ((LORA, "  gates: { pass_rate: { then: stop } }"), (16, 12), &["the key margin is missing in"]),
    (("seed: 1", "sft: { data: d.jsonl }"), (6, 1), &["a section sft or a section raft, not both"]),
    (("numeric: {}", "numeric: {}, exact: {}"), (12, 13), &["raft.verifier: write exactly one of"]),
    (("numeric: {}", "numeric"), (12, 13), &["write exactly one of", "numeric has no value"]),
    (("Instruct }", "Instruct, checkpoint: a-1 }"), (3, 7), &["base: write exactly one of"]),
    (("share: 0.1", "share: 0.1, count: 5"), (8, 12), &["write share or count, and not both"]),
    (("seed: 1", "queue: { from: '22:00' }"), (2, 8), &["queue: needs both from and until"]),
    ((RATE, "max_tokens: 256"), (15, 17), &["must be above sampling.max_new_tokens (256)"]),
    (
        (LORA, "  selection: { min_reward: 7 }"),
        (16, 28),
        &["must be at most 1, the highest reward"],
    ),
    (
        (
            "raft:\n  prompts: prompts.jsonl\n  heldout: { share: 0.1 }\n",
            "promote: { channel: a }\nraft:\n  prompts: prompts.jsonl\n",
        ),
        (6, 10),
        &["promote: needs `raft.heldout`"],
    ),
    (
        ("text: heldout.txt }", "text: a.txt }\n  - { name: text, text: b.txt }"),
        (6, 13),
        &["twice"],
    ),
    ((", text: heldout.txt", ""), (5, 5), &["evals[0]: write exactly one of text", "prompts"]),
    (("text: heldout.txt", "prompts: p.jsonl"), (5, 5), &["evals[0].verifier: name the verifier"]),
    (("numeric: {}", "command: { argv: [] }"), (12, 32), &["argv: name an executable"]),
    (
        ("numeric: {}", "llm_judge: { url: 'a:80', model: m }"),
        (12, 33),
        &["url: must be an API's address, such as http://"],
    ),
];

/// Texts that are no YAML, or another document than a spec.
pub(crate) const WRONG_DOCUMENTS: [Mistake; 13] = [
    (("  cycles: 3", "\tcycles: 3"), (9, 1), &["a tab; YAML is indented by spaces"]),
    (("alpha: 32 }", "alpha: 32"), (16, 9), &["a bracket of line 16 may be left open"]),
    (
        ("  cycles: 3", "    cycles: 3"),
        (9, 5),
        &["indented by 4 spaces; the lines above have 0 or 2"],
    ),
    (("  training:", " training:"), (13, 2), &["indented by 1 space; the lines above have 0 or 2"]),
    (("  cycles: 3", "  cycles: 3\n  cycles: 4"), (10, 3), &["the key cycles is written twice"]),
    ((LORA, "  chat: { system: Answer: short }"), (16, 25), &["a text with a colon lacks quotes"]),
    (("numeric: {}", r#"regex: { pattern: "\d" }"#), (12, 33), &["pattern in single quotes"]),
    (("raft:\n", "---\nraft:\n"), (7, 1), &["a spec is one document; remove the line ---"]),
    ((SPEC, "name: mine\n"), (1, 1), &["the key base is missing, such as base: { model: "]),
    ((SPEC, "train my model, please\n"), (1, 1), &["a spec is a section of keys, such as name"]),
    ((SPEC, "- name: mine\n"), (1, 1), &["a spec is a section of keys, such as name"]),
    ((SPEC, "# nothing yet\n"), (1, 1), &["a spec is a section of keys, such as name"]),
    ((SPEC, "base: { model: a/b }\n"), (1, 1), &["has neither a section raft nor a section sft"]),
];

pub(crate) const MISTAKES_IN_JSON: [Mistake; 6] = [
    (("cycles", "cycels"), (6, 5), &["unknown key cycels in raft; did you mean cycles?"]),
    (("\"r\": 16", "\"r\": 0"), (8, 20), &["raft.lora.r: must be from 1 to 4096, not 0"]),
    (("3,", "\"three\","), (6, 15), &["raft.cycles: must be from 0 to 10000, not \"three\""]),
    (("3,", "3"), (7, 5), &["this JSON has a mistake: expected `,` or `}`"]),
    (("32 }", "32"), (10, 1), &["this JSON has a mistake: EOF while parsing an object"]),
    (
        ("    \"cycles", "\t\t\"cycels"),
        (6, 3),
        &["unknown key cycels in raft; did you mean cycles?"],
    ),
];
