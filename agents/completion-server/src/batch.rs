//! Draws the tokens of all open requests together: each step adds one token to every sample.
//! Requests wait in order of arrival for a free slot. A request whose client has disconnected is
//! dropped.

use std::{collections::BTreeMap, sync::Arc};

use engine::{
    BatchGenerator, FinishReason, GenerateError, ModelTokenizer, PromptInput, PromptRequest,
    SamplingParameters, ScoreOptions, TokenScore, TokenizerError,
};
use tokio::sync::{mpsc, watch};

use crate::choice_text::ChoiceText;

/// A request whose prompts are tokenized and fit into the context.
#[derive(Debug)]
pub(crate) struct BatchRequest {
    /// Index of the model in the batch.
    pub model: usize,
    pub prompts: Vec<PromptTokens>,
    pub sampling: SamplingParameters,
    pub scored: ScoreOptions,
    pub stops: Vec<String>,
    /// True if each choice begins with the prompt.
    pub echo: bool,
    /// False if the answer is only the echoed prompt.
    pub draws: bool,
    /// True if pieces contain tokens besides their text.
    pub reports_tokens: bool,
    pub events: mpsc::Sender<ChoiceEvent>,
}

/// A prompt with the seeds of its choices.
#[derive(Debug)]
pub(crate) struct PromptTokens {
    pub tokens: Vec<u32>,
    /// The text to echo; empty without an echo.
    pub text: String,
    pub seeds: Vec<u64>,
    pub max_new_tokens: usize,
}

/// A message to the client of a request.
#[derive(Debug)]
pub(crate) enum ChoiceEvent {
    Piece(ChoicePiece),
    /// The engine failed; the text is the reason.
    Failed(String),
}

/// A part of a choice.
#[derive(Debug, Default)]
pub(crate) struct ChoicePiece {
    pub choice: usize,
    pub text: String,
    /// The tokens since the previous piece; empty unless the request reports tokens.
    pub tokens: Vec<PieceToken>,
    /// The number of tokens drawn since the previous piece.
    pub drawn: usize,
    /// Set in the last piece of the choice.
    pub finish: Option<FinishReason>,
}

/// A token of a choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PieceToken {
    pub token: u32,
    /// `None` for the first token of a prompt, which nothing precedes.
    pub logprob: Option<f64>,
    pub alternatives: Vec<(u32, f64)>,
}

/// Returns a channel with room for all events of a request, so that the batch never waits for a
/// client: one for each token of each choice, one for its end, and a failure.
pub(crate) fn open_event_channel(
    prompts: &[PromptTokens],
) -> (mpsc::Sender<ChoiceEvent>, mpsc::Receiver<ChoiceEvent>) {
    let events = |prompt: &PromptTokens| prompt.seeds.len() * (prompt.max_new_tokens + 1);
    mpsc::channel(prompts.iter().map(events).sum::<usize>() + 1)
}

/// Identifies the prompt of a sample: the request and the prompt's index in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptTag {
    request: u64,
    prompt: usize,
}

/// The models of a server, and the requests that are being answered.
pub(crate) struct CompletionBatch {
    /// Generators on one base, each with its own adapter or none.
    models: Vec<BatchGenerator<PromptTag>>,
    tokenizer: Arc<ModelTokenizer>,
    /// No request is admitted while this many samples are open, of all models together.
    slots: usize,
    requests: BTreeMap<u64, OpenRequest>,
    /// The number of requests so far, which is the id of the newest one.
    count: u64,
}

impl CompletionBatch {
    pub(crate) fn new(
        models: Vec<BatchGenerator<PromptTag>>,
        tokenizer: Arc<ModelTokenizer>,
        slots: usize,
    ) -> Self {
        Self { models, tokenizer, slots, requests: BTreeMap::new(), count: 0 }
    }

    /// Answers requests until the inbox is closed. Sends to `is_idle` after each step, and when it
    /// waits for a request.
    ///
    /// # Errors
    /// The engine fails. All open requests get the error.
    pub(crate) fn run(
        mut self,
        mut inbox: mpsc::Receiver<BatchRequest>,
        is_idle: &watch::Sender<bool>,
    ) -> anyhow::Result<()> {
        loop {
            if self.requests.is_empty() {
                is_idle.send_replace(true);
                let Some(request) = inbox.blocking_recv() else { return Ok(()) };
                is_idle.send_replace(false);
                self.admit_request(request);
            }
            while self.has_free_slot()
                && let Ok(request) = inbox.try_recv()
            {
                self.admit_request(request);
            }
            self.drop_ended_requests();
            if let Err(error) = self.draw_step() {
                let message = wire::format_error_chain(&error);
                for open in self.requests.values() {
                    open.send_event(ChoiceEvent::Failed(message.clone()));
                }
                return Err(error.into());
            }
            is_idle.send_replace(false);
        }
    }

