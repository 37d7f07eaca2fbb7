//! Sampling from an external OpenAI-compatible server. The weights that it serves cannot be
//! verified; only the model's name is known.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, bail};
use bounded_http::{CompletionClient, read_key_file};
use futures::future::{FutureExt, LocalBoxFuture};
use llama::completion::fold_seed;
use serde::Deserialize;
use serde_json::{Value, json};
use wire::v1;

use super::{
    WorkerConfig,
    pending_calls::DrawnSample,
    sample_task::{HttpPrompt, SampleError, SampleTask},
};
use crate::OpenAiEndpoint;

/// For a query about the server itself.
const QUERY_TIMEOUT: Duration = Duration::from_secs(30);
const QUERY_BYTES_MAX: usize = 4 * 1024 * 1024;

/// For loading an adapter, and for scoring a canary.
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// The servers (by `owned_by`) that are known to accept `top_k` at this path, and to draw from the
/// whole vocabulary without it.
const TOP_K_SERVERS: [&str; 2] = ["vllm", "llamacpp"];

pub(super) struct EndpointBackend {
    endpoint: OpenAiEndpoint,
    http: CompletionClient,
    adapter: Option<PathBuf>,
    adapter_key: String,
    model: Option<EndpointModel>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct EndpointModel {
    name: String,
    takes_top_k: bool,
}

impl EndpointBackend {
    /// Reads the server's key. Sends no request yet.
    pub(super) fn new(endpoint: &OpenAiEndpoint, config: &WorkerConfig) -> anyhow::Result<Self> {
        let read = |path: &PathBuf| {
            read_key_file(path)
                .with_context(|| format!("read --endpoint-key-file {}", path.display()))
        };
        let key = endpoint.key_file.as_ref().map(read).transpose()?;
        Ok(Self {
            endpoint: endpoint.clone(),
            http: CompletionClient::for_url(&endpoint.url, key)?,
            adapter: config.adapter.clone(),
            adapter_key: config.adapter_key.clone(),
            model: None,
        })
    }

    pub(super) fn unverified_reason(&self) -> String {
        format!("the weights that {} serves cannot be verified", self.endpoint.url)
    }

    /// Finds the model, and loads the adapter if there is one; only the first time. After an error,
    /// another host may have the model.
    pub(super) async fn ensure_model(&mut self) -> anyhow::Result<()> {
        if self.model.is_some() {
            return Ok(());
        }
        let listed = self.http.get("/models", QUERY_TIMEOUT, QUERY_BYTES_MAX).await?;
        let model = choose_model(&listed, self.endpoint.model.as_deref())
            .with_context(|| format!("--generator-engine {}", self.endpoint.url))?;
        self.model = Some(match &self.adapter {
            None => model,
            Some(adapter) => {
                let name = self.load_adapter(adapter.clone()).await?;
                EndpointModel { name, ..model }
            }
        });
        Ok(())
    }

    /// Loads an adapter through vLLM's interface, and returns its name. The server reads the files
    /// itself, so it must see them under the same path.
    async fn load_adapter(&self, adapter: PathBuf) -> anyhow::Result<String> {
        let digest = self.adapter_key.rsplit(':').next().unwrap_or_default();
        let name = format!("flotilla-{}", digest.get(..16).unwrap_or(digest));
        let body = json!({ "lora_name": name, "lora_path": adapter });
        let loaded =
            self.http.post_json("/load_lora_adapter", &body, LOAD_TIMEOUT, QUERY_BYTES_MAX).await;
        match loaded {
            Ok(_) => Ok(name),
            Err(error) if error.is_unknown_path() => bail!(
                "{} serves its own weights and no adapters, but the order's policy has one; \
                 use vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 on this box, or llama.cpp (E109)",
                self.endpoint.url
            ),
            // An earlier worker loaded it: the name is derived from its content.
            Err(error) if error.to_string().contains("already been loaded") => Ok(name),
            Err(error) => Err(error).context("load the adapter"),
        }
    }

