//! Builds the facts that agents of each role would write, without doing any work.

use cycle::Run;
use wire::{Fact, FactBody, FactKey, Record, v1};

use super::memory_log::make_tree;

/// Optimizer steps of a training; its only checkpoint is published at the end.
const TRAINING_STEPS: u32 = 24;

/// Returns the fact that an agent would write in reaction to `record`, or `None` if no role reacts
/// to it.
///
/// Evaluations need `run`, which names the suite; without it, checkpoints get no answer.
pub(super) fn answer_fact(
    run: Option<&Run>,
    record: &Record,
) -> anyhow::Result<Option<(FactKey, FactBody)>> {
    let Fact { subject, body } = &record.fact;
    Ok(match (&subject.key, body) {
        (_, FactBody::GenerateOrder(order)) => {
            let place = FactKey::Samples { cycle: order.cycle, job: order.job.parse()? };
            Some((place, FactBody::Samples(make_samples(order))))
        }
        (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
            let place = FactKey::Verdicts { cycle: *cycle, job: job.clone() };
            Some((place, FactBody::Verdicts(make_verdicts(record.sequence, samples))))
        }
        (_, FactBody::TrainOrder(order)) => {
            let place = FactKey::Checkpoint { cycle: order.cycle, step: TRAINING_STEPS };
            Some((place, FactBody::Checkpoint(make_checkpoint(order))))
        }
        (FactKey::Checkpoint { cycle, step }, FactBody::Checkpoint(checkpoint)) => {
            let suite = run.and_then(|run| run.spec.suites.first());
            let Some(suite) = suite else { return Ok(None) };
            let place =
                FactKey::Eval { cycle: *cycle, step: *step, suite: suite.name.as_str().parse()? };
            Some((place, FactBody::Eval(make_eval(checkpoint))))
        }
        _ => None,
    })
}

pub(super) fn make_samples(order: &v1::GenerateOrder) -> v1::Samples {
    let manifest =
        |tree: Option<&v1::Tree>| tree.map_or(String::new(), |tree| tree.manifest.clone());
    let mut samples = Vec::new();
    for request in &order.requests {
        for index in request.first..request.first + request.count {
            samples.push(v1::samples::Sample {
                prompt_id: request.prompt_id.clone(),
                index,
                text: format!("7+5=12 4+8+{}=1{index} #1{index}2", index % 2),
                tokens: 24,
                finish: v1::samples::Finish::Stop.into(),
                logprob: None,
                ..Default::default()
            });
        }
    }
    v1::Samples {
        run: order.run.clone(),
        cycle: order.cycle,
        job: order.job.clone(),
        attempt: order.attempt,
        purpose: order.purpose,
        agent: "generator-1".into(),
        engine: engine::ENGINE.into(),
        base: manifest(order.base.as_ref()),
        adapter: manifest(order.adapter.as_ref()),
        samples,
        wall_s: 1.5,
        ..Default::default()
    }
}

pub(super) fn make_verdicts(samples_sequence: u64, samples: &v1::Samples) -> v1::Verdicts {
    let judge = |sample: &v1::samples::Sample| {
        let passes = sample.index.is_multiple_of(3);
        let outcome =
            if passes { v1::verdicts::Outcome::Pass } else { v1::verdicts::Outcome::Fail };
        v1::verdicts::Verdict {
            prompt_id: sample.prompt_id.clone(),
            index: sample.index,
            outcome: outcome.into(),
            reward: f64::from(u8::from(passes)),
            detail: String::new(),
        }
    };
    v1::Verdicts {
        run: samples.run.clone(),
        cycle: samples.cycle,
        job: samples.job.clone(),
        purpose: samples.purpose,
        agent: "verifier-1".into(),
        verifier: "exact".into(),
        samples_sequence,
        verdicts: samples.samples.iter().map(judge).collect(),
        wall_s: 0.1,
        ..Default::default()
    }
}

pub(super) fn make_checkpoint(order: &v1::TrainOrder) -> v1::Checkpoint {
    let base = order.base.as_ref().and_then(|base| base.tree.clone());
    v1::Checkpoint {
        run: order.run.clone(),
        cycle: order.cycle,
        step: TRAINING_STEPS,
        steps: TRAINING_STEPS,
        r#final: true,
        content: v1::checkpoint::Content::Adapter.into(),
        tree: Some(make_tree(&format!("{}-{}", order.run, order.cycle))),
        parent: order.adapter.clone().or_else(|| base.clone()),
        base,
        loss: 0.5,
        learning_rate: 0.002,
        tokens: 65_536,
        wall_s: 3.0,
        agent: "trainer-1".into(),
        resume: None,
        engine: engine::ENGINE.into(),
        grad_norm: 0.625,
        grad_norm_max: 1.25,
        weighting: None,
        weight_change: Some(0.0625),
        trained_tokens: 49_152,
        packing: 1.0,
        skipped: 0,
        canary: Vec::new(),
        peak_memory_bytes: 1 << 30,
    }
}

pub(super) fn make_eval(checkpoint: &v1::Checkpoint) -> v1::Eval {
    v1::Eval {
        run: checkpoint.run.clone(),
        cycle: checkpoint.cycle,
        step: checkpoint.step,
        suite: "text".into(),
        manifest: checkpoint.tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone()),
        mean_nll: 1.0,
        perplexity: 2.7,
        engine: engine::ENGINE.into(),
        agent: "evaluator-1".into(),
        process: Some(v1::eval::Process::default()),
        ..Default::default()
    }
}
