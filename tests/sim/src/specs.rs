//! The runs of a seed: always a long RAFT run, and in some seeds a short one, an SFT run or a
//! watched run beside it, perhaps in another pool; or all of them in queues.

use wire::{Digest, Fact, FactBody, FactKey, RunId, Subject, derive_seed, v1};

use crate::{
    channel_model,
    task::{self, OTHER_POOL, SUITE, blob, tree},
};

pub(crate) const PROMPTS: u32 = 12;
pub(crate) const HELDOUT: u32 = 4;
const SAMPLES: u32 = 4;
const CYCLES: u32 = 2;
pub(crate) const SUITES: [&str; 2] = ["sums", "code"];

/// The allowed difference between canaries of agents.
const TOLERANCE: f64 = 0.05;

/// The training of an adapter on several boxes, one step of each at a time.
const ACROSS: v1::Across = v1::Across {
    workers: 0,
    every: 1,
    outer_rate: 0.7,
    outer_momentum: 0.9,
    method: 0,
    send_share: 0.0,
};

/// The same, all steps at once.
const SOUP: v1::Across = v1::Across { method: v1::across::Method::Soup as i32, ..ACROSS };

/// The same between boxes that send only changes.
const CHANGES_ACROSS: v1::Across = v1::Across { send_share: 0.01, ..ACROSS };

pub(crate) const FIRST_RUN: &str = "r1";
/// A fork of the first run.
pub(crate) const FORKED_RUN: &str = "fork";
/// The name of runs that learn from feedback, which a number follows.
pub(crate) const LEARNING_RUN: &str = "learned";

/// The member that writes the facts of watched runs.
pub(crate) const WATCHER: &str = "watcher";

/// Returns the specs of the runs of a seed.
pub(crate) fn seed_specs(seed: u64) -> Vec<v1::Spec> {
    let mut random = fastrand::Rng::with_seed(derive_seed(seed, &["runs"]));
    let pool = if random.bool() { OTHER_POOL } else { "default" };
    let promotion = Some(channel_model::promotion());
    let mut specs = vec![v1::Spec { promotion, ..raft_spec(FIRST_RUN, "default", seed) }];
    let second = derive_seed(seed, &["second"]);
    if random.u32(0..4) == 0 {
        specs.push(raft_spec("r2", pool, second));
    }
    if random.u32(0..4) == 0 {
        let dataset = blob(b"dataset");
        let across = [ACROSS, CHANGES_ACROSS, SOUP].get(random.usize(0..9)).copied();
        let lora = Some(v1::Lora::default());
        let training = Some(v1::Training { lora, across, ..<_>::default() });
        let sft = v1::spec::Sft { dataset, training };
        let kind = Some(v1::spec::Kind::Sft(sft));
        specs.push(v1::Spec { kind, ..common_spec("sft", pool, second) });
    }
    if random.u32(0..4) == 0 {
        let kind = Some(v1::spec::Kind::Watched(v1::spec::Watched::default()));
        specs.push(v1::Spec { kind, ..common_spec("watched", "default", second) });
    }
    queue_runs(&mut specs, seed);
    specs
}

/// Returns true for the runs of seeds whose channel learns from feedback.
pub(crate) fn learns_from_feedback(runs: &[v1::Spec]) -> bool {
    runs.first().is_some_and(|first| derive_seed(first.seed, &["learns"]).is_multiple_of(3))
}

/// Returns true for the runs of seeds whose first run is forked.
pub(crate) fn is_forked(runs: &[v1::Spec]) -> bool {
    runs.first().is_some_and(|first| derive_seed(first.seed, &["forks"]).is_multiple_of(4))
}

/// Returns the spec of a run that learns from the feedback up to a position, by the settings of a
/// move of the channel.
pub(crate) fn learning_spec(run: &str, feedback: u64, learning: u64) -> v1::Spec {
    let training = Some(v1::Training { lora: Some(v1::Lora::default()), ..<_>::default() });
    let sft = v1::spec::Sft { dataset: blob(b"feedback"), training };
    let promotion = v1::spec::Promotion { feedback, learning, ..channel_model::promotion() };
    v1::Spec {
        kind: Some(v1::spec::Kind::Sft(sft)),
        promotion: Some(promotion),
        ..common_spec(run, "default", feedback)
    }
}

/// Puts all runs of some seeds into the queues of their pools.
fn queue_runs(specs: &mut [v1::Spec], seed: u64) {
    let mut random = fastrand::Rng::with_seed(derive_seed(seed, &["queue"]));
    if random.u32(0..3) == 0 {
        let is_watched = |spec: &v1::Spec| matches!(spec.kind, Some(v1::spec::Kind::Watched(_)));
        for spec in specs.iter_mut().filter(|spec| !is_watched(spec)) {
            let priority = random.i32(0..3);
            spec.queue = Some(v1::spec::Queue { priority, ..<_>::default() });
        }
    }
}

/// Returns the facts that a user, or the watcher of a training, writes for a run.
pub(crate) fn submitted_facts(spec: &v1::Spec) -> Vec<Fact> {
    let run = RunId::new(spec.run.as_str()).expect("a legal name");
    let is_watched = matches!(spec.kind, Some(v1::spec::Kind::Watched(_)));
    let place = if is_watched { FactKey::WatchedSpec } else { FactKey::Spec };
    let fact = |key, body| Fact { subject: Subject::new(&run, key), body };
    let mut facts = vec![fact(place, FactBody::Spec(spec.clone()))];
    if is_watched {
        let order = v1::TrainOrder {
            run: spec.run.clone(),
            base: spec.base.clone(),
            seed: spec.seed,
            ..Default::default()
        };
        facts.extend(task::saved_steps().map(|step| {
            let checkpoint = task::make_checkpoint(&order, step, WATCHER);
            fact(FactKey::WatchedCheckpoint { step }, checkpoint)
        }));
    }
    facts
}

