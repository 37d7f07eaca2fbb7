//! A model as a judge, behind an OpenAI-compatible endpoint. Every failure of the endpoint is an
//! `error`, never a failed sample.

use serde::Deserialize;
use serde_json::{Value, json};
use wire::v1::verifier::LlmJudge;

use crate::{
    calls::VerifyItem, endpoint_client::Endpoint, judge::find_document, judge_result::JudgeResult,
};

const ANSWER_BYTES_MAX: usize = 1 << 20;

const EXCERPT_CHARS_MAX: usize = 200;

/// The endpoint, the prompt template and the reward at which a sample passes.
#[derive(Debug)]
pub(crate) struct ModelJudge {
    endpoint: Endpoint,
    model: String,
    prompt: String,
    pass_at: f64,
}

/// The model must answer this object.
#[derive(Debug, Deserialize)]
struct ModelGrade {
    reward: f64,
    #[serde(default)]
    reason: String,
}

impl ModelJudge {
    /// Fails if the prompt does not contain `{completion}`.
    pub(crate) fn new(judge: &LlmJudge) -> Result<Self, String> {
        if !judge.prompt.contains("{completion}") {
            return Err("the judge's prompt must contain {completion}".into());
        }
        let url = format!("{}/chat/completions", judge.url.trim_end_matches('/'));
        Ok(Self {
            endpoint: Endpoint::new(url, &judge.key_env, judge.timeout_s, ANSWER_BYTES_MAX),
            model: judge.model.clone(),
            prompt: judge.prompt.clone(),
            pass_at: judge.pass_at,
        })
    }

    pub(crate) fn judge_item(&self, item: &VerifyItem) -> JudgeResult {
        let asked = self.endpoint.post_json(&self.build_request(item));
        match asked.and_then(|body| Ok(self.parse_grade(&body)?)) {
            Ok(result) => result,
            Err(error) => error.into_result(&format!("the judge at {}", self.endpoint.url())),
        }
    }

    fn build_request(&self, item: &VerifyItem) -> String {
        // A completion that contains `{answer}` does not receive the answer.
        let values = [
            ("{prompt}", item.question_text()),
            ("{completion}", item.completion.as_str()),
            ("{answer}", item.answer.as_deref().unwrap_or_default()),
        ];
        let content = wire::fill_template(&self.prompt, &values);
        let asked = json!({
            "model": self.model,
            "temperature": 0,
            "messages": [{ "role": "user", "content": content }],
        });
        asked.to_string()
    }

