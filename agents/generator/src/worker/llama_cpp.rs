//! Drawing samples with a `llama-server` of our own: base from the shelf, adapter converted for
//! it, prompts and completions by our own tokenizer.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use engine::{Canary, Config, Tokenizer};
use formats::{GgufModel, convert, is_gguf};
use futures::future::{FutureExt, LocalBoxFuture};
use llama::{
    Address, Serve, Server, Shelf, Shelved,
    completion::{self, Completion, Sampling, Stop},
    scoring,
};
use wire::v1;

use super::{
    WorkerConfig,
    http::Http,
    open::Drawn,
    served::{NotDrawn, Prepared, Prompt, Task},
};
use crate::{LlamaCpp, backend::BaseDtype};

/// To a request that every step of the server answers.
const PING_LIMIT: Duration = Duration::from_secs(60);
const PING_BYTES_MAX: usize = 16 * 1024 * 1024;

/// To what one token is worth, behind a short text.
const SCORE_LIMIT: Duration = Duration::from_secs(120);
const SCORE_BYTES_MAX: usize = 64 * 1024;

/// A server is started for at least so many positions a sequence: most orders then fit.
const CONTEXT_MIN: usize = 512;

/// llama-server stops a sequence this close to the end of its context.
const CONTEXT_SPARE: usize = 2;

pub(super) struct Source {
    config: LlamaCpp,
    model: PathBuf,
    model_key: String,
    adapter: Option<PathBuf>,
    /// What the server is given of the two, once it is converted.
    converted: Option<Converted>,
    tokenizer: Tokenizer,
    model_config: Config,
    positions: usize,
    ends: Vec<u32>,
    slots: u32,
    running: Option<Running>,
}

struct Converted {
    base: PathBuf,
    adapter: Option<PathBuf>,
    _in_use: Option<Shelved>,
}

struct Running {
    server: Server,
    http: Http,
    /// Positions each sequence may take.
    context: usize,
}

impl Source {
    /// Starts nothing yet: how long sequences are is known with the first call.
    pub(super) fn new(llama: &LlamaCpp, config: &WorkerConfig, slots: u32) -> anyhow::Result<Self> {
        let model = match is_gguf(&config.base) {
            true => GgufModel::open(&config.base)?.config().clone(),
            false => Config::load(&config.base)?,
        };
        let tokenizer = Tokenizer::load(&config.base)?;
        clear(&llama.directory)
            .with_context(|| format!("prepare {}", llama.directory.display()))?;
        Ok(Self {
            config: llama.clone(),
            model: config.base.clone(),
            model_key: config.base_key.clone(),
            adapter: config.adapter.clone(),
            converted: None,
            tokenizer,
            positions: model.max_positions,
            ends: model.eos_tokens.clone(),
            model_config: model,
            slots,
            running: None,
        })
    }

    pub(super) fn prepare(
        &self,
        text: &str,
        sampling: &Sampling,
        logprobs: bool,
    ) -> Result<Prepared, String> {
        let prompt = self.tokenizer.encode(text).map_err(|error| error.to_string())?;
        let (tokens, positions) = (prompt.len(), self.positions);
        if tokens == 0 {
            return Err(
                "it has no tokens, and this model has nothing to start from; give it some \
                        text"
                    .to_owned(),
            );
        }
        if tokens >= positions {
            return Err(format!(
                "it has {tokens} tokens, but the model's {positions} positions must also hold a \
                 new one; shorten it"
            ));
        }
        let room = u32::try_from(positions - tokens).unwrap_or(u32::MAX);
        let max_new_tokens = sampling.max_new_tokens.min(room);
        Ok(Prepared {
            prompt: Prompt::Tokens(prompt),
            sampling: Sampling { max_new_tokens, ..*sampling },
            positions: tokens + max_new_tokens as usize,
            logprobs,
        })
    }

    pub(super) fn fits(&self, positions: usize) -> bool {
        self.running.as_ref().is_some_and(|running| positions <= running.context)
    }

    /// Starts the server, or another in its place, for sequences of so many positions.
    pub(super) fn start(&mut self, positions: usize, beat: &mut dyn FnMut()) -> anyhow::Result<()> {
        // What it holds, and its socket's name, are needed anew.
        self.running = None;
        self.convert(beat)?;
        let converted = self.converted.as_ref().context("nothing was converted")?;
        let most = self.positions.max(positions);
        let context = positions.next_power_of_two().max(CONTEXT_MIN).min(most);
        let serve = Serve {
            base: &converted.base,
            adapter: converted.adapter.as_deref(),
            slots: self.slots,
            context: u32::try_from(context + CONTEXT_SPARE)?,
            exact: self.config.dtype == BaseDtype::F32,
            directory: &self.config.directory,
        };
        let mut server = Server::start(&self.config.server, &serve)?;
        server.await_ready(self.config.ready_limit, beat)?;
        let http = match server.address() {
            Address::Socket(path) => Http::over(path, server.key())?,
            Address::Port(port) => {
                Http::at(&format!("http://127.0.0.1:{port}"), Some(server.key().to_owned()))?
            }
        };
        tracing::info!(context, slots = self.slots, "llama-server is ready");
        self.running = Some(Running { server, http, context });
        Ok(())
    }

    fn convert(&mut self, beat: &mut dyn FnMut()) -> anyhow::Result<()> {
        if self.converted.is_some() {
            return Ok(());
        }
        let llama = &self.config;
        let adapter = self.adapter.as_deref();
        let adapter = adapter.map(|adapter| convert_adapter(&self.model, adapter, llama));
        let adapter = adapter.transpose()?;
        let in_use = if is_gguf(&self.model) {
            None
        } else {
            let shelf = Shelf::open(&llama.shelf, llama.shelf_bytes)?;
            let dtype = llama.dtype.into();
            Some(shelf.model(&self.model_key, &self.model, dtype, &mut |_, _| beat())?)
        };
        let base = in_use.as_ref().map_or(&*self.model, Shelved::path).to_owned();
        self.converted = Some(Converted { base, adapter, _in_use: in_use });
        Ok(())
    }

