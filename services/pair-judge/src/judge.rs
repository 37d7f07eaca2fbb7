//! The shell of a judge: asks about several pairs at a time, and repeats what failed.

use std::{pin::pin, time::Duration};

use comparison::{PairedTest, PromptAnswers};
use futures::{StreamExt, stream};
use spec::JudgeSpec;

use crate::{
    command_judge::CommandJudge,
    endpoint_judge::EndpointJudge,
    error::{AskError, JudgeError},
    judged_answers::{JudgedAnswers, PairOutcome, ScoreSums},
    preference::Preference,
    shown_pairs::{ShownPair, order_pairs},
};

/// Attempts for a pair whose reply cannot be read.
const TRIES_MAX: u32 = 2;
/// Attempts for a pair while the endpoint is busy or down.
const BUSY_TRIES_MAX: u32 = 4;
/// Pause before the second attempt, doubled for each further one.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);

/// Unjudged pairs in a row that end a comparison, because the judge does not work.
const FAILURES_MAX: u32 = 8;

/// Maximum number of characters of a problem in a report.
const PROBLEM_CHARS_MAX: usize = 500;

/// A judge of pairs of answers.
#[derive(Debug)]
pub struct PairJudge {
    source: JudgeSource,
    name: String,
    seed: u64,
    pairs_max: usize,
    concurrency: usize,
}

#[derive(Debug)]
enum JudgeSource {
    Command(CommandJudge),
    Endpoint(EndpointJudge),
}

impl PairJudge {
    /// Creates a judge of a checked file. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// The key of an endpoint is not set, or the file names no judge.
    pub fn new(spec: &JudgeSpec) -> Result<Self, JudgeError> {
        let (source, name, concurrency) = match (&spec.command, &spec.endpoint) {
            (Some(command), _) => {
                let source = JudgeSource::Command(CommandJudge::new(command));
                (source, command.argv.join(" "), command.processes)
            }
            (None, Some(endpoint)) => {
                let source = JudgeSource::Endpoint(EndpointJudge::new(endpoint)?);
                let name = format!("{} at {}", endpoint.model, endpoint.url);
                (source, name, endpoint.concurrency)
            }
            (None, None) => {
                let problem = "the file names neither command nor endpoint".to_owned();
                return Err(JudgeError::Command { problem });
            }
        };
        let (pairs_max, concurrency) = (spec.pairs as usize, concurrency as usize);
        Ok(Self { source, name, seed: spec.seed, pairs_max, concurrency })
    }

    /// Judges the answers of the prompts in their order, until the test decides or the file's number
    /// of pairs is reached. `show` is called with the number of pairs so far.
    ///
    /// # Errors
    /// The judge cannot be used, or has no readable preference for several pairs in a row, or for
    /// any pair.
    pub async fn judge_prompts(
        &self,
        prompts: impl Iterator<Item = PromptAnswers>,
        test: PairedTest,
        show: &dyn Fn(u64),
    ) -> Result<JudgedAnswers, JudgeError> {
        let pairs = order_pairs(prompts, self.seed).take(self.pairs_max);
        let judge_one = |shown: ShownPair| async move {
            let outcome = self.judge_pair(&shown).await;
            (shown, outcome)
        };
        let mut outcomes = pin!(stream::iter(pairs).map(judge_one).buffered(self.concurrency));
        let mut sums = ScoreSums::new(test, self.name.clone());
        let mut failures = 0;
        while let Some((shown, outcome)) = outcomes.next().await {
            let outcome = outcome?;
            match &outcome {
                PairOutcome::Judged(_) => failures = 0,
                PairOutcome::Equal => {}
                PairOutcome::Unjudged(problem) => {
                    failures += 1;
                    if failures >= FAILURES_MAX {
                        let problem = problem.clone();
                        return Err(JudgeError::NoPreference { pairs: failures, problem });
                    }
                }
            }
            if !sums.add_outcome(&shown, outcome) {
                break;
            }
            show(sums.count_pairs());
        }
        let judged = sums.finish();
        if judged.scores.iter().all(Option::is_none) {
            let problem = judged.report.last_problem;
            return Err(JudgeError::NoPreference { pairs: failures, problem });
        }
        Ok(judged)
    }

    async fn judge_pair(&self, shown: &ShownPair) -> Result<PairOutcome, JudgeError> {
        if shown.first == shown.second {
            return Ok(PairOutcome::Equal);
        }
        let (mut tries, mut backoff) = (1, FIRST_BACKOFF);
        loop {
            let (problem, is_busy) = match self.ask_once(shown).await {
                Ok(preference) => return Ok(PairOutcome::Judged(preference)),
                Err(AskError::Unavailable(error)) => return Err(error),
                Err(AskError::NoPreference { problem, is_busy }) => (problem, is_busy),
            };
            if tries >= if is_busy { BUSY_TRIES_MAX } else { TRIES_MAX } {
                let problem = problem.chars().take(PROBLEM_CHARS_MAX).collect();
                return Ok(PairOutcome::Unjudged(problem));
            }
            if is_busy {
                tokio::time::sleep(backoff).await;
                backoff *= 2;
            }
            tries += 1;
        }
    }

