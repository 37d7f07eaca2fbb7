//! Checks that orders follow from the state of the run: its plan, policy and seeds.

use wire::{JobId, PromptEntry, TrainPart, derive_seed, v1};

use crate::{
    canary_vote, schedule, select,
    split_training::{self, SplitTraining},
    state::{PolicyWeights, Run},
};

/// Skips the texts of requests without `prompts`.
pub(super) fn check_generate_order(
    run: &Run,
    number: u32,
    id: &JobId,
    order: &v1::GenerateOrder,
    prompts: Option<&[PromptEntry]>,
) -> Vec<String> {
    let (Some(raft), Some(cycle)) = (run.raft_spec(), run.cycles.get(&number)) else {
        return vec!["ordered before anything was planned".into()];
    };
    // The fold reports a job that is not in the plan.
    let Some(job) = cycle.jobs.get(id) else { return Vec::new() };
    let mut found = Vec::new();
    if order.purpose() != job.purpose {
        found.push("its purpose is not its job's".into());
    }
    if order.suite != job.suite {
        found.push("its suite is not its job's".into());
    }
    match run.sampling_policy(number, job.purpose) {
        Some(PolicyWeights { base, adapter }) => {
            let same = order.base.as_ref() == Some(&base) && order.adapter == adapter;
            found.extend((!same).then(|| "orders samples of another policy".to_owned()));
        }
        None => found.push("ordered before there was a policy to sample from".into()),
    }
    if order.sampling != schedule::sampling_settings(raft, number, job.purpose, &job.suite) {
        found.push("its sampling is not the spec's".into());
    }
    if order.accept_unverified_policy != raft.accept_unverified_policy {
        found.push("its requirement of a verified policy differs from the spec".into());
    }
    if order.logprobs != schedule::needs_logprobs(raft, job.purpose) {
        found.push("its request for log-probs differs from the spec".into());
    }
    if order.token_logprobs != schedule::needs_token_logprobs(raft, job.purpose) {
        found.push("its request for log-probs of tokens differs from the spec".into());
    }
    if order.episodes != schedule::plays_episodes(raft, job.purpose, &job.suite) {
        found.push("its request for episodes differs from the spec".into());
    }
    if order.seed != schedule::generate_seed(run.spec.seed, number, job.purpose, &job.suite) {
        found.push("its seed does not follow from the run's".into());
    }
    found.extend(check_round(run, order.round));
    found.extend(check_requests(&job.draws, &order.requests, prompts));
    found
}

/// Checks that all orders of one policy have the same canary text. Skipped without the training
/// prompts.
pub(super) fn check_canary(
    run: &Run,
    number: u32,
    order: &v1::GenerateOrder,
    train: Option<&[PromptEntry]>,
) -> Option<String> {
    let wanted = canary_vote::canary_text_for(run, number, order.purpose(), train?);
    (order.canary != wanted).then(|| "its canary is not that of its policy".into())
}

/// Rejects a round in the future. It may be in the past: the coordinator may not yet have known of
/// the latest resume.
fn check_round(run: &Run, round: u32) -> Option<String> {
    (round > run.round).then(|| {
        format!("ordered in round {round}, but the run was resumed {} times", run.round - 1)
    })
}

/// Checks that the requests match the draws of their job, and their texts the prompts.
fn check_requests(
    draws: &[v1::plan::Draw],
    requests: &[v1::generate_order::Request],
    prompts: Option<&[PromptEntry]>,
) -> Option<String> {
    if draws.len() != requests.len() {
        return Some(format!("{} requests for {} planned draws", requests.len(), draws.len()));
    }
    draws.iter().zip(requests).find_map(|(draw, request)| {
        let v1::plan::Draw { prompt: line, first, count } = draw;
        if (request.first, request.count) != (*first, *count) {
            return Some(format!("its request for line {line} differs from the plan"));
        }
        let prompt = prompts?.get(*line as usize);
        let same = prompt.is_some_and(|p| p.id == request.prompt_id && p.prompt == request.text);
        (!same)
            .then(|| format!("its prompt {:?} is not line {line} of the file", request.prompt_id))
    })
}

/// Checks dataset, settings, replay, canary, weights, seed and round.
pub(super) fn check_train_order(run: &Run, number: u32, order: &v1::TrainOrder) -> Vec<String> {
    let mut found = Vec::new();
    let mut expect = |same: bool, what: &str| {
        if !same {
            found.push(what.to_owned());
        }
    };
    match &run.spec.kind {
        Some(v1::spec::Kind::Raft(raft)) => {
            let selected = run.cycles.get(&number).and_then(|cycle| cycle.selected.as_ref());
            let Some(selected) = selected else {
                return vec!["ordered before anything was selected".into()];
            };
            expect(selected.kept > 0, "orders training on nothing");
            expect(order.dataset == selected.dataset, "its dataset is not what was selected");
            let training = schedule::training_settings(raft, number);
            expect(order.training == training, "its training is not the spec's");
            let replay = select::replayed_datasets(run, raft, number);
            #[expect(clippy::float_cmp, reason = "written as exactly this")]
            let share = order.replay_share == select::replay_share(raft);
            expect(
                order.replay == replay && share,
                "it replays samples, but the spec requests no \
                                                     replay",
            );
            let canary = run.cycles.get(&number).map_or("", |cycle| &cycle.canary_text);
            expect(order.canary == canary, "its canary is not of what was selected");
            let policy = run.training_policy(number);
            let base = order.base.as_ref().and_then(|base| base.tree.clone());
            let same = policy
                .is_some_and(|policy| Some(policy.base) == base && policy.adapter == order.adapter);
            expect(same, "trains another model than the one the cycle continues from");
        }
        Some(v1::spec::Kind::Sft(sft)) => {
            expect(order.dataset == sft.dataset, "its dataset is not the spec's");
            expect(order.training == sft.training, "its training is not the spec's");
            let same = order.base == run.spec.base && order.adapter.is_none();
            expect(same, "trains another model than the spec's base");
        }
        Some(v1::spec::Kind::Watched(_)) => return vec!["a watched run orders nothing".into()],
        None => {}
    }
    let seed = derive_seed(run.spec.seed, &["train", &number.to_string()]);
    expect(order.seed == seed, "its seed does not follow from the run's");
    found.extend(check_round(run, order.round));
    found
}

/// Checks that the part of a training on several boxes follows from its facts.
pub(super) fn check_train_part(
    run: &Run,
    (number, outer, part): (u32, u32, TrainPart),
    order: &v1::TrainOrder,
) -> Option<String> {
    let untouched = SplitTraining::default();
    let training = run.cycles.get(&number).map_or(&untouched, |cycle| &cycle.split_training);
    let expected = match part {
        TrainPart::Slice(slice) => split_training::slice_order(training, order, outer, slice)
            .map(v1::train_order::Part::Slice),
        TrainPart::Merge => Some(v1::train_order::Part::Merge(split_training::merge_order(
            run, training, order, outer,
        ))),
    };
    (order.part != expected || order.part.is_none())
        .then(|| "its part does not follow from the outer steps before it".into())
}
