//! Conversations written as a model was taught to read them: by the chat template beside its
//! tokenizer, as `apply_chat_template` of Hugging Face's transformers does it.

mod environment;
mod message;
mod tokens;

use std::path::Path;

use formats::{Config, ConfigError};
use minijinja::{Environment, Value, context};

pub(crate) use self::message::{Message, answer, asked, said, wrapped};
use self::{
    message::{ASSISTANT, last_role, plain},
    tokens::{Tokens, TokensError},
};

/// A model's chat template and what of its tokenizer bears on it.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    tokens: Tokens,
    /// What trainers put behind a completion; empty where it is no added token.
    end: String,
    /// Where generation stops.
    stops: Vec<String>,
}

/// A conversation whose last turn a model is to learn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    pub prompt: String,
    pub completion: String,
}

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(
        "the base has no chat template: neither chat_template.jinja nor \"chat_template\" in \
         tokenizer_config.json; take a model that was taught to chat, add one of these files, or \
         write lines as \"prompt\" and \"completion\" (D106)"
    )]
    None,
    #[error("the base's chat template (D106)")]
    Syntax(#[source] minijinja::Error),
    #[error("the base's tokenizer")]
    Tokens(#[from] TokensError),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Why a conversation cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    #[error(
        "a conversation needs the base's chat template to be written; write \"prompt\" (and \
         \"completion\") as text here (D106)"
    )]
    NoTemplate,
    #[error(
        "expected a list of messages such as {{\"role\": \"user\", \"content\": \"2+2=\"}} (D107)"
    )]
    Shape,
    #[error("message {number}: {what} (D107)")]
    Message { number: usize, what: &'static str },
    #[error(
        "the last message is an assistant's, so there is nothing to answer; move it to a field of \
         its own (D107)"
    )]
    Answered,
    #[error("the last message must be an assistant's: that is what is trained on (D107)")]
    Unanswered,
    #[error("the base's chat template refuses it (D106)")]
    Refused(#[source] minijinja::Error),
    #[error(
        "the base's chat template writes a conversation otherwise once it is answered ({before:?} \
         becomes {answered:?}), so its last turn is no text that follows the others; write this \
         line as \"prompt\" and \"completion\" (D106)"
    )]
    Unstable { before: String, answered: String },
    #[error("the base's chat template writes nothing for the last message (D106)")]
    Nothing,
    #[error(
        "the base's chat template ends a turn with {end:?}, at which generation would not stop; \
         add that token's id to \"eos_token_id\" in the model's generation_config.json (D106)"
    )]
    Endless { end: String },
}

/// Of two texts, from where they part.
const SHOWN_CHARS: usize = 60;

impl Template {
    /// Of a model's directory, or what of it is small. `now` is what templates are told of time.
    ///
    /// # Errors
    /// When there is none, or a file cannot be used.
    pub(crate) fn load(dir: &Path, now: &jiff::Zoned) -> Result<Self, TemplateError> {
        let (tokens, text) = Tokens::load(dir)?;
        let text = text.ok_or(TemplateError::None)?;
        let ids = Config::load(dir)?.eos_tokens;
        let end = ids.first().and_then(|id| tokens.text(*id)).unwrap_or_default().to_owned();
        let stops = ids.iter().filter_map(|id| tokens.text(*id)).map(str::to_owned).collect();
        let environment = environment::of(&text, now).map_err(TemplateError::Syntax)?;
        Ok(Self { environment, tokens, end, stops })
    }

    /// The text that a model is to go on with.
    ///
    /// # Errors
    /// When these are no messages, end with an answer, or the template refuses them.
    pub(crate) fn prompt(&self, messages: &[Message]) -> Result<String, ChatError> {
        if last_role(messages)? == ASSISTANT {
            return Err(ChatError::Answered);
        }
        let text = self.render(messages, true)?;
        Ok(self.without_beginning(text))
    }

    /// What goes before the last turn, and that turn without the token that ends completions.
    ///
    /// # Errors
    /// When these are no messages, do not end with an answer, or the template refuses them or does
    /// not let the last turn follow the others.
    pub(crate) fn pair(&self, messages: &[Message]) -> Result<Pair, ChatError> {
        if last_role(messages)? != ASSISTANT {
            return Err(ChatError::Unanswered);
        }
        let (_, earlier) = messages.split_last().ok_or(ChatError::Shape)?;
        let prompt = self.render(earlier, true)?;
        let whole = self.render(messages, false)?;
        let Some(completion) = whole.strip_prefix(&prompt) else {
            let (before, answered) = parting(&prompt, &whole);
            return Err(ChatError::Unstable { before, answered });
        };
        let completion = self.without_end(completion).to_owned();
        if completion.is_empty() {
            return Err(ChatError::Nothing);
        }
        Ok(Pair { prompt: self.without_beginning(prompt), completion })
    }

    /// Whether generation stops where the template ends a turn, as far as it shows one.
    ///
    /// # Errors
    /// When it would go on.
    pub(crate) fn check_end(&self) -> Result<(), ChatError> {
        const SAID: &str = "a";
        let say = |role: &str| context! { role, content => SAID };
        let Ok(pair) = self.pair(&[say("user"), say(ASSISTANT)]) else { return Ok(()) };
        let behind = pair.completion.rsplit_once(SAID).map_or("", |(_, behind)| behind);
        match self.tokens.at_end_of(behind) {
            Some(end) if !self.stops.iter().any(|stop| stop == end) => {
                Err(ChatError::Endless { end: end.to_owned() })
            }
            _ => Ok(()),
        }
    }

    fn render(&self, messages: &[Message], answer_next: bool) -> Result<String, ChatError> {
        let messages: Vec<Value> = messages.iter().map(plain).collect();
        let context = context! {
            messages,
            add_generation_prompt => answer_next,
            ..Value::from_pairs(self.tokens.named.clone())
        };
        let template = self.environment.get_template(environment::NAME);
        template.and_then(|template| template.render(context)).map_err(ChatError::Refused)
    }

    /// A tokenizer that puts a beginning before every text would put a second one.
    fn without_beginning(&self, text: String) -> String {
        match self.tokens.beginning.as_deref().and_then(|token| text.strip_prefix(token)) {
            Some(rest) => rest.to_owned(),
            None => text,
        }
    }

    /// Trainers put the model's end token behind every completion, and generators stop at it:
    /// neither text has it, nor what a template writes behind it. Another token that ends a turn
    /// stays.
    fn without_end<'a>(&self, completion: &'a str) -> &'a str {
        let trimmed = completion.trim_end();
        match trimmed.strip_suffix(&self.end) {
            Some(text) if !self.end.is_empty() => text,
            _ if self.tokens.at_end_of(trimmed).is_some() => trimmed,
            _ => completion,
        }
    }
}

fn parting(before: &str, answered: &str) -> (String, String) {
    let same = before.chars().zip(answered.chars()).take_while(|(a, b)| a == b);
    let at: usize = same.map(|(a, _)| a.len_utf8()).sum();
    let shown = |text: &str| text[at..].chars().take(SHOWN_CHARS).collect();
    (shown(before), shown(answered))
}

#[cfg(test)]
pub(super) mod tests;
