//! A model as a judge, behind an OpenAI-compatible endpoint. Every failure of the endpoint is an
//! `error`, never a failed sample.

use std::time::Duration;

use reqwest::{Client, Response, redirect};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::v1::verifier::LlmJudge;

use crate::{calls::VerifyItem, judge::find_document, judge_result::JudgeResult};

/// The timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The upper bound of a spec's timeout.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// The limit of an answer's body.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The number of characters of an endpoint's answer that an error message quotes.
const EXCERPT_CHARS_MAX: usize = 200;

/// A judge model: its endpoint, its prompt template and the reward at which a sample passes.
#[derive(Debug)]
pub(crate) struct ModelJudge {
    url: String,
    model: String,
    prompt: String,
    key: Option<KeyVariable>,
    timeout: Duration,
    pass_at: f64,
}

/// The name of the environment variable that contains the key; never the key itself.
#[derive(Debug)]
struct KeyVariable(String);

/// The JSON object that the model must answer.
#[derive(Debug, Deserialize)]
struct ModelGrade {
    reward: f64,
    #[serde(default)]
    reason: String,
}

impl ModelJudge {
    /// Checks the settings.
    ///
    /// # Errors
    /// Returns an error if the prompt does not contain `{completion}`.
    pub(crate) fn new(judge: &LlmJudge) -> Result<Self, String> {
        if !judge.prompt.contains("{completion}") {
            return Err("the judge's prompt must contain {completion}".into());
        }
        let limit = Duration::try_from_secs_f64(judge.timeout_s).unwrap_or(Duration::ZERO);
        Ok(Self {
            url: format!("{}/chat/completions", judge.url.trim_end_matches('/')),
            model: judge.model.clone(),
            prompt: judge.prompt.clone(),
            key: Some(KeyVariable(judge.key_env.clone())).filter(|key| !key.0.is_empty()),
            timeout: limit.min(TIMEOUT_MAX),
            pass_at: judge.pass_at,
        })
    }

    /// Asks the model to grade one item.
    pub(crate) fn judge_item(&self, item: &VerifyItem) -> JudgeResult {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let asked = match runtime {
            Ok(runtime) => runtime.block_on(self.request_grade(item)),
            Err(error) => Err(format!("start a runtime: {error}")),
        };
        match asked.and_then(|body| self.parse_grade(&body)) {
            Ok(opinion) => opinion,
            Err(problem) => {
                JudgeResult::host_error(format!("the judge at {}: {problem}", self.url))
            }
        }
    }

    /// Sends the request and returns the body of a successful answer.
    async fn request_grade(&self, item: &VerifyItem) -> Result<Vec<u8>, String> {
        let said = |error: reqwest::Error| format!("{:#}", anyhow::Error::new(error.without_url()));
        let none = redirect::Policy::none();
        let client = Client::builder().no_proxy().redirect(none).connect_timeout(CONNECT_TIMEOUT);
        let body = json!({
            "model": self.model,
            "temperature": 0,
            "messages": [{ "role": "user", "content": fill_template(&self.prompt, item) }],
        });
        let mut request = client.build().map_err(said)?.post(&self.url).timeout(self.timeout);
        if let Some(KeyVariable(variable)) = &self.key {
            let key = std::env::var(variable).map_err(|_| format!("{variable} is not set here"))?;
            request = request.bearer_auth(key);
        }
        let request = request.header("content-type", "application/json").body(body.to_string());
        let response = request.send().await.map_err(said)?;
        let status = response.status();
        let bytes = read_body(response).await.map_err(said)?.ok_or("its answer is too long")?;
        if status.is_success() {
            return Ok(bytes);
        }
        let told: String =
            String::from_utf8_lossy(&bytes).trim().chars().take(EXCERPT_CHARS_MAX).collect();
        Err(format!("{status}: {told}"))
    }

    /// Parses the model's answer; the reward must be between 0 and 1.
    fn parse_grade(&self, body: &[u8]) -> Result<JudgeResult, String> {
        let answer: Value =
            serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))?;
        let content = &answer["choices"][0]["message"]["content"];
        let text = content.as_str().ok_or("its answer has no choices[0].message.content")?;
        let grade = find_document(text).and_then(|value| ModelGrade::deserialize(value).ok());
        let Some(ModelGrade { reward, reason }) = grade else {
            let said: String = text.chars().take(EXCERPT_CHARS_MAX).collect();
            return Err(format!("its answer has no {{\"reward\": 0..1}}: {said}"));
        };
        if !(0.0..=1.0).contains(&reward) {
            return Err(format!("its reward {reward} is not from 0 to 1"));
        }
        let opinion = if reward >= self.pass_at {
            JudgeResult::full_pass()
        } else {
            JudgeResult::failed_because("")
        };
        Ok(JudgeResult { reward, detail: reason, ..opinion })
    }
}

