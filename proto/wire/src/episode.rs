//! Episodes: samples of several turns, between which an environment answers.

use crate::{derive_seed, v1};

/// The bits of a whole number that readers of JSON keep if they use doubles.
const JSON_INTEGER_BITS: u32 = 53;

/// The largest size of an episode's last observation in JSON, without its quotation marks. The
/// others are bounded by the model's tokens.
pub const LAST_OBSERVATION_BYTES_MAX: usize = 1024;

/// The tokens of an episode behind its prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EpisodeTokens {
    pub ids: Vec<u32>,
    /// Ranges of `ids` that the model did not draw, as `[start, end)`: observations, with the text
    /// of the chat template around them.
    pub masked: Vec<[u32; 2]>,
}

/// Derives the seed with which an environment plays the episodes of a prompt. It is the same for all
/// samples of the prompt and in all cycles, so that they meet the same situation.
pub fn derive_environment_seed(run_seed: u64, prompt_id: &str) -> u64 {
    derive_seed(run_seed, &["environment", prompt_id]) >> (u64::BITS - JSON_INTEGER_BITS)
}

/// Derives the seed from which the samples of an episode's turn are drawn; `turn` is counted from 0.
/// The first turn has the seed of the order, as samples without an environment.
pub fn derive_turn_seed(order_seed: u64, turn: u32) -> u64 {
    match turn {
        0 => order_seed,
        _ => derive_seed(order_seed, &["turn", &turn.to_string()]),
    }
}

/// Cuts the last observation of an episode, which the model does not read, to
/// [`LAST_OBSERVATION_BYTES_MAX`].
pub fn shorten_last_observation(observation: &mut String) {
    let mut bytes = 0;
    let exceeds = |letter: char| {
        bytes += match letter {
            '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
            '\0'..='\x1f' => 6,
            _ => letter.len_utf8(),
        };
        bytes > LAST_OBSERVATION_BYTES_MAX
    };
    if let Some(end) = observation.find(exceeds) {
        observation.truncate(end);
    }
}

impl v1::Verifier {
    /// Returns the environment that plays the episodes, if this is one.
    pub fn environment(&self) -> Option<&v1::verifier::Environment> {
        match &self.how {
            Some(v1::verifier::How::Environment(environment)) => Some(environment),
            _ => None,
        }
    }
}

impl EpisodeTokens {
    /// Joins the tokens of turns in their order.
    pub fn from_turns(turns: &[v1::samples::Turn]) -> Self {
        let mut tokens = Self::default();
        let count = |ids: &Vec<u32>| u32::try_from(ids.len()).unwrap_or(u32::MAX);
        for turn in turns {
            tokens.ids.extend(&turn.token_ids);
            if !turn.observation_ids.is_empty() {
                let start = count(&tokens.ids);
                tokens.ids.extend(&turn.observation_ids);
                tokens.masked.push([start, count(&tokens.ids)]);
            }
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_drawn_tokens_are_not_masked() {
        let turn = |token_ids: &[u32], observation_ids: &[u32]| v1::samples::Turn {
            token_ids: token_ids.into(),
            observation_ids: observation_ids.into(),
            ..Default::default()
        };
        let turns = [turn(&[1, 2], &[3]), turn(&[4], &[5, 6]), turn(&[7, 8], &[])];
        let tokens = EpisodeTokens::from_turns(&turns);
        assert_eq!(tokens.ids, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(tokens.masked, [[2, 3], [4, 6]]);
        assert_eq!(EpisodeTokens::from_turns(&[]), EpisodeTokens::default());
    }

    #[test]
    fn the_last_observation_is_cut_between_letters_at_its_size_in_json() {
        let json_bytes = |text: &str| serde_json::to_string(text).unwrap().len() - 2;
        for letter in
            ["a", "é", "€", "𝄞", "\"", "\\", "\n", "\u{8}", "\u{1b}", "\u{1f}", " ", "\u{7f}"]
        {
            let mut observation = format!("a{}", letter.repeat(2000));
            let whole = observation.clone();
            shorten_last_observation(&mut observation);
            assert!(whole.starts_with(&observation));
            let free = LAST_OBSERVATION_BYTES_MAX - json_bytes(&observation);
            assert!(free < json_bytes(letter), "{letter:?}: {free} bytes are free");
            let short = observation.clone();
            shorten_last_observation(&mut observation);
            assert_eq!(observation, short, "a short one is unchanged");
        }
    }

    #[test]
    fn seeds_of_environments_are_exact_in_json() {
        let seeds: Vec<u64> = (0..100).map(|run| derive_environment_seed(run, "p")).collect();
        assert!(seeds.iter().all(|seed| *seed < 1 << JSON_INTEGER_BITS), "{seeds:?}");
        assert_ne!(seeds[0], seeds[1]);
        assert_ne!(derive_environment_seed(0, "p"), derive_environment_seed(0, "q"));
        assert_eq!(derive_turn_seed(7, 0), 7);
        assert_ne!(derive_turn_seed(7, 1), derive_turn_seed(7, 2));
    }
}
