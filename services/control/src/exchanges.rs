//! Requests to channels that were kept with their answers, the feedback of users, and the training
//! data that both make.

use std::collections::BTreeMap;

use bus::{EXCHANGE_BYTES_MAX, ExchangeError, ExchangeMessage, ExchangePart, is_exchange_id};
use serde_json::{Value, json};
use wire::{RunId, v1};

use crate::{ChannelError, FleetControl, to_timestamp};

use v1::kept_exchange::Feedback;

/// An answer with a reward above it is right.
const RIGHT_REWARD: f64 = 0.5;
/// Feedback on a channel that keeps nothing any more.
const FEEDBACK_DAYS: u32 = 30;

/// The reason why feedback was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum FeedbackError {
    #[error("field {field}: {remedy} (G101)")]
    Field { field: &'static str, remedy: String },
    #[error(
        "channel {channel} has kept no answer {id:?}; it keeps answers if it was set up with \
         `flotilla serve {channel} --keep-days DAYS`, for that long (R120)"
    )]
    Unknown { channel: RunId, id: String },
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

impl FleetControl {
    /// Keeps a request with its answer for some days. One that is too long is not kept, which
    /// `false` says.
    ///
    /// # Errors
    /// The bus does not acknowledge.
    pub async fn keep_exchange(
        &self,
        channel: &RunId,
        exchange: &v1::KeptExchange,
        days: u32,
    ) -> Result<bool, ExchangeError> {
        let payload = serde_json::to_vec(exchange).unwrap_or_default();
        let is_kept = payload.len() <= EXCHANGE_BYTES_MAX && is_exchange_id(&exchange.id);
        if is_kept {
            let (id, part) = (exchange.id.as_str(), ExchangePart::Answer);
            self.bus.write_exchange(channel, id, part, payload.into(), days).await?;
        }
        Ok(is_kept)
    }

    /// Checks feedback on an answer before it is recorded.
    ///
    /// # Errors
    /// The feedback says nothing or is out of bounds, or the answer is not kept.
    pub async fn require_exchange(
        &self,
        channel: &RunId,
        id: &str,
        feedback: &Feedback,
    ) -> Result<(), FeedbackError> {
        check_feedback(feedback)?;
        let part = ExchangePart::Answer;
        let known =
            is_exchange_id(id) && self.bus.read_exchange(channel, id, part).await?.is_some();
        let unknown = || FeedbackError::Unknown { channel: channel.clone(), id: id.to_owned() };
        if known { Ok(()) } else { Err(unknown()) }
    }

    /// Records what users say of an answer that [`FleetControl::require_exchange`] has found; replaces
    /// what was said of it before.
    ///
    /// # Errors
    /// The feedback says nothing or is out of bounds, or the bus does not acknowledge.
    pub async fn record_feedback(
        &self,
        channel: &RunId,
        id: &str,
        feedback: &Feedback,
    ) -> Result<(), FeedbackError> {
        check_feedback(feedback)?;
        let last = self.find_channel_model(channel.as_str()).await?;
        let days = last.keeping.map_or(FEEDBACK_DAYS, |it| it.days);
        let payload = serde_json::to_vec(feedback).unwrap_or_default();
        self.bus.write_exchange(channel, id, ExchangePart::Feedback, payload.into(), days).await?;
        Ok(())
    }

    /// Returns the kept requests to a channel with their answers and feedback, oldest first.
    ///
    /// # Errors
    /// The bus does not answer, or the caller may not read them.
    pub async fn list_exchanges(
        &self,
        channel: &RunId,
    ) -> Result<Vec<v1::KeptExchange>, ExchangeError> {
        Ok(fold_exchanges(&self.bus.list_exchanges(channel, 0).await?))
    }
}

fn check_feedback(feedback: &Feedback) -> Result<(), FeedbackError> {
    let wrong =
        |field, remedy: &str| Err(FeedbackError::Field { field, remedy: remedy.to_owned() });
    let bytes = feedback.edit.len() + feedback.comment.len();
    match feedback.reward {
        _ if bytes > EXCHANGE_BYTES_MAX => wrong(
            "edit",
            &format!(
                "has {bytes} bytes with the comment, the limit is {EXCHANGE_BYTES_MAX}; shorten it"
            ),
        ),
        Some(reward) if !(0.0..=1.0).contains(&reward) => wrong("reward", "must be from 0 to 1"),
        None if bytes == 0 => wrong("reward", "write rating, reward, edit or comment"),
        _ => Ok(()),
    }
}

