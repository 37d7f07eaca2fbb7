//! What an order asks for follows from the run's state: the plan, the policy, the seeds.

use wire::{JobId, Prompt, derive, v1};

use crate::{
    proof, schedule, select,
    state::{Policy, Run},
};

pub(super) fn generate(
    run: &Run,
    number: u32,
    id: &JobId,
    order: &v1::GenerateOrder,
    prompts: Option<&[Prompt]>,
) -> Vec<String> {
    let (Some(raft), Some(cycle)) = (run.raft(), run.cycles.get(&number)) else {
        return vec!["ordered before anything was planned".into()];
    };
    // Folding says so of a job that is in no plan.
    let Some(job) = cycle.jobs.get(id) else { return Vec::new() };
    let mut found = Vec::new();
    if order.purpose() != job.purpose {
        found.push("its purpose is not its job's".into());
    }
    if order.suite != job.suite {
        found.push("its suite is not its job's".into());
    }
    match run.policy(number, job.purpose) {
        Some(Policy { base, adapter }) => {
            let same = order.base.as_ref() == Some(&base) && order.adapter == adapter;
            found.extend((!same).then(|| "orders samples of another policy".to_owned()));
        }
        None => found.push("ordered before there was a policy to sample from".into()),
    }
    if order.sampling != schedule::sampling(raft, number, job.purpose, &job.suite) {
        found.push("its sampling is not the spec's".into());
    }
    if order.accept_unverified_policy != raft.accept_unverified_policy {
        found.push("whether its policy must be verified is not as the spec says".into());
    }
    if order.logprobs != schedule::logprobs(raft, job.purpose) {
        found.push("whether its samples tell their logprob is not as the spec says".into());
    }
    if order.seed != schedule::generate_seed(run.spec.seed, number, job.purpose, &job.suite) {
        found.push("its seed does not follow from the run's".into());
    }
    found.extend(round(run, order.round));
    found.extend(requests(&job.draws, &order.requests, prompts));
    found
}

/// The text that shows a policy is one and the same in all its orders.
pub(super) fn canary(
    run: &Run,
    number: u32,
    order: &v1::GenerateOrder,
    train: Option<&[Prompt]>,
) -> Option<String> {
    let wanted = proof::text(run, number, order.purpose(), train?);
    (order.canary != wanted).then(|| "its canary is not that of its policy".into())
}

/// A coordinator may not have heard of the newest resume, but it cannot foresee one.
fn round(run: &Run, round: u32) -> Option<String> {
    (round > run.round).then(|| {
        format!("ordered in round {round}, but the run was resumed {} times", run.round - 1)
    })
}

fn requests(
    draws: &[v1::plan::Draw],
    requests: &[v1::generate_order::Request],
    prompts: Option<&[Prompt]>,
) -> Option<String> {
    if draws.len() != requests.len() {
        return Some(format!("{} requests for {} planned draws", requests.len(), draws.len()));
    }
    draws.iter().zip(requests).find_map(|(draw, request)| {
        let v1::plan::Draw { prompt: line, first, count } = draw;
        if (request.first, request.count) != (*first, *count) {
            return Some(format!("what it requests of line {line} is not what was planned"));
        }
        let prompt = prompts?.get(*line as usize);
        let same = prompt.is_some_and(|p| p.id == request.prompt_id && p.prompt == request.text);
        (!same)
            .then(|| format!("its prompt {:?} is not line {line} of the file", request.prompt_id))
    })
}

pub(super) fn train(run: &Run, number: u32, order: &v1::TrainOrder) -> Vec<String> {
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
            let training = schedule::training(raft, number);
            expect(order.training == training, "its training is not the spec's");
            let replay = select::replay(run, raft, number);
            #[expect(clippy::float_cmp, reason = "written as exactly this")]
            let share = order.replay_share == select::replay_share(raft);
            expect(order.replay == replay && share, "it replays what the spec does not ask for");
            let canary = run.cycles.get(&number).map_or("", |cycle| &cycle.canary);
            expect(order.canary == canary, "its canary is not of what was selected");
            let policy = run.trained_from(number);
            let base = order.base.as_ref().and_then(|base| base.tree.clone());
            let same = policy
                .is_some_and(|policy| Some(policy.base) == base && policy.adapter == order.adapter);
            expect(same, "trains something else than the cycle goes on from");
        }
        Some(v1::spec::Kind::Sft(sft)) => {
            expect(order.dataset == sft.dataset, "its dataset is not the spec's");
            expect(order.training == sft.training, "its training is not the spec's");
            let same = order.base == run.spec.base && order.adapter.is_none();
            expect(same, "trains something else than the spec's base");
        }
        Some(v1::spec::Kind::Watched(_)) => return vec!["a watched run orders nothing".into()],
        None => {}
    }
    let seed = derive(run.spec.seed, &["train", &number.to_string()]);
    expect(order.seed == seed, "its seed does not follow from the run's");
    found.extend(round(run, order.round));
    found
}
