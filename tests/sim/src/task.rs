//! What is asked of the fleet, and what its models and verifiers answer: the same,
//! whoever is asked, as with real ones on one class of machine.

use std::collections::BTreeMap;

use wire::{Digest, Fact, FactBody, FactKey, PromptEntry, Subject, derive_seed, v1};

pub(crate) const PROMPTS: u32 = 12;
const HELDOUT: u32 = 4;
const SAMPLES: u32 = 4;
const CYCLES: u32 = 2;
pub(crate) const SUITE: &str = "text";
const SUITES: [&str; 2] = ["sums", "code"];

/// What boxes may differ by, and do.
const TOLERANCE: f64 = 0.05;
const NOISE: f32 = 0.01;

/// What a box has loaded that does not load what it is told to.
const STALE: &str = "b3:forgotten";

/// Steps of a training, and how often it publishes.
pub(crate) const STEPS: u32 = 4;
pub(crate) const SAVE_EVERY: u32 = 2;

fn tree(manifest: &Digest) -> v1::Tree {
    v1::Tree { path: format!("trees/{manifest}"), manifest: manifest.to_string() }
}

fn blob(content: &[u8]) -> Option<v1::Blob> {
    let digest = Digest::hash_bytes(content).to_string();
    Some(v1::Blob { digest, bytes: content.len() as u64 })
}

/// Each seed's run is of another kind: stale samples or fresh ones, from the base or on, all
/// prompts or the harder half with a budget, with a gate or without, with prompt suites or without,
/// with samples that tell how likely they were, of which few may be too sure.
pub(crate) fn spec(run: &str, seed: u64) -> v1::Spec {
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
        pass_rate: Some(gate),
        patience: 2,
        pass_rates: if kind(4) { vec![of_suite] } else { Vec::new() },
        entropy: kind(5).then_some(sure),
        ..Default::default()
    };
    v1::Spec {
        run: run.into(),
        seed,
        base: Some(v1::Base { tree: Some(tree(&Digest::hash_bytes(b"base"))), random_init: false }),
        pool: "default".into(),
        suites: vec![v1::Suite { name: SUITE.into(), text: blob(b"text"), ..Default::default() }],
        kind: Some(v1::spec::Kind::Raft(v1::spec::Raft {
            prompts: blob(b"prompts"),
            prompt_count: PROMPTS,
            heldout: blob(b"heldout"),
            heldout_count: HELDOUT,
            cycles: CYCLES + u32::from(kind(0)),
            samples_per_prompt: SAMPLES,
            heldout_samples_per_prompt: 2,
            sampling: Some(v1::Sampling { max_new_tokens: 16, ..Default::default() }),
            selection: Some(v1::Selection {
                keep_per_prompt: 1,
                min_reward: 0.5,
                ..Default::default()
            }),
            training: Some(v1::Training { lora: Some(v1::Lora::default()), ..Default::default() }),
            staleness: u32::from(kind(0)),
            from_base: kind(1),
            prompts_per_cycle: if kind(2) { PROMPTS / 2 } else { 0 },
            curriculum: kind(2).then_some(curriculum),
            gates: kind(3).then_some(gates),
            prompt_suites: if kind(4) { SUITES.map(prompt_suite).into() } else { Vec::new() },
            entropy: kind(5),
            proof: Some(v1::spec::Proof {
                canary: kind(6),
                tolerance: TOLERANCE,
                ..Default::default()
            }),
            ..Default::default()
        })),
        ..Default::default()
    }
}

/// Of the same ids as the run's own held-out prompts.
fn prompt_suite(name: &str) -> v1::PromptSuite {
    v1::PromptSuite {
        name: name.into(),
        prompts: blob(name.as_bytes()),
        count: HELDOUT,
        samples_per_prompt: 2,
        sampling: Some(v1::Sampling { max_new_tokens: 8, ..Default::default() }),
        pass_at: vec![1, 2],
        ..Default::default()
    }
}

/// The prompts of all suites.
pub(crate) fn suites() -> BTreeMap<String, Vec<PromptEntry>> {
    SUITES.map(|name| (name.to_owned(), prompts("h"))).into()
}

/// Small jobs, so that there are several.
pub(crate) fn sizing() -> cycle::JobSizing {
    cycle::JobSizing { samples_min: 4, samples_max: 16, ..cycle::JobSizing::default() }
}