    pub(super) fn draw_sample(
        &self,
        task: SampleTask,
    ) -> impl Future<Output = Result<DrawnSample, SampleError>> + use<> {
        let (http, model) = (self.http.clone(), self.model.clone());
        async move {
            let (Some(model), HttpPrompt::Text(prompt)) = (model, &task.request.prompt) else {
                return Err(SampleError {
                    message: "no model was found".into(),
                    connection_lost: false,
                });
            };
            let request = build_request(&model, prompt, &task)
                .map_err(|message| SampleError { message, connection_lost: false })?;
            let new_tokens = task.request.sampling.max_new_tokens;
            let (limit, bytes_max) = task.request.answer_limits(new_tokens);
            let answer = http.post_json("/completions", &request, limit, bytes_max).await;
            let answer = answer.map_err(|error| {
                let broke_off = error.is_transport();
                let message = format!("{:#}", anyhow::Error::from(error));
                SampleError { message, connection_lost: broke_off }
            })?;
            parse_sample(&answer, &task).map_err(|error| SampleError {
                message: format!("{error:#}"),
                connection_lost: false,
            })
        }
    }

    /// Returns the log-probabilities of a text, through the `echo` option that OpenAI's interface
    /// had and vLLM has. Empty if the server does not support it.
    pub(super) async fn score_canary(&self, text: &str) -> Result<Vec<f32>, SampleError> {
        let Some(model) = &self.model else { return Ok(Vec::new()) };
        let request = json!({
            "model": model.name,
            "prompt": text,
            "max_tokens": 0,
            "echo": true,
            "logprobs": 1,
            "temperature": 0.0,
        });
        match self.http.post_json("/completions", &request, LOAD_TIMEOUT, QUERY_BYTES_MAX).await {
            Ok(answer) => Ok(parse_echo_logprobs(&answer, text).unwrap_or_default()),
            Err(error) if error.is_transport() => {
                let message = format!("{:#}", anyhow::Error::from(error));
                Err(SampleError { message, connection_lost: true })
            }
            Err(error) => {
                tracing::info!(%error, "the endpoint reports no log-probabilities of a given text");
                Ok(Vec::new())
            }
        }
    }

    pub(super) fn check_alive(&self) -> LocalBoxFuture<'static, bool> {
        let http = self.http.clone();
        async move { http.get("/models", QUERY_TIMEOUT, QUERY_BYTES_MAX).await.is_ok() }
            .boxed_local()
    }
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
    #[serde(default)]
    owned_by: String,
}

/// Returns the model with the wanted name; without a name, the only model.
fn choose_model(listed: &[u8], wanted: Option<&str>) -> anyhow::Result<EndpointModel> {
    let listed: ModelList =
        serde_json::from_slice(listed).context("its /models is not a list of models")?;
    let names =
        || listed.data.iter().map(|one| one.id.as_str()).take(20).collect::<Vec<_>>().join(", ");
    let found = match (wanted, &listed.data[..]) {
        (Some(wanted), all) => all.iter().find(|one| one.id == wanted),
        (None, [only]) => Some(only),
        (None, _) => None,
    };
    match (found, wanted) {
        (Some(found), _) => Ok(EndpointModel {
            name: found.id.clone(),
            takes_top_k: TOP_K_SERVERS.contains(&found.owned_by.as_str()),
        }),
        (None, Some(wanted)) => bail!("it does not serve {wanted:?}; it serves {} (E109)", names()),
        (None, None) => bail!(
            "it does not serve exactly one model; choose with --endpoint-model: \
                               {} (E109)",
            names()
        ),
    }
}