    pub(super) fn draw(&self, task: Task) -> impl Future<Output = Result<Drawn, NotDrawn>> + use<> {
        let http = self.running.as_ref().map(|running| running.http.clone());
        let (tokenizer, ends) = (self.tokenizer.clone(), self.ends.clone());
        async move {
            let Some(http) = http else {
                return Err(not_drawn("llama-server was not started"));
            };
            let Prompt::Tokens(prompt) = &task.of.prompt else {
                return Err(not_drawn("the prompt has no tokens"));
            };
            let request =
                completion::request(prompt, &task.of.sampling, task.seed, task.of.logprobs);
            let (limit, bytes_max) = task.limits();
            let answer = http.post("/completion", &request, limit, bytes_max).await;
            let answer = answer.map_err(|error| {
                let broke_off = error.is_transport();
                let message = format!("{:#}", anyhow::Error::from(error));
                NotDrawn { message, broke_off }
            })?;
            let completion = completion::answer(&answer).map_err(|error| not_drawn(&error))?;
            read(completion, &task, &tokenizer, &ends)
        }
    }

    /// Token by token: the server tells no more at a time.
    pub(super) async fn canary(
        &self,
        text: &str,
        beat: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, NotDrawn> {
        let http = self.running.as_ref().map(|running| running.http.clone());
        let http = http.ok_or_else(|| not_drawn("llama-server was not started"))?;
        let Canary { tokens, scored } =
            Canary::read(&self.tokenizer, &self.model_config, text, wire::CANARY_TOKENS)
                .map_err(|error| not_drawn(&format!("{:#}", anyhow::Error::from(error))))?;
        let mut canary = Vec::with_capacity(scored.len());
        for place in scored {
            let request = scoring::request(&tokens[..place], tokens[place]);
            let answer = http.post("/completion", &request, SCORE_LIMIT, SCORE_BYTES_MAX).await;
            let answer = answer.map_err(|error| {
                let broke_off = error.is_transport();
                let message = format!("{:#}", anyhow::Error::from(error));
                NotDrawn { message, broke_off }
            })?;
            let scored = scoring::answer(&answer, tokens[place]);
            canary.push(scored.map_err(|error| not_drawn(&error))?);
            beat();
        }
        Ok(canary)
    }

    /// Asks for what the server's loop itself must answer, between two of its steps.
    pub(super) fn ping(&self) -> LocalBoxFuture<'static, bool> {
        let http = self.running.as_ref().map(|running| running.http.clone());
        async move {
            match http {
                Some(http) => match http.get("/slots", PING_LIMIT, PING_BYTES_MAX).await {
                    Ok(_) => true,
                    // A build without it: alive, at least.
                    Err(error) => !error.is_transport(),
                },
                None => false,
            }
        }
        .boxed_local()
    }

    pub(super) fn death(&mut self) -> Option<String> {
        let (ending, said) = self.running.as_mut()?.server.ended()?;
        Some(format!("llama-server ended ({ending}); it said last: {said}"))
    }
}

fn not_drawn(error: &(impl ToString + ?Sized)) -> NotDrawn {
    NotDrawn { message: error.to_string(), broke_off: false }
}

/// The sample, as the embedded engine would tell it.
fn read(
    completion: Completion,
    task: &Task,
    tokenizer: &Tokenizer,
    ends: &[u32],
) -> Result<Drawn, NotDrawn> {
    use v1::samples::Finish;
    let Completion { mut tokens, text, count, stop, logprobs } = completion;
    let mut finish = match stop {
        Stop::End => Finish::Stop,
        Stop::Limit => Finish::Length,
    };
    let nth = task.nth;
    if tokens.is_empty() {
        return Ok(Drawn { nth, text, tokens: count, finish, logprob: None });
    }
    // A character that was not whole at the limit may have brought a token more.
    tokens.truncate(task.of.sampling.max_new_tokens as usize);
    // Ends that the model's settings name, and its GGUF file does not.
    if let Some(end) = tokens.iter().position(|token| ends.contains(token)) {
        tokens.truncate(end + 1);
        finish = Finish::Stop;
    }
    let spoken = match (finish, tokens.split_last()) {
        (Finish::Stop, Some((_, spoken))) => spoken,
        _ => &tokens[..],
    };
    let text = tokenizer.decode(spoken).map_err(|error| not_drawn(&error))?;
    let logprob = logprobs.get(..tokens.len()).map(|each| each.iter().sum());
    let tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    Ok(Drawn { nth, text, tokens, finish, logprob })
}

/// What a worker before us left behind.
fn clear(directory: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir_all(directory)
}

fn convert_adapter(base: &Path, adapter: &Path, llama: &LlamaCpp) -> anyhow::Result<PathBuf> {
    if is_gguf(adapter) {
        return Ok(adapter.to_owned());
    }
    if is_gguf(base) {
        bail!(
            "{} is a GGUF file, so the adapter must be one too: convert {} with `flotilla convert \
             lora` (M111)",
            base.display(),
            adapter.display()
        );
    }
    let converted = llama.directory.join("adapter.gguf");
    convert::lora(base, adapter, &converted, convert::Dtype::F32)
        .with_context(|| format!("convert the adapter {} for llama.cpp", adapter.display()))?;
    Ok(converted)
}
