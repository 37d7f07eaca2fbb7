//! A model at an OpenAI-compatible endpoint that judges pairs.

use std::time::Duration;

use bounded_http::{ChatReply, CompletionClient, CompletionHttpError};
use serde_json::json;
use spec::EndpointJudgeSpec;

use crate::{
    error::{AskError, JudgeError},
    preference::{self, Preference},
    shown_pairs::ShownPair,
};

const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A client of the endpoint, and the request's template.
#[derive(Debug)]
pub(crate) struct EndpointJudge {
    client: CompletionClient,
    model: String,
    template: String,
    timeout: Duration,
}

impl EndpointJudge {
    pub(crate) fn new(spec: &EndpointJudgeSpec) -> Result<Self, JudgeError> {
        let read_key = |variable: &String| {
            let no_key = |_| JudgeError::NoKey { variable: variable.clone() };
            std::env::var(variable).map_err(no_key)
        };
        let variable = Some(&spec.key_env).filter(|name| !name.is_empty());
        let key = variable.map(read_key).transpose()?;
        Ok(Self {
            client: CompletionClient::for_url(spec.url.trim_end_matches('/'), key)?,
            model: spec.model.clone(),
            template: spec.prompt.clone(),
            timeout: Duration::from_secs_f64(spec.timeout_s),
        })
    }

    pub(crate) async fn ask_once(&self, shown: &ShownPair) -> Result<Preference, AskError> {
        let ShownPair { prompt, first, second, .. } = shown;
        let values = [("{prompt}", prompt), ("{first}", first), ("{second}", second)]
            .map(|(name, text)| (name, text.as_str()));
        let content = wire::fill_template(&self.template, &values);
        let body = json!({
            "model": self.model,
            "temperature": 0,
            "messages": [{ "role": "user", "content": content }],
        });
        let path = "/chat/completions";
        let reply = self.client.post_json(path, &body, self.timeout, ANSWER_BYTES_MAX).await;
        let text = ChatReply::parse(&reply.map_err(describe_failure)?).text;
        let preference = text.and_then(|text| preference::parse_text(&text));
        preference.map_err(AskError::unreadable)
    }
}

fn describe_failure(error: CompletionHttpError) -> AskError {
    if let Some(reason) = error.refusal_reason() {
        return AskError::unreadable(reason);
    }
    if error.is_transient() {
        let problem = wire::format_error_chain(&error);
        return AskError::NoPreference { problem, is_busy: true };
    }
    AskError::Unavailable(JudgeError::Endpoint(error))
}
