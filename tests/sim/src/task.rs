//! Deterministic results of the simulated models and verifiers. They do not depend on the agent, as
//! on real machines of one kind.

use std::collections::BTreeMap;

use wire::{
    Digest, Fact, FactBody, FactKey, PromptEntry, Subject, derive_seed, encode_logprobs, v1,
};

use crate::specs::{HELDOUT, PROMPTS, SUITES};

pub(crate) const SUITE: &str = "text";

/// The pool of some agents and runs. The others are in the pool `default`.
pub(crate) const OTHER_POOL: &str = "other";

/// The actual noise of the canaries of agents.
const NOISE: f32 = 0.01;

/// The adapter that the stale agent uses instead of the ordered one.
const STALE: &str = "b3:forgotten";

/// Training steps, and steps between two checkpoints.
const STEPS: u32 = 4;
const SAVE_EVERY: u32 = 2;

pub(crate) fn saved_steps() -> impl Iterator<Item = u32> {
    (1..=STEPS).filter(|step| step % SAVE_EVERY == 0)
}

pub(crate) fn tree(manifest: &Digest) -> v1::Tree {
    v1::Tree { path: format!("trees/{manifest}"), manifest: manifest.to_string() }
}

pub(crate) fn teacher() -> v1::Tree {
    tree(&Digest::hash_bytes(b"teacher"))
}

pub(crate) fn blob(content: &[u8]) -> Option<v1::Blob> {
    let digest = Digest::hash_bytes(content).to_string();
    Some(v1::Blob { digest, bytes: content.len() as u64 })
}

pub(crate) fn suite_prompts() -> BTreeMap<String, Vec<PromptEntry>> {
    SUITES.map(|name| (name.to_owned(), prompts("h"))).into()
}

/// Small jobs, so that a cycle has several.
pub(crate) fn job_sizing() -> cycle::JobSizing {
    cycle::JobSizing { samples_min: 4, samples_max: 16, ..cycle::JobSizing::default() }
}

pub(crate) fn prompts(prefix: &str) -> Vec<PromptEntry> {
    let count = if prefix == "h" { HELDOUT } else { PROMPTS };
    let line = |n| format!(r#"{{"id":"{prefix}{n}","prompt":"{n}+1="}}"#);
    let lines: Vec<String> = (0..count).map(line).collect();
    PromptEntry::parse_all(lines.join("\n").as_bytes()).expect("prompts written here are prompts")
}

pub(crate) fn new_fact(like: &Subject, place: FactKey, body: FactBody) -> Fact {
    Fact { subject: Subject::new(&like.run, place), body }
}

/// Log-probabilities of a canary text for a policy, with a little noise per agent.
fn canary_logprobs(text: &str, policy: &str, agent: &str) -> Vec<f32> {
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

/// True if the samples were drawn with another policy than they name.
pub(crate) fn is_stale(samples: &v1::Samples) -> bool {
    let policy = format!("{} {}", samples.base, samples.adapter);
    samples.canary != canary_logprobs("text", &policy, &samples.agent)
}

/// The samples of an order. With `lies` they name another adapter than the ordered one. With
/// `stale` they are drawn with another policy than they name.
pub(crate) fn make_samples(
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
                logprob: order.logprobs.then(|| -3.0 * f64::from(policy_entropy(&policy)) / 10.0),
                token_logprobs: match order.token_logprobs {
                    true => encode_logprobs(&[-f64::from(policy_entropy(&policy)) / 10.0; 3]),
                    false => Vec::new(),
                },
                ..Default::default()
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
        canary: canary_logprobs(&order.canary, &policy, agent),
        ..Default::default()
    })
}

/// The mean entropy of a policy in tenths of a nat per token: 8 to 15.
fn policy_entropy(policy: &str) -> u8 {
    8 + u8::try_from(derive_seed(0, &["sure", policy]) % 8).unwrap_or_default()
}

/// Changes the texts as if another policy had drawn them.
pub(crate) fn change_texts(body: FactBody) -> FactBody {
    let FactBody::Samples(mut samples) = body else { return body };
    for sample in &mut samples.samples {
        sample.text = format!("{}3", sample.text);
    }
    FactBody::Samples(samples)
}

