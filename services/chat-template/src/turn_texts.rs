//! The texts that a chat template writes around an observation, between two answers of a model.

use wire::v1;

use super::{ASSISTANT_ROLE, ChatError, ChatTemplate};

/// Placeholders that no template contains.
const QUESTION: &str = "flotilla-question";
const ANSWER: &str = "flotilla-answer";
const OBSERVATION: &str = "flotilla-observation";

/// The texts before and after an observation. Both are empty if the prompts are not conversations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TurnTexts {
    /// Begins after the token with which generation stopped.
    pub before: String,
    /// Ends where the next answer begins.
    pub after: String,
}

impl TurnTexts {
    /// Adds the texts to a verifier that is an environment; returns another one as it is.
    pub fn add_to_verifier(&self, verifier: Option<v1::Verifier>) -> Option<v1::Verifier> {
        let mut verifier = verifier?;
        if let Some(v1::verifier::How::Environment(environment)) = &mut verifier.how {
            environment.before_observation.clone_from(&self.before);
            environment.after_observation.clone_from(&self.after);
        }
        Some(verifier)
    }
}

impl ChatTemplate {
    /// Returns the texts around the observation in a message of this role, after an answer and
    /// before the next one. Fails if the template writes no such message.
    pub fn render_turn_texts(&self, role: &str) -> Result<TurnTexts, ChatError> {
        let message = |role: &str, content: &str| minijinja::context! { role, content };
        let turns = [
            message("user", QUESTION),
            message(ASSISTANT_ROLE, ANSWER),
            message(role, OBSERVATION),
        ];
        let rendered = self.render_messages(&turns, true).ok();
        let between = rendered.as_ref().and_then(|text| {
            let (_, behind) = text.split_once(ANSWER)?;
            behind.split_once(OBSERVATION)
        });
        let (before, after) =
            between.ok_or_else(|| ChatError::NoObservation { role: role.to_owned() })?;
        let mut stops = self.stop_tokens.iter().filter(|stop| !stop.is_empty());
        let before = stops.find_map(|stop| before.strip_prefix(stop.as_str())).unwrap_or(before);
        Ok(TurnTexts { before: before.to_owned(), after: after.to_owned() })
    }
}