    fn has_free_slot(&self) -> bool {
        self.models.iter().map(BatchGenerator::open_samples).sum::<usize>() < self.slots
    }

    fn admit_request(&mut self, request: BatchRequest) {
        self.count += 1;
        let Some(generator) = self.models.get_mut(request.model) else { return };
        for (index, prompt) in request.prompts.iter().enumerate() {
            let sampling =
                SamplingParameters { max_new_tokens: prompt.max_new_tokens, ..request.sampling };
            let wanted = PromptRequest {
                tag: PromptTag { request: self.count, prompt: index },
                prompt: PromptInput::Tokens(prompt.tokens.clone()),
                seeds: prompt.seeds.clone(),
                sampling,
            };
            if let Err(error) = generator.admit_scored_request(wanted, request.scored) {
                // Prompts before it are cancelled, because the request is not open.
                let message = wire::format_error_chain(&error);
                let _ = request.events.try_send(ChoiceEvent::Failed(message));
                return;
            }
        }
        let choices = request.prompts.iter().map(|prompt| prompt.seeds.len()).sum();
        let choices = std::iter::repeat_with(OpenChoice::default).take(choices).collect();
        self.requests.insert(self.count, OpenRequest { request, choices });
    }

    /// Drops requests that are answered or whose client has disconnected, and their samples.
    fn drop_ended_requests(&mut self) {
        self.requests.retain(|_, open| !open.request.events.is_closed() && !open.has_ended());
        let requests = &self.requests;
        for generator in &mut self.models {
            generator.cancel_samples(|tag, index| {
                let open = requests.get(&tag.request);
                open.is_none_or(|open| {
                    open.choices[open.choice_number(tag.prompt, index)].has_ended
                })
            });
        }
    }

    /// Draws one token of every sample, and sends the pieces that are complete.
    fn draw_step(&mut self) -> Result<(), GenerateError> {
        for generator in self.models.iter_mut().filter(|it| !it.is_idle()) {
            let done = generator.generate_step()?;
            let mut take = |tag: &PromptTag, index, sample: &SampleTokens<'_>| match self
                .requests
                .get_mut(&tag.request)
            {
                Some(open) => open.take_tokens(&self.tokenizer, (tag.prompt, index), sample),
                None => Ok(()),
            };
            for sample in generator.running_samples() {
                let tokens = SampleTokens {
                    tokens: sample.tokens,
                    logprobs: sample.logprobs,
                    alternatives: sample.alternatives,
                    prompt_scores: sample.prompt_scores,
                    finish: None,
                };
                take(sample.tag, sample.index, &tokens)?;
            }
            for sample in &done {
                let tokens = SampleTokens {
                    tokens: &sample.tokens,
                    logprobs: &sample.logprobs,
                    alternatives: &sample.alternatives,
                    prompt_scores: &sample.prompt_scores,
                    finish: Some(sample.finish),
                };
                take(&sample.tag, sample.index, &tokens)?;
            }
        }
        Ok(())
    }
}

/// The tokens of a sample so far.
struct SampleTokens<'a> {
    tokens: &'a [u32],
    logprobs: &'a [f64],
    /// The likely tokens at each position; empty unless the request reports them.
    alternatives: &'a [Vec<(u32, f64)>],
    prompt_scores: &'a [TokenScore],
    finish: Option<FinishReason>,
}

/// A request that is being answered.
struct OpenRequest {
    request: BatchRequest,
    /// The choices of all prompts, those of the first prompt first.
    choices: Vec<OpenChoice>,
}

/// A choice that is being drawn.
#[derive(Default)]
struct OpenChoice {
    text: ChoiceText,
    /// The number of the sample's tokens that were read.
    read: usize,
    /// The content of the next piece so far.
    next: ChoicePiece,
    has_begun: bool,
    has_ended: bool,
}

