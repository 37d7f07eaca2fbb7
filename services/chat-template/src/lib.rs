//! Renders conversations with the chat template beside a model's tokenizer. The result equals that
//! of `apply_chat_template` in Hugging Face's transformers.

mod jinja;
mod messages;
mod methods;
mod namespaces;
mod paid_text;
mod special_tokens;
mod turn_texts;

use std::{io, panic::resume_unwind, path::Path, thread};

use formats::{GgufModel, GgufModelError, ModelConfigError, ModelOutline, is_gguf};
use minijinja::{Environment, Value, context};

use self::{
    messages::{ASSISTANT_ROLE, check_messages, flatten_content},
    special_tokens::SpecialTokens,
};
pub use self::{
    messages::{
        ChatMessage, assistant_message, last_user_text, list_messages, question_text, wrap_prompt,
    },
    special_tokens::SpecialTokensError,
    turn_texts::TurnTexts,
};

/// The chat template of a model, with the special tokens of its tokenizer.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: SpecialTokens,
    /// Appended to a completion by trainers. Empty if it is not an added token.
    end_token: String,
    stop_tokens: Vec<String>,
}

/// A conversation, split before its last turn, which a model learns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptCompletion {
    pub prompt: String,
    pub completion: String,
}

/// The reason why a base has no usable chat template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(
        "the base has no chat template: neither chat_template.jinja nor \"chat_template\" in \
         tokenizer_config.json; use a chat model, add one of these files, or write lines as \
         \"prompt\" and \"completion\" (D106)"
    )]
    None,
    #[error("the base's chat template (D106)")]
    Syntax(#[source] minijinja::Error),
    #[error("the base's tokenizer")]
    Tokens(#[from] SpecialTokensError),
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    #[error(transparent)]
    Gguf(#[from] GgufModelError),
}

/// The reason why a conversation cannot be rendered.
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
    #[error("start a thread to render a conversation")]
    Thread(#[source] io::Error),
    #[error(
        "the base's chat template re-renders earlier turns once they are answered ({before:?} \
         becomes {answered:?}), so prompt and completion would not add up to the conversation; \
         write this line as \"prompt\" and \"completion\" (D106)"
    )]
    Unstable { before: String, answered: String },
    #[error("the base's chat template writes nothing for the last message (D106)")]
    Nothing,
    #[error(
        "the base's chat template writes no message of the role {role:?} after an answer; set \
         `role: user` in the environment's settings (D106)"
    )]
    NoObservation { role: String },
    #[error(
        "the base's chat template ends a turn with {end:?}, at which generation would not stop; \
         add that token's id to \"eos_token_id\" in the model's generation_config.json (D106)"
    )]
    Endless { end: String },
}

/// Values that nest as deeply as fuel allows are shown and dropped by recursion. Only what is used of
/// the stack takes memory.
const STACK_BYTES: usize = 1 << 30;

/// Characters from the first difference of two texts.
const SHOWN_CHARS: usize = 60;

impl ChatTemplate {
    /// Reads a GGUF file, or a model's directory, which may contain only the small files. Templates
    /// see the time that `clock` returns.
    ///
    /// # Errors
    /// The model has no template, or one that cannot be used.
    pub fn load(
        model: &Path,
        clock: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
    ) -> Result<Self, TemplateError> {
        let (tokens, text, ids) = if is_gguf(model) {
            let file = GgufModel::open(model)?;
            let text = file.chat_template().ok_or(TemplateError::None)?.to_owned();
            let (names, json) = (file.special_tokens(), file.tokenizer_json()?);
            let tokens = SpecialTokens::from_gguf(model, names, &json)?;
            (tokens, text, file.model_config().eos_tokens.clone())
        } else {
            let (tokens, text) = SpecialTokens::load(model)?;
            let text = text.ok_or(TemplateError::None)?;
            (tokens, text, ModelOutline::from_dir(model)?.eos_tokens)
        };
        let end = ids.first().and_then(|id| tokens.token_text(*id)).unwrap_or_default().to_owned();
        let stops = ids.iter().filter_map(|id| tokens.token_text(*id)).map(str::to_owned).collect();
        let environment = jinja::build_environment(&text, clock).map_err(TemplateError::Syntax)?;
        Ok(Self { environment, tokens, end_token: end, stop_tokens: stops })
    }

    /// Returns a template for readers, which writes the role before each message. No model knows it.
    pub fn for_readers() -> Self {
        const TEXT: &str = "{% for message in messages %}{{ message.role }}: \
                            {{ message.content }}\n{% endfor %}\
                            {% if add_generation_prompt %}assistant: {% endif %}";
        let environment = jinja::build_environment(TEXT, jiff::Zoned::now);
        Self {
            environment: environment.expect("the template is valid"),
            tokens: SpecialTokens::default(),
            end_token: String::new(),
            stop_tokens: Vec::new(),
        }
    }