    async fn ask_once(&self, shown: &ShownPair) -> Result<Preference, AskError> {
        match &self.source {
            JudgeSource::Command(command) => command.ask_once(shown).await,
            JudgeSource::Endpoint(endpoint) => endpoint.ask_once(shown).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use comparison::{Decision, JudgeReport};
    use serde_json::json;

    use super::*;

    /// Prompts of which the model B has the good answer to both samples.
    fn prompts(count: usize) -> impl Iterator<Item = PromptAnswers> {
        (0..count).map(|number| PromptAnswers {
            prompt_id: format!("p{number}"),
            prompt: "which?".into(),
            answers: vec![["bad".into(), "good".into()], ["bad".into(), "good".into()]],
        })
    }

    fn judge_with(yaml: &str, count: usize) -> Result<JudgedAnswers, JudgeError> {
        let spec = JudgeSpec::parse(yaml).unwrap();
        let test = PairedTest::new(0.05).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            PairJudge::new(&spec).unwrap().judge_prompts(prompts(count), test, &|_| {}).await
        })
    }

    fn sed_judge(scripts: &[&str]) -> String {
        let scripts: Vec<String> =
            scripts.iter().map(|it| format!(", -e, '{}'", it.replace('\'', "''"))).collect();
        format!("command: {{ argv: [sed, -u, -E{}], processes: 2 }}", scripts.concat())
    }

    fn decide(judged: &JudgedAnswers) -> Decision {
        let mut test = PairedTest::new(0.05).unwrap();
        for scores in judged.scores.iter().flatten() {
            test.add_pair(*scores);
        }
        test.decision()
    }

    #[test]
    fn a_program_that_knows_the_good_answer_decides_and_is_then_not_asked_again() {
        let judge = sed_judge(&[
            r#"s/.*"first":"good".*"id":([0-9]+).*/{"id":\1,"better":"first"}/"#,
            "t",
            r#"s/.*"id":([0-9]+).*/{"id":\1,"better":"second"}/"#,
        ]);
        let judged = judge_with(&judge, 500).unwrap();
        assert_eq!(decide(&judged), Decision::B);
        let JudgeReport { judged: pairs, first_won, second_won, ties, .. } = judged.report;
        assert!(pairs < 100 && judged.scores.len() < 50, "{pairs} pairs were enough");
        assert_eq!((first_won, second_won, ties), (pairs / 2, pairs / 2, 0));
    }

    #[test]
    fn a_program_that_always_prefers_the_first_position_decides_nothing() {
        let judge = sed_judge(&[r#"s/.*"id":([0-9]+).*/{"id":\1,"better":"first"}/"#]);
        let judged = judge_with(&format!("{judge}\npairs: 60"), 500).unwrap();
        assert_eq!((decide(&judged), judged.scores.len()), (Decision::Undecided, 30));
        assert_eq!((judged.report.judged, judged.report.first_won), (60, 60));
    }

    #[test]
    fn a_program_without_preferences_ends_the_comparison_soon() {
        for (judge, count, words) in [
            (
                sed_judge(&[r#"s/.*"id":([0-9]+).*/{"id":\1,"better":"A"}/"#]),
                500,
                "8 pairs in a row",
            ),
            (sed_judge(&[r#"s/.*"id":([0-9]+).*/{"id":\1}/"#]), 1, "2 pairs in a row"),
            ("command: { argv: [/nowhere/judge] }".to_owned(), 500, "does not run"),
        ] {
            let error = judge_with(&judge, count).unwrap_err().to_string();
            assert!(error.contains(words) && error.ends_with("(R122)"), "{judge}: {error}");
        }
    }

    #[test]
    fn a_model_is_asked_once_more_if_its_reply_is_unreadable_and_then_not_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/", listener.local_addr().unwrap());
        let replies =
            ["I like both.", r#"{"better": "tie"}"#, "Hm.", "Hm.", r#"{"better": "first"}"#];
        let served = std::thread::spawn(move || {
            let answer_one = |reply: &str| {
                let body = json!({ "choices": [{ "message": { "content": reply } }] }).to_string();
                let (mut stream, _) = listener.accept().unwrap();
                let (mut asked, mut part) = (String::new(), [0; 4096]);
                while !asked.contains("THE END") {
                    let length = stream.read(&mut part).unwrap();
                    asked.push_str(&String::from_utf8_lossy(&part[..length]));
                }
                let head = format!("content-length: {}\r\nconnection: close", body.len());
                let answer = format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).unwrap();
                asked
            };
            replies.map(answer_one)
        });
        let prompt = "{prompt} 1: {first} 2: {second} THE END";
        let yaml = format!(
            "endpoint: {{ url: '{url}', model: m, prompt: '{prompt}', concurrency: 1 }}\npairs: 3"
        );
        let judged = judge_with(&yaml, 9).unwrap();
        let JudgeReport { judge, judged, ties, unjudged, first_won, last_problem, .. } =
            judged.report;
        assert_eq!((judged, ties, unjudged, first_won), (2, 1, 1, 1));
        assert!(last_problem.ends_with("tie: Hm.") && judge.starts_with("m at http"), "{judge}");
        let asked = served.join().unwrap();
        assert!(asked[0].starts_with("POST /v1/chat/completions "), "{}", asked[0]);
        let orders = asked.map(|text| text.contains("which? 1: bad 2: good THE END"));
        assert_eq!(orders[0], orders[1], "a repetition asks the same");
        assert_ne!(orders[1], orders[2], "the order alternates");
    }

    #[test]
    fn a_key_that_is_not_set_is_named() {
        let yaml = "endpoint: { url: 'http://127.0.0.1:1/v1', model: m, \
                    key_env: FLOTILLA_JUDGE_KEY_NOT_SET }";
        let error = PairJudge::new(&JudgeSpec::parse(yaml).unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("FLOTILLA_JUDGE_KEY_NOT_SET is not set; export it"), "{error}");
    }
}
