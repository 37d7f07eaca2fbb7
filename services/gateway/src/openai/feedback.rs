//! `POST /v1/feedback`: what users say of an answer that was kept.

use axum::body::Bytes;
use control::parse_channel_name;
use serde::Deserialize;
use serde_json::{Value, json};
use wire::v1::kept_exchange::Feedback;

use super::{CompletionError, ModelProxy, keeping::name_texts};

/// The body of a request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FeedbackRequest {
    /// The channel.
    model: String,
    /// Of the answer.
    id: String,
    rating: Option<Rating>,
    /// From 0 (wrong) to 1 (right), for example a verifier's.
    reward: Option<f64>,
    /// The right answer.
    #[serde(default)]
    edit: String,
    #[serde(default)]
    comment: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Rating {
    Up,
    Down,
}

impl ModelProxy {
    /// Records feedback, and returns the answer to the client.
    pub(super) async fn accept_feedback(&self, body: &Bytes) -> Result<Value, CompletionError> {
        let said: FeedbackRequest =
            serde_json::from_slice(body).map_err(CompletionError::Feedback)?;
        let Ok(channel) = parse_channel_name(&said.model) else {
            return Err(CompletionError::NoModel(said.model));
        };
        let reward = match (said.reward, said.rating) {
            (Some(_), Some(_)) => return Err(CompletionError::TwoRatings),
            (None, Some(rating)) => Some(if matches!(rating, Rating::Up) { 1.0 } else { 0.0 }),
            (reward, None) => reward,
        };
        let feedback = Feedback { reward, edit: said.edit, comment: said.comment };
        let not_kept = CompletionError::NotKept;
        self.control.require_exchange(&channel, &said.id, &feedback).await.map_err(not_kept)?;
        let feedback = self.redact_feedback(feedback).await?;
        self.control.record_feedback(&channel, &said.id, &feedback).await.map_err(not_kept)?;
        Ok(json!({ "object": "feedback", "id": said.id, "model": said.model }))
    }

    async fn redact_feedback(&self, feedback: Feedback) -> Result<Feedback, CompletionError> {
        let Feedback { reward, edit, comment } = feedback;
        if edit.is_empty() && comment.is_empty() {
            return Ok(Feedback { reward, edit, comment });
        }
        let texts = name_texts([("edit", &edit), ("comment", &comment)]);
        let texts = self.keeper.redact_texts(texts).await?;
        let texts = texts.ok_or(CompletionError::NotAllowed)?;
        let [edit, comment] = ["edit", "comment"].map(|name| texts[name].clone());
        Ok(Feedback { reward, edit, comment })
    }
}
