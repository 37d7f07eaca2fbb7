//! Environments: executables that answer a model's turns with observations, and reward the episode
//! (docs/VERIFIERS.md). An environment keeps running as a served command does. It is asked once for
//! each turn while a sample is drawn, and again when it is judged: the answers must be the same, and
//! the rewards count that it gives then.

use serde_json::Value;
use wire::{
    shorten_last_observation,
    v1::{
        verdicts::Outcome,
        verifier::{Command, Environment},
    },
};

use crate::{
    calls::VerifyItem,
    command::CommandVerifier,
    episode::{ActionRequest, EnvironmentAnswer, PlayedEpisode, PlayedTurn},
    judge_result::JudgeResult,
    program::SandboxSlot,
};

/// For the first answer of a process, which may import and load much.
const START_TIMEOUT_S: f64 = 60.0;

/// One action of a model, with everything that the environment's answer may depend on.
#[derive(Debug, Clone, Copy)]
pub struct EpisodeStep<'a> {
    /// The prompt, with all its fields.
    pub item: &'a VerifyItem,
    pub seed: u64,
    /// The turns before this one.
    pub history: &'a [PlayedTurn],
    pub action: &'a str,
    /// True if the environment must end the episode.
    pub is_last: bool,
}

/// The verifier that replays episodes.
#[derive(Debug, Clone)]
pub(crate) struct EnvironmentVerifier {
    command: CommandVerifier,
    max_turns: u32,
    pass_at: f64,
}

/// The reason why a replayed episode has no reward.
#[derive(Debug, PartialEq, Eq)]
struct ReplayFailure {
    problem: String,
    /// True if the environment may have failed at the same action while the sample was drawn.
    is_repeated: bool,
}

impl EpisodeStep<'_> {
    pub(crate) fn to_request(self) -> ActionRequest {
        let VerifyItem { prompt_id, prompt, answer, fields, .. } = self.item;
        let mut all = fields.clone();
        all.insert("prompt_id".into(), prompt_id.as_str().into());
        all.insert("prompt".into(), prompt.as_str().into());
        all.insert("answer".into(), answer.as_deref().into());
        ActionRequest {
            prompt: all,
            seed: self.seed,
            history: self.history.to_vec(),
            action: self.action.to_owned(),
            last: self.is_last,
        }
    }
}

impl From<&Environment> for EnvironmentVerifier {
    fn from(settings: &Environment) -> Self {
        let Environment { argv, timeout_s, paths, max_turns, pass_at, .. } = settings;
        let command = Command {
            argv: argv.clone(),
            timeout_s: *timeout_s,
            paths: paths.clone(),
            serve: true,
            processes: 0,
            concurrent: 1,
            start_timeout_s: START_TIMEOUT_S,
        };
        Self { command: (&command).into(), max_turns: *max_turns, pass_at: *pass_at }
    }
}

