use std::{path::PathBuf, time::Instant};

use engine::{
    CompletionExample, CompletionTokens, LanguageModel, MatrixDtype, ModelTokenizer, PromptInput,
    PromptRequest, SampleCompletion, SamplingParameters,
};
use reqwest::Client;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::{CompletionServerConfig, run_completion_server, serve::LoadedModels};

const KEY: &str = "secret";
const PROMPT: &str = "def main(files, limit):";
const START_LIMIT: Duration = Duration::from_secs(60);

/// A server of a small model with an adapter, which runs as long as the test.
struct TestServer {
    http: Client,
    base: PathBuf,
    adapter: PathBuf,
    _directory: tempfile::TempDir,
}

impl TestServer {
    async fn start() -> Self {
        let set = golden::small_set();
        let directory = tempfile::tempdir().unwrap();
        let (socket, key_file) = (directory.path().join("s"), directory.path().join("key"));
        std::fs::write(&key_file, format!("{KEY}\n")).unwrap();
        let (base, adapter) = (set.model_path("qwen2-tiny"), set.adapter_path("qwen2-r8-qv"));
        let config = CompletionServerConfig {
            base: base.clone(),
            adapters: vec![adapter.clone(), adapter.clone()],
            serves_base: true,
            alias: "served".into(),
            slots: 3,
            context: 200,
        };
        let address = ListenAddress::Socket(socket.clone());
        std::thread::spawn(move || {
            let engine = ("cpu", MatrixDtype::F32);
            run_completion_server(&config, engine, &address, &key_file).unwrap();
        });
        let http = bounded_http::client_builder().no_proxy().pool_max_idle_per_host(0);
        let http = http.unix_socket(socket.as_path()).build().unwrap();
        let began = Instant::now();
        while http.get("http://localhost/health").send().await.is_err() {
            assert!(began.elapsed() < START_LIMIT, "the server does not start");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Self { http, base, adapter, _directory: directory }
    }

    async fn post_text(&self, path: &str, key: &str, body: String) -> (u16, String) {
        let url = format!("http://localhost{path}");
        let answer = self.http.post(url).bearer_auth(key).body(body).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let (status, text) = self.post_text(path, KEY, body.to_string()).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Returns the events of a streamed answer.
    async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, text) = self.post_text(path, KEY, body.to_string()).await;
        assert_eq!(status, 200, "{text}");
        let events: Vec<&str> =
            text.split_terminator("\n\n").map(|it| it.strip_prefix("data: ").unwrap()).collect();
        let (last, events) = events.split_last().unwrap();
        assert_eq!(*last, "[DONE]");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    fn load_model(&self, adapted: bool) -> (LanguageModel, ModelTokenizer) {
        let adapter = adapted.then_some(self.adapter.as_path());
        engine::load_model(&self.base, adapter, "cpu", MatrixDtype::F32).unwrap()
    }

    /// Draws a greedy sample with the engine itself.
    fn draw_sample(&self, adapted: bool, max_new_tokens: usize) -> SampleCompletion<()> {
        let (model, tokenizer) = self.load_model(adapted);
        let sampling =
            SamplingParameters { temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens };
        let prompt = PromptInput::Text(PROMPT.into());
        let request = PromptRequest { tag: (), prompt, seeds: vec![1], sampling };
        let results = engine::generate_all(&model, &tokenizer, 1, vec![request], |_, _| ());
        results.unwrap().remove(0).unwrap().remove(0)
    }
}

fn greedy(max_tokens: u32) -> Value {
    json!({ "model": "m", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0 })
}

fn with(mut request: Value, field: &str, value: Value) -> Value {
    request[field] = value;
    request
}

fn join_texts(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
}

#[tokio::test]
async fn answers_are_those_of_the_engine_whole_and_in_pieces() {
    let server = TestServer::start().await;
    let expected = server.draw_sample(false, 12);
    let request = with(greedy(12), "logprobs", json!(2));
    let whole = server.post("/v1/completions", &request).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["text"], expected.text, "{whole}");
    let logprobs: Vec<f64> = serde_json::from_value(choice["logprobs"]["token_logprobs"].clone())
        .expect("all tokens are scored");
    assert_eq!(logprobs, expected.logprobs);
    assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"], logprobs[0]);
    assert_eq!(whole["usage"]["completion_tokens"], expected.tokens.len());
    assert_eq!(whole["model"], "served");
    assert!(whole["id"].as_str().unwrap().starts_with("cmpl-"), "{whole}");

    let options = json!({ "include_usage": true });
    let streamed = with(with(request, "stream", json!(true)), "stream_options", options);
    let events = server.stream("/v1/completions", &streamed).await;
    assert_eq!(join_texts(&events), expected.text);
    let finish = events.iter().filter(|event| event["choices"][0]["finish_reason"].is_string());
    assert_eq!(
        (finish.count(), events.last().unwrap()["usage"].clone()),
        (1, whole["usage"].clone())
    );