fn common_spec(run: &str, pool: &str, seed: u64) -> v1::Spec {
    v1::Spec {
        run: run.into(),
        seed,
        base: Some(v1::Base {
            tree: Some(tree(&Digest::hash_bytes(b"base"))),
            random_init: false,
            adapter: None,
        }),
        pool: pool.into(),
        suites: vec![v1::Suite {
            name: SUITE.into(),
            text: blob(b"text"),
            format: v1::suite::Format::Documents.into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// Returns the spec of a RAFT run. The bits of its seed select staleness, the training start (base
/// or previous adapter), a curriculum with a budget, gates, prompt suites, an entropy limit, the
/// canary, the objective, log-probabilities of tokens, distillation from a teacher with or without a
/// verifier, and training on several boxes.
fn raft_spec(run: &str, pool: &str, seed: u64) -> v1::Spec {
    let kind = |bit: u32| derive_seed(seed, &["kind"]) >> bit & 1 == 1;
    let curriculum = v1::Curriculum {
        difficulty: Some(v1::curriculum::Difficulty { target: vec![0.3], explore: 0.3 }),
        budget: Some(v1::curriculum::Budget { min: 1, max: 3 * SAMPLES }),
    };
    let gate = v1::gates::Gate { then: v1::gates::Then::RollBack.into(), ..Default::default() };
    let of_suite = v1::gates::Gate { suite: SUITES[0].into(), ..gate };
    let sure =
        v1::gates::Gate { margin: 0.9, then: v1::gates::Then::Stop.into(), ..Default::default() };
    let gates = v1::Gates {
        pass_rate: Some(gate.clone()),
        patience: 2,
        pass_rates: if kind(4) { vec![of_suite] } else { Vec::new() },
        entropy: kind(5).then_some(sure),
        divergence: kind(7).then_some(v1::gates::Gate { margin: 0.8, ..gate }),
        ..Default::default()
    };
    let is_taught = kind(7) && kind(10);
    let other = if kind(8) { "dpo" } else { "rloo" };
    let name = if is_taught { "distillation" } else { other };
    let verifier = (!is_taught || kind(11)).then(v1::Verifier::default);
    // A correction needs the log-probabilities of tokens.
    let corrected = [("truncate_tokens".to_owned(), 2.0)].into();
    let objective = kind(7).then(|| v1::Objective {
        name: name.into(),
        settings: if kind(9) { corrected } else { Default::default() },
        off_policy: false,
    });
    v1::Spec {
        kind: Some(v1::spec::Kind::Raft(v1::spec::Raft {
            prompts: blob(b"prompts"),
            prompt_count: PROMPTS,
            heldout: blob(b"heldout").filter(|_| verifier.is_some()),
            heldout_count: if verifier.is_some() { HELDOUT } else { 0 },
            verifier,
            teacher: is_taught.then(task::teacher),
            cycles: if run == FIRST_RUN { CYCLES + u32::from(kind(0)) } else { 1 },
            samples_per_prompt: SAMPLES,
            heldout_samples_per_prompt: 2,
            sampling: Some(v1::Sampling { max_new_tokens: 16, ..Default::default() }),
            selection: Some(v1::Selection {
                keep_per_prompt: 1,
                min_reward: 0.5,
                ..Default::default()
            }),
            training: Some(v1::Training {
                lora: Some(v1::Lora::default()),
                across: (kind(12) && kind(13) && objective.is_none())
                    .then(|| shared_training(seed)),
                objective,
                ..Default::default()
            }),
            staleness: u32::from(kind(0)),
            from_base: kind(1),
            prompts_per_cycle: if kind(2) { PROMPTS / 2 } else { 0 },
            curriculum: kind(2).then_some(curriculum),
            gates: kind(3).then_some(gates),
            prompt_suites: if kind(4) { SUITES.map(prompt_suite).into() } else { Vec::new() },
            entropy: kind(5),
            token_logprobs: kind(9) || is_taught,
            proof: Some(v1::spec::Proof {
                canary: kind(6),
                tolerance: TOLERANCE,
                ..Default::default()
            }),
            ..Default::default()
        })),
        ..common_spec(run, pool, seed)
    }
}

/// Its prompts have the same ids as the held-out prompts of the run.
fn shared_training(seed: u64) -> v1::Across {
    let kinds = [ACROSS, SOUP, CHANGES_ACROSS, CHANGES_ACROSS];
    kinds[fastrand::Rng::with_seed(derive_seed(seed, &["across"])).usize(0..kinds.len())]
}

fn prompt_suite(name: &str) -> v1::PromptSuite {
    v1::PromptSuite {
        name: name.into(),
        prompts: blob(name.as_bytes()),
        count: HELDOUT,
        samples_per_prompt: 2,
        sampling: Some(v1::Sampling { max_new_tokens: 8, ..Default::default() }),
        pass_at: vec![1, 2],
        verifier: Some(v1::Verifier::default()),
    }
}
