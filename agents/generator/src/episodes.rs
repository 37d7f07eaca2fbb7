//! Draws episodes: the model's turns in the worker, and between them the answers of an environment.
//! All episodes of an order are played at once; each continues as soon as its environment has
//! answered.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use agent::{JobError, LeasedJob, PromptFiles};
use anyhow::{Context, anyhow};
use futures::{StreamExt, stream};
use verifier::{
    ActionError, EnvironmentAnswer, EnvironmentHost, EpisodeStep, OpenEnvironment, VerifyItem,
};
use wire::{derive_environment_seed, derive_turn_seed, v1};

use crate::{
    episode_results::{EpisodeEnd, EpisodeResults},
    messages::{GenerateRequest, GeneratedSamples, GeneratorAnswer, GeneratorRequest},
    open_episode::OpenEpisode,
    policy_worker::{LoadedWorkerGuard, PolicyWorker},
};

/// Before an environment that failed is asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Plays the episodes of orders on this host.
pub(crate) struct EpisodePlayer {
    host: EnvironmentHost,
    prompt_files: PromptFiles,
}

/// The worker that draws the turns of an order.
#[derive(Clone, Copy)]
pub(crate) struct TurnWorker<'a> {
    pub policies: &'a PolicyWorker,
    pub loaded: &'a LoadedWorkerGuard<'a>,
}

/// The prompts of an order's requests: as tokens, and with their fields.
#[derive(Clone, Copy)]
struct EpisodeInputs<'a> {
    prompts: &'a [Vec<u32>],
    items: &'a [VerifyItem],
}

/// The settings and the state that the episodes of an order have in common.
struct OrderPlay<'a> {
    worker: TurnWorker<'a>,
    request: &'a GenerateRequest,
    environment: OpenEnvironment<'a>,
    settings: &'a v1::verifier::Environment,
    run_seed: u64,
    /// Set after the first failure, so that the others do not continue.
    has_failed: AtomicBool,
}

impl EpisodePlayer {
    pub(crate) fn new(host: EnvironmentHost) -> Self {
        Self { host, prompt_files: PromptFiles::default() }
    }

    /// Draws the samples of an order for episodes. `on_progress` receives the finished ones.
    pub(crate) async fn draw_episodes(
        &self,
        (job, order): (&LeasedJob, &v1::GenerateOrder),
        worker: TurnWorker<'_>,
        request: GenerateRequest,
        on_progress: impl FnMut(u32) + Send,
    ) -> Result<GeneratedSamples, JobError> {
        let spec = job.read_spec().await?;
        let (settings, file) = find_environment(&spec, order).ok_or_else(|| {
            JobError::fatal_failure(anyhow!(
                "the spec names no environment for prompts of suite {:?} (E111)",
                order.suite
            ))
        })?;
        let environment = self.host.open_environment(settings).await?;
        let known = self.prompt_files.load_prompts(job, file).await?;
        let item = |prompt_id: &str| {
            let prompt = known
                .get(prompt_id)
                .with_context(|| format!("the prompts file has no prompt {prompt_id:?} (E111)"));
            prompt.map(|prompt| VerifyItem::from_prompt(prompt, 0, String::new()))
        };
        let items: anyhow::Result<Vec<VerifyItem>> =
            request.requests.iter().map(|request| item(&request.prompt_id)).collect();
        let items = items.map_err(JobError::fatal_failure)?;
        let contexts = vec![Vec::new(); request.requests.len()];
        let first = GenerateRequest { contexts: Some(contexts), ..request.clone() };
        let mut generated = worker.draw_turns(first).await?;
        let prompts = std::mem::take(&mut generated.prompts);
        let play = OrderPlay {
            worker,
            request: &request,
            environment,
            settings,
            run_seed: spec.seed,
            has_failed: AtomicBool::new(false),
        };
        let first_turns = std::mem::take(&mut generated.samples);
        let inputs = EpisodeInputs { prompts: &prompts, items: &items };
        generated.samples = play.play_all(first_turns, inputs, on_progress).await?;
        Ok(generated)
    }
}

/// Returns the environment of an order's prompts, and their file.
fn find_environment<'a>(
    spec: &'a v1::Spec,
    order: &v1::GenerateOrder,
) -> Option<(&'a v1::verifier::Environment, &'a v1::Blob)> {
    let Some(v1::spec::Kind::Raft(raft)) = &spec.kind else { return None };
    let set = raft.find_prompt_set(order.purpose(), &order.suite)?;
    Some((set.verifier?.environment()?, set.file?))
}

pub(crate) fn unexpected_answer() -> JobError {
    JobError::retryable_failure(anyhow!("unexpected answer from the worker (E107)"))
}

impl TurnWorker<'_> {
    async fn draw_turns(&self, request: GenerateRequest) -> Result<GeneratedSamples, JobError> {
        let request = GeneratorRequest::Generate(request);
        match self.policies.call(self.loaded, &request, |_| ()).await? {
            GeneratorAnswer::Generated(generated) => Ok(generated),
            GeneratorAnswer::Adopted | GeneratorAnswer::Scored(_) | GeneratorAnswer::NotHere(_) => {
                Err(unexpected_answer())
            }
        }
    }
}

