//! Drawing samples from an OpenAI-compatible server that somebody else runs. Which weights it
//! serves, nobody can say from here: a name is all there is to go by.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, bail};
use futures::future::{FutureExt, LocalBoxFuture};
use llama::completion::folded;
use serde::Deserialize;
use serde_json::{Value, json};
use wire::v1;

use super::{
    WorkerConfig,
    http::Http,
    open::Drawn,
    served::{NotDrawn, Prompt, Task},
};
use crate::Endpoint;

/// To a question about the server itself.
const BRIEF_LIMIT: Duration = Duration::from_secs(30);
const BRIEF_BYTES_MAX: usize = 4 * 1024 * 1024;

/// To load an adapter.
const LOAD_LIMIT: Duration = Duration::from_secs(300);

/// A key is shorter.
const KEY_BYTES_MAX: u64 = 16 * 1024;

/// Who is known to take `top_k` at this address, and to draw from the whole vocabulary without.
const TAKE_TOP_K: [&str; 2] = ["vllm", "llamacpp"];

pub(super) struct Source {
    endpoint: Endpoint,
    http: Http,
    adapter: Option<PathBuf>,
    adapter_key: String,
    model: Option<Model>,
}

/// What is asked for there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Model {
    name: String,
    takes_top_k: bool,
}

impl Source {
    pub(super) fn new(endpoint: &Endpoint, config: &WorkerConfig) -> anyhow::Result<Self> {
        let key = endpoint.key_file.as_ref().map(|path| read_key(path)).transpose()?;
        Ok(Self {
            endpoint: endpoint.clone(),
            http: Http::at(&endpoint.url, key)?,
            adapter: config.adapter.clone(),
            adapter_key: config.adapter_key.clone(),
            model: None,
        })
    }

    pub(super) fn caveat(&self) -> String {
        format!("nobody can check which weights {} serves", self.endpoint.url)
    }

    /// Finds the model, and has the adapter loaded if there is one.
    ///
    /// # Errors
    /// When it is not there, or not to be had: another box may have it.
    pub(super) async fn begin(&mut self) -> anyhow::Result<()> {
        if self.model.is_some() {
            return Ok(());
        }
        let listed = self.http.get("/models", BRIEF_LIMIT, BRIEF_BYTES_MAX).await?;
        let model = choose(&listed, self.endpoint.model.as_deref())
            .with_context(|| format!("--generator-engine {}", self.endpoint.url))?;
        self.model = Some(match &self.adapter {
            None => model,
            Some(adapter) => {
                let name = self.load(adapter.clone()).await?;
                Model { name, ..model }
            }
        });
        Ok(())
    }

    /// Asks for an adapter by the way that vLLM has for it. It reads the files itself, so it must
    /// see them under the same path.
    async fn load(&self, adapter: PathBuf) -> anyhow::Result<String> {
        let digest = self.adapter_key.rsplit(':').next().unwrap_or_default();
        let name = format!("flotilla-{}", digest.get(..16).unwrap_or(digest));
        let body = json!({ "lora_name": name, "lora_path": adapter });
        let loaded = self.http.post("/load_lora_adapter", &body, LOAD_LIMIT, BRIEF_BYTES_MAX).await;
        match loaded {
            Ok(_) => Ok(name),
            Err(error) if error.is_unknown_path() => bail!(
                "{} serves its own weights and no adapters, but the order's policy has one; \
                 use vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 on this box, or llama.cpp (E109)",
                self.endpoint.url
            ),
            // By an earlier worker: it is named after its content.
            Err(error) if error.to_string().contains("already been loaded") => Ok(name),
            Err(error) => Err(error).context("load the adapter"),
        }
    }

    pub(super) fn draw(&self, task: Task) -> impl Future<Output = Result<Drawn, NotDrawn>> + use<> {
        let (http, model) = (self.http.clone(), self.model.clone());
        async move {
            let (Some(model), Prompt::Text(prompt)) = (model, &task.of.prompt) else {
                return Err(NotDrawn { message: "no model was found".into(), broke_off: false });
            };
            let request = request(&model, prompt, &task)
                .map_err(|message| NotDrawn { message, broke_off: false })?;
            let (limit, bytes_max) = task.limits();
            let answer = http.post("/completions", &request, limit, bytes_max).await;
            let answer = answer.map_err(|error| {
                let broke_off = error.is_transport();
                let message = format!("{:#}", anyhow::Error::from(error));
                NotDrawn { message, broke_off }
            })?;
            read(&answer, &task)
                .map_err(|error| NotDrawn { message: format!("{error:#}"), broke_off: false })
        }
    }