    // More samples than slots, all from one prompt.
    let several = with(with(greedy(12), "n", json!(7)), "temperature", json!(1));
    let several = with(several, "seed", json!(5));
    let (one, other) = (
        server.post("/v1/completions", &several).await,
        server.post("/v1/completions", &several).await,
    );
    assert_eq!(one["choices"].as_array().unwrap().len(), 7);
    assert_eq!(one["choices"], other["choices"]);
    assert_ne!(one["choices"][0]["text"], one["choices"][1]["text"]);
    assert_ne!(one["id"], other["id"]);
}

#[tokio::test]
async fn a_request_chooses_its_adapter() {
    let server = TestServer::start().await;
    let scales =
        |first: u8, second: u8| json!([{ "id": 0, "scale": first }, { "id": 1, "scale": second }]);
    let ask = async |lora: Value| {
        let request = with(with(greedy(12), "lora", lora), "logprobs", json!(0));
        server.post("/v1/completions", &request).await["choices"].clone()
    };
    let (base, first, second) =
        tokio::join!(ask(scales(0, 0)), ask(scales(1, 0)), ask(scales(0, 1)));
    let expected = server.draw_sample(true, 12);
    assert_eq!(first[0]["text"], expected.text);
    assert_eq!(first, second);
    assert_ne!(first[0]["logprobs"], base[0]["logprobs"]);
}

#[tokio::test]
async fn a_conversation_is_written_with_the_model_s_template() {
    let server = TestServer::start().await;
    let template = chat_template::ChatTemplate::load(&server.base, jiff::Zoned::now).unwrap();
    let messages = json!([{ "role": "user", "content": "2+2=" }]);
    let asked: Vec<chat_template::ChatMessage> = serde_json::from_value(messages.clone()).unwrap();
    let prompt = template.render_prompt(&asked).unwrap();
    let expected = server.post("/v1/completions", &with(greedy(9), "prompt", json!(prompt))).await;
    let request = json!({
        "messages": messages, "max_completion_tokens": 9, "temperature": 0, "logprobs": true,
        "top_logprobs": 2,
    });
    let found = server.post("/v1/chat/completions", &request).await;
    let choice = &found["choices"][0];
    assert_eq!(choice["message"]["content"], expected["choices"][0]["text"]);
    assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!(choice["logprobs"]["tokens"].is_null());
    let events = server.stream("/v1/chat/completions", &with(request, "stream", json!(true))).await;
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let texts = events.iter().filter_map(|it| it["choices"][0]["delta"]["content"].as_str());
    assert_eq!(texts.collect::<String>(), choice["message"]["content"].as_str().unwrap());
}

#[test]
fn a_gguf_file_has_the_chat_template_of_its_source() {
    let set = golden::small_set();
    let messages = json!([{ "role": "user", "content": "2+2=" }]);
    let messages: Vec<chat_template::ChatMessage> = serde_json::from_value(messages).unwrap();
    for name in ["qwen2-tiny", "llama-tiny"] {
        let file = set.root.join("gguf").join(name).with_extension("gguf");
        let [of_file, of_directory] = [file, set.model_path(name)].map(|model| {
            let template = chat_template::ChatTemplate::load(&model, jiff::Zoned::now).unwrap();
            template.render_prompt(&messages).unwrap()
        });
        assert_eq!(of_file, of_directory, "{name}");
    }
}

#[tokio::test]
async fn a_stop_text_ends_an_answer() {
    let server = TestServer::start().await;
    let text = server.draw_sample(false, 30).text;
    let middle: Vec<char> = text.chars().skip(8).take(3).collect();
    let stop: String = middle.into_iter().collect();
    let expected = text.split_once(stop.as_str()).unwrap().0;
    let request = with(greedy(30), "stop", json!([stop, "not in it"]));
    let found = server.post("/v1/completions", &request).await;
    assert_eq!(found["choices"][0]["text"], expected);
    assert_eq!(found["choices"][0]["finish_reason"], "stop");
    let events = server.stream("/v1/completions", &with(request, "stream", json!(true))).await;
    assert_eq!(join_texts(&events), expected);
}

