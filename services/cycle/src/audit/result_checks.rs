//! Checks that the results of agents belong to an order, and that conclusions follow from the
//! results.

use wire::{JobId, SuiteName, v1};

use crate::{
    cycle_summary,
    state::{Cycle, PlannedJob, PolicyWeights, Run},
};

fn find_job<'a>(run: &'a Run, cycle: u32, id: &JobId) -> Option<&'a PlannedJob> {
    run.cycles.get(&cycle)?.jobs.get(id)
}

/// Checks samples against their job and spec. `ordered`: the attempt was ordered.
pub(super) fn check_samples(
    run: &Run,
    cycle: u32,
    id: &JobId,
    samples: &v1::Samples,
    ordered: bool,
) -> Vec<String> {
    // The fold reports a job that is not in the plan.
    let Some(job) = find_job(run, cycle, id) else { return Vec::new() };
    let mut found = Vec::new();
    if !ordered {
        found.push(format!("attempt {} of its job was never ordered", samples.attempt));
    }
    if samples.purpose() != job.purpose {
        found.push("its purpose is not its job's".into());
    }
    let set = run.raft_spec().and_then(|raft| raft.find_prompt_set(job.purpose, &job.suite));
    let limit = set.and_then(|set| set.sampling).map_or(0, |sampling| sampling.max_new_tokens);
    if let Some(sample) = samples.samples.iter().find(|sample| limit > 0 && sample.tokens > limit) {
        let v1::samples::Sample { prompt_id, index, tokens, .. } = sample;
        found.push(format!(
            "sample {index} of prompt {prompt_id:?} has {tokens} tokens, the limit was {limit}"
        ));
    }
    if let Some(sample) = samples.samples.iter().find(|sample| !has_own_tokens(sample)) {
        let v1::samples::Sample { prompt_id, index, .. } = sample;
        found.push(format!(
            "sample {index} of prompt {prompt_id:?} has other tokens than its turns"
        ));
    }
    found
}

/// Returns false for an episode whose drawn tokens are not those of its turns.
fn has_own_tokens(sample: &v1::samples::Sample) -> bool {
    let drawn: usize = sample.turns.iter().map(|turn| turn.token_ids.len()).sum();
    sample.turns.is_empty() || drawn == sample.tokens as usize
}

pub(super) fn check_verdicts(
    run: &Run,
    cycle: u32,
    id: &JobId,
    verdicts: &v1::Verdicts,
) -> Vec<String> {
    let Some(job) = find_job(run, cycle, id) else { return Vec::new() };
    let mut found = Vec::new();
    if verdicts.purpose() != job.purpose {
        found.push("its purpose is not its job's".into());
    }
    if verdicts.suite != job.suite {
        found.push("its suite is not its job's".into());
    }
    let set = run.raft_spec().and_then(|raft| raft.find_prompt_set(job.purpose, &job.suite));
    let verifier = set.and_then(|set| set.verifier);
    let graded =
        verifier.and_then(|verifier| verifier.how.as_ref()).is_some_and(allows_partial_reward);
    let wrong = verdicts.verdicts.iter().find(|verdict| !is_valid_reward(verdict, graded));
    if let Some(v1::verdicts::Verdict { prompt_id, index, reward, .. }) = wrong {
        found.push(format!(
            "sample {index} of prompt {prompt_id:?} has a reward of {reward}, which is not its \
             outcome's"
        ));
    }
    found
}

/// Returns true if the verifier may assign rewards other than 0 and 1.
fn allows_partial_reward(how: &v1::verifier::How) -> bool {
    use v1::verifier::How;
    match how {
        How::Exact(_) | How::Numeric(_) | How::Regex(_) | How::JsonSchema(_) => false,
        How::ToolCall(call) => call.partial,
        How::Python(python) => python.partial,
        How::Pytest(pytest) => pytest.partial,
        How::Stdio(stdio) => stdio.partial,
        How::Compile(_)
        | How::Command(_)
        | How::Http(_)
        | How::Chain(_)
        | How::LlmJudge(_)
        | How::Environment(_) => true,
    }
}

fn is_valid_reward(verdict: &v1::verdicts::Verdict, graded: bool) -> bool {
    use v1::verdicts::Outcome;
    let expected = match verdict.outcome() {
        Outcome::Pass => 1.0,
        Outcome::Fail | Outcome::Error => 0.0,
        Outcome::Unspecified => return false,
    };
    #[expect(clippy::float_cmp, reason = "written as exactly this")]
    let exact = verdict.reward == expected;
    exact || (graded && verdict.reward.is_finite() && verdict.outcome() != Outcome::Error)
}

