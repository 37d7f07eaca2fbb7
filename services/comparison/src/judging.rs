//! The answers that a judge compares, and the counts of its preferences.

use serde::Serialize;

/// The answers of two models to one prompt, paired by their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptAnswers {
    /// Id of the prompt.
    pub prompt_id: String,
    /// Text of the prompt.
    pub prompt: String,
    /// An answer of the first model and one of the second.
    pub answers: Vec<[String; 2]>,
}

/// The counts of a judge's preferences over pairs of answers. The judge sees each pair in a random
/// order, so an unbiased one prefers both positions equally often.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct JudgeReport {
    /// The judge's command, or its model and address.
    pub judge: String,
    /// Pairs with a preference or a tie.
    pub judged: u32,
    /// Judged pairs whose answer shown first was preferred.
    pub first_won: u32,
    /// Judged pairs whose answer shown second was preferred.
    pub second_won: u32,
    /// Judged pairs without a preference.
    pub ties: u32,
    /// Pairs of equal answers, which count as ties. The judge was not asked.
    pub equal: u32,
    /// Pairs without a readable answer of the judge. They do not count.
    pub unjudged: u32,
    /// The reason for the last unjudged pair.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub last_problem: String,
}

impl JudgeReport {
    /// Returns `judged by ./judge.py: 97 pairs of answers (12 ties), 3 equal, 1 unjudged; the first
    /// position won 43 of 85 (50.6 %)`, and the last problem.
    #[must_use]
    pub fn describe(&self) -> String {
        let Self { judge, judged, first_won, second_won, ties, equal, unjudged, last_problem } =
            self;
        let won = first_won + second_won;
        let share = 100.0 * f64::from(*first_won) / f64::from(won.max(1));
        let position = match won {
            0 => "no position won".to_owned(),
            _ => format!("the first position won {first_won} of {won} ({share:.1} %)"),
        };
        let problem = match &**last_problem {
            "" => String::new(),
            problem => format!("; last problem: {problem}"),
        };
        format!(
            "judged by {judge}: {judged} pairs of answers ({ties} ties), {equal} equal, {unjudged} \
             unjudged; {position}{problem}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_has_all_counts_and_the_share_of_the_first_position() {
        let report = JudgeReport { judge: "./judge.py".into(), ..JudgeReport::default() };
        let expected = "judged by ./judge.py: 0 pairs of answers (0 ties), 0 equal, 0 unjudged; no \
                        position won";
        assert_eq!(report.describe(), expected);
        let report = JudgeReport { judged: 9, first_won: 6, second_won: 2, ties: 1, ..report };
        assert!(report.describe().ends_with("the first position won 6 of 8 (75.0 %)"));
        let report = JudgeReport { unjudged: 1, last_problem: "no text".into(), ..report };
        assert!(report.describe().ends_with("(75.0 %); last problem: no text"));
    }
}
