//! Any executable as a verifier: one JSON request on its stdin, one JSON verdict on its stdout. The
//! plug-in protocol of docs/VERIFIERS.md.

use std::time::Duration;

use serde::Deserialize;
use wire::v1::verdicts::Outcome;

use crate::{calls::Item, opinion::Opinion, process};

/// Of a spec that nobody checked.
const LONGEST_LIMIT: Duration = Duration::from_secs(3600);

/// An executable that judges.
#[derive(Debug, Clone)]
pub(crate) struct Verifier {
    argv: Vec<String>,
    limit: Duration,
}

/// What it must print.
#[derive(Debug, Deserialize)]
struct Answer {
    outcome: Word,
    reward: Option<f64>,
    #[serde(default)]
    detail: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Pass,
    Fail,
    Error,
}

impl From<&wire::v1::verifier::Command> for Verifier {
    fn from(command: &wire::v1::verifier::Command) -> Self {
        let limit = Duration::try_from_secs_f64(command.timeout_s).unwrap_or(Duration::ZERO);
        let limit = limit.min(LONGEST_LIMIT);
        Self { argv: command.argv.clone(), limit }
    }
}

impl Verifier {
    /// Whatever goes wrong with the verifier is an `error`, never a failed sample.
    pub(crate) fn judge(&self, item: &Item) -> Opinion {
        let request = match serde_json::to_vec(item) {
            Ok(request) => request,
            Err(error) => return Opinion::error(error.to_string()),
        };
        match process::run(&self.argv, request, self.limit) {
            Ok(output) => read(&output),
            Err(problem) => Opinion::trouble(problem),
        }
    }
}

pub(crate) fn read(output: &[u8]) -> Opinion {
    let answer: Answer = match serde_json::from_slice(output) {
        Ok(answer) => answer,
        Err(error) => return Opinion::trouble(format!("it printed no verdict: {error}")),
    };
    let (outcome, default) = match answer.outcome {
        Word::Pass => (Outcome::Pass, 1.0),
        Word::Fail => (Outcome::Fail, 0.0),
        Word::Error => (Outcome::Error, 0.0),
    };
    let reward = answer.reward.unwrap_or(default);
    if !reward.is_finite() {
        return Opinion::trouble("its reward is not a number");
    }
    let elsewhere = outcome == Outcome::Error;
    Opinion { outcome, reward, detail: answer.detail, elsewhere }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn judge(script: &str, limit: Duration) -> Opinion {
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let item = Item { completion: "4".into(), answer: Some("4".into()), ..Item::example() };
        Verifier { argv, limit }.judge(&item)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn it_sees_the_completion_and_its_word_counts() {
        let script = r#"grep -q '"completion":"4"' && echo '{"outcome":"pass","reward":0.7}'"#;
        let opinion = judge(script, LONG);
        assert_eq!((opinion.outcome, opinion.reward), (Outcome::Pass, 0.7));
        let opinion = judge(r#"echo '{"outcome":"fail","detail":"no"}'"#, LONG);
        assert_eq!(opinion, Opinion::fail("no"));
    }

    #[test]
    fn whatever_it_does_wrong_is_an_error_never_a_reward_of_zero() {
        let cases = [
            ("exit 3", "it ended with"),
            ("echo hello", "it printed no verdict"),
            ("kill -9 $$", "it ended with"),
            ("yes", "it"),
            ("echo '{\"outcome\":\"pass\",\"reward\":1e999}'", "it"),
        ];
        for (script, detail) in cases {
            let opinion = judge(script, Duration::from_secs(2));
            assert_eq!(opinion.outcome, Outcome::Error, "{script}");
            assert!(opinion.detail.starts_with(detail), "{script}: {}", opinion.detail);
        }
    }

    #[test]
    fn one_that_leaves_something_behind_does_not_hold_the_others_up() {
        let began = Instant::now();
        // It must have left the group by the time its parent ends.
        let script = r#"f=$(mktemp -u); setsid sh -c "touch $f; exec sleep 30" &
            until [ -e $f ]; do sleep 0.01; done; rm $f; echo '{"outcome":"pass"}'"#;
        assert_eq!(judge(script, LONG).outcome, Outcome::Error);
        assert!(began.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_hung_one_is_killed_with_all_it_started() {
        let began = Instant::now();
        let opinion = judge("sleep 60 & sleep 60", Duration::from_millis(200));
        assert_eq!(opinion.outcome, Outcome::Error);
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}