    /// What it tells of a text, by the way that OpenAI had for it and vLLM has. Many have none.
    pub(super) async fn canary(&self, text: &str) -> Result<Vec<f32>, NotDrawn> {
        let Some(model) = &self.model else { return Ok(Vec::new()) };
        let request = json!({
            "model": model.name,
            "prompt": text,
            "max_tokens": 0,
            "echo": true,
            "logprobs": 1,
            "temperature": 0.0,
        });
        match self.http.post("/completions", &request, LOAD_LIMIT, BRIEF_BYTES_MAX).await {
            Ok(answer) => Ok(scored(&answer, text).unwrap_or_default()),
            Err(error) if error.is_transport() => {
                let message = format!("{:#}", anyhow::Error::from(error));
                Err(NotDrawn { message, broke_off: true })
            }
            Err(error) => {
                tracing::info!(%error, "the endpoint tells nothing of a text");
                Ok(Vec::new())
            }
        }
    }

    pub(super) fn ping(&self) -> LocalBoxFuture<'static, bool> {
        let http = self.http.clone();
        async move { http.get("/models", BRIEF_LIMIT, BRIEF_BYTES_MAX).await.is_ok() }.boxed_local()
    }
}

fn read_key(path: &std::path::Path) -> anyhow::Result<String> {
    use std::io::Read;
    let mut key = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(KEY_BYTES_MAX).read_to_string(&mut key))
        .with_context(|| format!("read --endpoint-key-file {}", path.display()))?;
    Ok(key.trim().to_owned())
}

#[derive(Deserialize)]
struct Listed {
    data: Vec<Named>,
}

#[derive(Deserialize)]
struct Named {
    id: String,
    #[serde(default)]
    owned_by: String,
}

/// The model of that name; without one, the only one.
fn choose(listed: &[u8], wanted: Option<&str>) -> anyhow::Result<Model> {
    let listed: Listed =
        serde_json::from_slice(listed).context("its /models is no list of models")?;
    let names =
        || listed.data.iter().map(|one| one.id.as_str()).take(20).collect::<Vec<_>>().join(", ");
    let found = match (wanted, &listed.data[..]) {
        (Some(wanted), all) => all.iter().find(|one| one.id == wanted),
        (None, [only]) => Some(only),
        (None, _) => None,
    };
    match (found, wanted) {
        (Some(found), _) => Ok(Model {
            name: found.id.clone(),
            takes_top_k: TAKE_TOP_K.contains(&found.owned_by.as_str()),
        }),
        (None, Some(wanted)) => bail!("it serves no {wanted:?}, but {} (E109)", names()),
        (None, None) => bail!("say which of its models with --endpoint-model: {} (E109)", names()),
    }
}

fn request(model: &Model, prompt: &str, task: &Task) -> Result<Value, String> {
    let sampling = &task.of.sampling;
    let mut request = json!({
        "model": model.name,
        "prompt": prompt,
        "n": 1,
        "seed": folded(task.seed),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stream": false,
    });
    if model.takes_top_k {
        // Both take 0 or less for the whole vocabulary; 0 is what both agree on.
        request["top_k"] = json!(sampling.top_k);
        request["min_p"] = json!(0.0);
    } else if sampling.top_k > 0 {
        return Err(format!(
            "the order asks for top_k {}, which this server is not known to take; set \
             raft.sampling.top_k to 0",
            sampling.top_k
        ));
    }
    Ok(request)
}

#[derive(Deserialize)]
struct Answer {
    choices: Vec<Choice>,
    usage: Usage,
}