#[tokio::test]
async fn prompts_are_scored_as_the_engine_scores_texts() {
    let server = TestServer::start().await;
    let (model, tokenizer) = server.load_model(false);
    let tokens = tokenizer.encode_prompt(PROMPT).unwrap();
    let example = CompletionExample {
        prompt: String::new(),
        completion: PROMPT.into(),
        tokens: CompletionTokens::Cut,
    };
    let expected = engine::score_completions(&model, &tokenizer, &[example], usize::MAX, |_, _| ());
    let expected = expected.unwrap().remove(0).unwrap();
    let request = json!({
        "prompt": [tokens, [tokens[0], tokens[1]]], "max_tokens": 1, "echo": true, "logprobs": 1,
        "temperature": 0,
    });
    let found = server.post("/v1/completions", &request).await;
    let logprobs = &found["choices"][0]["logprobs"];
    let scores = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(scores.len(), tokens.len() + 1, "the prompt and one drawn token");
    assert!(scores[0].is_null() && logprobs["top_logprobs"][0].is_null());
    for (found, expected) in scores[1..].iter().zip(&expected) {
        assert!((found.as_f64().unwrap() - expected).abs() < 1e-3, "{found} {expected}");
    }
    let likeliest = |at: usize| -> f64 {
        let likely = logprobs["top_logprobs"][at].as_object().unwrap();
        likely.values().map(|it| it.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max)
    };
    assert_eq!(likeliest(tokens.len()), scores[tokens.len()].as_f64().unwrap(), "it is greedy");
    assert!(found["choices"][0]["text"].as_str().unwrap().starts_with(PROMPT));
    assert_eq!(found["choices"][1]["logprobs"]["tokens"].as_array().unwrap().len(), 3);
    let alone = with(with(request, "max_tokens", json!(0)), "prompt", json!(PROMPT));
    let alone = server.post("/v1/completions", &alone).await;
    assert_eq!(alone["choices"][0]["text"], PROMPT);
    assert_eq!(alone["usage"]["completion_tokens"], 0);
    let offsets = alone["choices"][0]["logprobs"]["text_offset"].as_array().unwrap();
    assert_eq!((offsets.len(), &offsets[0]), (tokens.len(), &json!(0)));
}

#[tokio::test]
async fn a_check_is_answered_between_two_steps() {
    let server = TestServer::start().await;
    let check = async |key: &str| {
        let request = server.http.get("http://localhost/slots").bearer_auth(key);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!((check("other").await, check(KEY).await), (401, 200), "it is idle");
    let request = greedy(150);
    let answer = server.post("/v1/completions", &request);
    let checks = async {
        for _ in 0..3 {
            assert_eq!(check(KEY).await, 200);
        }
    };
    let (answer, ()) = tokio::join!(answer, checks);
    assert_eq!(answer["object"], "text_completion");
}

#[tokio::test]
async fn an_engine_that_hangs_answers_no_check() {
    let config = CompletionServerConfig {
        base: golden::small_set().model_path("qwen2-tiny"),
        adapters: Vec::new(),
        serves_base: true,
        alias: "served".into(),
        slots: 1,
        context: 200,
    };
    let models = LoadedModels::load(&config, "cpu", MatrixDtype::F32).unwrap();
    let (requests, _inbox) = mpsc::channel(1);
    let (is_idle, batch_idle) = watch::channel(true);
    let api = models.open_api(&config, requests, batch_idle).unwrap();
    api.await_step().await;
    is_idle.send_replace(false);
    let check = api.await_step();
    tokio::pin!(check);
    let pause = Duration::from_millis(100);
    assert!(tokio::time::timeout(pause, &mut check).await.is_err(), "it has done no step");
    is_idle.send_replace(false);
    check.await;
}

#[tokio::test]
async fn a_wrong_request_is_refused_with_its_field() {
    let server = TestServer::start().await;
    let refused = async |path: &str, key: &str, body: String| {
        let (status, text) = server.post_text(path, key, body).await;
        let error: Value = serde_json::from_str(&text).unwrap();
        (status, error["error"]["message"].as_str().unwrap().to_owned())
    };
    let ask = async |body: Value| refused("/v1/completions", KEY, body.to_string()).await;
    let (status, message) = refused("/v1/completions", "other", greedy(1).to_string()).await;
    assert!(status == 401 && message.ends_with("(K101)"), "{message}");
    let (status, message) = refused("/v1/embeddings", KEY, "{}".into()).await;
    assert!(status == 404 && message.ends_with("(G108)"), "{message}");
    let (status, message) = refused("/v1/completions", KEY, " ".repeat(BODY_BYTES_MAX + 1)).await;
    assert!(status == 413 && message.ends_with("(G101)"), "{message}");
    for (body, expected) in [
        (with(greedy(1), "tool_choice", json!("required")), "`tool_choice` is not supported"),
        (with(greedy(1), "prompt", json!([])), "`prompt` has no tokens"),
        (with(greedy(1), "prompt", json!([999_999])), "`prompt` has the token 999999"),
        (with(greedy(1), "prompt", json!(vec![1; 201])), "the prompt has 201 tokens"),
        // It is not read: a megabyte of text takes a hundred of memory.
        (with(greedy(1), "prompt", json!("a ".repeat(1 << 20))), "the prompt has 2097152 bytes"),
        (
            // 25 600 tokens, with 20 likely ones each.
            json!({ "prompt": vec![vec![1; 100]; 256], "echo": true, "logprobs": 20,
                    "max_tokens": 0 }),
            "`logprobs`: the answer has more than 524288",
        ),
        (json!([]), "the body must be a JSON object"),
    ] {
        let (status, message) = ask(body).await;
        assert!(status == 400 && message.starts_with(expected), "{message}");
    }
    let longest = with(greedy(9), "prompt", json!(vec![1; 200]));
    let found = server.post("/v1/completions", &longest).await;
    assert_eq!(found["usage"]["completion_tokens"], 1);
}