    /// Renders messages as the text that the model continues with its answer.
    ///
    /// # Errors
    /// They are not a list, end with an answer, or are refused by the template.
    pub fn render_prompt(&self, messages: &[ChatMessage]) -> Result<String, ChatError> {
        if check_messages(messages)? == ASSISTANT_ROLE {
            return Err(ChatError::Answered);
        }
        let text = self.render_messages(messages, true)?;
        Ok(self.strip_prepended_token(text))
    }

    /// Renders messages that end with an answer, and splits the text into the part before the last
    /// turn and that turn without the token that ends completions. Fails also if the template
    /// renders the earlier turns differently once the last one is present.
    pub fn render_pair(&self, messages: &[ChatMessage]) -> Result<PromptCompletion, ChatError> {
        if check_messages(messages)? != ASSISTANT_ROLE {
            return Err(ChatError::Unanswered);
        }
        let (_, earlier) = messages.split_last().ok_or(ChatError::Shape)?;
        let prompt = self.render_messages(earlier, true)?;
        let whole = self.render_messages(messages, false)?;
        let Some(completion) = whole.strip_prefix(&prompt) else {
            let (before, answered) = first_difference(&prompt, &whole);
            return Err(ChatError::Unstable { before, answered });
        };
        let completion = self.strip_end_token(completion).to_owned();
        if completion.is_empty() {
            return Err(ChatError::Nothing);
        }
        Ok(PromptCompletion { prompt: self.strip_prepended_token(prompt), completion })
    }

    /// Fails with [`ChatError::Endless`] if generation would continue after the token with which
    /// the template ends a turn. A template that shows no such token passes.
    pub fn check_end_token(&self) -> Result<(), ChatError> {
        const SAID: &str = "a";
        let say = |role: &str| context! { role, content => SAID };
        let Ok(pair) = self.render_pair(&[say("user"), say(ASSISTANT_ROLE)]) else { return Ok(()) };
        let behind = pair.completion.rsplit_once(SAID).map_or("", |(_, behind)| behind);
        match self.tokens.last_token_of(behind) {
            Some(end) if !self.stop_tokens.iter().any(|stop| stop == end) => {
                Err(ChatError::Endless { end: end.to_owned() })
            }
            _ => Ok(()),
        }
    }

    fn render_messages(
        &self,
        messages: &[ChatMessage],
        answer_next: bool,
    ) -> Result<String, ChatError> {
        let messages: Vec<Value> = messages.iter().map(flatten_content).collect();
        let context = context! {
            messages,
            add_generation_prompt => answer_next,
            ..Value::from_pairs(self.tokens.by_name.clone())
        };
        let template = self.environment.get_template(jinja::TEMPLATE_NAME);
        let render = move || template.and_then(|template| template.render(context));
        thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            let rendering = thread.spawn_scoped(scope, render).map_err(ChatError::Thread)?;
            match rendering.join() {
                Ok(rendered) => rendered.map_err(ChatError::Refused),
                Err(panic) => resume_unwind(panic),
            }
        })
    }

    /// Removes the token that the tokenizer prepends to every text, so that it does not appear
    /// twice.
    fn strip_prepended_token(&self, text: String) -> String {
        match self.tokens.prepended_token.as_deref().and_then(|token| text.strip_prefix(token)) {
            Some(rest) => rest.to_owned(),
            None => text,
        }
    }

    /// Removes the model's end token and any text after it. Trainers append that token to every
    /// completion and generators stop at it, so neither text contains it. Another token that ends a
    /// turn stays.
    fn strip_end_token<'a>(&self, completion: &'a str) -> &'a str {
        let trimmed = completion.trim_end();
        match trimmed.strip_suffix(&self.end_token) {
            Some(text) if !self.end_token.is_empty() => text,
            _ if self.tokens.last_token_of(trimmed).is_some() => trimmed,
            _ => completion,
        }
    }
}

/// Returns the beginnings of both texts from their first difference.
fn first_difference(before: &str, answered: &str) -> (String, String) {
    let same = before.chars().zip(answered.chars()).take_while(|(a, b)| a == b);
    let at: usize = same.map(|(a, _)| a.len_utf8()).sum();
    let shown = |text: &str| text[at..].chars().take(SHOWN_CHARS).collect();
    (shown(before), shown(answered))
}

#[cfg(test)]
mod tests;