#[derive(Deserialize)]
struct Choice {
    text: String,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Echo {
    choices: Vec<Echoed>,
}

#[derive(Deserialize)]
struct Echoed {
    text: String,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
}

/// Of the last tokens of a text that was echoed; none where the answer is of anything else.
fn scored(answer: &[u8], text: &str) -> Option<Vec<f32>> {
    let echo: Echo = serde_json::from_slice(answer).ok()?;
    let echoed = echo.choices.into_iter().next().filter(|echoed| echoed.text == text)?;
    let Logprobs { tokens, token_logprobs } = echoed.logprobs?;
    // The first has nothing before it to be predicted from; parts of characters are left out.
    let whole = tokens.iter().zip(token_logprobs).skip(1);
    let whole = whole.filter(|(token, _)| !token.contains(char::REPLACEMENT_CHARACTER));
    let all: Vec<f32> = whole.map(|(_, worth)| worth).collect::<Option<_>>()?;
    Some(all[all.len().saturating_sub(wire::CANARY_TOKENS)..].to_vec())
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u32,
}

fn read(answer: &[u8], task: &Task) -> anyhow::Result<Drawn> {
    use v1::samples::Finish;
    let answer: Answer =
        serde_json::from_slice(answer).context("the endpoint's answer is no completion")?;
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
    let (tokens, limit) = (answer.usage.completion_tokens, task.of.sampling.max_new_tokens);
    if tokens > limit {
        bail!("the endpoint answers {tokens} tokens where at most {limit} were asked for (E109)");
    }
    // Its own settings decide what its probabilities are of, and nobody can see them from here.
    let logprob = None;
    Ok(Drawn { nth: task.nth, text: choice.text.clone(), tokens, finish, logprob })
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use llama::completion::Sampling;

    use super::*;
    use crate::worker::{open::Tag, served::Prepared};

    fn task(top_k: u32) -> Task {
        let sampling = Sampling { temperature: 0.7, top_k, top_p: 0.9, max_new_tokens: 8 };
        let prompt = Prompt::Text("1+1=".into());
        let of = Rc::new(Prepared { prompt, sampling, positions: 0, logprobs: false });
        Task { tag: Tag { call: 1, request: 0 }, nth: 3, seed: u64::MAX, of }
    }

    #[test]
    fn the_model_is_the_one_named_or_the_only_one() {
        let one = br#"{"data":[{"id":"a","owned_by":"vllm"}]}"#;
        let two = br#"{"object":"list","data":[{"id":"a"},{"id":"b","owned_by":"ollama"}]}"#;
        let model = |name: &str, takes_top_k| Model { name: name.into(), takes_top_k };
        assert_eq!(choose(one, None).unwrap(), model("a", true));
        assert_eq!(choose(two, Some("b")).unwrap(), model("b", false));
        let error = |listed, wanted| choose(listed, wanted).unwrap_err().to_string();
        assert!(error(two, None).contains("--endpoint-model: a, b"));
        assert!(error(one, Some("c")).contains("no \"c\", but a"));
        assert!(error(b"<html>", None).contains("no list"));
    }

    #[test]
    fn a_cut_that_a_server_may_not_know_is_refused_not_dropped() {
        let known = Model { name: "a".into(), takes_top_k: true };
        let unknown = Model { takes_top_k: false, ..known.clone() };
        assert_eq!(request(&known, "x", &task(40)).unwrap()["top_k"], 40);
        assert_eq!(request(&known, "x", &task(0)).unwrap()["min_p"], 0.0);
        assert!(request(&unknown, "x", &task(0)).unwrap().get("top_k").is_none());
        assert!(request(&unknown, "x", &task(40)).unwrap_err().contains("raft.sampling.top_k"));
    }

    #[test]
    fn of_an_echoed_text_the_last_tokens_count_and_what_is_no_echo_tells_nothing() {
        let told = |tokens: &[&str], worth: &[Option<f32>]| {
            let logprobs = json!({ "tokens": tokens, "token_logprobs": worth });
            let answer = json!({ "choices": [{ "text": "a", "logprobs": logprobs }] });
            scored(answer.to_string().as_bytes(), "a")
        };
        let three = ["a", "\u{fffd}", "c"];
        assert_eq!(told(&three, &[None, Some(-1.5), Some(-0.25)]), Some(vec![-0.25]));
        assert_eq!(told(&three, &[None, Some(-1.5), None]), None);
        assert_eq!(told(&["a"; 41], &[Some(-1.0); 41]).unwrap().len(), wire::CANARY_TOKENS);
        for nothing in [r#"{"text":"a","logprobs":null}"#, r#"{"text":"b"}"#, r#"{"text":"a"}"#] {
            let answer = format!(r#"{{"choices":[{nothing}]}}"#);
            assert_eq!(scored(answer.as_bytes(), "a"), None, "{nothing}");
        }
    }

    #[test]
    fn an_answer_that_is_not_one_sample_is_refused() {
        let answer = |text: &str| read(text.as_bytes(), &task(0));
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
