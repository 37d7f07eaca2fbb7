//! Answers as JSON, in the form of OpenAI's API.

use std::sync::Arc;

use engine::{FinishReason, ModelTokenizer, TokenizerError};
use serde_json::{Map, Value, json};

use crate::{
    batch::{ChoicePiece, PieceToken},
    request::ApiKind,
    token_lists::{ScoredToken, TokenLists},
};

/// Writes the answer to one request.
#[derive(Clone)]
pub(crate) struct AnswerWriter {
    pub kind: ApiKind,
    pub id: String,
    /// Time of the answer, in seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    pub tokenizer: Arc<ModelTokenizer>,
    /// True if log-probabilities are wanted.
    pub logprobs: bool,
    /// True if choices begin with their prompts.
    pub echo: bool,
    pub prompt_tokens: usize,
}

impl AnswerWriter {
    /// Writes a complete answer. `choices` has one piece per choice.
    ///
    /// # Errors
    /// A token cannot be decoded.
    pub(crate) fn write_answer(&self, choices: &[ChoicePiece]) -> Result<Value, TokenizerError> {
        let object = match self.kind {
            ApiKind::Chat => "chat.completion",
            ApiKind::Text => "text_completion",
        };
        let write = |piece: &ChoicePiece| {
            let mut choice = self.begin_choice(piece, &mut 0)?;
            match self.kind {
                ApiKind::Chat => {
                    let message = json!({ "role": "assistant", "content": piece.text });
                    choice.insert("message".into(), message);
                }
                ApiKind::Text => {
                    choice.insert("text".into(), piece.text.as_str().into());
                }
            }
            Ok(Value::Object(choice))
        };
        let written = choices.iter().map(write).collect::<Result<Vec<_>, TokenizerError>>()?;
        let drawn = choices.iter().map(|choice| choice.drawn).sum();
        let mut answer = self.begin_answer(object, written);
        answer["usage"] = self.write_usage(drawn);
        Ok(answer)
    }

    /// Writes the event that begins a choice of a conversation.
    pub(crate) fn write_role(&self, choice: usize) -> Value {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice =
            json!({ "index": choice, "delta": delta, "logprobs": null, "finish_reason": null });
        self.begin_answer("chat.completion.chunk", vec![choice])
    }

    /// Writes the event of a piece. `offset` is the number of characters of its choice before it.
    ///
    /// # Errors
    /// A token cannot be decoded.
    pub(crate) fn write_piece(
        &self,
        piece: &ChoicePiece,
        offset: &mut usize,
    ) -> Result<Value, TokenizerError> {
        let mut choice = self.begin_choice(piece, offset)?;
        let object = match self.kind {
            ApiKind::Chat => {
                let delta = match piece.text.as_str() {
                    "" => json!({}),
                    text => json!({ "content": text }),
                };
                choice.insert("delta".into(), delta);
                "chat.completion.chunk"
            }
            ApiKind::Text => {
                choice.insert("text".into(), piece.text.as_str().into());
                "text_completion"
            }
        };
        Ok(self.begin_answer(object, vec![Value::Object(choice)]))
    }

    /// Writes the event with the number of tokens.
    pub(crate) fn write_usage_event(&self, drawn: usize) -> Value {
        let object = match self.kind {
            ApiKind::Chat => "chat.completion.chunk",
            ApiKind::Text => "text_completion",
        };
        let mut event = self.begin_answer(object, Vec::new());
        event["usage"] = self.write_usage(drawn);
        event
    }

    fn begin_answer(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn write_usage(&self, drawn: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
        })
    }

    fn begin_choice(
        &self,
        piece: &ChoicePiece,
        offset: &mut usize,
    ) -> Result<Map<String, Value>, TokenizerError> {
        let finish = piece.finish.map(|finish| match finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        let logprobs = match self.logprobs {
            true => self.write_logprobs(&piece.tokens, offset)?,
            false => Value::Null,
        };
        let mut choice = Map::new();
        choice.insert("index".into(), piece.choice.into());
        choice.insert("finish_reason".into(), finish.into());
        choice.insert("logprobs".into(), logprobs);
        Ok(choice)
    }

    /// Writes log-probabilities: of conversations as `content`; of completions in OpenAI's form
    /// and, without an echoed prompt, also as `content`, as llama-server does.
    fn write_logprobs(
        &self,
        tokens: &[PieceToken],
        offset: &mut usize,
    ) -> Result<Value, TokenizerError> {
        let mut logprobs = match self.kind {
            ApiKind::Chat => json!({}),
            ApiKind::Text => self.write_token_lists(tokens, offset)?,
        };
        if !self.echo {
            let content = tokens.iter().map(|token| self.write_token(token));
            logprobs["content"] = content.collect::<Result<Vec<_>, _>>()?.into();
        }
        Ok(logprobs)
    }

    /// Writes the log-probabilities of a completion in OpenAI's form: parallel lists.
    fn write_token_lists(
        &self,
        tokens: &[PieceToken],
        offset: &mut usize,
    ) -> Result<Value, TokenizerError> {
        let mut lists = TokenLists::default();
        for PieceToken { token, logprob, alternatives } in tokens {
            let text = self.tokenizer.decode_token(*token)?;
            let decode = |(id, logprob): &(u32, f64)| -> Result<(String, f64), TokenizerError> {
                Ok((self.tokenizer.decode_token(*id)?, *logprob))
            };
            let alternatives = alternatives.iter().map(decode).collect::<Result<Vec<_>, _>>()?;
            lists.add_token(ScoredToken { text, logprob: *logprob, alternatives }, offset);
        }
        Ok(json!(lists))
    }

    fn write_token(&self, token: &PieceToken) -> Result<Value, TokenizerError> {
        let write = |id: u32, logprob: Option<f64>| -> Result<Value, TokenizerError> {
            let text = self.tokenizer.decode_token(id)?;
            // The bytes of a part of a character are unknown.
            let is_whole = !text.contains(char::REPLACEMENT_CHARACTER);
            let bytes = is_whole.then(|| text.as_bytes().to_vec());
            Ok(json!({ "token": text, "logprob": logprob, "bytes": bytes }))
        };
        let alternatives =
            token.alternatives.iter().map(|(id, logprob)| write(*id, Some(*logprob)));
        let mut written = write(token.token, token.logprob)?;
        written["top_logprobs"] = alternatives.collect::<Result<Vec<_>, TokenizerError>>()?.into();
        Ok(written)
    }
}