    /// Requires a reward from 0 to 1.
    fn parse_grade(&self, body: &[u8]) -> Result<JudgeResult, String> {
        let answer: Value =
            serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))?;
        let content = &answer["choices"][0]["message"]["content"];
        let text = content.as_str().ok_or("its answer has no choices[0].message.content")?;
        let grade = find_document(text).and_then(|value| ModelGrade::deserialize(value).ok());
        let Some(ModelGrade { reward, reason }) = grade else {
            let excerpt: String = text.chars().take(EXCERPT_CHARS_MAX).collect();
            return Err(format!("its answer has no {{\"reward\": 0..1}}: {excerpt}"));
        };
        if !(0.0..=1.0).contains(&reward) {
            return Err(format!("its reward {reward} is not from 0 to 1"));
        }
        let result = if reward >= self.pass_at {
            JudgeResult::full_pass()
        } else {
            JudgeResult::failed_because("")
        };
        Ok(JudgeResult { reward, detail: reason, ..result })
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

    /// Judges with an endpoint that answers one request, and returns that request.
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
        let (result, asked) = judge("200 OK", "{\"reward\": 0.75, \"reason\": \"nearly\"}");
        assert_eq!((result.outcome, result.reward), (Outcome::Pass, 0.75));
        assert_eq!(result.detail, "nearly");
        assert!(asked.starts_with("POST /v1/chat/completions "), "{asked}");
        assert!(asked.contains("{answer} for 2+2") && !asked.contains("four"), "{asked}");
        let (result, _) = judge("200 OK", "```json\n{\"reward\": 0.25}\n```");
        assert_eq!((result.outcome, result.reward), (Outcome::Fail, 0.25));
    }

    #[test]
    fn a_busy_endpoint_is_asked_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let served = std::thread::spawn(move || {
            for (status, grade) in [("429 Busy", "{}"), ("200 OK", "{\"reward\": 1}")] {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut asked, mut part) = (String::new(), [0; 4096]);
                while !asked.contains("THE END") {
                    let length = stream.read(&mut part).unwrap();
                    assert!(length > 0, "{asked}");
                    asked.push_str(&String::from_utf8_lossy(&part[..length]));
                }
                let body = json!({ "choices": [{ "message": { "content": grade } }] }).to_string();
                let head = format!("content-length: {}\r\nconnection: close", body.len());
                let answer = format!("HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        let prompt = "{completion} THE END".into();
        let settings = LlmJudge { url, prompt, timeout_s: 20.0, ..LlmJudge::default() };
        let result = ModelJudge::new(&settings).unwrap().judge_item(&VerifyItem::example_item());
        assert_eq!(result.outcome, Outcome::Pass, "{result:?}");
        served.join().unwrap();
    }

    #[test]
    fn one_connection_serves_many_completions() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let body =
            json!({ "choices": [{ "message": { "content": "{\"reward\": 1}" } }] }).to_string();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        std::thread::spawn(move || {
            // A second connection is never accepted.
            let (mut stream, _) = listener.accept().unwrap();
            let (mut request, mut part) = (String::new(), [0; 4096]);
            while let Ok(length @ 1..) = stream.read(&mut part) {
                request.push_str(&String::from_utf8_lossy(&part[..length]));
                if request.contains("THE END") {
                    request.clear();
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            }
        });
        let settings = LlmJudge {
            url,
            prompt: "{completion} THE END".into(),
            timeout_s: 10.0,
            ..LlmJudge::default()
        };
        let judge = ModelJudge::new(&settings).unwrap();
        for _ in 0..3 {
            assert_eq!(judge.judge_item(&VerifyItem::example_item()).outcome, Outcome::Pass);
        }
    }

    #[test]
    fn whatever_goes_wrong_is_an_error_that_another_try_may_not_make() {
        for (status, content) in [
            ("200 OK", "I would say 8 of 10"),
            ("200 OK", "{\"reward\": 8}"),
            ("200 OK", "{\"reward\": \"1\"}"),
            ("500 Oops", "{\"reward\": 1}"),
        ] {
            let (result, _) = judge(status, content);
            assert!(result.outcome == Outcome::Error && result.retry_elsewhere, "{result:?}");
        }
        let gone = LlmJudge {
            url: "http://127.0.0.1:1/v1".into(),
            prompt: "{completion}".into(),
            timeout_s: 1.0,
            ..LlmJudge::default()
        };
        let result = ModelJudge::new(&gone).unwrap().judge_item(&VerifyItem::example_item());
        assert!(result.outcome == Outcome::Error && result.retry_elsewhere, "{result:?}");
        assert!(result.is_unreachable, "{result:?}");
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", silent.local_addr().unwrap());
        let silent = ModelJudge::new(&LlmJudge { url, timeout_s: 0.3, ..gone.clone() }).unwrap();
        assert!(!silent.judge_item(&VerifyItem::example_item()).is_unreachable);
        let other = VerifyItem { completion: "5".into(), ..VerifyItem::example_item() };
        assert!(!silent.judge_item(&other).is_unreachable);
        let keyed = LlmJudge { key_env: "FLOTILLA_JUDGE_KEY_NOT_SET".into(), ..gone };
        let result = ModelJudge::new(&keyed).unwrap().judge_item(&VerifyItem::example_item());
        assert!(result.detail.contains("FLOTILLA_JUDGE_KEY_NOT_SET"), "{}", result.detail);
    }
}
