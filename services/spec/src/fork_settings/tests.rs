use super::*;

const RICH: &str = "
name: sums
seed: 11
pool: night
base: { checkpoint: base-1 }
evals:
  - { name: text, text: a.txt }
  - { name: pairs, text: b.jsonl }
  - { name: carry, prompts: c.jsonl, verifier: { numeric: {} } }
raft:
  prompts: prompts.jsonl
  heldout: heldout.jsonl
  cycles: 5
  prompts_per_cycle: 40
  samples_per_prompt: 6
  heldout_samples_per_prompt: 4
  token_logprobs: true
  sampling: { temperature: { linear: [1.0, 0.5] }, top_k: 9, top_p: 0.9, max_new_tokens: 64 }
  verifier: { chain: { stages: [{ verifier: { command: { argv: [/judge] } } }] } }
  selection: { policy: top_percent, min_reward: 3, keep_share: 0.25, at_least: 4 }
  training:
    { epochs: 2, learning_rate: [4e-4, 1e-4], schedule: linear, packing: false, save_every: 9 }
  objective: { dapo: { kl: 0.001 } }
  lora: { r: 4, alpha: 8, target_modules: [q_proj], dropout: 0.1 }
  curriculum: { difficulty: { target: 0.4 }, budget: { min: 2, max: 9 } }
  gates:
    perplexity: [{ suite: text, margin: 0.1, then: stop }]
    pass_rate: [{ margin: 0.2 }, { suite: carry, margin: 0.3, then: tell }]
    entropy: { least: 0.1 }
    dropped_tokens: { most: 0.5, then: stop }
    divergence: { most: 2 }
    patience: 3
  proof: { canary: true, tolerance: 0.05 }
";

const ACROSS: &str = "
base: { checkpoint: base-1 }
evals: [{ name: text, text: a.txt }]
raft:
  prompts: prompts.jsonl
  verifier: { exact: {} }
  selection: { adaptive: { target: 0.5 }, replay: { cycles: 2 }, similarity: 0.8 }
  training:
    across: { workers: 3, every: 7, merge: nesterov, outer: { rate: 0.5 }, send_share: 0.25 }
";

/// Returns the spec fact's content of a spec file, with values that only a submission knows.
fn submitted(yaml: &str) -> v1::Spec {
    let spec = RunSpec::parse(yaml).unwrap();
    let raft = spec.raft.as_ref().unwrap();
    let mut resolved = raft.to_proto(&spec.measured_suites());
    let blob = |digest: &str| Some(v1::Blob { digest: digest.into(), bytes: 7 });
    resolved.prompts = blob("p");
    resolved.prompt_count = 50;
    resolved.heldout = raft.heldout.as_ref().and_then(|_| blob("h"));
    resolved.proof.iter_mut().for_each(|proof| proof.tokenizer = "tokens".into());
    let mut suites = Vec::new();
    for suite in &spec.evals {
        match &suite.text {
            Some(text) if text.ends_with(".jsonl") => suites.push(v1::Suite {
                name: suite.name.clone(),
                format: v1::suite::Format::Documents.into(),
                ..v1::Suite::default()
            }),
            Some(_) => suites.push(v1::Suite { name: suite.name.clone(), ..v1::Suite::default() }),
            None => resolved.prompt_suites.push(v1::PromptSuite {
                name: suite.name.clone(),
                count: 4,
                ..v1::PromptSuite::default()
            }),
        }
    }
    v1::Spec {
        run: "sums-1".into(),
        name: spec.name.clone(),
        seed: spec.seed,
        base: Some(v1::Base { random_init: true, ..v1::Base::default() }),
        pool: spec.pool.clone(),
        suites,
        kind: Some(v1::spec::Kind::Raft(resolved)),
        ..v1::Spec::default()
    }
}

#[test]
fn a_fork_names_modules_of_its_base() {
    let settings = ["lora.target_modules=[their_proj]".to_owned()];
    let parent = submitted(RICH);
    let refused = apply_fork_settings(&parent, 2, false, &settings).unwrap_err().to_string();
    assert!(refused.contains("raft.lora.target_modules[0]: must be one of"), "{refused}");
    let other = v1::Spec { other_model_type: "arcee".into(), ..parent };
    let forked = apply_fork_settings(&other, 2, false, &settings).unwrap();
    let Some(v1::spec::Kind::Raft(raft)) = forked.kind else { panic!("no raft run") };
    let lora = raft.training.and_then(|training| training.lora).unwrap();
    assert_eq!(lora.target_modules, ["their_proj"]);
}

fn fork(yaml: &str, settings: &[&str]) -> Result<v1::Spec, ForkSettingError> {
    let settings: Vec<String> = settings.iter().map(|it| (*it).to_owned()).collect();
    apply_fork_settings(&submitted(yaml), 2, true, &settings)
}

fn raft(spec: v1::Spec) -> v1::spec::Raft {
    let Some(v1::spec::Kind::Raft(raft)) = spec.kind else { panic!("no raft run") };
    raft
}

#[test]
fn a_fork_without_changes_has_the_same_spec() {
    for yaml in [RICH, ACROSS] {
        assert_eq!(fork(yaml, &[]).unwrap(), submitted(yaml));
    }
}