pub(crate) fn prompts(prefix: &str) -> Vec<PromptEntry> {
    let count = if prefix == "h" { HELDOUT } else { PROMPTS };
    let line = |n| format!(r#"{{"id":"{prefix}{n}","prompt":"{n}+1="}}"#);
    let lines: Vec<String> = (0..count).map(line).collect();
    PromptEntry::parse_all(lines.join("\n").as_bytes()).expect("prompts written here are prompts")
}

pub(crate) fn fact(like: &Subject, place: FactKey, body: FactBody) -> Fact {
    Fact { subject: Subject::new(&like.run, place), body }
}

/// What a text is worth to a policy; to each box a little otherwise.
fn canary(text: &str, policy: &str, agent: &str) -> Vec<f32> {
    if text.is_empty() {
        return Vec::new();
    }
    let figure = |seed: &str| {
        #[expect(clippy::cast_precision_loss, reason = "below a thousand")]
        let value = (derive_seed(7, &["canary", seed]) % 1000) as f32 / 1000.0;
        value
    };
    (0..16)
        .map(|token| {
            let noise = figure(&format!("{agent} {token}")) * NOISE;
            -1.0 - figure(&format!("{policy} {token}")) - noise
        })
        .collect()
}

/// Whether samples were drawn with something else than they say.
pub(crate) fn is_stale(samples: &v1::Samples) -> bool {
    let policy = format!("{} {}", samples.base, samples.adapter);
    samples.canary != canary("text", &policy, &samples.agent)
}

/// The samples of an order. A liar uses the base where an adapter was ordered, or leaves one
/// out, and says so; a stale box uses another policy and says nothing of it.
pub(crate) fn samples(
    order: &v1::GenerateOrder,
    agent: &str,
    wall_s: f64,
    lies: bool,
    stale: bool,
) -> FactBody {
    let manifest =
        |tree: &Option<v1::Tree>| tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone());
    let adapter = if lies { "b3:stale".to_owned() } else { manifest(&order.adapter) };
    let used = if stale { STALE } else { &adapter };
    let policy = format!("{} {used}", manifest(&order.base));
    let mut samples = Vec::new();
    for request in &order.requests {
        for index in request.first..request.first + request.count {
            let drawn =
                derive_seed(order.seed, &["text", &policy, &request.prompt_id, &index.to_string()]);
            samples.push(v1::samples::Sample {
                prompt_id: request.prompt_id.clone(),
                index,
                text: format!("{}", drawn % 1000),
                tokens: 3,
                finish: v1::samples::Finish::Stop.into(),
                logprob: order.logprobs.then(|| -3.0 * f64::from(policy_sureness(&policy)) / 10.0),
            });
        }
    }
    FactBody::Samples(v1::Samples {
        run: order.run.clone(),
        cycle: order.cycle,
        job: order.job.clone(),
        attempt: order.attempt,
        purpose: order.purpose,
        agent: agent.into(),
        base: manifest(&order.base),
        adapter,
        samples,
        wall_s,
        suite: order.suite.clone(),
        canary: canary(&order.canary, &policy, agent),
        ..Default::default()
    })
}

/// Nats that a policy's tokens cost it, in tenths: from 8 to 15.
fn policy_sureness(policy: &str) -> u8 {
    8 + u8::try_from(derive_seed(0, &["sure", policy]) % 8).unwrap_or_default()
}

/// The same samples, as another policy would have made them.
pub(crate) fn made_otherwise(body: FactBody) -> FactBody {
    let FactBody::Samples(mut samples) = body else { return body };
    for sample in &mut samples.samples {
        sample.text = format!("{}3", sample.text);
    }
    FactBody::Samples(samples)
}

pub(crate) fn verdicts(samples: &v1::Samples, sequence: u64, agent: &str) -> FactBody {
    let judge = |sample: &v1::samples::Sample| {
        // Each suite's verifier passes others.
        let rest = samples.suite.len() as u64 % 3;
        let pass = sample.text.parse::<u64>().is_ok_and(|number| number % 3 == rest);
        let outcome = if pass { v1::verdicts::Outcome::Pass } else { v1::verdicts::Outcome::Fail };
        v1::verdicts::Verdict {
            prompt_id: sample.prompt_id.clone(),
            index: sample.index,
            outcome: outcome.into(),
            reward: f64::from(u8::from(pass)),
            detail: String::new(),
        }
    };
    FactBody::Verdicts(v1::Verdicts {
        run: samples.run.clone(),
        cycle: samples.cycle,
        job: samples.job.clone(),
        purpose: samples.purpose,
        agent: agent.into(),
        samples_sequence: sequence,
        suite: samples.suite.clone(),
        verdicts: samples.samples.iter().map(judge).collect(),
        ..Default::default()
    })
}

/// A checkpoint depends on what it was trained on and from, and on nothing else.
pub(crate) fn checkpoint(order: &v1::TrainOrder, step: u32, agent: &str) -> FactBody {
    let base = order.base.as_ref().and_then(|base| base.tree.clone());
    let parent = order.adapter.clone().or_else(|| base.clone());
    let name = |tree: &Option<v1::Tree>| tree.as_ref().map_or("", |tree| &tree.manifest).to_owned();
    let dataset = order.dataset.as_ref().map_or("", |blob| &blob.digest);
    let base_name = name(&base);
    let content = format!("{} {} {dataset} {} {step}", name(&base), name(&parent), order.seed);
    let made = tree(&Digest::hash_bytes(content.as_bytes()));
    let policy = format!("{base_name} {}", made.manifest);
    let shown = canary(&order.canary, &policy, agent);
    FactBody::Checkpoint(v1::Checkpoint {
        run: order.run.clone(),
        cycle: order.cycle,
        step,
        steps: STEPS,
        r#final: step == STEPS,
        content: v1::checkpoint::Content::Adapter.into(),
        canary: if step == STEPS { shown } else { Vec::new() },
        tree: Some(made),
        base,
        parent,
        agent: agent.into(),
        ..Default::default()
    })
}

pub(crate) fn eval(checkpoint: &v1::Checkpoint, agent: &str) -> FactBody {
    let manifest = checkpoint.tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone());
    FactBody::Eval(v1::Eval {
        run: checkpoint.run.clone(),
        cycle: checkpoint.cycle,
        step: checkpoint.step,
        suite: SUITE.into(),
        manifest,
        agent: agent.into(),
        ..Default::default()
    })
}