/// Joins each answer with the newest feedback on it, in the order of the answers. Feedback on
/// answers that are not there any more is left out.
pub(crate) fn fold_exchanges(messages: &[ExchangeMessage]) -> Vec<v1::KeptExchange> {
    let mut exchanges: BTreeMap<&str, (u64, v1::KeptExchange)> = BTreeMap::new();
    for message in messages.iter().filter(|it| it.part == ExchangePart::Answer) {
        let Ok(kept) = serde_json::from_slice(&message.payload) else { continue };
        let (id, at) = (message.exchange.clone(), Some(to_timestamp(message.time_ms)));
        let kept = v1::KeptExchange { id, at, feedback: None, feedback_at: 0, ..kept };
        exchanges.insert(&message.exchange, (message.sequence, kept));
    }
    for message in messages.iter().filter(|it| it.part == ExchangePart::Feedback) {
        let Some((_, kept)) = exchanges.get_mut(message.exchange.as_str()) else { continue };
        if let Ok(feedback) = serde_json::from_slice(&message.payload)
            && message.sequence > kept.feedback_at
        {
            (kept.feedback, kept.feedback_at) = (Some(feedback), message.sequence);
        }
    }
    let mut exchanges: Vec<(u64, v1::KeptExchange)> = exchanges.into_values().collect();
    exchanges.sort_by_key(|(sequence, _)| *sequence);
    exchanges.into_iter().map(|(_, kept)| kept).collect()
}

/// Returns how good users found an answer, from 0 to 1; `None` if they did not say. An answer that
/// was corrected was wrong.
pub(crate) fn exchange_score(exchange: &v1::KeptExchange) -> Option<f64> {
    let feedback = exchange.feedback.as_ref()?;
    let corrected = !feedback.edit.is_empty() && feedback.edit != exchange.answer;
    feedback.reward.or_else(|| corrected.then_some(0.0))
}

/// Returns the right answer as far as users said it: their own, or one that they liked.
fn right_answer(exchange: &v1::KeptExchange) -> Option<&str> {
    let feedback = exchange.feedback.as_ref()?;
    if !feedback.edit.is_empty() {
        return Some(&feedback.edit);
    }
    let is_right = feedback.reward.is_some_and(|reward| reward > RIGHT_REWARD);
    is_right.then_some(exchange.answer.as_str())
}

/// Returns a wrong answer, if there is one: what users corrected, or disliked.
fn wrong_answer(exchange: &v1::KeptExchange) -> Option<&str> {
    let is_wrong = exchange_score(exchange).is_some_and(|score| score < RIGHT_REWARD);
    is_wrong.then_some(exchange.answer.as_str())
}

/// The answers to one prompt, as users rated them.
#[derive(Default)]
struct PromptFeedback<'a> {
    right: Option<&'a str>,
    wrong: Option<&'a str>,
}

/// Writes the examples of [`build_examples`] as lines of JSON.
pub(crate) fn write_examples(exchanges: &[v1::KeptExchange]) -> String {
    build_examples(exchanges).iter().map(|example| format!("{example}\n")).collect()
}

/// Returns an example for each prompt to which users said the right answer: `id`, `prompt` and
/// `completion`, which training reads; `answer`, which verifiers read; and, if there was a wrong
/// answer too, `chosen` and `rejected` as TRL reads them. Texts, or lists of messages for
/// conversations. The newest feedback on a prompt counts.
pub fn build_examples(exchanges: &[v1::KeptExchange]) -> Vec<Value> {
    let mut prompts: BTreeMap<(&str, &str), PromptFeedback<'_>> = BTreeMap::new();
    let mut rated: Vec<&v1::KeptExchange> =
        exchanges.iter().filter(|exchange| exchange.feedback.is_some()).collect();
    rated.sort_by_key(|exchange| exchange.feedback_at);
    for exchange in rated {
        let key = (exchange.messages_json.as_str(), exchange.prompt.as_str());
        let known = prompts.entry(key).or_default();
        let (right, wrong) = (right_answer(exchange), wrong_answer(exchange));
        known.right = right.or(known.right).filter(|text| wrong != Some(*text));
        known.wrong = wrong.or(known.wrong).filter(|text| right != Some(*text));
    }
    let examples = prompts
        .iter()
        .filter_map(|((messages, prompt), known)| build_example(messages, prompt, known));
    let mut examples: Vec<Value> = examples.collect();
    examples.sort_by_cached_key(Value::to_string);
    examples
}

