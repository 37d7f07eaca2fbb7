//! An episode while it is played: its tokens, its turns, and the room that is left.

use verifier::PlayedTurn;
use wire::{
    shorten_last_observation,
    v1::samples::{Finish, Sample, Turn},
};

/// An episode whose last turn the model has drawn.
#[derive(Debug, Clone)]
pub(crate) struct OpenEpisode {
    /// The sample so far. Its tokens and log-probabilities are those of all turns.
    sample: Sample,
    /// The turns before the last one, as the environment sees them.
    history: Vec<PlayedTurn>,
    /// Tokens of the prompt and all turns.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// The largest number of tokens after the prompt.
    max_tokens: u32,
}

impl OpenEpisode {
    /// Begins with the first turn, whose `token_ids` are all its tokens.
    pub(crate) fn begin_episode(mut first: Sample, prompt: &[u32], max_tokens: u32) -> Self {
        let token_ids = std::mem::take(&mut first.token_ids);
        let tokens = [prompt, &token_ids].concat();
        let text = first.text.clone();
        first.turns = vec![Turn { text, token_ids, ..Turn::default() }];
        let (history, prompt_tokens) = (Vec::new(), prompt.len());
        Self { sample: first, history, tokens, prompt_tokens, max_tokens }
    }

    /// Returns the prompt's id and the index of the sample.
    pub(crate) fn sample_name(&self) -> (&str, u32) {
        (&self.sample.prompt_id, self.sample.index)
    }

    pub(crate) fn turn_count(&self) -> u32 {
        u32::try_from(self.sample.turns.len()).unwrap_or(u32::MAX)
    }

    /// Returns the turns before the last one.
    pub(crate) fn earlier_turns(&self) -> &[PlayedTurn] {
        &self.history
    }

    /// Returns the text of the last turn.
    pub(crate) fn last_action(&self) -> &str {
        self.sample.turns.last().map_or("", |turn| &turn.text)
    }

    /// Returns the answer to the last turn.
    pub(crate) fn last_observation(&self) -> &str {
        self.sample.turns.last().map_or("", |turn| &turn.observation)
    }

    /// Returns the tokens of the prompt and all turns.
    pub(crate) fn all_tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the number of tokens that may follow; `None` if there are too many already.
    pub(crate) fn tokens_left(&self) -> Option<u32> {
        let used = u32::try_from(self.tokens.len() - self.prompt_tokens).unwrap_or(u32::MAX);
        self.max_tokens.checked_sub(used)
    }

    /// Returns true if the last turn was cut at the largest number of tokens.
    pub(crate) fn is_cut(&self) -> bool {
        self.sample.finish() == Finish::Length
    }

    /// Adds the environment's answer to the last turn.
    pub(crate) fn add_observation(&mut self, observation: String) {
        if let Some(turn) = self.sample.turns.last_mut() {
            turn.observation = observation;
        }
    }

    /// Adds a turn: `prompt` has the tokens before it, with those of `text`, in which the last
    /// observation is.
    pub(crate) fn add_turn(&mut self, text: &str, prompt: &[u32], drawn: Sample) {
        if let Some(turn) = self.sample.turns.last_mut() {
            turn.observation_ids = prompt.get(self.tokens.len()..).unwrap_or_default().to_vec();
            self.history.push(PlayedTurn {
                action: turn.text.clone(),
                observation: turn.observation.clone(),
            });
        }
        self.tokens = [prompt, &drawn.token_ids].concat();
        let Sample { text: turn, token_ids, tokens, finish, logprob, token_logprobs, .. } = drawn;
        let sample = &mut self.sample;
        sample.text.push_str(text);
        sample.text.push_str(&turn);
        sample.tokens = sample.tokens.saturating_add(tokens);
        sample.finish = finish;
        sample.logprob = sample.logprob.zip(logprob).map(|(before, own)| before + own);
        // Without those of one turn, those of the others belong to no tokens.
        match token_logprobs.is_empty() || sample.token_logprobs.is_empty() {
            true => sample.token_logprobs.clear(),
            false => sample.token_logprobs.extend(token_logprobs),
        }
        sample.turns.push(Turn { text: turn, token_ids, ..Turn::default() });
    }

    /// Ends the episode. Its last observation is shortened.
    pub(crate) fn into_sample(mut self) -> Sample {
        if let Some(turn) = self.sample.turns.last_mut() {
            shorten_last_observation(&mut turn.observation);
        }
        self.sample
    }