/// Fails if the order needs an option that the server is not known to accept.
fn build_request(model: &EndpointModel, prompt: &str, task: &SampleTask) -> Result<Value, String> {
    let sampling = &task.request.sampling;
    let mut request = json!({
        "model": model.name,
        "prompt": prompt,
        "n": 1,
        "seed": fold_seed(task.seed),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stream": false,
    });
    if model.takes_top_k {
        // Both servers accept 0 for the whole vocabulary.
        request["top_k"] = json!(sampling.top_k);
        request["min_p"] = json!(0.0);
    } else if sampling.top_k > 0 {
        return Err(format!(
            "the order asks for top_k {}, which this server is not known to support; set \
             raft.sampling.top_k to 0",
            sampling.top_k
        ));
    }
    Ok(request)
}

#[derive(Deserialize)]
struct EndpointCompletion {
    choices: Vec<EndpointChoice>,
    usage: CompletionUsage,
}

#[derive(Deserialize)]
struct EndpointChoice {
    text: String,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct EchoAnswer {
    choices: Vec<EchoChoice>,
}

#[derive(Deserialize)]
struct EchoChoice {
    text: String,
    logprobs: Option<EchoLogprobs>,
}

#[derive(Deserialize)]
struct EchoLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
}

/// Returns the log-probabilities of the last tokens of an echoed text. Returns `None` if the answer
/// contains another text or no log-probabilities.
fn parse_echo_logprobs(answer: &[u8], text: &str) -> Option<Vec<f32>> {
    let echo: EchoAnswer = serde_json::from_slice(answer).ok()?;
    let echoed = echo.choices.into_iter().next().filter(|echoed| echoed.text == text)?;
    let EchoLogprobs { tokens, token_logprobs } = echoed.logprobs?;
    // The first token has no context and thus no probability; tokens that are parts of characters
    // are skipped.
    let whole = tokens.iter().zip(token_logprobs).skip(1);
    let whole = whole.filter(|(token, _)| !token.contains(char::REPLACEMENT_CHARACTER));
    let all: Vec<f32> = whole.map(|(_, worth)| worth).collect::<Option<_>>()?;
    Some(all[all.len().saturating_sub(wire::CANARY_TOKENS_MAX)..].to_vec())
}

#[derive(Deserialize)]
struct CompletionUsage {
    completion_tokens: u32,
}