/// Requires that all training samples were settled before the selection.
pub(super) fn check_selection(run: &Run, number: u32) -> Vec<String> {
    let cycle = run.cycles.get(&number);
    let judged = cycle.is_some_and(|cycle| cycle.is_settled(v1::Purpose::Train));
    if judged { Vec::new() } else { vec!["selected before every sample was judged".into()] }
}

/// Checks order, steps, content and base.
pub(super) fn check_checkpoint(run: &Run, number: u32, checkpoint: &v1::Checkpoint) -> Vec<String> {
    let manifest = |tree: Option<&v1::Tree>| tree.map(|tree| tree.manifest.clone());
    let spec_base = run.spec.base.as_ref().and_then(|base| base.tree.as_ref());
    if run.raft_spec().is_some() && number == 0 {
        let adapter = run.spec.base.as_ref().and_then(|base| base.adapter.as_ref());
        let (content, start, base) = match adapter {
            Some(_) => (v1::checkpoint::Content::Adapter, adapter, manifest(spec_base)),
            None => (v1::checkpoint::Content::Model, spec_base, None),
        };
        let adopted = manifest(checkpoint.tree.as_ref()) == manifest(start)
            && manifest(checkpoint.base.as_ref()) == base
            && checkpoint.content() == content
            && checkpoint.r#final;
        return if adopted { Vec::new() } else { vec!["it is not the spec's base".into()] };
    }
    if run.is_watched() {
        return check_watched_checkpoint(number, checkpoint, manifest(spec_base));
    }
    let mut found = Vec::new();
    let mut expect = |holds: bool, what: &str| {
        if !holds {
            found.push(what.to_owned());
        }
    };
    expect(
        run.cycles.get(&number).is_some_and(Cycle::is_training_ordered),
        "no training was ordered",
    );
    let v1::Checkpoint { step, steps, r#final, .. } = checkpoint;
    expect(step <= steps && *r#final == (step == steps), "its step, steps and final contradict");
    expect(checkpoint.tree.is_some(), "it names no tree");
    let policy = run.training_policy(number);
    let trained =
        policy.map_or(manifest(spec_base), |PolicyWeights { base, .. }| Some(base.manifest));
    if run.raft_spec().is_none() {
        let parent = manifest(checkpoint.parent.as_ref());
        expect(parent == manifest(spec_base), "its parent is not the spec's base");
    }
    let lora = run.spec_training().is_some_and(|training| training.lora.is_some());
    match checkpoint.content() {
        v1::checkpoint::Content::Adapter => {
            expect(lora, "it is an adapter, but every weight was to be trained");
            let base = manifest(checkpoint.base.as_ref());
            expect(base == trained, "its base is not the model that was trained");
        }
        v1::checkpoint::Content::Model => expect(!lora, "it is a model, not the adapter asked for"),
        v1::checkpoint::Content::Unspecified => expect(false, "it does not state its contents"),
    }
    found
}

/// Requires base and parent of the spec; the training of a watched run is unknown.
fn check_watched_checkpoint(
    number: u32,
    checkpoint: &v1::Checkpoint,
    spec_base: Option<String>,
) -> Vec<String> {
    let manifest = |tree: &Option<v1::Tree>| tree.as_ref().map(|tree| tree.manifest.clone());
    let v1::Checkpoint { step, steps, r#final, .. } = checkpoint;
    let named = if *r#final { step == steps } else { *steps == 0 || step < steps };
    let content = checkpoint.content();
    let base = manifest(&checkpoint.base);
    let based = match content {
        v1::checkpoint::Content::Adapter => base.is_some() && base == spec_base,
        v1::checkpoint::Content::Model | v1::checkpoint::Content::Unspecified => base.is_none(),
    };
    let parented = manifest(&checkpoint.parent) == spec_base;
    let rules = [
        (number == 0, "a watched run has no other cycle than 0"),
        (named, "its step, steps and final contradict"),
        (checkpoint.tree.is_some(), "it names no tree"),
        (content != v1::checkpoint::Content::Unspecified, "it does not state its contents"),
        (based, "its base is not the spec's"),
        (parented, "its parent is not the spec's base"),
        (checkpoint.resume.is_none(), "a watched run cannot be resumed"),
    ];
    rules.into_iter().filter(|(holds, _)| !holds).map(|(_, what)| what.to_owned()).collect()
}

/// Requires that the spec contains the suite, and that the perplexity equals exp(mean_nll).
pub(super) fn check_eval(run: &Run, suite: &SuiteName, eval: &v1::Eval) -> Vec<String> {
    let mut found = Vec::new();
    if !run.spec.suites.iter().any(|asked| asked.name == suite.as_str()) {
        found.push(format!("the spec asks for no eval {suite}"));
    }
    // Perplexity and exp(mean_nll) may differ by rounding.
    let expected = eval.mean_nll.exp();
    let close = (eval.perplexity - expected).abs() <= expected.abs() * 1e-6;
    if eval.tokens > 0 && !close {
        found.push("its perplexity does not follow from its mean_nll".into());
    }
    found
}

pub(super) fn check_pass_rates(run: &Run, number: u32, rates: &v1::PassRates) -> Vec<String> {
    let Some(cycle) = run.cycles.get(&number) else { return Vec::new() };
    let follow = cycle_summary::pass_rates(run, number, cycle).as_ref() == Some(rates);
    let wrong = (!follow).then(|| "they do not follow from the cycle's verdicts".to_owned());
    wrong.into_iter().collect()
}

pub(super) fn check_cycle_done(run: &Run, number: u32, done: &v1::CycleDone) -> Vec<String> {
    let Some(cycle) = run.cycles.get(&number) else { return Vec::new() };
    let before = number.checked_sub(1).and_then(|before| run.cycles.get(&before));
    let early = before.is_some_and(|before| before.done.is_none());
    let mut found = Vec::new();
    found.extend(early.then(|| "done before the cycle before it was".to_owned()));
    if !has_same_counts(done, &cycle_summary::summarize_cycle(run, number, cycle)) {
        found.push("its counts do not follow from its cycle's facts".into());
    }
    found
}

/// Ignores durations, which are rounded from log times.
fn has_same_counts(a: &v1::CycleDone, b: &v1::CycleDone) -> bool {
    let counts = |done: &v1::CycleDone| (done.sampled, done.kept, done.set_aside);
    let judged = |done: &v1::CycleDone| (done.findings.clone(), done.best, done.then);
    counts(a) == counts(b)
        && (&a.heldout, &a.train, &a.pass_at) == (&b.heldout, &b.train, &b.pass_at)
        && a.suites == b.suites
        && a.samples_by_agent == b.samples_by_agent
        && judged(a) == judged(b)
}

pub(super) fn check_done(run: &Run, done: &v1::Done) -> Vec<String> {
    use v1::done::Status;
    let ended = |number: u32| run.cycles.get(&number).is_some_and(|cycle| cycle.done.is_some());
    let holds = match done.status() {
        Status::Succeeded => {
            let last = run.stopped_after().unwrap_or(run.last_cycle());
            (0..=last).all(ended)
        }
        Status::Cancelled => run.cancelled,
        Status::Failed => !done.message.is_empty(),
        Status::Unspecified => false,
    };
    if holds {
        return Vec::new();
    }
    let status = done.status().as_str_name().to_lowercase();
    vec![format!("the run's facts do not show that it {status}")]
}

pub(super) fn find_missing_results(run: &Run, number: u32, cycle: &Cycle) -> Vec<String> {
    let mut findings = Vec::new();
    let trained = cycle.final_checkpoint().is_some();
    for (id, job) in &cycle.jobs {
        let planned = trained || job.purpose == v1::Purpose::Train;
        let expected = planned && job.set_aside.is_none();
        if expected && job.samples.is_none() {
            findings.push(format!("cycle {number}, job {id}: planned but never sampled"));
        }
        if expected && job.needs.verdicts && job.verdicts.is_none() {
            findings.push(format!("cycle {number}, job {id}: never verified"));
        }
        if expected && job.needs.scores && job.scores.is_none() && !job.is_void() {
            findings.push(format!("cycle {number}, job {id}: never scored"));
        }
    }
    if trained
        && !cycle.split_training.outer_steps.is_empty()
        && !cycle.split_training.is_complete()
    {
        findings.push(format!("cycle {number}: steps of its training never counted"));
    }
    if !cycle.has_all_evals(&run.spec.suites) {
        findings.push(format!("cycle {number}: a checkpoint was never evaluated"));
    }
    if let Some(selected) = cycle.selected.as_ref().filter(|selected| selected.kept > 0)
        && !trained
    {
        let kept = selected.kept;
        findings.push(format!("cycle {number}: {kept} samples selected, never trained on"));
    }
    findings
}