/// Returns `None` without a right answer, or if the request's messages are none.
fn build_example(messages: &str, prompt: &str, known: &PromptFeedback<'_>) -> Option<Value> {
    let right = known.right?;
    // The same in later runs, whose samples are compared by it.
    let id = wire::Digest::hash_bytes(format!("{messages}\n{prompt}").as_bytes()).to_string();
    let messages: Option<Value> =
        if messages.is_empty() { None } else { Some(serde_json::from_str(messages).ok()?) };
    let turn = |text: &str| match &messages {
        Some(_) => json!([{ "role": "assistant", "content": text }]),
        None => Value::from(text),
    };
    let mut line = json!({
        "id": &id[id.len() - 16..],
        "prompt": messages.clone().unwrap_or_else(|| prompt.into()),
        "completion": turn(right),
        "answer": right,
    });
    if let Some(wrong) = known.wrong.filter(|wrong| *wrong != right) {
        line["chosen"] = turn(right);
        line["rejected"] = turn(wrong);
    }
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(sequence: u64, id: &str, part: ExchangePart, payload: &Value) -> ExchangeMessage {
        let (exchange, payload) = (id.to_owned(), payload.to_string().into());
        ExchangeMessage { sequence, time_ms: 0, exchange, part, payload }
    }

    fn answer(sequence: u64, id: &str, prompt: &str, text: &str) -> ExchangeMessage {
        message(sequence, id, ExchangePart::Answer, &json!({ "prompt": prompt, "answer": text }))
    }

    fn feedback(sequence: u64, id: &str, said: &Value) -> ExchangeMessage {
        message(sequence, id, ExchangePart::Feedback, said)
    }

    fn examples(messages: &[ExchangeMessage]) -> Vec<Value> {
        build_examples(&fold_exchanges(messages))
    }

    #[test]
    fn liked_and_corrected_answers_become_examples_and_pairs() {
        let found = examples(&[
            answer(1, "a", "1+1=", "2"),
            answer(2, "b", "2+2=", "5"),
            answer(3, "c", "3+3=", "7"),
            answer(4, "d", "4+4=", "8"),
            feedback(5, "a", &json!({ "reward": 1.0 })),
            feedback(6, "b", &json!({ "edit": "4" })),
            feedback(7, "c", &json!({ "reward": 0.0 })),
        ]);
        let liked = json!({ "prompt": "1+1=", "completion": "2", "answer": "2" });
        let corrected = json!({
            "prompt": "2+2=", "completion": "4", "answer": "4", "chosen": "4", "rejected": "5",
        });
        let without_id = |mut line: Value| {
            line.as_object_mut().unwrap().remove("id").expect("an id");
            line
        };
        let mut found: Vec<Value> = found.into_iter().map(without_id).collect();
        found.sort_by_key(|line| line["prompt"].to_string());
        assert_eq!(found, [liked, corrected]);
    }

    #[test]
    fn the_newest_feedback_on_a_prompt_counts() {
        let found = examples(&[
            answer(1, "a", "1+1=", "3"),
            answer(2, "b", "1+1=", "2"),
            feedback(3, "a", &json!({ "edit": "11" })),
            feedback(4, "b", &json!({ "reward": 1.0 })),
            feedback(5, "gone", &json!({ "reward": 1.0 })),
        ]);
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0]["chosen"], &found[0]["rejected"]), (&"2".into(), &"3".into()));
    }

    #[test]
    fn an_answer_that_users_came_to_dislike_is_not_trained_on() {
        let messages = [
            answer(1, "a", "1+1=", "3"),
            answer(2, "b", "1+1=", "3"),
            feedback(3, "a", &json!({ "reward": 1.0 })),
            feedback(4, "b", &json!({ "reward": 0.0 })),
        ];
        assert_eq!(examples(&messages), [] as [Value; 0]);
        assert_eq!(examples(&messages[..3]).len(), 1);
    }

    #[test]
    fn a_conversation_stays_a_list_of_messages() {
        let messages = json!([{ "role": "user", "content": "hi" }]);
        let kept = json!({ "messagesJson": messages.to_string(), "answer": "hello" });
        let found = examples(&[
            message(1, "a", ExchangePart::Answer, &kept),
            feedback(2, "a", &json!({ "reward": 1.0 })),
        ]);
        assert_eq!(found[0]["prompt"], messages);
        assert_eq!(found[0]["completion"][0]["content"], "hello");
    }

    #[test]
    fn feedback_that_says_nothing_or_too_much_is_refused() {
        let refused = |feedback: &Feedback| check_feedback(feedback).unwrap_err().to_string();
        assert!(refused(&Feedback::default()).contains("rating, reward, edit"));
        let reward = Feedback { reward: Some(1.5), ..Default::default() };
        assert!(refused(&reward).contains("from 0 to 1"));
        assert!(check_feedback(&Feedback { edit: "4".into(), ..Default::default() }).is_ok());
    }
}