/// Rejects an answer with another number of completions, an unknown finish reason or too many
/// tokens.
fn parse_sample(answer: &[u8], task: &SampleTask) -> anyhow::Result<DrawnSample> {
    use v1::samples::Finish;
    let answer: EndpointCompletion =
        serde_json::from_slice(answer).context("the endpoint's answer is not a completion")?;
    let [choice] = &answer.choices[..] else {
        bail!(
            "the endpoint answers {} completions where one was asked for (E109)",
            answer.choices.len()
        );
    };
    let finish = match choice.finish_reason.as_deref() {
        Some("stop") => Finish::Stop,
        Some("length") => Finish::Length,
        other => {
            bail!("the endpoint ends a completion for {other:?}, neither stop nor length (E109)")
        }
    };
    let (tokens, limit) = (answer.usage.completion_tokens, task.request.sampling.max_new_tokens);
    if tokens > limit {
        bail!("the endpoint answers {tokens} tokens where at most {limit} were asked for (E109)");
    }
    // The server's own settings decide what its probabilities mean, and they are not visible here.
    let logprob = None;
    let text = choice.text.clone();
    Ok(DrawnSample { nth: task.nth, text, tokens, finish, logprob, record: None, ids: Vec::new() })
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use llama::completion::LlamaSampling;

    use super::*;
    use crate::worker::{
        pending_calls::SampleTag,
        sample_task::{PreparedRequest, WantedLogprobs},
    };

    fn task(top_k: u32) -> SampleTask {
        let sampling = LlamaSampling { temperature: 0.7, top_k, top_p: 0.9, max_new_tokens: 8 };
        let prompt = HttpPrompt::Text("1+1=".into());
        let wanted = WantedLogprobs::None;
        let of = Rc::new(PreparedRequest { prompt, sampling, positions: 0, wanted });
        let tag = SampleTag { call: 1, request: 0 };
        SampleTask { tag, nth: 3, seed: u64::MAX, request: of, slot: 0 }
    }

    #[test]
    fn the_model_is_the_one_named_or_the_only_one() {
        let one = br#"{"data":[{"id":"a","owned_by":"vllm"}]}"#;
        let two = br#"{"object":"list","data":[{"id":"a"},{"id":"b","owned_by":"ollama"}]}"#;
        let model = |name: &str, takes_top_k| EndpointModel { name: name.into(), takes_top_k };
        assert_eq!(choose_model(one, None).unwrap(), model("a", true));
        assert_eq!(choose_model(two, Some("b")).unwrap(), model("b", false));
        let error = |listed, wanted| choose_model(listed, wanted).unwrap_err().to_string();
        assert!(error(two, None).contains("--endpoint-model: a, b"));
        assert!(error(one, Some("c")).contains("not serve \"c\"; it serves a"));
        assert!(error(b"<html>", None).contains("not a list"));
    }

    #[test]
    fn a_cut_that_a_server_may_not_know_is_refused_not_dropped() {
        let known = EndpointModel { name: "a".into(), takes_top_k: true };
        let unknown = EndpointModel { takes_top_k: false, ..known.clone() };
        assert_eq!(build_request(&known, "x", &task(40)).unwrap()["top_k"], 40);
        assert_eq!(build_request(&known, "x", &task(0)).unwrap()["min_p"], 0.0);
        assert!(build_request(&unknown, "x", &task(0)).unwrap().get("top_k").is_none());
        assert!(
            build_request(&unknown, "x", &task(40)).unwrap_err().contains("raft.sampling.top_k")
        );
    }

    #[test]
    fn the_last_tokens_of_an_echoed_text_count_and_other_answers_are_ignored() {
        let parsed = |tokens: &[&str], worth: &[Option<f32>]| {
            let logprobs = json!({ "tokens": tokens, "token_logprobs": worth });
            let answer = json!({ "choices": [{ "text": "a", "logprobs": logprobs }] });
            parse_echo_logprobs(answer.to_string().as_bytes(), "a")
        };
        let three = ["a", "\u{fffd}", "c"];
        assert_eq!(parsed(&three, &[None, Some(-1.5), Some(-0.25)]), Some(vec![-0.25]));
        assert_eq!(parsed(&three, &[None, Some(-1.5), None]), None);
        assert_eq!(parsed(&["a"; 41], &[Some(-1.0); 41]).unwrap().len(), wire::CANARY_TOKENS_MAX);
        for nothing in [r#"{"text":"a","logprobs":null}"#, r#"{"text":"b"}"#, r#"{"text":"a"}"#] {
            let answer = format!(r#"{{"choices":[{nothing}]}}"#);
            assert_eq!(parse_echo_logprobs(answer.as_bytes(), "a"), None, "{nothing}");
        }
    }

    #[test]
    fn an_answer_that_is_not_one_sample_is_refused() {
        let answer = |text: &str| parse_sample(text.as_bytes(), &task(0));
        let whole = r#"{"choices":[{"text":"2","finish_reason":"stop","index":0}],
            "usage":{"completion_tokens":2,"prompt_tokens":4}}"#;
        let drawn = answer(whole).unwrap();
        assert_eq!((drawn.nth, drawn.text.as_str(), drawn.tokens), (3, "2", 2));
        for (from, to) in [
            ("stop", "content_filter"),
            (r#""completion_tokens":2"#, r#""completion_tokens":9"#),
            (r#","index":0}"#, r#"},{"text":"3","finish_reason":"stop"}"#),
            ("usage", "used"),
        ] {
            assert!(answer(&whole.replace(from, to)).is_err(), "{to}");
        }
    }
}