impl OrderPlay<'_> {
    /// Continues all episodes after their first turns, and returns them in the order of these.
    async fn play_all(
        &self,
        first_turns: Vec<v1::samples::Sample>,
        inputs: EpisodeInputs<'_>,
        mut on_progress: impl FnMut(u32) + Send,
    ) -> Result<Vec<v1::samples::Sample>, JobError> {
        let slots = self.worker.policies.calls_at_once();
        let first_turns = first_turns.into_iter().enumerate();
        let plays: Vec<_> =
            first_turns.map(|(number, first)| self.play_numbered(number, first, inputs)).collect();
        let mut plays = stream::iter(plays).buffer_unordered(slots);
        let mut results = EpisodeResults::default();
        // Calls in progress are not dropped after a failure, because the worker would be ended.
        while let Some((number, end)) = plays.next().await {
            results.record_end(number, end);
            self.has_failed.store(results.has_failed(), Ordering::Relaxed);
            on_progress(results.sample_count());
        }
        results.into_samples()
    }

    async fn play_numbered(
        &self,
        number: usize,
        first: v1::samples::Sample,
        EpisodeInputs { prompts, items }: EpisodeInputs<'_>,
    ) -> (usize, Result<EpisodeEnd, JobError>) {
        let place = items.iter().position(|item| item.prompt_id == first.prompt_id);
        let found = place.and_then(|place| Some((prompts.get(place)?, items.get(place)?)));
        let played = match found {
            Some((prompt, item)) => self.play_episode(first, prompt, item).await,
            None => Err(unexpected_answer()),
        };
        (number, played)
    }

    /// Plays an episode from its first turn to its end.
    async fn play_episode(
        &self,
        first: v1::samples::Sample,
        prompt: &[u32],
        item: &VerifyItem,
    ) -> Result<EpisodeEnd, JobError> {
        let v1::verifier::Environment { before_observation, after_observation, max_turns, .. } =
            self.settings;
        let max_tokens = self.request.sampling.max_new_tokens;
        let seed = derive_environment_seed(self.run_seed, &item.prompt_id);
        let mut episode = OpenEpisode::begin_episode(first, prompt, max_tokens);
        loop {
            if self.has_failed.load(Ordering::Relaxed) {
                return Err(JobError::Stopped);
            }
            let is_last = episode.turn_count() >= *max_turns;
            let step = EpisodeStep {
                item,
                seed,
                history: episode.earlier_turns(),
                action: episode.last_action(),
                is_last,
            };
            let began = Instant::now();
            let answered = self.ask_environment(step).await;
            let answer = match answered {
                Ok(answer) => answer,
                Err(ActionError::Worker(error)) => return Err(error),
                Err(ActionError::Environment(error)) => {
                    let (sample, lost) = (episode.into_cut_sample(), began.elapsed());
                    return Ok(EpisodeEnd::Failed { sample, error, lost });
                }
            };
            episode.add_observation(answer.observation);
            if answer.is_done || episode.is_cut() {
                return Ok(EpisodeEnd::Played(episode.into_sample()));
            }
            let observation = episode.last_observation();
            let text = format!("{before_observation}{observation}{after_observation}");
            let Some(request) = self.next_turn(&episode, text.clone()) else {
                return Ok(EpisodeEnd::Played(episode.into_cut_sample()));
            };
            let mut drawn = self.worker.draw_turns(request).await?;
            match (drawn.prompts.pop(), drawn.samples.pop()) {
                (Some(prompt), Some(turn)) => episode.add_turn(&text, &prompt, turn),
                _ => return Ok(EpisodeEnd::Played(episode.into_cut_sample())),
            }
        }
    }

    /// Asks once more if the environment fails: its process may have ended because of another
    /// episode.
    async fn ask_environment(
        &self,
        step: EpisodeStep<'_>,
    ) -> Result<EnvironmentAnswer, ActionError> {
        match self.environment.answer_action(step).await {
            Err(ActionError::Environment(_)) if !self.has_failed.load(Ordering::Relaxed) => {
                tokio::time::sleep(RETRY_PAUSE).await;
                self.environment.answer_action(step).await
            }
            answered => answered,
        }
    }

    /// Returns the request for the next turn of an episode; `None` if no token is left for it.
    fn next_turn(&self, episode: &OpenEpisode, text: String) -> Option<GenerateRequest> {
        let max_new_tokens = episode.tokens_left().filter(|left| *left > 0)?;
        let (prompt_id, index) = episode.sample_name();
        Some(GenerateRequest {
            sampling: v1::Sampling { max_new_tokens, ..self.request.sampling },
            seed: derive_turn_seed(self.request.seed, episode.turn_count()),
            requests: vec![v1::generate_order::Request {
                prompt_id: prompt_id.to_owned(),
                text,
                first: index,
                count: 1,
            }],
            logprobs: self.request.logprobs,
            token_logprobs: self.request.token_logprobs,
            canary: String::new(),
            contexts: Some(vec![episode.all_tokens().to_vec()]),
        })
    }
}