/// Reads the body. Returns `None` if it is larger than `ANSWER_BYTES_MAX`.
async fn read_body(mut response: Response) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if bytes.len() + chunk.len() > ANSWER_BYTES_MAX {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Some(bytes))
}

/// Replaces each placeholder once, in a single pass: a completion that contains `{answer}` does not
/// receive the answer.
fn fill_template(template: &str, item: &VerifyItem) -> String {
    let values = [
        ("{prompt}", item.question_text()),
        ("{completion}", item.completion.as_str()),
        ("{answer}", item.answer.as_deref().unwrap_or_default()),
    ];
    let mut filled = String::new();
    let mut rest = template;
    loop {
        let found = values.iter().filter_map(|(name, value)| Some((rest.find(name)?, name, value)));
        let Some((at, name, value)) = found.min_by_key(|(at, ..)| *at) else {
            filled.push_str(rest);
            return filled;
        };
        filled.push_str(&rest[..at]);
        filled.push_str(value);
        rest = &rest[at + name.len()..];
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use wire::v1::verdicts::Outcome;

    use super::*;

    /// An endpoint that answers one request, and what it was asked.
    fn judge(status: &str, content: &str) -> (JudgeResult, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/", listener.local_addr().unwrap());
        let body = json!({ "choices": [{ "message": { "content": content } }] }).to_string();
        let length = body.len();
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            let mut part = [0; 4096];
            while !String::from_utf8_lossy(&asked).contains("THE END") {
                let length = stream.read(&mut part).unwrap();
                asked.extend_from_slice(&part[..length]);
            }
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&asked).into_owned()
        });
        let settings = LlmJudge {
            url,
            model: "m".into(),
            prompt: "{completion} for {prompt} THE END".into(),
            timeout_s: 20.0,
            pass_at: 0.5,
            ..LlmJudge::default()
        };
        let item = VerifyItem {
            prompt: "2+2".into(),
            completion: "{answer}".into(),
            ..VerifyItem::example_item()
        };
        let item = VerifyItem { answer: Some("four".into()), ..item };
        (ModelJudge::new(&settings).unwrap().judge_item(&item), served.join().unwrap())
    }

    #[test]
    fn a_grade_is_a_reward_and_a_completion_is_not_told_the_answer() {
        let (opinion, asked) = judge("200 OK", "{\"reward\": 0.75, \"reason\": \"nearly\"}");
        assert_eq!((opinion.outcome, opinion.reward), (Outcome::Pass, 0.75));
        assert_eq!(opinion.detail, "nearly");
        assert!(asked.starts_with("POST /v1/chat/completions "), "{asked}");
        assert!(asked.contains("{answer} for 2+2") && !asked.contains("four"), "{asked}");
        let (opinion, _) = judge("200 OK", "```json\n{\"reward\": 0.25}\n```");
        assert_eq!((opinion.outcome, opinion.reward), (Outcome::Fail, 0.25));
    }

    #[test]
    fn whatever_goes_wrong_is_an_error_that_another_try_may_not_make() {
        for (status, content) in [
            ("200 OK", "I would say 8 of 10"),
            ("200 OK", "{\"reward\": 8}"),
            ("200 OK", "{\"reward\": \"1\"}"),
            ("500 Oops", "{\"reward\": 1}"),
        ] {
            let (opinion, _) = judge(status, content);
            assert!(opinion.outcome == Outcome::Error && opinion.retry_elsewhere, "{opinion:?}");
        }
        let gone = LlmJudge {
            url: "http://127.0.0.1:1/v1".into(),
            prompt: "{completion}".into(),
            timeout_s: 5.0,
            ..LlmJudge::default()
        };
        let opinion = ModelJudge::new(&gone).unwrap().judge_item(&VerifyItem::example_item());
        assert!(opinion.outcome == Outcome::Error && opinion.retry_elsewhere, "{opinion:?}");
        let keyed = LlmJudge { key_env: "FLOTILLA_JUDGE_KEY_NOT_SET".into(), ..gone };
        let opinion = ModelJudge::new(&keyed).unwrap().judge_item(&VerifyItem::example_item());
        assert!(opinion.detail.contains("FLOTILLA_JUDGE_KEY_NOT_SET"), "{}", opinion.detail);
    }
}
