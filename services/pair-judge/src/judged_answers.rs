//! The scores that follow from a judge's preferences.

use comparison::{Decision, JudgeReport, Pair, PairedTest};

use crate::{preference::Preference, shown_pairs::ShownPair};

/// The scores of prompts, and the counts of the preferences behind them.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgedAnswers {
    /// The mean scores of each prompt's judged pairs: 1 and 0 for a preferred answer and the other,
    /// 0.5 each for a tie. `None` for a prompt without a judged pair.
    pub scores: Vec<Option<Pair>>,
    pub report: JudgeReport,
}

/// The outcome of asking about a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PairOutcome {
    Judged(Preference),
    /// Both answers are the same, so the judge was not asked.
    Equal,
    /// The judge has no readable preference, for this reason.
    Unjudged(String),
}

/// Sums up the outcomes of pairs, in their order, and tests the scores of each complete prompt.
#[derive(Debug)]
pub(crate) struct ScoreSums {
    test: PairedTest,
    answers: JudgedAnswers,
    open: PromptSum,
}

/// The sums of the prompt whose pairs are being added.
#[derive(Debug, Default)]
struct PromptSum {
    a: f64,
    b: f64,
    pairs: u32,
}

impl ScoreSums {
    pub(crate) fn new(test: PairedTest, judge: String) -> Self {
        let report = JudgeReport { judge, ..JudgeReport::default() };
        let answers = JudgedAnswers { scores: Vec::new(), report };
        Self { test, answers, open: PromptSum::default() }
    }

    /// Adds the outcome of the next pair. Returns false without counting it if the prompts before it
    /// have decided.
    pub(crate) fn add_outcome(&mut self, shown: &ShownPair, outcome: PairOutcome) -> bool {
        while self.answers.scores.len() < shown.prompt_number {
            self.close_prompt();
        }
        if self.test.decision() != Decision::Undecided {
            return false;
        }
        let report = &mut self.answers.report;
        let of_first = match outcome {
            PairOutcome::Unjudged(problem) => {
                report.unjudged += 1;
                report.last_problem = problem;
                return true;
            }
            PairOutcome::Equal => {
                report.equal += 1;
                0.5
            }
            PairOutcome::Judged(preference) => {
                report.judged += 1;
                let (count, of_first) = match preference {
                    Preference::First => (&mut report.first_won, 1.0),
                    Preference::Second => (&mut report.second_won, 0.0),
                    Preference::Tie => (&mut report.ties, 0.5),
                };
                *count += 1;
                of_first
            }
        };
        let of_a = if shown.is_a_first { of_first } else { 1.0 - of_first };
        let PromptSum { a, b, pairs } = &mut self.open;
        (*a, *b, *pairs) = (*a + of_a, *b + (1.0 - of_a), *pairs + 1);
        true
    }

    /// Returns the number of pairs with an outcome.
    pub(crate) fn count_pairs(&self) -> u64 {
        let JudgeReport { judged, equal, unjudged, .. } = self.answers.report;
        u64::from(judged) + u64::from(equal) + u64::from(unjudged)
    }

    pub(crate) fn finish(mut self) -> JudgedAnswers {
        if self.test.decision() == Decision::Undecided {
            self.close_prompt();
        }
        self.answers
    }

    fn close_prompt(&mut self) {
        let PromptSum { a, b, pairs } = std::mem::take(&mut self.open);
        let count = f64::from(pairs);
        let scores = (pairs > 0).then(|| Pair { a: a / count, b: b / count });
        if let Some(scores) = scores {
            self.test.add_pair(scores);
        }
        self.answers.scores.push(scores);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(prompt_number: usize, is_a_first: bool) -> ShownPair {
        let (prompt, first, second) = (String::new(), String::new(), String::new());
        ShownPair { prompt_number, prompt, first, second, is_a_first }
    }

    fn sums() -> ScoreSums {
        ScoreSums::new(PairedTest::new(0.05).unwrap(), "j".into())
    }

    #[test]
    fn a_prompt_has_the_mean_of_its_judged_pairs() {
        let mut sums = sums();
        for (prompt, is_a_first, outcome) in [
            (0, true, PairOutcome::Judged(Preference::First)),
            (0, false, PairOutcome::Judged(Preference::First)),
            (0, true, PairOutcome::Judged(Preference::Tie)),
            (0, true, PairOutcome::Judged(Preference::First)),
            (1, true, PairOutcome::Unjudged("why".into())),
            (2, false, PairOutcome::Judged(Preference::First)),
            (2, false, PairOutcome::Unjudged("because".into())),
            (3, true, PairOutcome::Equal),
        ] {
            assert!(sums.add_outcome(&shown(prompt, is_a_first), outcome));
        }
        assert_eq!(sums.count_pairs(), 8);
        let JudgedAnswers { scores, report } = sums.finish();
        let pair = |a, b| Some(Pair { a, b });
        assert_eq!(scores, [pair(0.625, 0.375), None, pair(0.0, 1.0), pair(0.5, 0.5)]);
        let expected = JudgeReport {
            judge: "j".into(),
            judged: 5,
            first_won: 4,
            second_won: 0,
            ties: 1,
            equal: 1,
            unjudged: 2,
            last_problem: "because".into(),
        };
        assert_eq!(report, expected);
    }

    #[test]
    fn pairs_after_the_decision_do_not_count() {
        let mut sums = sums();
        let preferred = || PairOutcome::Judged(Preference::Second);
        let prompts = 0..1000;
        let asked =
            prompts.take_while(|it| sums.add_outcome(&shown(*it, true), preferred())).count();
        assert!((5..50).contains(&asked), "{asked}");
        let JudgedAnswers { scores, report } = sums.finish();
        assert_eq!((scores.len(), report.judged as usize), (asked, asked));
        assert!(scores.iter().all(|it| *it == Some(Pair { a: 0.0, b: 1.0 })));
    }

    #[test]
    fn a_judge_that_prefers_a_position_decides_nothing() {
        let mut sums = sums();
        for place in 0..2000 {
            let pair = shown(place / 2, place % 2 == 0);
            assert!(sums.add_outcome(&pair, PairOutcome::Judged(Preference::First)));
        }
        let JudgedAnswers { scores, report } = sums.finish();
        assert!(scores.iter().all(|it| *it == Some(Pair { a: 0.5, b: 0.5 })));
        assert_eq!((report.first_won, report.second_won), (2000, 0));
    }
}