impl EnvironmentVerifier {
    /// Asks the environment, and starts it if necessary.
    pub(crate) fn answer_action(
        &self,
        request: &ActionRequest,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<EnvironmentAnswer, String> {
        let is_last = request.last;
        let request = match serde_json::to_value(request) {
            Ok(Value::Object(request)) => request,
            Ok(_) => return Err("a request is no object".into()),
            Err(error) => return Err(error.to_string()),
        };
        EnvironmentAnswer::parse(self.command.request_answer(&request, slot)?, is_last)
    }

    /// Plays the episode of a sample again. What goes wrong is the environment's error, never a
    /// failed sample.
    pub(crate) fn judge_item(&self, item: &VerifyItem, slot: &mut SandboxSlot<'_>) -> JudgeResult {
        let Some(episode) = &item.episode else {
            return JudgeResult::input_error(
                "an environment judges episodes, but this sample has no turns: its generator is of \
                 an older version, or it was not drawn by a run with this environment (V106)",
            );
        };
        let ask = |request: &ActionRequest| self.answer_action(request, slot);
        match self.replay_episode(item, episode, ask) {
            Ok(reward) => {
                let passes = reward >= self.pass_at;
                let outcome = if passes { Outcome::Pass } else { Outcome::Fail };
                JudgeResult::from_outcome(outcome, reward, String::new())
            }
            Err(ReplayFailure { problem, is_repeated }) => {
                let detail = format!("the environment failed: {problem} (V106)");
                match is_repeated {
                    // Another host would not help.
                    true => JudgeResult::input_error(detail),
                    false => JudgeResult::host_error(detail),
                }
            }
        }
    }

    /// Returns the sum of the rewards. Fails if an answer differs from that of the episode.
    fn replay_episode(
        &self,
        item: &VerifyItem,
        episode: &PlayedEpisode,
        mut ask: impl FnMut(&ActionRequest) -> Result<EnvironmentAnswer, String>,
    ) -> Result<f64, ReplayFailure> {
        let failed = |problem| ReplayFailure { problem, is_repeated: false };
        let mut reward = 0.0;
        for (turn, number) in episode.turns.iter().zip(1_u32..) {
            let before = number as usize - 1;
            let step = EpisodeStep {
                item,
                seed: episode.seed,
                history: &episode.turns[..before],
                action: &turn.action,
                is_last: number >= self.max_turns,
            };
            let is_final = number as usize == episode.turns.len();
            // A generator ends an episode so if the environment does not answer an action.
            let is_repeated = is_final && episode.is_cut && turn.observation.is_empty();
            let answered = ask(&step.to_request());
            let mut answer = answered.map_err(|problem| ReplayFailure { problem, is_repeated })?;
            reward += answer.reward;
            if is_final {
                // As in the sample.
                shorten_last_observation(&mut answer.observation);
            }
            // A cut episode may end without the environment.
            let fits = answer.is_done == is_final || (is_final && episode.is_cut);
            if answer.observation != turn.observation || !fits {
                return Err(failed(format!(
                    "it answered turn {number} otherwise than while the sample was drawn: the \
                     answer must depend on the request alone"
                )));
            }
        }
        if episode.turns.is_empty() || !reward.is_finite() {
            return Err(failed("the episode has no turns, or its rewards have no sum".into()));
        }
        Ok(reward)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use wire::LAST_OBSERVATION_BYTES_MAX;

    use super::*;

    fn verifier(max_turns: u32) -> EnvironmentVerifier {
        let argv = vec!["play".into()];
        (&Environment { argv, max_turns, pass_at: 1.0, ..Environment::default() }).into()
    }

    /// Repeats the action, gives 0.75 each time, and ends after two turns.
    fn repeat(request: &ActionRequest) -> Result<EnvironmentAnswer, String> {
        let observation = request.action.clone();
        let is_done = request.history.len() == 1 || request.last;
        Ok(EnvironmentAnswer { observation, reward: 0.75, is_done })
    }

    fn episode(turns: &[(&str, &str)], is_cut: bool) -> PlayedEpisode {
        let turn = |(action, observation): &(&str, &str)| PlayedTurn {
            action: (*action).into(),
            observation: (*observation).into(),
        };
        PlayedEpisode { seed: 5, turns: turns.iter().map(turn).collect(), is_cut }
    }

    #[test]
    fn an_episode_is_replayed_turn_by_turn_and_its_rewards_add_up() {
        let mut item = VerifyItem { answer: Some("4".into()), ..VerifyItem::example_item() };
        item.fields.insert("tier".into(), json!(1));
        let mut asked = Vec::new();
        let replayed = verifier(8).replay_episode(
            &item,
            &episode(&[("a", "a"), ("b", "b")], false),
            |request| {
                asked.push(serde_json::to_value(request).unwrap());
                repeat(request)
            },
        );
        assert_eq!(replayed, Ok(1.5));
        let prompt = json!({ "prompt_id": "p", "prompt": "", "answer": "4", "tier": 1 });
        let history = json!([{ "action": "a", "observation": "a" }]);
        let expected = json!({
            "prompt": prompt, "seed": 5, "history": history, "action": "b", "last": false,
        });
        assert_eq!(asked[1], expected);
        assert_eq!((&asked[0]["history"], &asked[0]["last"]), (&json!([]), &json!(false)));
    }

    #[test]
    fn an_answer_that_differs_when_replayed_is_an_error() {
        let item = VerifyItem::example_item();
        let replay = |max_turns, turns: &[(&str, &str)], is_cut| {
            verifier(max_turns).replay_episode(&item, &episode(turns, is_cut), repeat)
        };
        for (turns, place) in [
            (&[("a", "b"), ("b", "b")][..], "turn 1"),
            (&[("a", "a"), ("b", "c")], "turn 2"),
            // It has ended the episode before, or not yet.
            (&[("a", "a"), ("b", "b"), ("c", "c")], "turn 2"),
            (&[("a", "a")], "turn 1"),
        ] {
            let ReplayFailure { problem, is_repeated } = replay(8, turns, false).unwrap_err();
            assert!(problem.contains(place) && !is_repeated, "{problem}");
        }
        assert_eq!(replay(8, &[("a", "a")], true), Ok(0.75), "cut before its end");
        assert_eq!(replay(1, &[("a", "a")], false), Ok(0.75), "ended at the last turn");
        assert!(replay(8, &[], false).is_err());
        let long = "x".repeat(LAST_OBSERVATION_BYTES_MAX + 9);
        let (long, short) = (&*long, &long[..LAST_OBSERVATION_BYTES_MAX]);
        assert_eq!(replay(8, &[(long, long), (long, short)], false), Ok(1.5));
        assert_eq!(replay(8, &[(long, short)], true), Ok(0.75), "cut");
        assert!(replay(8, &[(long, short), ("b", "b")], false).is_err(), "not the last one");
    }

    #[test]
    fn an_environment_that_failed_while_drawn_fails_for_the_sample_not_for_the_host() {
        let item = VerifyItem::example_item();
        let replay = |turns: &[(&str, &str)], is_cut| {
            let fail_at_b = |request: &ActionRequest| match &*request.action {
                "b" => Err("it ended".to_owned()),
                _ => repeat(request),
            };
            let failed =
                verifier(8).replay_episode(&item, &episode(turns, is_cut), fail_at_b).unwrap_err();
            assert_eq!(failed.problem, "it ended");
            failed.is_repeated
        };
        assert!(replay(&[("a", "a"), ("b", "")], true));
        assert!(!replay(&[("a", "a"), ("b", "b")], true), "it answered before");
        assert!(!replay(&[("a", "a"), ("b", "")], false), "it ended the episode before");
        assert!(!replay(&[("b", ""), ("c", "c")], true), "it answered before");
    }
}