    /// Ends the episode because no turn can follow the last one.
    pub(crate) fn into_cut_sample(mut self) -> Sample {
        self.sample.set_finish(Finish::Length);
        self.into_sample()
    }
}

#[cfg(test)]
mod tests {
    use wire::{EpisodeTokens, LAST_OBSERVATION_BYTES_MAX};

    use super::*;

    fn drawn(text: &str, token_ids: &[u32]) -> Sample {
        Sample {
            prompt_id: "p".into(),
            index: 3,
            text: text.into(),
            tokens: u32::try_from(token_ids.len()).unwrap(),
            finish: Finish::Stop.into(),
            logprob: Some(-1.5),
            token_logprobs: vec![0; 2 * token_ids.len()],
            token_ids: token_ids.into(),
            ..Sample::default()
        }
    }

    #[test]
    fn an_episode_keeps_the_tokens_of_its_turns_and_sums_up_the_drawn_ones() {
        let mut episode = OpenEpisode::begin_episode(drawn("add", &[5, 0]), &[1, 2], 8);
        assert_eq!((episode.sample_name(), episode.turn_count()), (("p", 3), 1));
        assert_eq!((episode.last_action(), episode.tokens_left()), ("add", Some(6)));
        episode.add_observation("7".into());
        assert!(episode.earlier_turns().is_empty());
        assert_eq!(episode.all_tokens(), [1, 2, 5, 0]);
        episode.add_turn("<7>", &[1, 2, 5, 0, 9, 9], drawn("#7", &[6, 0]));
        assert_eq!(episode.all_tokens(), [1, 2, 5, 0, 9, 9, 6, 0]);
        assert_eq!((episode.last_action(), episode.tokens_left()), ("#7", Some(2)));
        let seen = PlayedTurn { action: "add".into(), observation: "7".into() };
        assert_eq!(episode.earlier_turns(), [seen]);
        episode.add_observation(String::new());
        let sample = episode.into_sample();
        assert_eq!((sample.text.as_str(), sample.tokens), ("add<7>#7", 4));
        assert_eq!((sample.logprob, sample.token_logprobs.len()), (Some(-3.0), 8));
        let tokens = EpisodeTokens::from_turns(&sample.turns);
        assert_eq!((tokens.ids, tokens.masked), (vec![5, 0, 9, 9, 6, 0], vec![[2, 4]]));
        assert!(sample.token_ids.is_empty());
    }

    #[test]
    fn an_episode_without_room_for_a_turn_is_cut_behind_its_last_drawn_token() {
        let mut episode = OpenEpisode::begin_episode(drawn("add", &[5, 0]), &[1], 2);
        assert_eq!(episode.tokens_left(), Some(0));
        episode.add_observation("7".into());
        let sample = episode.into_cut_sample();
        assert_eq!(sample.finish(), Finish::Length);
        assert!(sample.turns[0].observation_ids.is_empty());
        assert_eq!(sample.turns[0].observation, "7");
    }

    #[test]
    fn only_the_last_observation_is_shortened_however_the_episode_ends() {
        let long = "x".repeat(LAST_OBSERVATION_BYTES_MAX + 9);
        let mut episode = OpenEpisode::begin_episode(drawn("a", &[5]), &[1], 9);
        episode.add_observation(long.clone());
        episode.add_turn(
            "",
            &[1, 5, 6],
            Sample { finish: Finish::Length.into(), ..drawn("b", &[7]) },
        );
        assert!(episode.is_cut());
        episode.add_observation(long.clone());
        for sample in [episode.clone().into_sample(), episode.into_cut_sample()] {
            let lengths: Vec<usize> =
                sample.turns.iter().map(|turn| turn.observation.len()).collect();
            assert_eq!(lengths, [long.len(), LAST_OBSERVATION_BYTES_MAX]);
        }
    }

    #[test]
    fn log_probabilities_of_a_part_of_the_turns_are_dropped() {
        let mut episode = OpenEpisode::begin_episode(drawn("a", &[5]), &[1], 9);
        let other = Sample { logprob: None, token_logprobs: Vec::new(), ..drawn("b", &[6]) };
        episode.add_turn("", &[1, 5], other);
        let sample = episode.into_sample();
        assert_eq!((sample.logprob, sample.token_logprobs), (None, Vec::new()));
    }
}