#[test]
fn a_description_says_all_that_can_be_set() {
    for yaml in [RICH, ACROSS] {
        let spec = submitted(yaml);
        let described = describe_spec(&spec, &raft(spec.clone()));
        let mut resolved = raft(resolve_spec(&described).unwrap());
        let was = raft(spec);
        // The files, which no setting names.
        resolved.prompts = was.prompts.clone();
        resolved.prompt_count = was.prompt_count;
        resolved.heldout = was.heldout.clone();
        resolved.verifier = was.verifier.clone();
        resolved.prompt_suites = was.prompt_suites.clone();
        resolved.proof.iter_mut().for_each(|proof| proof.tokenizer = "tokens".into());
        assert_eq!(resolved, was);
    }
}

#[test]
fn a_setting_changes_only_what_it_names() {
    let changed = fork(
        RICH,
        &["raft.training.learning_rate=1e-5", "cycles=9", "seed=3", "gates.patience=null"],
    )
    .unwrap();
    let mut expected = submitted(RICH);
    expected.seed = 3;
    if let Some(v1::spec::Kind::Raft(raft)) = &mut expected.kind {
        raft.cycles = 9;
        raft.training.as_mut().unwrap().learning_rate = 1e-5;
        raft.schedules.as_mut().unwrap().learning_rate = vec![];
        raft.gates.as_mut().unwrap().patience = 0;
    }
    assert_eq!(changed, expected);
    let other = raft(
        fork(ACROSS, &["objective={ssd: {}}", "selection.replay=null", "staleness=1"]).unwrap(),
    );
    let objective = other.training.unwrap().objective.unwrap();
    assert_eq!((objective.name.as_str(), objective.off_policy), ("ssd", true));
}

#[test]
fn the_queue_and_the_promotion_can_be_set() {
    let mut parent = submitted(RICH);
    let change = |parent: &v1::Spec, settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|it| (*it).to_owned()).collect();
        apply_fork_settings(parent, 2, true, &settings)
    };
    let night = ["queue.priority=3", "queue.from='22:00'", "queue.until='7:05'"];
    let spec = change(&parent, &[&night[..], &["promote.channel=stable"]].concat()).unwrap();
    let queue = v1::spec::Queue { priority: 3, from_minute: Some(1320), until_minute: Some(425) };
    assert_eq!(spec.queue, Some(queue));
    let (channel, alpha) = ("stable".into(), 0.05);
    let promotion = v1::spec::Promotion { channel, alpha, ..Default::default() };
    assert_eq!(spec.promotion, Some(promotion.clone()));
    parent.queue = Some(queue);
    parent.promotion = Some(v1::spec::Promotion { feedback: 7, ..promotion.clone() });
    assert_eq!(change(&parent, &[]).unwrap(), parent);
    let mut started = parent.clone();
    started.promotion = Some(v1::spec::Promotion { feedback: 7, learning: 2, ..promotion });
    assert_eq!(change(&started, &[]).unwrap(), parent, "a user starts the fork");
    let spec = change(&parent, &["promote.alpha=0.1", "queue=null"]).unwrap();
    let promotion = spec.promotion.unwrap();
    assert_eq!((promotion.alpha.to_bits(), promotion.feedback), (0.1_f64.to_bits(), 7));
    assert_eq!(spec.queue, None);
    let other = change(&parent, &["promote.channel=test"]).unwrap().promotion.unwrap();
    assert_eq!((other.channel.as_str(), other.feedback), ("test", 0));
    assert_eq!(change(&parent, &["promote=null"]).unwrap().promotion, None);
    let error = change(&parent, &["queue.from='22'"]).unwrap_err().to_string();
    assert!(error.contains("queue.from: must be a time"), "{error}");
}

#[test]
fn the_default_of_a_setting_can_be_set() {
    let plain = raft(fork(RICH, &["training.packing=true", "sampling.top_k=0"]).unwrap());
    assert_eq!(plain.training.unwrap().packing, Some(true));
    assert_eq!(plain.sampling.unwrap().top_k, 0);
}

#[test]
fn a_setting_that_cannot_change_is_refused_by_name() {
    for (setting, said) in [
        ("base.checkpoint=x", "field base.checkpoint: cannot change in a fork"),
        ("prompts=x", "field raft.prompts: cannot change in a fork"),
        ("raft.verifier.exact={}", "field raft.verifier.exact: cannot change in a fork"),
        ("raft.heldout=x", "field raft.heldout: cannot change in a fork"),
        ("name=x", "field name: cannot be set; name the fork with --name"),
        ("raft={}", "field raft: is a section"),
        ("cycles=2", "field raft.cycles: must be above 2"),
        ("lora.r=9", "field raft.lora.r: cannot change, because the adapter of cycle 2"),
        ("cycles", "\"cycles\" is not KEY=VALUE"),
        ("=2", "\"=2\" is not KEY=VALUE"),
        ("training.learning_rat=1", "did you mean learning_rate?"),
        ("training.learning_rate=-1", "raft.training.learning_rate: must be from 1e-12 to 10"),
        (
            "gates.perplexity=[{suite: x, margin: 1}]",
            "raft.gates.perplexity[0].suite: must be one of text, pairs, not x",
        ),
    ] {
        let error = fork(RICH, &[setting]).unwrap_err().to_string();
        assert!(error.contains(said), "{setting}: {error}");
        assert!(!error.contains("line 1"), "{setting}: {error}");
    }
    let lora = fork(RICH, &["lora.r=9", "from_base=true"]).unwrap();
    assert_eq!(raft(lora).training.unwrap().lora.unwrap().r, 9);
    let dropout = fork(RICH, &["lora.dropout=0.5"]).unwrap();
    assert_eq!(raft(dropout).training.unwrap().lora.unwrap().dropout.to_bits(), 0.5_f64.to_bits());
}