impl OpenRequest {
    fn has_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.has_ended)
    }

    /// Returns the index of a prompt's choice among all choices of the request.
    fn choice_number(&self, prompt: usize, index: usize) -> usize {
        // All prompts have the same number of choices.
        prompt * (self.choices.len() / self.request.prompts.len().max(1)) + index
    }

    /// Reads the new tokens of a sample, and sends a piece if there is new text or the choice ends.
    fn take_tokens(
        &mut self,
        tokenizer: &ModelTokenizer,
        (prompt, index): (usize, usize),
        sample: &SampleTokens<'_>,
    ) -> Result<(), TokenizerError> {
        let number = self.choice_number(prompt, index);
        let choice = &mut self.choices[number];
        if choice.has_ended {
            return Ok(());
        }
        if !std::mem::replace(&mut choice.has_begun, true) && self.request.echo {
            choice.echo_prompt(&self.request.prompts[prompt], sample.prompt_scores);
        }
        if self.request.draws {
            choice.read_tokens(tokenizer, sample, &self.request)?;
        }
        choice.next.finish = match sample.finish {
            _ if choice.text.is_stopped() => Some(FinishReason::Stop),
            Some(_) if !self.request.draws => Some(FinishReason::Length),
            finish => finish,
        };
        if choice.next.text.is_empty() && choice.next.finish.is_none() {
            return Ok(());
        }
        choice.has_ended = choice.next.finish.is_some();
        let mut piece = std::mem::take(&mut choice.next);
        piece.choice = number;
        if !self.request.reports_tokens {
            piece.tokens.clear();
        }
        self.send_event(ChoiceEvent::Piece(piece));
        Ok(())
    }

    /// Sends an event. The channel has room for all of them; it is closed if the client
    /// disconnected.
    fn send_event(&self, event: ChoiceEvent) {
        let _ = self.request.events.try_send(event);
    }
}

impl OpenChoice {
    /// Adds the prompt and its scores to the next piece.
    fn echo_prompt(&mut self, prompt: &PromptTokens, scores: &[TokenScore]) {
        self.next.text.push_str(&prompt.text);
        let first = prompt.tokens.first().map(|token| PieceToken {
            token: *token,
            logprob: None,
            alternatives: Vec::new(),
        });
        let others = scores.iter().map(|score| PieceToken {
            token: score.token,
            logprob: Some(score.logprob),
            alternatives: score.alternatives.clone(),
        });
        self.next.tokens.extend(first.into_iter().chain(others));
    }

    /// Adds the new tokens of a sample to the next piece. The token that ends it has no text.
    fn read_tokens(
        &mut self,
        tokenizer: &ModelTokenizer,
        sample: &SampleTokens<'_>,
        request: &BatchRequest,
    ) -> Result<(), TokenizerError> {
        let ends = usize::from(sample.finish == Some(FinishReason::Stop));
        let with_text = sample.tokens.len() - ends;
        while self.read < sample.tokens.len() && !self.text.is_stopped() {
            let (at, token) = (self.read, sample.tokens[self.read]);
            self.read += 1;
            self.next.drawn += 1;
            let alternatives = sample.alternatives.get(at).cloned().unwrap_or_default();
            let logprob = sample.logprobs.get(at).copied();
            self.next.tokens.push(PieceToken { token, logprob, alternatives });
            if at < with_text {
                let shown = self.text.push_token(tokenizer, token, &request.stops)?;
                self.next.text.push_str(&shown);
            }
        }
        if sample.finish.is_some() {
            let rest = self.text.finish_text(tokenizer, &request.stops)?;
            self.next.text.push_str(&rest);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use engine::{MatrixDtype, load_model};

    use super::*;

    fn ask(tokens: Vec<u32>) -> (BatchRequest, mpsc::Receiver<ChoiceEvent>) {
        let prompt =
            PromptTokens { tokens, text: String::new(), seeds: vec![1, 2], max_new_tokens: 9 };
        let prompts = vec![prompt];
        let (events, receiver) = open_event_channel(&prompts);
        let sampling =
            SamplingParameters { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: 1 };
        let request = BatchRequest {
            model: 0,
            prompts,
            sampling,
            scored: ScoreOptions::default(),
            stops: Vec::new(),
            echo: false,
            draws: true,
            reports_tokens: false,
            events,
        };
        (request, receiver)
    }

    #[test]
    fn a_request_whose_client_is_gone_leaves_its_slots_to_others() {
        let base = golden::small_set().model_path("qwen2-tiny");
        let (model, tokenizer) = load_model(&base, None, "cpu", MatrixDtype::F32).unwrap();
        let models = vec![BatchGenerator::new(model, tokenizer.clone(), 2)];
        let mut batch = CompletionBatch::new(models, Arc::new(tokenizer), 2);
        let (request, client) = ask(vec![1, 2, 3]);
        batch.admit_request(request);
        batch.draw_step().unwrap();
        assert!(!batch.has_free_slot());
        drop(client);
        batch.drop_ended_requests();
        assert!(batch.has_free_slot() && batch.requests.is_empty());
        assert_eq!(batch.models[0].open_samples(), 0);

        let (request, mut client) = ask(vec![999_999]);
        batch.admit_request(request);
        assert!(matches!(client.try_recv(), Ok(ChoiceEvent::Failed(_))));
        assert!(batch.requests.is_empty());
    }
}