pub(crate) fn make_verdicts(samples: &v1::Samples, sequence: u64, agent: &str) -> FactBody {
    let judge = |sample: &v1::samples::Sample| {
        // The verifier of each suite passes other samples.
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

pub(crate) fn make_scores(samples: &v1::Samples, sequence: u64, agent: &str) -> FactBody {
    // Each seventh sample is too long for the teacher.
    let score = |sample: &v1::samples::Sample| v1::scores::Score {
        token_logprobs: match sample.text.len() % 7 {
            0 => Vec::new(),
            length => encode_logprobs(&[-0.125 * length as f64; 3]),
        },
    };
    FactBody::Scores(v1::Scores {
        run: samples.run.clone(),
        cycle: samples.cycle,
        job: samples.job.clone(),
        agent: agent.into(),
        teacher: teacher().manifest,
        samples_sequence: sequence,
        scores: samples.samples.iter().map(score).collect(),
        ..Default::default()
    })
}

/// A checkpoint that depends only on its base, parent, dataset, seed and step.
pub(crate) fn make_checkpoint(order: &v1::TrainOrder, step: u32, agent: &str) -> FactBody {
    let base = order.base.as_ref().and_then(|base| base.tree.clone());
    let parent = order.adapter.clone().or_else(|| base.clone());
    let name = |tree: &Option<v1::Tree>| tree.as_ref().map_or("", |tree| &tree.manifest).to_owned();
    let dataset = order.dataset.as_ref().map_or("", |blob| &blob.digest);
    let base_name = name(&base);
    let content = format!("{} {} {dataset} {} {step}", name(&base), name(&parent), order.seed);
    let new_tree = tree(&Digest::hash_bytes(content.as_bytes()));
    let policy = format!("{base_name} {}", new_tree.manifest);
    let canary = canary_logprobs(&order.canary, &policy, agent);
    FactBody::Checkpoint(v1::Checkpoint {
        run: order.run.clone(),
        cycle: order.cycle,
        step,
        steps: STEPS,
        r#final: step == STEPS,
        content: v1::checkpoint::Content::Adapter.into(),
        canary: if step == STEPS { canary } else { Vec::new() },
        tree: Some(new_tree),
        base,
        parent,
        agent: agent.into(),
        weighting: make_weighting(order, step),
        ..Default::default()
    })
}

/// The facts of a part of a training on several boxes: a delta, or a checkpoint if one is due and a
/// merge.
pub(crate) fn make_part_results(order: &v1::TrainOrder, agent: &str) -> Vec<(FactKey, FactBody)> {
    let manifest =
        |tree: &Option<v1::Tree>| tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone());
    let hash = |content: String| Some(tree(&Digest::hash_bytes(content.as_bytes())));
    let cycle = order.cycle;
    match &order.part {
        Some(v1::train_order::Part::Slice(slice)) => {
            let planned = slice.planned.clone().unwrap_or_default();
            let start = manifest(&slice.start);
            let end = planned.first.saturating_add(planned.steps).min(STEPS);
            let steps = end.saturating_sub(planned.first);
            let content = format!("{start} {} {} {steps}", order.seed, planned.first);
            let delta = v1::Delta {
                run: order.run.clone(),
                cycle,
                outer: slice.outer,
                slice: slice.slice,
                agent: agent.into(),
                start,
                tree: hash(content).filter(|_| steps > 0),
                first: planned.first,
                steps,
                total_steps: STEPS,
                tokens: u64::from(steps) * 10,
                trained_tokens: u64::from(steps) * 4,
                wall_s: f64::from(steps),
                ..Default::default()
            };
            let key = FactKey::Delta { cycle, outer: slice.outer, slice: slice.slice };
            vec![(key, FactBody::Delta(delta))]
        }
        Some(v1::train_order::Part::Merge(merge)) => {
            let deltas: Vec<String> =
                merge.deltas.iter().map(|delta| manifest(&delta.tree)).collect();
            let start = manifest(&merge.start);
            let merged = hash(format!("{start} {deltas:?} {}", order.seed));
            let mut facts = Vec::new();
            if let Some(due) = &merge.checkpoint {
                let (agent, tree) = (agent.into(), merged.clone());
                let checkpoint = v1::Checkpoint { tree, agent, ..due.clone() };
                let key = FactKey::Checkpoint { cycle, step: due.step };
                facts.push((key, FactBody::Checkpoint(checkpoint)));
            }
            let fact = v1::Merge {
                run: order.run.clone(),
                cycle,
                outer: merge.outer,
                agent: agent.into(),
                start,
                deltas,
                tree: merged,
                derived: merge.derived,
                kept: match merge.heldout {
                    Some(_) => merge.deltas.iter().map(|delta| delta.slice).collect(),
                    None => Vec::new(),
                },
                total_steps: if merge.outer == 0 { STEPS } else { 0 },
                ..Default::default()
            };
            facts.push((FactKey::Merge { cycle, outer: merge.outer }, FactBody::Merge(fact)));
            facts
        }
        None => Vec::new(),
    }
}

/// The weights of tokens if the order has an objective; the divergence depends on its dataset.
fn make_weighting(order: &v1::TrainOrder, step: u32) -> Option<v1::checkpoint::Weighting> {
    order.training.as_ref()?.objective.as_ref()?;
    let dataset = order.dataset.as_ref().map_or("", |blob| &blob.digest);
    let drawn = derive_seed(order.seed, &["weighting", dataset, &step.to_string()]) % 10;
    Some(v1::checkpoint::Weighting {
        tokens: 100,
        dropped: drawn,
        divergence: Some(f64::from(u8::try_from(drawn).unwrap_or_default()) / 10.0),
        ..Default::default()
    })
}

pub(crate) fn make_eval(checkpoint: &v1::Checkpoint, agent: &str) -> FactBody {
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
